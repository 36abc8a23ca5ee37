"""Commands and episodes in sandboxes: ours beside `docker exec`, SWE-ReX 1.4 and a container per episode.

    python benchmarks/sandbox.py [--quick] [--levels 1,8,32] [--seconds 5] [--rounds 3] [--output FILE]

All on this machine, in one image, with the same limits, in turn over several rounds, so that noise hits all alike.
`plain` is `echo hello`, what the summary's ratios are of; `search` is git status and grep in a small repository;
`turnover` is an episode: acquire, ten plain commands, release. Needs Docker, bubblewrap, and a package index for
SWE-ReX the first time. What it starts is removed at the end, also after Ctrl-C; after a kill, by the reaper.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import platform
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from sandbox_containers import DockerExec, FreshContainers, base_image
from sandbox_load import COMMANDS_PER_EPISODE, Load, System
from sandbox_ours import Ours
from sandbox_report import PLAIN, SEARCH, TURNOVER, Row, levels, quantile, row_json, summarize, table
from sandbox_swerex import SweRex, packages_folder

from agentrl.config import SandboxConfig
from agentrl.sandbox.docker_client import connect
from agentrl.sandbox.limits import Limits

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "benchmarks" / "results" / "sandbox.json"
COMMANDS = {PLAIN: "echo hello", SEARCH: 'git status --short && grep -rn "return 7" src'}
BUSY_FRACTION = 0.1
TURNOVER_ROUNDS = 2  # at most: fresh containers take half a minute for one round of 32
SET_UP = (
    "cd /testbed && mkdir -p src && for i in $(seq 20); do "
    "printf 'def f%d():\\n    return %d\\n' $i $i > src/m$i.py; done && "
    "git init -q . && git add . && git -c user.email=a@example.org -c user.name=a commit -qm start"
)


class Bench:
    """The rows measured so far."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    async def measure(
        self, work: str, system: str, sandboxes: int, number: int, inside: Callable[[], Awaitable[float | None]],
        load: Callable[[], Awaitable[Load]],
    ) -> None:  # fmt: skip
        """Run `load` and note what it did and what it cost."""
        inside_before, machine_before = await inside(), _machine_cpu_s()
        done = await load()
        machine, after = _machine_cpu_s() - machine_before, await inside()
        count = len(done.latencies_s)
        used = None if inside_before is None or after is None else (after - inside_before) * 1e3 / count
        row = Row(
            work=work,
            system=system,
            sandboxes=sandboxes,
            round=number,
            count=count,
            seconds=done.seconds,
            p50_ms=quantile(done.latencies_s, 0.5) * 1e3,
            p95_ms=quantile(done.latencies_s, 0.95) * 1e3,
            client_cpu_ms=done.client_cpu_s * 1e3 / count,
            inside_cpu_ms=used,
            machine_cpu_ms=machine * 1e3 / count,
            lease_p50_ms=quantile(done.leases_s, 0.5) * 1e3 if done.leases_s else None,
        )
        self.rows.append(row)
        print(
            f"{work:9}{system:20}{sandboxes:4}  round {number}  {row.per_s:8.1f}/s  p50 {row.p50_ms:.2f} ms", flush=True
        )


def _machine_cpu_s() -> float:
    """CPU seconds that the whole machine has been busy since boot."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


async def _nothing() -> None:
    return None


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything; the document to write."""
    top, limits = max(arguments.levels), Limits.of(SandboxConfig())
    run_id = f"bench-{secrets.token_hex(4)}"
    client = await asyncio.to_thread(connect, 120.0)
    base = await asyncio.to_thread(base_image, client)
    bench, starts = Bench(), []
    machine = await _machine(client)
    if machine["busy_fraction_before"] > BUSY_FRACTION:
        print(
            f"others keep {machine['busy_fraction_before']:.0%} of this machine busy: not figures to quote", flush=True
        )
    async with AsyncExitStack() as stack:
        ours = [Ours("docker", top, f"{run_id}-d"), Ours("bubblewrap", top, f"{run_id}-b")]
        execs = DockerExec(base, limits, run_id)
        systems: list[System] = [*ours, execs]
        async with AsyncExitStack() as others:
            for each in ours:
                stack.push_async_callback(each.close)
                starts.append(_start(each.name, top, await each.open()))
                await each.prepare(SET_UP)
            others.push_async_callback(execs.close)
            starts.append(_start(execs.name, top, await execs.open(top)))
            await execs.prepare(SET_UP)
            if not arguments.without_swe_rex:
                rex = await asyncio.to_thread(SweRex, client, base, limits, run_id)
                others.push_async_callback(rex.close)
                starts.append(_start("swe-rex", top, await rex.open(top)))
                await rex.prepare(SET_UP)
                systems += rex.ways()
            machine["busy_fraction_all_idle"] = await _busy_fraction()
            await _commands(bench, systems, arguments)
        for each in ours:
            await each.end_leases()
        fresh = FreshContainers(base, limits, run_id)
        stack.push_async_callback(fresh.close)
        await _turnovers(bench, [*ours, fresh], arguments)
    found = levels(bench.rows)
    return {
        "benchmark": "sandbox",
        "command": "python benchmarks/sandbox.py " + " ".join(sys.argv[1:]),
        "commit": _commit(),
        "machine": machine,
        "versions": _versions(),
        "commands": {**COMMANDS, TURNOVER: f"acquire, {COMMANDS_PER_EPISODE} x {COMMANDS[PLAIN]}, release"},
        "image": base,
        "summary": summarize(found, sandboxes=top),
        "levels": found,
        "starts": starts,
        "rows": [row_json(row) for row in bench.rows],
    }


async def _commands(bench: Bench, systems: list[System], arguments: argparse.Namespace) -> None:
    """Each round visits every level, each level every system; the search once only, and for half the time."""
    for number in range(1, arguments.rounds + 1):
        works = {PLAIN: arguments.seconds, SEARCH: arguments.seconds / 2} if number == 1 else {PLAIN: arguments.seconds}
        for sandboxes, (work, seconds), system in itertools.product(arguments.levels, works.items(), systems):
            load = functools.partial(system.load, COMMANDS[work], count=sandboxes, seconds=seconds * system.share)
            await bench.measure(work, system.name, sandboxes, number, system.inside_cpu_s, load)


async def _turnovers(bench: Bench, systems: list[Ours | FreshContainers], arguments: argparse.Namespace) -> None:
    for number in range(1, min(arguments.rounds, TURNOVER_ROUNDS) + 1):
        for sandboxes, system in itertools.product(arguments.levels, systems):
            load = functools.partial(system.turnover, COMMANDS[PLAIN], count=sandboxes, seconds=arguments.seconds / 2)
            await bench.measure(TURNOVER, system.name, sandboxes, number, _nothing, load)


def _start(system: str, count: int, seconds: float) -> dict[str, Any]:
    print(f"started   {system:20}{count:4}  in {seconds:.1f} s", flush=True)
    return {"system": system, "count": count, "seconds": round(seconds, 3), "per_s": round(count / seconds, 2)}


async def _machine(client: Any) -> dict[str, Any]:
    """What this ran on, and how busy it was before."""
    return {
        "cores": os.cpu_count(),
        "cpu": _cpu_model(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "docker": client.version()["Version"],
        "python": platform.python_version(),
        "busy_fraction_before": await _busy_fraction(),
    }


async def _busy_fraction() -> float:
    """Of the machine's processors, over a second in which nothing of ours runs."""
    before, began = _machine_cpu_s(), time.perf_counter()
    await asyncio.sleep(1.0)
    return round((_machine_cpu_s() - before) / (time.perf_counter() - began) / (os.cpu_count() or 1), 3)


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())


def _versions() -> dict[str, str]:
    """Of SWE-ReX and what its speed hangs on."""
    wanted = {"swe-rex", "aiohttp", "fastapi", "starlette", "uvicorn", "pydantic", "pexpect"}
    found: list[Distribution] = list(distributions(path=[str(packages_folder())]))
    return {each.name: each.version for each in sorted(found, key=lambda each: each.name) if each.name in wanted}


def _commit() -> str:
    """The commit, with `+` where files differ from it."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=10
        )
        dirty = subprocess.run(
            ["git", "diff", "--quiet", "HEAD", "--", "agentrl", "benchmarks"], cwd=ROOT, check=False, timeout=10
        )
        return head.stdout.strip() + ("+" if dirty.returncode else "")
    return "unknown"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--levels", type=_numbers, default=[1, 8, 32], help="sandboxes at once, the summary is of the last"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load; half of it for search and turnover")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-swe-rex", action="store_true", help="where no package index can be reached")
    parser.add_argument(
        "--quick", action="store_true", help="does it run: levels 1,4, half a second, one round, no file"
    )
    parser.add_argument("--output", type=Path, help=f"where the JSON goes ({OUTPUT.relative_to(ROOT)})")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.levels, arguments.seconds, arguments.rounds = [1, 4], 0.5, 1
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    began = time.perf_counter()
    document = await run(arguments)
    print("\n" + table(document["levels"]))
    print(f"\n{time.perf_counter() - began:.0f} s\n" + json.dumps(document["summary"], indent=1))
    output = arguments.output or (None if arguments.quick else OUTPUT)
    if output is not None:
        output.write_text(json.dumps(document, indent=1) + "\n")


def _numbers(text: str) -> list[int]:
    return sorted({int(each) for each in text.split(",")})


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("interrupted; what was started is removed", file=sys.stderr)
        sys.exit(130)

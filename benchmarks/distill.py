"""Does a teacher teach, and for how much less than reinforcement learning? Fresh solve rates and device time.

    python benchmarks/distill.py [--teacher FOLDER] [--seeds 0 1 2] [--only rl] [--dry-run]
    python benchmarks/distill.py --only rl --train.optimizer.learning-rate 1e-3    # of every run that distils

Cases (`--only` chooses):
  rl               per seed: distillation from the shipped policy, and RL by the fastest schedule (async, two updates);
                   device time of each until RL's level
  kinds            a short run with a `transformers` and with a `vllm` teacher: which is cheaper on these cores
  two-teachers     both task families, taught by a teacher of each, and by either teacher alone
  cross-tokenizer  a teacher with another tokenizer, scored over byte-aligned spans
  offline          from the trajectories that RL recorded

Teachers are built by `agentrl sft` where none is given; what that cost is in the result. Each run is a process of its
own with a folder under `--work`: a finished one is read, one that was begun goes on. Writes
benchmarks/results/distill.json after every run; `summary` has `min_gain` (a fraction: 0.2 is 20 points) and
`device_time_vs_rl` (above 1: distillation is cheaper).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import distill_figures as figures
from distill_plan import BOTH_FAMILIES, CASES, ENVIRONMENT, KINDS, Choice, Plan, StudentRun, TeacherModel, make_plan
from orchestration_result import ROOT, document

from agentrl.errors import AgentRLError, RunFailedError
from agentrl.run.bench_plan import check_settings, clear_unborn, is_finished, steps_done
from agentrl.run.bench_schedules import run_agentrl, run_child
from agentrl.run.folder import is_run_folder
from agentrl.run.signals import INTERRUPTED, Interrupted, run_interruptible
from agentrl.telemetry.writing import write_whole

RESULT = ROOT / "benchmarks" / "results" / "distill.json"
_PART_LIMIT_S = 3 * 3600.0
_TAIL_CHARS = 2000


def parse(words: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and the dotted options that it does not know."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=512, help="fresh tasks of every evaluation")
    parser.add_argument("--every", type=int, default=2, help="deliveries between points of a curve; RL's: 4 times")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help=f"of: {', '.join(CASES)}")
    parser.add_argument("--kind", default="transformers", choices=KINDS, help="how teachers are run")
    parser.add_argument("--teacher", type=Path, help="a folder; default: built by `agentrl sft`")
    parser.add_argument("--settings-teacher", type=Path, help="one that is good at the second family")
    parser.add_argument("--other-teacher", type=Path, help="one with another tokenizer")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "distill")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--dry-run", action="store_true", help="print the commands and stop")
    return parser.parse_known_args(words)


def choice_of(options: argparse.Namespace, extra: Sequence[str]) -> Choice:
    given = {"teacher": options.teacher, "settings": options.settings_teacher, "other": options.other_teacher}
    return Choice(
        work=options.work.resolve(),
        seeds=tuple(options.seeds),
        tasks=options.tasks,
        kind=options.kind,
        every=options.every,
        given={name: folder.resolve() for name, folder in given.items() if folder is not None},
        extra=tuple(extra),
    )


# --- running ------------------------------------------------------------------------------------------------------


async def run_part(words: Sequence[str], log: Path) -> float:
    """An `agentrl` command to its end; minutes taken. Raises `RunFailedError` with the end of its output."""
    began = time.monotonic()
    try:
        code: int | str = await run_agentrl(words, log, limit_s=_PART_LIMIT_S)
    except TimeoutError:
        code = f"nothing within {_PART_LIMIT_S / 3600:g} hours"
    if code != 0:
        raise RunFailedError(
            f"agentrl {shlex.join(words)} ended with {code}:\n{tail_of(log)}",
            where=str(log),
            remedy="mend the cause; the same command goes on with what is unfinished",
        )
    return (time.monotonic() - began) / 60


def tail_of(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-_TAIL_CHARS:]


async def build(teacher: TeacherModel) -> None:
    """Build a teacher that is not there, and note what that cost."""
    cost = cost_file(teacher)
    if teacher.given or cost.exists():
        return
    if teacher.folder.exists():  # of a build that was interrupted
        shutil.rmtree(teacher.folder)
    print(f"teacher {teacher.name}: agentrl {shlex.join(teacher.command())}", flush=True)
    minutes = await run_part(teacher.command(), teacher.folder.with_suffix(".log"))
    write_whole(cost, json.dumps({"command": shlex.join(["agentrl", *teacher.command()]), "minutes": minutes}) + "\n")


def cost_file(teacher: TeacherModel) -> Path:
    return teacher.folder.with_suffix(".cost.json")


def evaluation(model: Path, folder: Path, tasks: int, more: Sequence[str] = ()) -> list[str]:
    """The words that evaluate a model as students are evaluated."""
    words = ["eval", ENVIRONMENT, "--preset", "demo", "--model", str(model), "--split", "fresh"]
    return [*words, "--tasks", str(tasks), "--run-dir", str(folder), "--plain", *more]


async def evaluate(model: Path, folder: Path, tasks: int, more: Sequence[str] = ()) -> dict[str, Any]:
    """Solve rate of a model, once; later calls read the kept result."""
    result = folder / "eval.json"
    if not result.exists():
        shutil.rmtree(folder, ignore_errors=True)  # of an evaluation that was interrupted
        await run_part(evaluation(model, folder, tasks, more), folder.with_suffix(".log"))
    found = json.loads(result.read_text(encoding="utf-8"))
    return {key: found[key] for key in ("solve", "low", "high", "n")}


async def describe(teacher: TeacherModel, choice: Choice, *, on_mixture: bool) -> dict[str, Any]:
    """What a teacher cost and how good it is."""
    work = choice.work
    found: dict[str, Any] = {"folder": str(teacher.folder)}
    if cost_file(teacher).exists():
        found |= json.loads(cost_file(teacher).read_text(encoding="utf-8"))
    warm_start = teacher.folder / "warm_start.json"
    if warm_start.is_file():
        stages = json.loads(warm_start.read_text(encoding="utf-8"))["stages"]
        found["train_cpu_s"] = round(sum(stage["cpu_s"] for stage in stages), 1)
    found["fresh"] = await evaluate(teacher.folder, work / f"{teacher.name}-fresh", choice.tasks)
    if on_mixture:
        folder = work / f"{teacher.name}-mixture"
        found["mixture"] = await evaluate(teacher.folder, folder, choice.tasks, [BOTH_FAMILIES])
    return found


async def run_all(plan: Plan, output: Path) -> None:
    """Teachers, then runs with their curves; the result is written after each."""
    choice = plan.choice
    result: dict[str, Any] = document("distill") | {"tasks": choice.tasks, "temperature": 1.0, "kind": choice.kind}
    told = result["teachers"] = {}
    mixed = bool(plan.of("two-teachers"))
    for name, teacher in plan.teachers.items():
        await build(teacher)
        told[name] = await describe(teacher, choice, on_mixture=mixed and name in ("teacher", "settings"))
        print(f"teacher {name}: {told[name]['fresh']['solve']:.1%} of {choice.tasks} fresh tasks", flush=True)
    for number, run in enumerate(plan.runs, 1):
        if not is_done(run):
            clear_unborn(run.folder)
            print(f"[{number}/{len(plan.runs)}] {run.name}: {state(run)}", flush=True)
            await run_child(run)
        for model, folder in plan.curve(run).values():
            await evaluate(model, folder, choice.tasks, [f"--seed={run.seed}"])
        write(result, plan, output)
    show(write(result, plan, output))


def is_done(run: StudentRun) -> bool:
    return is_finished(run.folder, run.config.steps)


def state(run: StudentRun) -> str:
    """For whoever watches."""
    if is_done(run):
        return "finished"
    return f"goes on after {steps_done(run.folder)} deliveries" if is_run_folder(run.folder) else "to be run"


# --- the result ---------------------------------------------------------------------------------------------------


def write(result: dict[str, Any], plan: Plan, output: Path) -> dict[str, Any]:
    """The result of what is finished."""
    cases = read_cases(plan, result["teachers"])
    complete = all(is_done(run) and len(between(plan, run)) == len(plan.curve(run)) for run in plan.runs)
    whole = {**result, "complete": complete, "summary": figures.summary(cases, result["teachers"]), **cases}
    write_whole(output, json.dumps(whole, indent=1, allow_nan=False) + "\n")
    return whole


def between(plan: Plan, run: StudentRun) -> dict[int, float]:
    """Solve rates of a run's checkpoints that have been evaluated, by step."""
    found = {}
    for step, (_, folder) in plan.curve(run).items():
        with contextlib.suppress(FileNotFoundError):
            found[step] = json.loads((folder / "eval.json").read_text(encoding="utf-8"))["solve"]
    return found


def read_cases(plan: Plan, teachers: dict[str, Any]) -> dict[str, Any]:
    """The figures of every case that has what it needs."""

    def learned(case: str, part: str | None = None) -> list[figures.Learned]:
        return [
            figures.read_learned(run.folder, seed=run.seed, between=between(plan, run))
            for run in plan.of(case, part)
            if is_done(run)
        ]

    found: dict[str, Any] = {}
    if distilled := learned("rl", "distill"):
        found["rl"] = figures.against_rl(distilled, learned("rl", "rl"))
    for case, read in (("kinds", figures.kinds), ("two-teachers", None)):
        parts = {run.schedule: runs[0] for run in plan.of(case) if (runs := learned(case, run.schedule))}
        if read is not None and parts:
            found[case] = read(parts)
        elif parts and len(parts) == len(plan.of(case)):
            on_mixture = {name: each["mixture"]["solve"] for name, each in teachers.items() if "mixture" in each}
            found[case] = figures.mixture(parts, on_mixture)
    for case, part in (("cross-tokenizer", "other"), ("offline", "recorded")):
        if runs := learned(case, part):
            found[case] = runs[0].as_json()
    return found


def show(whole: dict[str, Any]) -> None:
    """The ratio of each seed, and the summary."""
    for row in whole.get("rl", {}).get("to_rl_level", ()):
        ratio = "not reached" if row["ratio"] is None else f"{row['ratio']:.2f} times less"
        print(
            f"seed {row['seed']}: to {row['level']:.1%}: RL {row['rl_device_s']} device-seconds, distillation "
            f"{row['distill_device_s']}: {ratio}"
        )
    print(json.dumps(whole["summary"], indent=1))


def main() -> int:
    options, extra = parse()
    try:
        choice = choice_of(options, extra)
        plan = make_plan(choice, options.only)
        for run in plan.runs:
            check_settings(run)
        if options.dry_run:
            dry_run(plan)
            return 0
        choice.work.mkdir(parents=True, exist_ok=True)
        run_interruptible(run_all(plan, options.output))
    except Interrupted:
        print("interrupted; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    except AgentRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def dry_run(plan: Plan) -> None:
    """The commands, and what is done of them."""
    tasks, work = plan.choice.tasks, plan.choice.work
    for teacher in plan.teachers.values():
        there = teacher.given or cost_file(teacher).exists()
        print(f"teacher {teacher.name}: {teacher.folder if there else 'to be built'}")
        if not there:
            print(f"  agentrl {shlex.join(teacher.command())}")
        print(f"  agentrl {shlex.join(evaluation(teacher.folder, work / f'{teacher.name}-fresh', tasks))}")
    for run in plan.runs:
        print(f"{run.name}: {state(run)}\n  agentrl {shlex.join(run.command())}")
        if curve := plan.curve(run):
            print(f"  then `agentrl eval` of its checkpoints {', '.join(map(str, curve))}")


if __name__ == "__main__":
    sys.exit(main())

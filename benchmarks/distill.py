"""Does a teacher teach, and for how much less than reinforcement learning? Fresh solve rates and device time.

    python benchmarks/distill.py [--teacher FOLDER] [--seeds 0 1 2] [--only rl] [--dry-run]
    python benchmarks/distill.py --only rl --train.optimizer.learning-rate 1e-3    # of every run that distils

Cases (`--only` chooses which are run; without it all but `kinds`):
  rl               per seed: RL by the fastest schedule (async, two updates), and distillation from the shipped policy;
                   device time of each until RL's level
  kinds            a short run with a `transformers` and with a `vllm` teacher: which is cheaper on these cores
  two-teachers     a student that knows both task families a little, taught by a teacher of each, and by either alone
  cross-tokenizer  a teacher with another tokenizer, scored over byte-aligned spans
  offline          from the trajectories that RL recorded

Teachers are built by `agentrl sft` where none is given; what that cost is in the result, a given one's as well where
its folder (`warm_start.json`) or the file beside it (`FOLDER.cost.json`) says so. Each run is a process of its own with
a folder under `--work`: a finished one is read, one that was begun goes on. A work folder is one comparison, with the
same options in each call; whatever `--only` runs, the result is made of all that is there.

Writes benchmarks/results/distill.json after every run. Its `summary` has `min_gain` (a fraction: 0.2 is 20 points) and
`device_time_vs_rl` (above 1: distillation is cheaper), both None until every planned seed is done, and with fewer than
three.
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
from distill_plan import (
    BOTH_FAMILIES,
    CASES,
    DEFAULT_CASES,
    ENVIRONMENT,
    KINDS,
    RL_EVERY,
    STUDENT,
    Choice,
    Plan,
    StudentRun,
    TeacherModel,
    make_plan,
)
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
_MIXTURE = ("teacher", "settings")


def parse(words: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and the dotted options that it does not know."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of case rl; the others have the first")
    parser.add_argument("--tasks", type=int, default=512, help="fresh tasks of every evaluation")
    parser.add_argument("--only", nargs="+", default=[], metavar="CASE", help=f"of: {', '.join(CASES)}")
    parser.add_argument("--kind", default="transformers", choices=KINDS, help="how teachers are run")
    parser.add_argument("--teacher", type=Path, help="a folder; default: built by `agentrl sft`")
    parser.add_argument("--settings-teacher", type=Path, help="one that is good at the second family")
    parser.add_argument("--other-teacher", type=Path, help="one with another tokenizer")
    parser.add_argument("--student", type=Path, help="of two-teachers: one that knows both families a little")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "distill")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--dry-run", action="store_true", help="print the commands and stop")
    return parser.parse_known_args(words)


def choice_of(options: argparse.Namespace, extra: Sequence[str]) -> Choice:
    given = {
        "teacher": options.teacher,
        "settings": options.settings_teacher,
        "other": options.other_teacher,
        STUDENT: options.student,
    }
    return Choice(
        work=options.work.resolve(),
        seeds=tuple(dict.fromkeys(options.seeds)),
        tasks=options.tasks,
        kind=options.kind,
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
    if is_there(teacher):
        return
    if teacher.folder.exists():  # of a build that was interrupted
        shutil.rmtree(teacher.folder)
    print(f"teacher {teacher.name}: agentrl {shlex.join(teacher.command())}", flush=True)
    minutes = await run_part(teacher.command(), teacher.folder.with_name(f"{teacher.folder.name}.log"))
    found = {"command": shlex.join(["agentrl", *teacher.command()]), "minutes": minutes}
    write_whole(cost_file(teacher), json.dumps(found) + "\n")


def is_there(teacher: TeacherModel) -> bool:
    return teacher.given or cost_file(teacher).exists()


def cost_file(teacher: TeacherModel) -> Path:
    return teacher.folder.with_name(f"{teacher.folder.name}.cost.json")


def evaluation(model: Path, folder: Path, tasks: int, more: Sequence[str] = ()) -> list[str]:
    """The words that evaluate a model as students are evaluated."""
    words = ["eval", ENVIRONMENT, "--preset", "demo", "--model", str(model), "--split", "fresh"]
    return [*words, "--tasks", str(tasks), "--run-dir", str(folder), "--plain", *more]


def kept(model: Path, folder: Path, tasks: int) -> dict[str, Any] | None:
    """The solve rate that an evaluation of this model on so many tasks has left there."""
    try:
        found = json.loads((folder / "eval.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if found["solve"] is None or (found["model"], found["tasks"]) != (str(model), tasks):
        return None
    return {key: found[key] for key in ("solve", "low", "high", "n")}


async def evaluate(model: Path, folder: Path, tasks: int, more: Sequence[str] = ()) -> None:
    """Leave the solve rate of a model there, where that is not done."""
    if kept(model, folder, tasks) is None:
        shutil.rmtree(folder, ignore_errors=True)  # interrupted, or of another model
        await run_part(evaluation(model, folder, tasks, more), folder.with_name(f"{folder.name}.log"))


def judged(plan: Plan, teacher: TeacherModel) -> dict[str, tuple[Path, list[str]]]:
    """The evaluations of a teacher by name: folder, and further options. A student's runs measure it themselves."""
    if teacher.name == STUDENT:
        return {}
    found: dict[str, tuple[Path, list[str]]] = {"fresh": (plan.choice.work / f"{teacher.name}-fresh", [])}
    if teacher.name in _MIXTURE and any(run.case == "two-teachers" for run in plan.chosen):
        found["mixture"] = (plan.choice.work / f"{teacher.name}-mixture", [BOTH_FAMILIES])
    return found


async def run_all(plan: Plan, output: Path) -> None:
    """Teachers, then runs with their curves; the result is written after each."""
    choice = plan.choice
    head = document("distill") | {"tasks": choice.tasks, "temperature": 1.0, "kind": choice.kind}
    for teacher in plan.needed():
        await build(teacher)
        for folder, more in judged(plan, teacher).values():
            await evaluate(teacher.folder, folder, choice.tasks, more)
        if (rate := read_teacher(plan, teacher).get("fresh")) is not None:
            print(f"teacher {teacher.name}: {rate['solve']:.1%} of {choice.tasks} fresh tasks", flush=True)
    for number, run in enumerate(plan.chosen, 1):
        if not is_done(run):
            clear_unborn(run.folder)
            print(f"[{number}/{len(plan.chosen)}] {run.name}: {state(run)}", flush=True)
            await run_child(run)
        while (step := next_checkpoint(plan, run)) is not None:
            model, folder = plan.curve(run)[step]
            await evaluate(model, folder, choice.tasks, [f"--seed={run.seed}"])
        write(head, plan, output)
    show(write(head, plan, output))


def is_done(run: StudentRun) -> bool:
    return is_finished(run.folder, run.config.steps)


def state(run: StudentRun) -> str:
    """For whoever watches."""
    if is_done(run):
        return "finished"
    return f"goes on after {steps_done(run.folder)} deliveries" if is_run_folder(run.folder) else "to be run"


def solved(plan: Plan, run: StudentRun) -> dict[int, float]:
    """Solve rates of a run by step: its own, and those of its checkpoints that have been evaluated."""
    found = {}
    for step, (model, folder) in plan.curve(run).items():
        if (rate := kept(model, folder, plan.choice.tasks)) is not None:
            found[step] = rate["solve"]
    return found | figures.own_rates(run.folder)


def next_checkpoint(plan: Plan, run: StudentRun) -> int | None:
    """The checkpoint of a finished run that is to be evaluated next; None where none is, or RL's level is unknown."""
    curve = plan.curve(run)
    if not curve:
        return None
    rates = solved(plan, run)
    if run.verb == "train":
        return figures.next_of_rl(rates, list(curve), every=RL_EVERY, tasks=plan.choice.tasks)
    (rl,) = (other for other in plan.of("rl", "rl") if other.seed == run.seed)
    if not is_done(rl):
        return None
    return figures.next_of_distillation(rates, list(curve), level=solved(plan, rl)[rl.config.steps])


def is_whole(plan: Plan, run: StudentRun) -> bool:
    """True where it is done, and what its curve needs is evaluated."""
    return is_done(run) and next_checkpoint(plan, run) is None


# --- the result ---------------------------------------------------------------------------------------------------


def write(head: dict[str, Any], plan: Plan, output: Path) -> dict[str, Any]:
    """The result of what is finished, in this call or before."""
    teachers = {name: read_teacher(plan, teacher) for name, teacher in plan.teachers.items() if is_there(teacher)}
    student = {STUDENT: teachers.pop(STUDENT)} if STUDENT in teachers else {}
    cases = read_cases(plan, teachers)
    expected = [run for run in plan.runs if run.case in DEFAULT_CASES]
    complete = {run.case for run in expected} == set(DEFAULT_CASES) and all(is_whole(plan, run) for run in expected)
    summary = figures.summary(cases, teachers)
    whole = {**head, "complete": complete, "summary": summary, "teachers": teachers, **student, **cases}
    write_whole(output, json.dumps(whole, indent=1, allow_nan=False) + "\n")
    return whole


def read_teacher(plan: Plan, teacher: TeacherModel) -> dict[str, Any]:
    """What is known of a teacher: what it cost, and how good it is where that was measured."""
    found: dict[str, Any] = {"folder": teacher.folder.name}  # a path would be this machine's
    with contextlib.suppress(FileNotFoundError):
        found |= json.loads(cost_file(teacher).read_text(encoding="utf-8"))
    with contextlib.suppress(FileNotFoundError):
        stages = json.loads((teacher.folder / "warm_start.json").read_text(encoding="utf-8"))["stages"]
        found.setdefault("train_cpu_s", round(sum(stage["cpu_s"] for stage in stages), 1))
    for name in ("fresh", "mixture"):
        rate = kept(teacher.folder, plan.choice.work / f"{teacher.name}-{name}", plan.choice.tasks)
        if rate is not None:
            found[name] = rate
    return found


def read_cases(plan: Plan, teachers: dict[str, Any]) -> dict[str, Any]:
    """The figures of every case that has what it needs."""

    def learned(case: str, part: str | None = None) -> list[figures.Learned]:
        return [
            figures.read_learned(run.folder, seed=run.seed, solved=solved(plan, run))
            for run in plan.of(case, part)
            if is_done(run)
        ]

    def parts(case: str) -> dict[str, figures.Learned]:
        return {run.schedule: runs[0] for run in plan.of(case) if (runs := learned(case, run.schedule))}

    found: dict[str, Any] = {}
    distilled, reinforced = learned("rl", "distill"), learned("rl", "rl")
    if distilled or reinforced:
        seeds = plan.choice.seeds
        unfinished = {run.seed for run in plan.of("rl") if not is_whole(plan, run)}
        found["rl"] = figures.against_rl(
            distilled,
            reinforced,
            seeds=seeds,
            whole=set(seeds) - unfinished,
            tasks=plan.choice.tasks,
            teacher_cpu_s=teachers.get("teacher", {}).get("train_cpu_s"),
        )
    if kinds := parts("kinds"):
        found["kinds"] = figures.kinds(kinds)
    mixed = parts("two-teachers")
    if mixed and len(mixed) == len(plan.of("two-teachers")):
        on_mixture = {name: each["mixture"]["solve"] for name, each in teachers.items() if "mixture" in each}
        found["two-teachers"] = figures.mixture(mixed, on_mixture)
    for case, part in (("cross-tokenizer", "other"), ("offline", "recorded")):
        if runs := learned(case, part):
            found[case] = runs[0].as_json()
    return found


def show(whole: dict[str, Any]) -> None:
    """The ratio of each seed, and the summary."""
    for row in whole.get("rl", {}).get("to_rl_level", ()):
        needed = row["distill_device_s"]
        ratio = "no ratio" if row["ratio"] is None else f"{row['ratio']:.2f} times less"
        print(
            f"seed {row['seed']}: to {row['level']:.1%}: RL {row['rl_device_s']} device-seconds, distillation "
            f"{'did not reach it' if needed is None else f'{needed}: {ratio}'}"
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
    for teacher in plan.needed():
        print(f"teacher {teacher.name}: {teacher.folder if is_there(teacher) else 'to be built'}")
        if not is_there(teacher):
            print(f"  agentrl {shlex.join(teacher.command())}")
        for folder, more in judged(plan, teacher).values():
            print(f"  agentrl {shlex.join(evaluation(teacher.folder, folder, plan.choice.tasks, more))}")
    for run in plan.chosen:
        print(f"{run.name}: {state(run)}\n  agentrl {shlex.join(run.command())}")
        if run.case == "rl" and run.verb == "train":
            print(f"  then `agentrl eval` every {RL_EVERY} deliveries, and between those where its level is reached")
        elif run.case == "rl":
            print("  then `agentrl eval` of its checkpoints, from the first on, until two have reached RL's level")


if __name__ == "__main__":
    sys.exit(main())

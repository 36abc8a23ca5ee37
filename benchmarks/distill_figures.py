"""Run folders of `benchmarks/distill.py` → its figures. Pure but for reading.

*Device time* of a run until a delivery: devices × the seconds of its steps so far (`time/step_s`), in which teachers
score as well; start-up and evaluations are left out. A run has *reached* a level at the first evaluation from which on
none is below it; the moment is found on the straight line from the evaluation before.

Distillation against reinforcement learning, seed by seed: the level is that RL run's last solve rate p. Distillation
must reach it as it is. RL has reached it one standard error below, p − √(p(1 − p)/n) with n tasks: a run that has long
stopped to rise is not charged until the evaluation in which chance was kindest to it. The ratio is the device time that
RL took, ÷ the device time that distillation took. Above 1 distillation is cheaper. The estimate over seeds is the
geometric mean, with its 95 % interval.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import RunFolderError
from agentrl.run.bench_comparison import estimate_json, rounded
from agentrl.run.bench_plan import MEASURE
from agentrl.run.bench_statistics import Estimate, paired_ratio
from agentrl.telemetry.metrics import MetricsRow, read_metrics
from agentrl.telemetry.run_data import load_runs

MIN_SEEDS = 3
_HOUR_S = 3600.0
_SHOWN = (
    *("teacher/kl", "teacher/top1_agreement", "teacher/tokens_per_s", "teacher/busy_fraction", "teacher/wait_fraction"),
    *("teacher/unscored_fraction", "teacher/failures", "correction/ess", "staleness/mean"),
)


@dataclass(frozen=True, slots=True)
class Point:
    """An evaluation: device seconds spent until then, and the solve rate on fresh tasks."""

    step: int
    device_s: float
    solve: float


@dataclass(frozen=True, slots=True)
class Learned:
    """A run from its first evaluation to its last. `means` are of the public metrics, over the steps that have them."""

    seed: int
    points: tuple[Point, ...]
    step_s: float
    learning_rate: float
    means: Mapping[str, float]

    @property
    def start(self) -> float:
        return self.points[0].solve

    @property
    def end(self) -> float:
        return self.points[-1].solve

    @property
    def gain(self) -> float:
        return self.end - self.start

    @property
    def device_s(self) -> float:
        """The whole run's."""
        return self.points[-1].device_s

    def reached_s(self, level: float) -> float | None:
        """Device seconds until `level` was reached; None where it was not."""
        first = len(self.points)
        while first > 0 and self.points[first - 1].solve >= level:
            first -= 1
        if first == len(self.points):
            return None
        reached = self.points[first]
        if first == 0:
            return reached.device_s
        before = self.points[first - 1]
        share = (level - before.solve) / (reached.solve - before.solve)
        return before.device_s + share * (reached.device_s - before.device_s)

    def as_json(self) -> dict[str, Any]:
        curve = [[point.step, rounded(point.device_s), rounded(point.solve)] for point in self.points]
        return {
            "seed": self.seed,
            "start": self.start,
            "end": self.end,
            "gain": rounded(self.gain),
            "device_s": rounded(self.device_s),
            "step_s": rounded(self.step_s),
            "learning_rate": self.learning_rate,
            "metrics": {name: rounded(value) for name, value in self.means.items()},
            "curve": curve,
        }


def own_rates(folder: Path) -> dict[int, float]:
    """Solve rates by step that a run measured itself."""
    return {row.step: row.values[MEASURE] for row in read_metrics(folder / "metrics.jsonl") if MEASURE in row.values}


def read_learned(folder: Path, *, seed: int, solved: Mapping[int, float]) -> Learned:
    """The figures of a finished run; `solved` are solve rates by step, its own and those of its checkpoints.

    Raises `RunFolderError` where it lacks what they are made of.
    """
    (run,) = load_runs([folder])
    hours = run.device_hours
    steps = [row for row in run.metrics if row.step > 0]
    if not steps or not solved.keys() >= {0, steps[-1].step} or not solved.keys() <= hours.keys():
        raise RunFolderError(
            f"it lacks {MEASURE} at its first or its last step, or its devices",
            where=str(folder / "metrics.jsonl"),
            remedy="run the benchmark again: it goes on with what is unfinished",
        )
    points = tuple(Point(step, hours[step] * _HOUR_S, solved[step]) for step in sorted(solved))
    means = {name: mean for name in _SHOWN if (mean := _mean(steps, name)) is not None}
    return Learned(
        seed, points, _mean(steps, "time/step_s") or 0.0, run.setting("train.optimizer.learning_rate"), means
    )


def _mean(rows: Sequence[MetricsRow], name: str) -> float | None:
    values = [row.values[name] for row in rows if name in row.values]
    return sum(values) / len(values) if values else None


# --- which checkpoints are evaluated ------------------------------------------------------------------------------


def allowed(level: float, tasks: int) -> float:
    """One standard error below a solve rate that was measured on so many tasks."""
    return level - math.sqrt(level * (1 - level) / tasks)


def next_of_rl(solved: Mapping[int, float], kept: Sequence[int], *, every: int, tasks: int) -> int | None:
    """The checkpoint of an RL run that is to be evaluated next, None where its curve tells enough.

    Every `every`-th comes first; then the stretch in which its level was reached is halved until it holds no kept
    checkpoint. `solved` has the first and the last step.
    """
    if missing := [step for step in kept if step % every == 0 and step not in solved]:
        return missing[0]
    steps = sorted(solved)
    level = allowed(solved[steps[-1]], tasks)
    below = [step for step in steps if solved[step] < level]
    if not below:
        return None
    reached = min(step for step in steps if step > below[-1])
    between = [step for step in kept if below[-1] < step < reached]
    return between[len(between) // 2] if between else None


def next_of_distillation(solved: Mapping[int, float], kept: Sequence[int], *, level: float) -> int | None:
    """The checkpoint of a distillation that is to be evaluated next, None where its curve tells enough.

    One after another until two in a row have reached the level; none where the last step, which the run evaluates
    itself, is below it: then it is not reached. `solved` has the first and the last step.
    """
    last = max(solved)
    if solved[last] < level:
        return None
    before = False
    for step in sorted({0, *kept, last}):
        if step not in solved:
            return step
        now = solved[step] >= level
        if now and before:
            return None
        before = now
    return None


# --- cases --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToLevel:
    """What it took on one seed to reach RL's level, in device seconds; None where it was not reached."""

    seed: int
    level: float
    rl_s: float | None
    distill_s: float | None

    @classmethod
    def of(cls, distilled: Learned, reinforced: Learned, *, tasks: int) -> ToLevel:
        level = reinforced.end
        return cls(reinforced.seed, level, reinforced.reached_s(allowed(level, tasks)), distilled.reached_s(level))

    def as_json(self) -> dict[str, Any]:
        """`ratio` is None as well where distillation was there before it began."""
        ratio = None
        if self.rl_s is not None and self.distill_s is not None and self.distill_s > 0:
            ratio = self.rl_s / self.distill_s
        return {
            "seed": self.seed,
            "level": self.level,
            "rl_device_s": rounded(self.rl_s),
            "distill_device_s": rounded(self.distill_s),
            "ratio": rounded(ratio),
        }


def against_rl(
    distilled: Sequence[Learned],
    reinforced: Sequence[Learned],
    *,
    seeds: Sequence[int],
    whole: Collection[int],
    tasks: int,
    teacher_cpu_s: float | None,
) -> dict[str, Any]:
    """Both by seed, and what it took to reach RL's level on the seeds that are `whole`: with both runs and curves.

    What is claimed of all is None until every one of `seeds` is whole, and where they are fewer than `MIN_SEEDS`.
    `ratio_with_teacher` has the CPU-seconds of the teacher's training, which happens once, on each seed's side of
    distillation as if they were device seconds.
    """
    ours, theirs = ({run.seed: run for run in runs} for runs in (distilled, reinforced))
    rows = [ToLevel.of(ours[seed], theirs[seed], tasks=tasks) for seed in seeds if seed in whole]
    claimed = len(rows) == len(seeds) >= MIN_SEEDS
    return {
        "distill": [run.as_json() for run in distilled],
        "rl": [run.as_json() for run in reinforced],
        "to_rl_level": [row.as_json() for row in rows],
        "min_gain": rounded(min(run.gain for run in distilled)) if claimed else None,
        "ratio": _json(_ratio(rows)) if claimed else None,
        "ratio_with_teacher": _json(_ratio(rows, teacher_cpu_s)) if claimed and teacher_cpu_s is not None else None,
    }


def _ratio(rows: Sequence[ToLevel], more_s: float = 0.0) -> Estimate | None:
    """RL's device time ÷ that of distillation and `more_s`; None where a run did not reach the level."""
    both = [(row.rl_s, row.distill_s) for row in rows]
    reached = [(rl_s, distill_s + more_s) for rl_s, distill_s in both if rl_s is not None and distill_s is not None]
    if len(reached) < len(rows):
        return None
    return paired_ratio([rl_s for rl_s, _ in reached], [distill_s for _, distill_s in reached])


def _json(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else estimate_json(estimate)


def mixture(students: Mapping[str, Learned], teachers: Mapping[str, float]) -> dict[str, Any]:
    """Students of both teachers and of either alone, and the teachers themselves, all on the mixture of families.

    `over_best_student`: of both, over the better student of one; `over_best_teacher`: over the better teacher itself.
    """
    alone = max(run.end for part, run in students.items() if part != "both")
    both = students["both"].end
    found: dict[str, Any] = {part: run.as_json() for part, run in students.items()}
    return found | {
        "teachers_on_mixture": dict(teachers),
        "over_best_student": rounded(both - alone),
        "over_best_teacher": rounded(both - max(teachers.values())) if teachers else None,
    }


def kinds(runs: Mapping[str, Learned]) -> dict[str, Any]:
    """How long a step takes with each kind of teacher, and how fast the teacher is."""
    return {
        kind: {
            "step_s": rounded(run.step_s),
            "device_s": rounded(run.device_s),
            **{name: rounded(value) for name, value in run.means.items() if name.startswith("teacher/")},
        }
        for kind, run in runs.items()
    }


def summary(found: Mapping[str, Any], teachers: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that the benchmark is judged by; None where they are not known (yet).

    `min_gain` and the ratios are claimed of three seeds or more, and not before all that are planned are whole; `seeds`
    says how many are. `device_time_vs_rl_with_teacher` counts the teacher's training as well, where its cost is known.
    """
    rl = found.get("rl", {})
    ratio, with_teacher = rl.get("ratio"), rl.get("ratio_with_teacher")
    two, other, recorded = (found.get(case, {}) for case in ("two-teachers", "cross-tokenizer", "offline"))
    return {
        "seeds": len(rl.get("to_rl_level", ())),
        "teacher_solve": teachers.get("teacher", {}).get("fresh", {}).get("solve"),
        "min_gain": rl.get("min_gain"),
        "device_time_vs_rl": None if ratio is None else ratio["value"],
        "device_time_vs_rl_interval": None if ratio is None else [ratio["low"], ratio["high"]],
        "device_time_vs_rl_with_teacher": None if with_teacher is None else with_teacher["value"],
        "two_teachers_over_best_alone": two.get("over_best_student"),
        "two_teachers_over_best_teacher": two.get("over_best_teacher"),
        "cross_tokenizer_gain": other.get("gain"),
        "offline_gain": recorded.get("gain"),
    }

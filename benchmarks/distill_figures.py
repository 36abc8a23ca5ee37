"""Run folders of `benchmarks/distill.py` → its figures. Pure but for reading.

*Device time* of a run until a delivery: devices × the seconds of its steps so far (`time/step_s`); start-up and
evaluations are left out. A run has *reached* a level at the first evaluation from which on none is below it.

Distillation against reinforcement learning, seed by seed: the level is that RL run's last solve rate; the ratio is the
device time that RL took to reach it, ÷ the device time that distillation took. Above 1 distillation is cheaper. The
estimate over seeds is the geometric mean, with its 95 % interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import RunFolderError
from agentrl.run.bench_comparison import estimate_json, rounded
from agentrl.run.bench_plan import MEASURE
from agentrl.run.bench_statistics import paired_ratio
from agentrl.telemetry.metrics import MetricsRow
from agentrl.telemetry.run_data import load_runs

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
        found = None
        for point in reversed(self.points):
            if point.solve < level:
                break
            found = point.device_s
        return found

    def as_json(self) -> dict[str, Any]:
        curve = [[point.step, rounded(point.device_s), rounded(point.solve)] for point in self.points]
        return {
            "seed": self.seed,
            "start": self.start,
            "end": self.end,
            "gain": rounded(self.gain),
            "device_s": rounded(self.device_s),
            "step_s": rounded(self.step_s),
            "metrics": {name: rounded(value) for name, value in self.means.items()},
            "curve": curve,
        }


def read_learned(folder: Path, *, seed: int, between: Mapping[int, float]) -> Learned:
    """The figures of a finished run; `between` are solve rates by step, of checkpoints that were evaluated afterwards.

    Raises `RunFolderError` where it lacks what they are made of.
    """
    (run,) = load_runs([folder])
    hours = run.device_hours
    solved = {**between, **{row.step: row.values[MEASURE] for row in run.metrics if MEASURE in row.values}}
    steps = [row for row in run.metrics if row.step > 0]
    if not steps or not solved.keys() >= {0, steps[-1].step} or not solved.keys() <= hours.keys():
        raise RunFolderError(
            f"it lacks {MEASURE} at its first or its last step, or its devices",
            where=str(folder / "metrics.jsonl"),
            remedy="run the benchmark again: it goes on with what is unfinished",
        )
    points = tuple(Point(step, hours[step] * _HOUR_S, solved[step]) for step in sorted(solved))
    means = {name: mean for name in _SHOWN if (mean := _mean(steps, name)) is not None}
    return Learned(seed, points, _mean(steps, "time/step_s") or 0.0, means)


def _mean(rows: Sequence[MetricsRow], name: str) -> float | None:
    values = [row.values[name] for row in rows if name in row.values]
    return sum(values) / len(values) if values else None


# --- cases --------------------------------------------------------------------------------------------------------


def against_rl(distilled: Sequence[Learned], reinforced: Sequence[Learned]) -> dict[str, Any]:
    """Both by seed, and what it took to reach RL's level; the estimate over seeds is None until every seed has both."""
    rl = {run.seed: run for run in reinforced}
    pairs = [(run, rl[run.seed]) for run in distilled if run.seed in rl]
    reached = [(theirs.reached_s(theirs.end), ours.reached_s(theirs.end)) for ours, theirs in pairs]
    seeds = [
        {
            "seed": ours.seed,
            "level": theirs.end,
            "rl_device_s": rounded(took),
            "distill_device_s": rounded(needed),
            "ratio": rounded(took / needed) if took and needed else None,
        }
        for (ours, theirs), (took, needed) in zip(pairs, reached, strict=True)
    ]
    both = [(took, needed) for took, needed in reached if took and needed]
    whole = len(both) == len(distilled) > 0
    estimate = paired_ratio([took for took, _ in both], [needed for _, needed in both]) if whole else None
    return {
        "distill": [run.as_json() for run in distilled],
        "rl": [run.as_json() for run in reinforced],
        "to_rl_level": seeds,
        "ratio": None if estimate is None else estimate_json(estimate),
    }


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
    """The figures that the benchmark is judged by; None where they are not known (yet)."""
    rl = found.get("rl", {})
    gains = [run["gain"] for run in rl.get("distill", ())]
    two, other, recorded = (found.get(case, {}) for case in ("two-teachers", "cross-tokenizer", "offline"))
    return {
        "teacher_solve": teachers.get("teacher", {}).get("fresh", {}).get("solve"),
        "min_gain": min(gains, default=None),
        "device_time_vs_rl": rl["ratio"]["value"] if rl.get("ratio") else None,
        "two_teachers_over_best_alone": two.get("over_best_student"),
        "cross_tokenizer_gain": other.get("gain"),
        "offline_gain": recorded.get("gain"),
    }

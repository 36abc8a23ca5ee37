"""`benchmarks/distill.py`: which checkpoints it looks at, and the figures that it makes of what it finds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import distill_figures as figures
import pytest
from distill_figures import Learned, Point


def learned(seed: int, *solved: float, device_s: float = 100.0, **means: float) -> Learned:
    """Evaluated before, and after each `device_s`."""
    points = tuple(Point(number, number * device_s, value) for number, value in enumerate(solved))
    return Learned(seed, points, 2.0, 5e-4, means)


def compared(
    ours: Sequence[Learned], theirs: Sequence[Learned], *, seeds: Sequence[int], tasks: int = 400, **fields: Any
) -> dict[str, Any]:
    """Every seed that has both runs is whole."""
    whole = {run.seed for run in ours} & {run.seed for run in theirs}
    return figures.against_rl(
        ours, theirs, **{"seeds": seeds, "whole": whole, "tasks": tasks, "teacher_cpu_s": None, **fields}
    )


# --- which checkpoints are evaluated ----------------------------------------------------------------------------


def evaluated(rate: Callable[[int], float], last: int, choose: Callable[[dict[int, float]], int | None]) -> list[int]:
    """The steps that `choose` asks for, in order, of a run whose solve rates are `rate`."""
    solved, asked = {0: rate(0), last: rate(last)}, []
    while (chosen := choose(solved)) is not None:
        assert chosen not in solved
        asked.append(chosen)
        solved[chosen] = rate(chosen)
    return asked


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (lambda step: min(0.65, 0.35 + 0.05 * step), [8, 16, 24, 4, 6]),
        (lambda step: min(0.65, 0.35 + 0.02 * step), [8, 16, 24, 12, 14]),
        (lambda step: 0.35, [8, 16, 24]),
        (lambda step: 0.35 if step < 32 else 0.65, [8, 16, 24, 28, 30]),
    ],
    ids=["early", "in the middle", "never rose", "at the very end"],
)
def test_rl_is_looked_at_closely_where_it_reaches_its_level(rate: Callable[[int], float], expected: list[int]) -> None:
    kept = range(2, 32, 2)
    asked = evaluated(rate, 32, lambda solved: figures.next_of_rl(solved, kept, every=8, tasks=512))
    assert asked == expected


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ([0.35, 0.62, 0.64, 0.7, 0.8], [1, 2]),
        ([0.35, 0.5, 0.62, 0.58, 0.63, 0.7, 0.7, 0.8], [1, 2, 3, 4, 5]),
        ([0.35, 0.4, 0.5, 0.6], [1, 2]),
        ([0.35, 0.7, 0.7, 0.59], []),
        ([0.6, 0.7, 0.7, 0.8], [1]),
    ],
    ids=["twice in a row", "a dip", "the last one confirms", "not reached", "there from the start"],
)
def test_distillation_is_looked_at_until_the_level_is_reached(curve: list[float], expected: list[int]) -> None:
    last = len(curve) - 1
    kept = range(1, last)
    asked = evaluated(curve.__getitem__, last, lambda solved: figures.next_of_distillation(solved, kept, level=0.6))
    assert asked == expected


# --- figures ----------------------------------------------------------------------------------------------------


def test_reached_is_for_good_and_between_two_evaluations() -> None:
    run = learned(0, 0.3, 0.5, 0.7, 0.6, 0.65, 0.8)
    assert run.reached_s(0.65) == pytest.approx(400), "between 100 and 200 s it was there, and fell below again"
    assert run.reached_s(0.7) == pytest.approx(400 + 100 / 3)
    assert run.reached_s(0.6) == pytest.approx(150)
    assert run.reached_s(0.3) == 0
    assert run.reached_s(0.2) == 0
    assert run.reached_s(0.81) is None
    assert run.gain == pytest.approx(0.5)


def test_rl_does_not_pay_for_a_plateau() -> None:
    """Its last evaluation is its best by chance; distillation has to reach that one as it is."""
    theirs = learned(0, 0.35, 0.655, 0.659, 0.661, device_s=800.0)
    ours = learned(0, 0.35, 0.65, 0.672)
    (row,) = compared([ours], [theirs], seeds=[0], tasks=512)["to_rl_level"]
    assert row["level"] == 0.661
    nearly = 0.661 - math.sqrt(0.661 * 0.339 / 512)
    assert row["rl_device_s"] == pytest.approx(800 * (nearly - 0.35) / 0.305, rel=1e-5)
    assert row["rl_device_s"] < 800
    assert row["distill_device_s"] == pytest.approx(150)


def test_device_time_against_rl_by_seed() -> None:
    """One standard error of 0.5 on 400 tasks is 0.025."""
    ours = [learned(0, 0.3, 0.5, 0.6), learned(1, 0.2, 0.4, 0.6), learned(2, 0.3, 0.5, 0.7)]
    times = {2: 800.0, 0: 400.0, 1: 300.0}
    theirs = [learned(seed, 0.275, 0.475, 0.5, device_s=device_s) for seed, device_s in times.items()]
    found = compared(ours, theirs, seeds=[0, 1, 2], teacher_cpu_s=300.0)
    table = [[row["seed"], row["rl_device_s"], row["distill_device_s"], row["ratio"]] for row in found["to_rl_level"]]
    assert table == [
        [0, 400, 100, pytest.approx(4)],
        [1, 300, 150, pytest.approx(2)],
        [2, 800, 100, pytest.approx(8)],
    ]
    summary = figures.summary({"rl": found}, {"teacher": {"fresh": {"solve": 0.9}}})
    assert summary["seeds"] == 3
    assert summary["min_gain"] == pytest.approx(0.3)
    assert summary["device_time_vs_rl"] == pytest.approx(4.0), "the geometric mean"
    low, high = summary["device_time_vs_rl_interval"]
    assert low < 4 < high
    assert low * high == pytest.approx(16, rel=1e-4)
    assert summary["device_time_vs_rl_with_teacher"] == pytest.approx((1 * 2 / 3 * 2) ** (1 / 3), rel=1e-5)
    assert summary["teacher_solve"] == 0.9
    assert summary["two_teachers_over_best_alone"] is None
    assert [run["learning_rate"] for run in found["distill"] + found["rl"]] == [5e-4] * 6
    unknown = figures.summary({"rl": compared(ours, theirs, seeds=[0, 1, 2])}, {})
    assert unknown["device_time_vs_rl_with_teacher"] is None
    assert unknown["device_time_vs_rl"] == pytest.approx(4.0)


def test_a_level_that_the_start_has_is_reached() -> None:
    """Nothing was needed for it: no ratio of that seed, and the estimate is one of the means."""
    ours = [learned(0, 0.55, 0.6), learned(1, 0.3, 0.7), learned(2, 0.3, 0.7)]
    theirs = [learned(seed, 0.1, 0.475, 0.5, device_s=400.0) for seed in range(3)]
    found = compared(ours, theirs, seeds=[0, 1, 2])
    assert [row["distill_device_s"] for row in found["to_rl_level"]] == [0, pytest.approx(50), pytest.approx(50)]
    assert [row["ratio"] for row in found["to_rl_level"]] == [None, pytest.approx(8), pytest.approx(8)]
    assert found["ratio"]["value"] == pytest.approx(12)
    flat = [learned(seed, 0.5, 0.5) for seed in range(3)]
    idle = compared(ours, flat, seeds=[0, 1, 2])
    assert [row["rl_device_s"] for row in idle["to_rl_level"]] == [0, 0, 0]
    assert idle["ratio"]["value"] == 0
    json.dumps(figures.summary({"rl": idle}, {}), allow_nan=False)


GOOD = [learned(seed, 0.3, 0.8) for seed in range(3)]
RL = [learned(seed, 0.3, 0.6) for seed in range(3)]


@pytest.mark.parametrize(
    ("ours", "theirs", "seeds", "whole", "min_gain"),
    [
        ([*GOOD[:2], learned(2, 0.3, 0.5)], RL, [0, 1, 2], 3, 0.2),
        (GOOD, RL[:2], [0, 1, 2], 2, None),
        (GOOD[:2], RL[:2], [0, 1], 2, None),
        (GOOD, [], [0, 1, 2], 0, None),
        ([], RL, [0, 1, 2], 0, None),
    ],
    ids=["not reached", "RL not done for a seed", "two seeds", "no RL yet", "RL alone"],
)
def test_nothing_is_claimed_that_does_not_hold(
    ours: Sequence[Learned], theirs: Sequence[Learned], seeds: Sequence[int], whole: int, min_gain: float | None
) -> None:
    found = compared(ours, theirs, seeds=seeds, teacher_cpu_s=1.0)
    summary = figures.summary({"rl": found}, {})
    assert summary["seeds"] == whole
    assert summary["min_gain"] == (None if min_gain is None else pytest.approx(min_gain))
    assert {value for name, value in summary.items() if name.startswith("device_time")} == {None}
    json.dumps(found, allow_nan=False)


def test_two_teachers_against_the_better_one() -> None:
    students = {"both": learned(0, 0.2, 0.8), "functions": learned(0, 0.2, 0.45), "settings": learned(0, 0.2, 0.5)}
    found = figures.mixture(students, {"teacher": 0.45, "settings": 0.55})
    assert found["over_best_student"] == pytest.approx(0.3)
    assert found["over_best_teacher"] == pytest.approx(0.25)
    summary = figures.summary({"two-teachers": found}, {})
    assert summary["two_teachers_over_best_alone"] == pytest.approx(0.3)
    assert summary["two_teachers_over_best_teacher"] == pytest.approx(0.25)

"""Means and paired ratios over seeds: textbook quantiles, coverage, and what is said where there is no ratio."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.run.bench_statistics import Estimate, mean_of, paired_ratio, student_quantile


@pytest.mark.parametrize(
    ("df", "t"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (30, 2.0423)]
)
def test_students_quantiles_are_the_tables(df: int, t: float) -> None:
    assert student_quantile(df) == pytest.approx(t, abs=5e-5)


def test_a_large_sample_is_normal() -> None:
    assert student_quantile(5000) == pytest.approx(1.96, abs=1e-3)
    with pytest.raises(ValueError, match="0 degrees"):
        student_quantile(0)


def test_a_mean_and_its_interval() -> None:
    found = mean_of([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776445 * math.sqrt(2.5) / math.sqrt(5)
    assert (found.value, found.n) == (3.0, 5)
    assert (found.low, found.high) == pytest.approx((3 - half, 3 + half), abs=1e-5)
    assert mean_of([7.0]) == Estimate(7.0, None, None, 1, "student", "one seed gives no interval")
    assert mean_of([]).value is None


def test_a_ratio_is_the_geometric_mean_of_the_seeds_ratios() -> None:
    found = paired_ratio([2.0, 8.0], [1.0, 1.0])
    assert found.value == pytest.approx(4.0)
    half = 12.7062 * (math.log(8) - math.log(2)) / math.sqrt(2) / math.sqrt(2)
    assert math.log(found.high or 0) == pytest.approx(math.log(4) + half, rel=1e-4)
    assert math.log(found.low or 0) == pytest.approx(math.log(4) - half, rel=1e-4)
    assert found.method == "log-student"


def test_seeds_are_paired_so_that_what_they_share_cancels() -> None:
    base = [1.0, 10.0, 3.0, 0.2, 5.0]
    found = paired_ratio([1.5 * value for value in base], base)
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_a_seed_that_did_not_improve_takes_fiellers_interval() -> None:
    values, base = [0.3, -0.05, 0.4, 0.35, 0.3], [0.2, 0.25, 0.22, 0.18, 0.2]
    found = paired_ratio(values, base)
    assert found.method == "fieller"
    assert "1 of 5 seeds did not improve" in found.note
    assert found.value == pytest.approx(np.mean(values) / np.mean(base))
    for bound in (found.low, found.high):  # the bounds are where the paired t statistic is the quantile
        assert bound is not None
        differences = np.array(values) - bound * np.array(base)
        t = abs(differences.mean()) / (differences.std(ddof=1) / math.sqrt(5))
        assert t == pytest.approx(2.776445, rel=1e-4)
    assert found.low < found.value < found.high  # type: ignore[operator]


def test_no_ratio_to_a_baseline_that_did_not_improve() -> None:
    found = paired_ratio([0.2, 0.3], [-0.1, 0.05])
    assert (found.value, found.low, found.high) == (None, None, None)
    assert "the baseline did not improve" in found.note


def test_no_bounds_where_the_baseline_is_not_told_apart_from_0() -> None:
    found = paired_ratio([0.2, 0.3, 0.2], [-0.1, 0.5, 0.1])
    assert found.value == pytest.approx(0.7 / 0.5)
    assert (found.low, found.high) == (None, None)
    assert "not told apart from 0" in found.note


@given(st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), max_size=8))
def test_there_is_never_a_nan_and_bounds_enclose_the_value(pairs: list[tuple[float, float]]) -> None:
    found = paired_ratio([x for x, _ in pairs], [y for _, y in pairs])
    numbers = [x for x in (found.value, found.low, found.high) if x is not None]
    assert all(not math.isnan(x) for x in numbers)
    if found.low is not None and found.high is not None and found.value is not None:
        slack = 1e-9 * max(1.0, abs(found.value))
        assert found.low - slack <= found.value <= found.high + slack


def test_intervals_cover_the_truth_19_times_in_20() -> None:
    """Of noisy runs with a true ratio of 1.5, five seeds each; a wrong quantile or an unpaired interval shows."""
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(1000):
        shared = np.exp(rng.normal(0, 0.5, 5))
        found = paired_ratio(
            list(1.5 * shared * np.exp(rng.normal(0, 0.2, 5))), list(shared * np.exp(rng.normal(0, 0.2, 5)))
        )
        assert found.low is not None
        assert found.high is not None
        assert found.high / found.low < 8, "what seeds share must not widen the interval"
        covered += found.low <= 1.5 <= found.high
    assert 930 <= covered <= 970

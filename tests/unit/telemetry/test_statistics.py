"""Intervals against published or enumerated values."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.telemetry.statistics import Interval, pass_at_k, pass_at_k_interval, wilson


def test_wilson_known_values() -> None:
    got = wilson(8, 10)
    assert (got.low, got.high) == (pytest.approx(0.4901625, abs=1e-6), pytest.approx(0.9433178, abs=1e-6))
    none = wilson(0, 20)
    assert none.low == 0.0
    assert none.high == pytest.approx(0.1611252, abs=1e-6)
    assert wilson(20, 20).high == 1.0


def test_wilson_without_trials_knows_nothing() -> None:
    got = wilson(0, 0)
    assert math.isnan(got.value)
    assert (got.low, got.high) == (0.0, 1.0)
    with pytest.raises(ValueError, match="3 successes of 2"):
        wilson(3, 2)


@given(n=st.integers(1, 9), data=st.data())
def test_pass_at_k_is_the_share_of_subsets(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_at_k_refuses_k_above_n() -> None:
    with pytest.raises(ValueError, match="pass@5"):
        pass_at_k(4, 1, 5)


def test_interval_moves_tasks_not_samples() -> None:
    """Four tasks, each all solved or all failed: 40 samples but only 4 independent ones."""
    wide = pass_at_k_interval([(10, 10), (10, 10), (10, 0), (10, 0)], 1)
    assert wide.value == 0.5
    assert wide.high - wide.low >= 0.7
    assert wide == pass_at_k_interval([(10, 10), (10, 10), (10, 0), (10, 0)], 1)


def test_interval_without_spread_is_not_a_point() -> None:
    assert pass_at_k_interval([(1, 0)] * 20, 1) == wilson(0, 20)
    empty = pass_at_k_interval([], 1)
    assert isinstance(empty, Interval)
    assert math.isnan(empty.value)

"""The trained share of slow groups against their share (K15)."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.rollout.fairness import FairnessMeter, group_seconds
from agentrl.rollout.groups import GroupResult

FAST, SLOW = 1.0, 8.0


def ratio(trained: list[float], lost: list[float]) -> float:
    meter = FairnessMeter()
    for seconds in trained:
        meter.trained(seconds)
    for seconds in lost:
        meter.lost(seconds)
    return meter.metrics()["fairness/slow_share_ratio"]


def test_k15_a_schedule_that_waits_is_fair() -> None:
    """A quarter of the groups is slow, and all are trained."""
    assert ratio([FAST] * 30 + [SLOW] * 10, []) == 1.0


def test_k15_a_schedule_that_drops_the_slow_is_found_out() -> None:
    """Half of the slow quarter is dropped: 5 of 35 trained are slow, where 10 of 40 were."""
    assert ratio([FAST] * 30 + [SLOW] * 5, [SLOW] * 5) == pytest.approx((5 / 35) / (10 / 40))
    assert ratio([FAST] * 30, [SLOW] * 10) == 0.0


def test_losses_that_hit_all_alike_are_fair() -> None:
    assert ratio([FAST] * 15 + [SLOW] * 5, [FAST] * 15 + [SLOW] * 5) == pytest.approx(1.0)


def test_equal_durations_are_equally_slow() -> None:
    """No tie is broken against anyone: with one duration for all there is nobody to be unfair to."""
    assert ratio([2.0] * 6, [2.0] * 6) == 1.0


def test_nothing_is_said_of_a_few_groups_or_none_trained() -> None:
    meter = FairnessMeter()
    for _ in range(7):
        meter.trained(1.0)
    assert meter.metrics() == {}
    meter.trained(1.0)
    assert meter.metrics() == {"fairness/slow_share_ratio": 1.0}
    lost = FairnessMeter()
    for _ in range(20):
        lost.lost(1.0)
    assert lost.metrics() == {}


def test_a_group_is_as_slow_as_its_slowest_rollout(toys: Any) -> None:
    """From lease to grade; the wait for a slot is not the task's."""
    infos = ({"setup_s": 1.0, "episode_s": 4.0, "score_s": 2.0}, {"setup_s": 0.5, "episode_s": 5.0}, {})
    members = tuple(toys.trajectory(member=i, info=info) for i, info in enumerate(infos))
    assert group_seconds(GroupResult("g0", "task", 0, members)) == 7.0

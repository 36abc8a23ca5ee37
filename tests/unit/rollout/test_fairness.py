"""Slow tasks get their share of training (K15)."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from schedule_world import Job, World, slow_share

from agentrl.rollout.filters import Verdict
from agentrl.rollout.schedule import BoundedSchedule

SLOW_FRACTION, SLOW_FACTOR, DELIVERIES, GROUPS = 0.25, 8.0, 80, 8


@dataclass(frozen=True, slots=True)
class DiscardAndRequeue(BoundedSchedule):
    """The reference: the first P finished are trained, what gets too old is thrown away."""

    @property
    def drops(self) -> bool:
        return True


def job_of(task: int, *, failing: float) -> Job:
    """One task in four is slow, 8 times as long as the others; durations have a tail (lognormal)."""
    chance = random.Random(f"task {task}")
    slow = chance.random() < SLOW_FRACTION
    verdict = Verdict.ZERO_VARIANCE if chance.random() < failing else Verdict.ACCEPTED
    return Job(chance.lognormvariate(0, 0.84) * (SLOW_FACTOR if slow else 1), verdict, slow)


def ratio_of_shares(schedule: BoundedSchedule, *, active: int | None, failing: float = 0.0) -> tuple[World, float]:
    """A run of `DELIVERIES` steps, and slow tasks' share of the trained groups over their share of the tasks."""
    world = World(schedule, lambda task: job_of(task, failing=failing), DELIVERIES, train_s=2.0, active=active).run()
    seen = max(group.task for group in world.groups.values()) + 1
    share = sum(job_of(task, failing=failing).slow for task in range(seen)) / seen
    return world, slow_share(world.trained()) / share


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize(("active", "window"), [(None, None), (6, None), (None, GROUPS)])
def test_k15_slow_tasks_get_their_share(staleness: int, active: int | None, window: int | None) -> None:
    """25 % of the tasks take 8 times as long; their share of training is theirs of the data, within 10 %."""
    schedule = BoundedSchedule(GROUPS, max_staleness=staleness, window=window)
    world, ratio = ratio_of_shares(schedule, active=active)
    assert ratio == pytest.approx(1, abs=0.1)
    assert max(world.staleness) == staleness
    assert world.dropped == []


@pytest.mark.parametrize("replace_filtered", [False, True])
def test_k15_filtered_groups_take_nothing_from_slow_ones(replace_filtered: bool) -> None:
    schedule = BoundedSchedule(GROUPS, max_staleness=1, replace_filtered=replace_filtered)
    world, ratio = ratio_of_shares(schedule, active=None, failing=0.3)
    assert ratio == pytest.approx(1, abs=0.1)
    assert world.dropped == []


@pytest.mark.parametrize("staleness", [1, 2])
def test_k15_discarding_what_is_late_starves_slow_tasks(staleness: int) -> None:
    """The same measure, of the policy that the readiness rule replaces: slow tasks lose more than half."""
    world, ratio = ratio_of_shares(DiscardAndRequeue(GROUPS, max_staleness=staleness), active=None)
    assert ratio < 0.5
    assert slow_share([world.groups[name] for name in world.dropped]) > 2 * SLOW_FRACTION
    assert max(world.staleness) <= staleness

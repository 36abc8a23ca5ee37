"""Whole runs of the scheduler with a fake clock, over settings, durations and failures (K14, K16, K17, K18)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_world import VERDICTS, Job, World

from agentrl.rollout.filters import Verdict
from agentrl.rollout.schedule import BoundedSchedule, SchedulerView

JOBS = st.lists(st.builds(Job, st.integers(0, 30), st.sampled_from(VERDICTS)), min_size=1, max_size=24)


@st.composite
def worlds(draw: st.DrawFn, *, oversample: st.SearchStrategy[float], endless: bool = False) -> World:
    """A run of some steps; its tasks repeat a drawn list, in which at least one group is accepted."""
    groups, staleness, steps = draw(st.integers(1, 4)), draw(st.integers(0, 3)), draw(st.integers(1, 8))
    jobs = [*draw(JOBS), Job(1)]
    updates = draw(st.integers(1, 3))
    return World(
        BoundedSchedule(
            groups,
            updates,
            staleness,
            window=draw(st.none() | st.integers(groups, groups * (staleness + 2))),
            oversample=draw(oversample),
            replace_filtered=draw(st.booleans()),
            total=None if endless else groups * steps,
        ),
        job_of=lambda task: jobs[task % len(jobs)],
        steps=steps,
        train_s=draw(st.integers(0, 12)) * updates,
        active=draw(st.none() | st.integers(1, 2 * groups)),
        restarts=draw(st.frozensets(st.integers(1, steps), max_size=2)),
        keep_places=draw(st.booleans()),
    )


def check_run(world: World) -> None:
    """The run came to its end, and what it trained is within the bound."""
    assert world.step == world.steps == len(world.batches)
    assert max(world.staleness, default=0) <= world.schedule.max_staleness
    for batch in world.batches:
        assert len(batch.trained) + len(batch.spent) == world.schedule.groups
        assert {world.groups[name].job.verdict for name in batch.trained} <= {Verdict.ACCEPTED}
        assert not world.schedule.replace_filtered or not batch.spent
    names = [name for batch in world.batches for name in (*batch.trained, *batch.spent)]
    assert len(set(names)) == len(names)


@settings(max_examples=400, deadline=None)
@given(worlds(oversample=st.just(1.0)))
def test_k14_k16_k17_no_token_is_too_old_and_nothing_is_ever_dropped(world: World) -> None:
    """Admission and readiness alone keep every token within S: the hard check never strikes, the run never hangs,
    every group that kept its place is in exactly one batch, and the ledger balances at every event."""
    world.run()
    check_run(world)
    assert world.dropped == []
    assert world.scheduler.state() == []
    kept = [
        g for g in world.groups.values() if g.job.verdict is Verdict.ACCEPTED or not world.schedule.replace_filtered
    ]
    assert len(kept) == world.schedule.groups * world.steps
    assert all(group.fate != "running" for group in world.groups.values())


@settings(max_examples=300, deadline=None)
@given(worlds(oversample=st.floats(1.01, 3.0)))
def test_k14_k17_oversampling_drops_what_would_be_too_old(world: World) -> None:
    world.run()
    check_run(world)
    assert all(world.groups[name].fate != "consumed" for name in world.dropped)


@settings(max_examples=150, deadline=None)
@given(worlds(oversample=st.sampled_from([1.0, 1.5, 2.0]), endless=True))
def test_k14_k17_a_run_without_end_keeps_the_bound(world: World) -> None:
    world.run()
    check_run(world)
    assert world.schedule.drops or world.dropped == []


@settings(max_examples=150, deadline=None)
@given(worlds(oversample=st.just(1.0)))
def test_k14_staleness_0_is_sync(world: World) -> None:
    """Round after round: P groups with one version, their batch, the next version. Nothing in between."""
    if world.schedule.max_staleness or world.schedule.replace_filtered:
        return
    world.run()
    size, version = world.schedule.groups, 0
    for step, batch in enumerate(world.batches):
        names = [f"g{size * step + i}" for i in range(size)]
        accepted = [name for name in names if world.groups[name].job.verdict is Verdict.ACCEPTED]
        assert list(batch.trained) == accepted
        assert list(batch.spent) == [name for name in names if name not in accepted]
        assert {(g.oldest, g.newest) for g in map(world.groups.__getitem__, names)} == {(version, version)}
        version += bool(accepted)


@dataclass(frozen=True, slots=True)
class Greedy(BoundedSchedule):
    """Forms a batch of the first P settled whatever is due, and drops nothing."""

    def ready(self, view: SchedulerView) -> bool:
        return view.batched is None and len(view.takeable) >= self.batch_size(view) > 0


@dataclass(frozen=True, slots=True)
class EarlyRelease(BoundedSchedule):
    """Frees a batch's places when the batch is formed, not when it is delivered."""

    @property
    def places(self) -> int:
        return (self.max_staleness + 2) * self.groups

    def admit(self, view: SchedulerView) -> int:
        return max(0, self.places - self.groups - len(view.waiting))


@pytest.mark.parametrize("reference", [Greedy, EarlyRelease])
@pytest.mark.parametrize("staleness", [1, 2])
def test_the_world_finds_a_schedule_that_breaks_the_bound(reference: type[BoundedSchedule], staleness: int) -> None:
    """One group in four is slow: without the readiness rule, or with places freed early, it would be too old."""
    worlds = [
        World(cls(2, max_staleness=staleness), lambda task: Job(50 if task % 4 == 0 else 1), steps=20, train_s=4)
        for cls in (BoundedSchedule, reference)
    ]
    assert worlds[0].run().dropped == []
    assert worlds[1].run().dropped != []


@st.composite
def views(draw: st.DrawFn) -> tuple[BoundedSchedule, SchedulerView]:
    """Places that can all be in time if P of them are taken for each version."""
    groups, staleness, version = draw(st.integers(1, 3)), draw(st.integers(0, 3)), 5
    free, waiting = groups, []
    for submitted in range(version - staleness, version + 1):
        here = draw(st.integers(0, free))
        waiting += [submitted] * here
        free += groups - here
    settled = draw(st.lists(st.booleans(), min_size=len(waiting), max_size=len(waiting)))
    takeable = tuple(v for v, done in zip(waiting, settled, strict=True) if done)
    return BoundedSchedule(groups, max_staleness=staleness), SchedulerView(version, tuple(waiting), takeable, None, 0)


@settings(max_examples=400, deadline=None)
@given(views())
def test_ready_is_exactly_that_all_others_can_still_be_in_time(case: tuple[BoundedSchedule, SchedulerView]) -> None:
    """Held against playing the versions to come: each takes the P oldest of what is left, finished or not."""
    schedule, view = case
    left = list(view.waiting)
    for submitted in view.takeable[: schedule.groups]:
        left.remove(submitted)
    version, in_time = view.version, True
    while left:
        version += 1
        batch, left = left[: schedule.groups], left[schedule.groups :]
        in_time &= all(version - submitted <= schedule.max_staleness for submitted in batch)
    assert schedule.ready(view) == (len(view.takeable) >= schedule.groups and in_time)
    everything = SchedulerView(view.version, view.waiting, view.waiting, None, 0)
    assert schedule.ready(everything) == (len(view.waiting) >= schedule.groups)

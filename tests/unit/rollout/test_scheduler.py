"""The scheduler under random events and failures (K14, K16, K17)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import StalenessError
from agentrl.rollout.filters import Verdict
from agentrl.rollout.schedule import SchedulerView, SyncSchedule
from agentrl.rollout.scheduler import ScheduleError, Scheduler, VersionSpan

# How a finished group may be judged: every verdict but `stale`, which dropping alone gives.
VERDICTS = (Verdict.ACCEPTED, Verdict.ZERO_VARIANCE, Verdict.TOO_FEW_VALID, Verdict.FAILED)


@dataclass(frozen=True)
class SlotSchedule:
    """A schedule that overlaps, to show that the scheduler itself knows nothing of `sync`."""

    groups: int
    max_staleness: int
    window: int | None
    updates: int = 1

    def admit(self, view: SchedulerView) -> int:
        return max(0, (self.max_staleness + 1) * self.groups - view.running - view.queued)

    def ready(self, view: SchedulerView) -> bool:
        return view.takeable >= self.groups


class Model:
    """The same bookkeeping done naively, to hold the scheduler against."""

    def __init__(self) -> None:
        self.state: dict[str, str] = {}

    def count(self, *states: str) -> int:
        return sum(state in states for state in self.state.values())

    def check(self, scheduler: Scheduler) -> None:
        counts = scheduler.counts()
        assert counts.balanced
        assert counts.submitted == len(self.state)
        assert counts.running == self.count("running")
        assert counts.queued == self.count("queued")
        assert counts.accepted == self.count("queued", "consumed")
        assert counts.filtered == self.count("filtered")
        assert counts.failed == self.count("failed")
        assert set(scheduler.running) == {g for g, s in self.state.items() if s == "running"}


def submit(scheduler: Scheduler, model: Model) -> str:
    name = f"g{len(model.state)}"
    scheduler.submit(name)
    model.state[name] = "running"
    return name


def finish(scheduler: Scheduler, model: Model, name: str, verdict: Verdict) -> None:
    span = VersionSpan(scheduler.version, scheduler.version) if verdict is Verdict.ACCEPTED else None
    scheduler.finish(name, verdict, span)
    fates = {Verdict.ACCEPTED: "queued", Verdict.FAILED: "failed"}
    model.state[name] = fates.get(verdict, "filtered")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_k17_sync_accounts_for_every_group_at_every_event(groups: int, rounds: int, data: st.DataObject) -> None:
    scheduler, model = Scheduler(SyncSchedule(groups=groups)), Model()
    for _ in range(rounds):
        assert scheduler.admissible() == groups
        running = []
        for _ in range(groups):
            running.append(submit(scheduler, model))
            model.check(scheduler)
        assert scheduler.admissible() == 0
        while running:
            assert not scheduler.ready()
            name = running.pop(data.draw(st.integers(0, len(running) - 1)))
            if data.draw(st.integers(0, 9)) == 0:
                assert scheduler.drop(name) is Verdict.FAILED
                model.state[name] = "failed"
            else:
                finish(scheduler, model, name, data.draw(st.sampled_from(VERDICTS)))
            model.check(scheduler)
        batch = scheduler.batch()
        assert list(batch) == [name for name, state in model.state.items() if state == "queued"]
        model.state |= dict.fromkeys(batch, "consumed")
        model.check(scheduler)
        if batch:
            scheduler.delivered(scheduler.version + 1)
        else:
            scheduler.next_round()
    assert scheduler.counts().running == scheduler.counts().queued == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(0, 2), st.integers(0, 4), st.data())
def test_k17_an_overlapping_schedule_accounts_for_every_group(
    groups: int, staleness: int, extra: int, data: st.DataObject
) -> None:
    """Random submit, finish, drop, batch and delivery: the ledger balances and no slot leaks."""
    scheduler = Scheduler(SlotSchedule(groups, staleness, groups + extra))
    model = Model()
    for _ in range(40):
        events = ["submit"] * (scheduler.admissible() > 0) + ["finish", "drop"] * bool(scheduler.running)
        events += ["batch"] * 3 * scheduler.ready() + ["drop_queued"] * bool(scheduler.queued)
        event = data.draw(st.sampled_from(events))
        if event == "submit":
            submit(scheduler, model)
        elif event == "finish":
            name = data.draw(st.sampled_from(scheduler.running))
            finish(scheduler, model, name, data.draw(st.sampled_from(VERDICTS)))
        elif event == "drop":
            name = data.draw(st.sampled_from(scheduler.running))
            assert scheduler.drop(name) is Verdict.FAILED
            model.state[name] = "failed"
        elif event == "drop_queued":
            name = data.draw(st.sampled_from(scheduler.queued))
            assert scheduler.drop(name) is Verdict.STALE
            model.state[name] = "filtered"
        else:
            window = scheduler.takeable
            batch = scheduler.batch()
            assert batch == window[:groups]
            model.state |= dict.fromkeys(batch, "consumed")
        model.check(scheduler)
        assert scheduler.counts().running + scheduler.counts().queued <= (staleness + 1) * groups


def test_windowed_fifo_lets_fast_groups_overtake_by_less_than_the_window() -> None:
    scheduler, model = Scheduler(SlotSchedule(groups=1, max_staleness=3, window=2)), Model()
    names = [submit(scheduler, model) for _ in range(4)]
    finish(scheduler, model, names[3], Verdict.ACCEPTED)
    finish(scheduler, model, names[2], Verdict.ACCEPTED)
    assert not scheduler.ready()
    finish(scheduler, model, names[1], Verdict.ACCEPTED)
    assert scheduler.batch() == (names[1],)
    # The window moves on only as the old ones settle: g0 still runs, so g2 is in it and g3 is not.
    assert scheduler.takeable == (names[2],)


@pytest.mark.parametrize(("oldest", "newest"), [(2, 3), (3, 4), (0, 3)])
def test_k14_k16_staleness_zero_means_every_token(oldest: int, newest: int) -> None:
    """One token of another version, older or newer, and the batch is refused with nothing consumed."""
    scheduler = Scheduler(SyncSchedule(groups=1), version=3)
    scheduler.submit("g0")
    scheduler.finish("g0", Verdict.ACCEPTED, VersionSpan(oldest, newest))
    with pytest.raises(StalenessError, match=f"versions {oldest} to {newest}"):
        scheduler.batch()
    assert scheduler.queued == ("g0",)
    assert scheduler.counts().balanced


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.integers(0, 6), st.integers(0, 6))
def test_k14_the_bound_is_exact(staleness: int, oldest: int, newest: int) -> None:
    version = 4
    scheduler = Scheduler(SlotSchedule(1, staleness, None), version=version)
    scheduler.submit("g")
    scheduler.finish("g", Verdict.ACCEPTED, VersionSpan(min(oldest, newest), max(oldest, newest)))
    if version - min(oldest, newest) <= staleness and max(oldest, newest) <= version:
        assert scheduler.batch() == ("g",)
    else:
        with pytest.raises(StalenessError):
            scheduler.batch()


def test_events_that_cannot_happen_are_refused() -> None:
    scheduler = Scheduler(SyncSchedule(groups=1))
    scheduler.submit("a")
    for event in (
        lambda: scheduler.submit("a"),
        lambda: scheduler.submit("b"),
        lambda: scheduler.finish("b", Verdict.FAILED),
        lambda: scheduler.finish("a", Verdict.ACCEPTED),
        lambda: scheduler.drop("b"),
        scheduler.batch,
        scheduler.next_round,
        lambda: scheduler.delivered(0),
    ):
        with pytest.raises(ScheduleError):
            event()
        assert scheduler.running == ("a",)
        assert scheduler.counts().balanced

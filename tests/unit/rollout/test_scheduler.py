"""The scheduler, event by event (K14, K16, K17). Whole runs: `test_schedule_properties`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_world import VERDICTS

from agentrl.errors import StalenessError
from agentrl.rollout.filters import Verdict
from agentrl.rollout.schedule import BoundedSchedule, ScheduleError
from agentrl.rollout.scheduler import Scheduler, Taken, VersionSpan


def fill(scheduler: Scheduler) -> list[str]:
    """Submit as many groups as may be; their names go on from those before."""
    first = scheduler.counts().submitted
    names = [f"g{first + i}" for i in range(scheduler.admissible())]
    for name in names:
        scheduler.submit(name)
    return names


def accept(scheduler: Scheduler, *names: str, version: int | None = None) -> None:
    """Finish groups, all of one version (the current one)."""
    at = scheduler.version if version is None else version
    for name in names:
        scheduler.finish(name, Verdict.ACCEPTED, VersionSpan(at, at))


def test_staleness_0_admits_nothing_between_a_batch_and_its_delivery() -> None:
    """K14: on-policy in truth."""
    scheduler = Scheduler(BoundedSchedule(groups=2))
    assert fill(scheduler) == ["g0", "g1"]
    accept(scheduler, "g1")
    assert not scheduler.ready()
    scheduler.finish("g0", Verdict.ZERO_VARIANCE)
    assert scheduler.admissible() == 0
    assert scheduler.batch() == Taken(trained=("g1",), spent=("g0",))
    assert (scheduler.admissible(), scheduler.to_come) == (0, 2)
    assert not scheduler.ready()
    scheduler.delivered(1)
    assert scheduler.admissible() == scheduler.to_come == 2


def test_a_round_that_trains_nothing_needs_no_delivery() -> None:
    """K17: its places come back all the same."""
    scheduler = Scheduler(BoundedSchedule(groups=2))
    fill(scheduler)
    scheduler.finish("g0", Verdict.FAILED)
    scheduler.finish("g1", Verdict.TOO_FEW_VALID)
    assert scheduler.batch() == Taken(trained=(), spent=("g0", "g1"))
    assert scheduler.counts().held == 2
    scheduler.next_round()
    assert (scheduler.version, scheduler.counts().held, scheduler.admissible()) == (0, 0, 2)


def test_with_staleness_1_the_next_groups_run_while_the_trainer_trains() -> None:
    scheduler = Scheduler(BoundedSchedule(groups=2, max_staleness=1))
    assert fill(scheduler) == ["g0", "g1", "g2", "g3"]
    accept(scheduler, "g3", "g1")
    assert scheduler.batch() == Taken(trained=("g1", "g3"), spent=())
    assert scheduler.admissible() == 0  # the batch's places are held until its delivery
    accept(scheduler, "g0")
    scheduler.delivered(1)
    assert fill(scheduler) == ["g4", "g5"]
    accept(scheduler, "g4", "g5")
    # g2 is of version 0: this is the last batch that may hold it, so it is waited for though three lie ready.
    assert not scheduler.ready()
    scheduler.finish("g2", Verdict.ACCEPTED, VersionSpan(0, 1))
    assert scheduler.batch() == Taken(trained=("g0", "g2"), spent=())
    assert scheduler.doomed() == ()


def test_a_filtered_group_is_replaced_at_once_where_that_is_wanted() -> None:
    scheduler = Scheduler(BoundedSchedule(groups=2, replace_filtered=True))
    fill(scheduler)
    scheduler.finish("g0", Verdict.ZERO_VARIANCE)
    accept(scheduler, "g1")
    assert not scheduler.ready()
    assert fill(scheduler) == ["g2"]
    accept(scheduler, "g2")
    assert scheduler.batch() == Taken(trained=("g1", "g2"), spent=())


@pytest.mark.parametrize(("groups", "staleness", "oversample", "places"), [(25, 1, 1.1, 55), (3, 0, 1.5, 5)])
def test_oversampling_rounds_up(groups: int, staleness: int, oversample: float, places: int) -> None:
    schedule = BoundedSchedule(groups, max_staleness=staleness, oversample=oversample)
    assert Scheduler(schedule).admissible() == places


def test_oversampling_trains_the_first_and_drops_the_rest_before_the_delivery() -> None:
    scheduler = Scheduler(BoundedSchedule(groups=2, oversample=2.5))
    assert len(fill(scheduler)) == 5
    accept(scheduler, "g4", "g3", "g1")
    scheduler.finish("g2", Verdict.FAILED)
    assert scheduler.batch() == Taken(trained=("g1",), spent=("g2",))
    assert scheduler.doomed() == ("g0", "g3", "g4")
    with pytest.raises(ScheduleError, match="g0, g3, g4"):
        scheduler.delivered(1)
    assert [scheduler.drop(name) for name in scheduler.doomed()] == [Verdict.STALE] * 3
    assert scheduler.admissible() == 0  # places are free, but the next version is too late for this one's tokens
    counts = scheduler.counts()
    assert (counts.submitted, counts.accepted, counts.filtered, counts.failed) == (5, 1, 3, 1)
    scheduler.delivered(1)
    assert scheduler.admissible() == 5


def test_a_dropped_place_that_was_spent_keeps_its_verdict() -> None:
    scheduler = Scheduler(BoundedSchedule(groups=1, oversample=3))
    fill(scheduler)
    accept(scheduler, "g0")
    scheduler.finish("g1", Verdict.FAILED)
    scheduler.finish("g2", Verdict.ZERO_VARIANCE)
    scheduler.batch()
    assert [scheduler.drop(name) for name in scheduler.doomed()] == [Verdict.FAILED, Verdict.ZERO_VARIANCE]
    counts = scheduler.counts()
    assert (counts.accepted, counts.filtered, counts.failed, counts.held) == (1, 1, 1, 1)


def test_a_finished_group_with_young_tokens_is_not_doomed() -> None:
    """Submitted at version 0, started at version 1: its tokens decide."""
    scheduler = Scheduler(BoundedSchedule(groups=1, max_staleness=1, oversample=2))
    fill(scheduler)
    accept(scheduler, "g0")
    scheduler.batch()
    scheduler.delivered(1)
    accept(scheduler, "g1", "g2", version=1)
    assert scheduler.batch() == Taken(trained=("g1",), spent=())
    assert scheduler.doomed() == ("g3",)


def test_windowed_fifo_lets_fast_groups_overtake_by_less_than_the_window() -> None:
    """K15: a batch looks at the W oldest only."""
    scheduler = Scheduler(BoundedSchedule(groups=1, max_staleness=3, window=2))
    names = fill(scheduler)
    accept(scheduler, names[3], names[2])
    assert not scheduler.ready()
    accept(scheduler, names[1])
    assert scheduler.batch().trained == (names[1],)
    # The window moves on only as the old ones are taken: g0 still runs, so g2 is in it and g3 is not.
    assert scheduler.takeable == (names[2],)


def test_the_end_of_a_run() -> None:
    """No more is submitted than batches will take; the last one may be smaller."""
    scheduler = Scheduler(BoundedSchedule(groups=2, max_staleness=1, total=5))
    submitted, trained = [], []
    for version in (1, 2, 3):
        names = fill(scheduler)
        accept(scheduler, *names)
        submitted.append(len(names))
        trained.append(len(scheduler.batch().trained))
        scheduler.delivered(version)
    assert (submitted, trained) == ([4, 1, 0], [2, 2, 1])
    assert (scheduler.admissible(), scheduler.ready(), scheduler.state()) == (0, False, [])


def test_after_the_last_batch_all_that_is_left_is_to_be_dropped() -> None:
    scheduler = Scheduler(BoundedSchedule(groups=1, max_staleness=2, oversample=2, total=1))
    assert fill(scheduler) == ["g0", "g1"]
    accept(scheduler, "g1")
    scheduler.batch()
    assert scheduler.doomed() == ("g0",)
    assert not scheduler.ready()


def test_staleness_is_told_by_where_it_came_from() -> None:
    """K16: from oldest to newest token in flight, from there to the batch in the queue."""
    scheduler = Scheduler(BoundedSchedule(groups=2, max_staleness=3), version=4)
    assert scheduler.staleness() == (0.0, 0.0)
    scheduler.restore("a", 1)
    scheduler.restore("b", 2)
    scheduler.finish("a", Verdict.ACCEPTED, VersionSpan(1, 3))
    scheduler.finish("b", Verdict.ACCEPTED, VersionSpan(3, 4))
    scheduler.batch()
    assert scheduler.staleness() == (1.5, 0.5)


def test_a_resumed_run_has_the_places_it_had() -> None:
    scheduler = Scheduler(BoundedSchedule(groups=2, max_staleness=1))
    fill(scheduler)
    accept(scheduler, "g1", "g2")
    scheduler.batch()
    scheduler.delivered(1)
    fill(scheduler)
    scheduler.finish("g5", Verdict.FAILED)
    assert scheduler.state() == [("g0", 0), ("g3", 0), ("g4", 1), ("g5", 1)]
    resumed = Scheduler(scheduler.schedule, version=1)
    for name, version in reversed(scheduler.state()):
        resumed.restore(name, version)
    assert [version for _, version in resumed.state()] == [0, 0, 1, 1]
    assert resumed.admissible() == 0
    assert (resumed.counts().submitted, resumed.counts().running) == (4, 4)
    resumed.finish("g5", Verdict.FAILED)
    accept(resumed, "g4", version=1)
    assert not resumed.ready()  # g0 and g3 are due
    accept(resumed, "g0", "g3", version=1)
    assert set(resumed.batch().trained) == {"g0", "g3"}


def test_a_run_resumed_with_a_smaller_bound_drops_what_does_not_fit() -> None:
    """Six groups of one version, two to a batch: what staleness 2 allowed, staleness 1 cannot train."""
    scheduler = Scheduler(BoundedSchedule(groups=2, max_staleness=1), version=2)
    for i in range(6):
        scheduler.restore(f"g{i}", 1)
    assert scheduler.admissible() == 0
    accept(scheduler, "g5", "g4", version=1)
    assert scheduler.batch().trained == ("g4", "g5")
    assert scheduler.doomed() == ("g0", "g1", "g2", "g3")


@pytest.mark.parametrize(("oldest", "newest"), [(2, 3), (3, 4), (0, 3)])
def test_k14_k16_staleness_zero_means_every_token(oldest: int, newest: int) -> None:
    """One token of another version, older or newer, and the batch is refused with nothing taken."""
    scheduler = Scheduler(BoundedSchedule(groups=1), version=3)
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
    scheduler = Scheduler(BoundedSchedule(1, max_staleness=staleness), version=version)
    scheduler.restore("g", version - staleness)
    scheduler.finish("g", Verdict.ACCEPTED, VersionSpan(min(oldest, newest), max(oldest, newest)))
    if version - min(oldest, newest) <= staleness and max(oldest, newest) <= version:
        assert scheduler.batch() == Taken(("g",), ())
    else:
        with pytest.raises(StalenessError):
            scheduler.batch()


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 3), st.integers(0, 3), st.booleans(), st.none() | st.integers(0, 4), st.data())
def test_k14_k17_any_order_of_events(
    groups: int, staleness: int, replaced: bool, extra: int | None, data: st.DataObject
) -> None:
    """Events in any order, groups dropped at will among them: each is accounted for, and none is ever too old, though
    every token is as old as its group may make it."""
    window = None if extra is None else groups + extra
    schedule = BoundedSchedule(groups, max_staleness=staleness, window=window, replace_filtered=replaced)
    scheduler, submitted, fates = Scheduler(schedule), {}, {}
    batch: Taken | None = None
    for _ in range(50):
        events = ["submit"] * 2 * (scheduler.admissible() > 0) + ["finish"] * 3 * bool(scheduler.running)
        events += ["drop"] * bool(scheduler.state()) + ["batch"] * 2 * scheduler.ready()
        events += ["deliver"] * (batch is not None)
        event = data.draw(st.sampled_from(events))
        if event == "submit":
            name = f"g{len(submitted)}"
            scheduler.submit(name)
            submitted[name], fates[name] = scheduler.version, "running"
        elif event == "finish":
            name = data.draw(st.sampled_from(scheduler.running))
            verdict = data.draw(st.sampled_from(VERDICTS))
            scheduler.finish(name, verdict, VersionSpan(submitted[name], scheduler.version))
            fates[name] = {Verdict.ACCEPTED: "queued", Verdict.FAILED: "failed"}.get(verdict, "filtered")
        elif event == "drop":
            name = data.draw(st.sampled_from([name for name, _ in scheduler.state()]))
            scheduler.drop(name)
            fates[name] = "failed" if fates[name] == "failed" else "filtered"
        elif event == "batch":
            batch = scheduler.batch()
            assert len(batch.trained) + len(batch.spent) == groups
            assert all(scheduler.version - submitted[name] <= staleness for name in batch.trained)
            assert all(fates[name] == "queued" for name in batch.trained)
            fates |= dict.fromkeys(batch.trained, "consumed")
        else:
            assert scheduler.doomed() == ()
            scheduler.delivered(scheduler.version + 1) if batch and batch.trained else scheduler.next_round()
            batch = None
        found = list(fates.values())
        counts = scheduler.counts()
        assert counts.balanced
        assert counts.held <= (staleness + 1) * groups
        assert (counts.submitted, counts.running) == (len(found), found.count("running"))
        assert (counts.queued, counts.accepted) == (found.count("queued"), counts.queued + found.count("consumed"))
        assert (counts.filtered, counts.failed) == (found.count("filtered"), found.count("failed"))


def test_events_that_cannot_happen_are_refused() -> None:
    scheduler = Scheduler(BoundedSchedule(groups=1))
    scheduler.submit("a")
    refused: list[Callable[[], object]] = [
        lambda: scheduler.submit("a"),
        lambda: scheduler.submit("b"),
        lambda: scheduler.restore("a", 0),
        lambda: scheduler.restore("b", 1),
        lambda: scheduler.finish("b", Verdict.FAILED),
        lambda: scheduler.finish("a", Verdict.ACCEPTED),
        lambda: scheduler.drop("b"),
        scheduler.batch,
        scheduler.next_round,
        lambda: scheduler.delivered(1),
    ]
    for event in refused:
        with pytest.raises(ScheduleError):
            event()
        assert scheduler.running == ("a",)
        assert scheduler.counts().balanced
    accept(scheduler, "a")
    scheduler.batch()
    for event in (scheduler.batch, scheduler.next_round, lambda: scheduler.delivered(2)):
        with pytest.raises(ScheduleError):
            event()


@pytest.mark.parametrize(
    ("numbers", "rule"),
    [
        ({"groups": 0}, "groups ≥ 1"),
        ({"groups": 2, "updates": 0}, "updates ≥ 1"),
        ({"groups": 2, "max_staleness": -1}, "max_staleness ≥ 0"),
        ({"groups": 2, "window": 1}, "window ≥ groups"),
        ({"groups": 2, "oversample": 0.9}, "oversample ≥ 1"),
        ({"groups": 2, "total": -1}, "total ≥ 0"),
    ],
)
def test_numbers_that_are_no_schedule_are_refused(numbers: dict[str, int], rule: str) -> None:
    with pytest.raises(ScheduleError, match=rule):
        BoundedSchedule(**numbers)

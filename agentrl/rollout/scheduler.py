"""The scheduler: groups, places, versions, deliveries. A state machine without clock, tasks or server.

Life of a group:

    submit ──▶ running ──finish──▶ accepted: queued ──batch──▶ consumed
                  │                                └──drop───▶ filtered (stale)
                  ├──finish──▶ filtered or failed, and its place: given back at once (`replace_filtered`),
                  │                                               or spent until its batch
                  └──drop────▶ filtered (stale)

Invariant, at every event: **submitted = accepted + filtered + failed + running**, where accepted = queued + consumed.
Whose place is held how long, and why no trained token is more than S versions old, says `agentrl.rollout.schedule`.
It is checked all the same: when a batch is formed, every group's oldest token is at most S versions behind the
current one and no token is ahead of it; anything else raises `StalenessError`, because a batch that breaks the bound
must never be trained.

Example, `BoundedSchedule(groups=2)`, on-policy:

    s = Scheduler(BoundedSchedule(groups=2))
    s.admissible()                                    # 2
    s.submit("g0"); s.submit("g1")                    # admissible() is 0 now
    s.finish("g0", Verdict.ACCEPTED, VersionSpan(0, 0))
    s.finish("g1", Verdict.ZERO_VARIANCE)
    s.ready()                                         # True
    s.batch()                                         # Taken(trained=("g0",), spent=("g1",))
    for name in s.doomed(): s.drop(name)              # only with oversample > 1
    s.delivered(1)                                    # admissible() is 2 again
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from agentrl.errors import StalenessError
from agentrl.rollout.filters import Verdict
from agentrl.rollout.schedule import BoundedSchedule, ScheduleError, SchedulerView


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The oldest and the newest policy version among a group's sampled tokens."""

    oldest: int
    newest: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The places of a batch: groups to train, and groups whose place was spent. Each oldest first."""

    trained: tuple[str, ...]
    spent: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Counts:
    """The scheduler's ledger of groups. spent: filtered or failed, their place waits for its batch · held: places."""

    submitted: int
    accepted: int
    filtered: int
    failed: int
    running: int
    queued: int
    spent: int
    held: int

    @property
    def balanced(self) -> bool:
        """The invariant."""
        return self.submitted == self.accepted + self.filtered + self.failed + self.running


@dataclass(slots=True)
class _Place:
    """A place that waits for a batch. `verdict` is None while its group runs; `span` is an accepted group's."""

    submitted: int
    verdict: Verdict | None = None
    span: VersionSpan | None = None

    @property
    def running(self) -> bool:
        return self.verdict is None

    @property
    def queued(self) -> bool:
        return self.verdict is Verdict.ACCEPTED

    @property
    def oldest(self) -> int:
        """No token of the group is of an older version than this."""
        return self.submitted if self.span is None else self.span.oldest


class Scheduler:
    """See the module's text. Every method is one event or one question, each O(places held)."""

    def __init__(self, schedule: BoundedSchedule, *, version: int = 0) -> None:
        self.schedule = schedule
        self._version = version
        self._places: dict[str, _Place] = {}  # waiting for a batch, by age
        self._batch: Taken | None = None  # formed and not yet delivered
        self._consumed = 0  # places that batches took
        self._submitted = self._accepted = self._filtered = self._failed = 0
        self._staleness = (0.0, 0.0)

    def __repr__(self) -> str:
        return f"Scheduler({self.schedule}, {self.view()}, {self.counts()})"

    # --- what it knows ----------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The current policy version."""
        return self._version

    @property
    def running(self) -> tuple[str, ...]:
        """Groups in progress, oldest first."""
        return tuple(name for name, place in self._places.items() if place.running)

    @property
    def queued(self) -> tuple[str, ...]:
        """Groups accepted and not yet consumed, oldest first."""
        return tuple(name for name, place in self._places.items() if place.queued)

    @property
    def takeable(self) -> tuple[str, ...]:
        """The settled places inside the window, accepted or spent, oldest first."""
        window = tuple(self._places.items())[: self.schedule.window]
        return tuple(name for name, place in window if not place.running)

    def counts(self) -> Counts:
        """The ledger."""
        running, queued = len(self.running), len(self.queued)
        return Counts(
            submitted=self._submitted,
            accepted=self._accepted,
            filtered=self._filtered,
            failed=self._failed,
            running=running,
            queued=queued,
            spent=len(self._places) - running - queued,
            held=len(self._places) + (self._batched or 0),
        )

    def view(self) -> SchedulerView:
        """What the schedule decides on."""
        return SchedulerView(
            version=self._version,
            waiting=tuple(place.submitted for place in self._places.values()),
            takeable=tuple(self._places[name].submitted for name in self.takeable),
            batched=self._batched,
            consumed=self._consumed,
        )

    def admissible(self) -> int:
        """How many groups may be submitted now."""
        return self.schedule.admit(self.view())

    @property
    def to_come(self) -> int:
        """How many groups may be submitted once the batch is delivered; without a batch, now."""
        return self.schedule.admit(replace(self.view(), batched=None))

    def ready(self) -> bool:
        """True where `batch` should be called."""
        return self.schedule.ready(self.view())

    def doomed(self) -> tuple[str, ...]:
        """Groups that no batch to come may hold, oldest first: drop them before the delivery.

        They are those that would exceed S and, after the last batch of a run with a `total`, all that is left. With
        `oversample` 1 there are none, unless a run was resumed with a smaller S.
        """
        view = self.view()
        if self.schedule.batch_size(view) == 0:
            return tuple(self._places)
        bound = self.schedule.oldest_in_time(view)
        return tuple(name for name, place in self._places.items() if place.oldest < bound)

    def staleness(self) -> tuple[float, float]:
        """Where the staleness of the last batch came from, in versions: in flight, in queue. (0, 0) before the first.

        In flight: from a group's oldest token to its newest; in queue: from its newest token to the batch, grading
        included. Means over the trained groups; their sum is the mean staleness of the oldest tokens.
        """
        return self._staleness

    def state(self) -> list[tuple[str, int]]:
        """(group, version it was submitted at) of each place that waits for a batch, oldest first, for `restore`."""
        return [(name, place.submitted) for name, place in self._places.items()]

    # --- what happens -----------------------------------------------------------------------------

    def submit(self, group_id: str) -> None:
        """A group starts. Raises `ScheduleError` without a free place or for a name that holds one."""
        if self.admissible() < 1:
            raise ScheduleError(f"no place is free for group {group_id}", where="Scheduler.submit")
        self._hold(group_id, self._version)

    def restore(self, group_id: str, submit_version: int) -> None:
        """A resumed run's group has the place it had: by its version among the others, whether one is free or not.

        Raises `ScheduleError` for a name that holds a place or for a version to come.
        """
        if submit_version > self._version:
            raise ScheduleError(
                f"group {group_id} of version {submit_version} cannot be restored at version {self._version}",
                where="Scheduler.restore",
            )
        self._hold(group_id, submit_version)
        self._places = dict(sorted(self._places.items(), key=lambda item: item[1].submitted))  # stable

    def finish(self, group_id: str, verdict: Verdict, span: VersionSpan | None = None) -> None:
        """A running group ended; `span` of its versions is needed where it is accepted."""
        place = self._places.get(group_id)
        if place is None or not place.running:
            raise ScheduleError(f"group {group_id} is not running", where="Scheduler.finish")
        if verdict is Verdict.ACCEPTED:
            if span is None:
                raise ScheduleError(f"accepted group {group_id} has no versions", where="Scheduler.finish")
            self._accepted += 1
            place.span = span
        elif verdict.filtered:
            self._filtered += 1
        else:
            self._failed += 1
        place.verdict = verdict
        if self.schedule.replace_filtered and not place.queued:
            del self._places[group_id]

    def drop(self, group_id: str) -> Verdict:
        """Give a waiting place up, before a delivery; what became of its group.

        Running or queued: filtered as stale. Spent: what it was. Raises `ScheduleError` for one that holds none.
        """
        place = self._places.pop(group_id, None)
        if place is None:
            raise ScheduleError(f"group {group_id} waits for no batch", where="Scheduler.drop")
        if place.verdict is not None and not place.queued:
            return place.verdict
        self._accepted -= place.queued
        self._filtered += 1
        return Verdict.STALE

    def batch(self) -> Taken:
        """Take the oldest settled places; they are held until `delivered`, or `next_round` where none is trained.

        Raises `ScheduleError` before `ready`, `StalenessError` where a group breaks the bound (nothing is taken).
        """
        view = self.view()
        if not self.schedule.ready(view):
            raise ScheduleError("no batch is ready", where=f"Scheduler.batch, {view}")
        names = self.takeable[: self.schedule.batch_size(view)]
        spans = {name: self._places[name].span for name in names if self._places[name].queued}
        check_staleness(spans, version=self._version, max_staleness=self.schedule.max_staleness)
        self._note_staleness([span for span in spans.values() if span is not None])
        for name in names:
            del self._places[name]
        self._consumed += len(names)
        self._batch = Taken(tuple(spans), tuple(name for name in names if name not in spans))
        return self._batch

    def delivered(self, version: int) -> None:
        """The policy servers hold `version` now, the next one, and the batch's places are free.

        Raises `ScheduleError` without a batch, for another version, and where doomed groups were not dropped.
        """
        if self._batch is None or version != self._version + 1:
            raise ScheduleError(
                f"version {version} was delivered at version {self._version}, "
                f"{'without' if self._batch is None else 'with'} a batch",
                where="Scheduler.delivered",
                remedy="one batch and one delivery for each version",
            )
        if doomed := self.doomed():
            raise ScheduleError(
                f"groups {', '.join(doomed)} can be trained no more",
                where="Scheduler.delivered",
                remedy="drop what `Scheduler.doomed` names before the delivery",
            )
        self._version = version
        self._batch = None

    def next_round(self) -> None:
        """Free the batch's places without a delivery: none of its groups was trained."""
        if self._batch is None or self._batch.trained:
            raise ScheduleError(
                f"there is something to deliver or no batch: {self._batch}", where="Scheduler.next_round"
            )
        self._batch = None

    # --- inside -----------------------------------------------------------------------------------

    @property
    def _batched(self) -> int | None:
        return None if self._batch is None else len(self._batch.trained) + len(self._batch.spent)

    def _hold(self, group_id: str, version: int) -> None:
        if group_id in self._places:
            raise ScheduleError(f"group {group_id} is in flight already", where="Scheduler")
        self._places[group_id] = _Place(version)
        self._submitted += 1

    def _note_staleness(self, spans: list[VersionSpan]) -> None:
        if spans:
            in_flight = sum(span.newest - span.oldest for span in spans) / len(spans)
            self._staleness = in_flight, sum(self._version - span.newest for span in spans) / len(spans)


def check_staleness(spans: Mapping[str, VersionSpan | None], *, version: int, max_staleness: int) -> None:
    """Raise `StalenessError` for a group with a token older than `version − max_staleness`, or newer."""
    for name, span in spans.items():
        if span is None:
            raise ScheduleError(f"group {name} is still running", where="check_staleness")
        if span.oldest < version - max_staleness or span.newest > version:
            raise StalenessError(
                f"group {name} holds tokens of versions {span.oldest} to {span.newest}; the batch is formed "
                f"at version {version} with staleness at most {max_staleness}",
                where=f"group {name}",
                remedy="drop it and report this: admission should have kept it out",
            )

"""The scheduler: groups, slots, versions, deliveries. A state machine without clock, tasks or server.

Life of a group:

    submit ──▶ running ──finish──▶ accepted: queued ──batch──▶ consumed
                  │                                └──drop───▶ filtered (stale)
                  ├──finish──▶ filtered
                  └──finish or drop──▶ failed

Invariant, at every event: **submitted = accepted + filtered + failed + running**, where accepted = queued +
consumed. A group holds a slot from `submit` until it is filtered, failed or consumed. When a batch is formed,
every group's oldest token is at most S versions behind the current one and no token is ahead of it; anything
else raises `StalenessError`, because a batch that breaks the bound must never be trained. With S = 0 every
token carries the current version.

Example, `SyncSchedule(groups=2)`:

    s = Scheduler(SyncSchedule(groups=2))
    s.admissible()                                    # 2
    s.submit("g0"); s.submit("g1")                    # admissible() is 0 now
    s.finish("g0", Verdict.ACCEPTED, VersionSpan(0, 0))
    s.finish("g1", Verdict.ZERO_VARIANCE)
    s.ready()                                         # True
    s.batch()                                         # ("g0",)
    s.delivered(1)                                    # admissible() is 2 again
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.errors import AgentRLError, StalenessError
from agentrl.rollout.filters import Verdict
from agentrl.rollout.schedule import Schedule, SchedulerView


class ScheduleError(AgentRLError):
    """An event that cannot happen in the scheduler's state: a fault of the program."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The oldest and the newest policy version among a group's sampled tokens."""

    oldest: int
    newest: int


@dataclass(frozen=True, slots=True)
class Counts:
    """The scheduler's ledger."""

    submitted: int
    accepted: int
    filtered: int
    failed: int
    running: int
    queued: int

    @property
    def balanced(self) -> bool:
        """The invariant."""
        return self.submitted == self.accepted + self.filtered + self.failed + self.running


class Scheduler:
    """See the module's text. Every method is one event; all of them are O(groups in flight)."""

    def __init__(self, schedule: Schedule, *, version: int = 0) -> None:
        self.schedule = schedule
        self._version = version
        self._order: dict[str, VersionSpan | None] = {}  # unsettled, by age; None while running
        self._submitted = self._accepted = self._filtered = self._failed = 0
        self._submitted_at_version = 0

    # --- what it knows ----------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The current policy version."""
        return self._version

    @property
    def running(self) -> tuple[str, ...]:
        """Groups in progress, oldest first."""
        return tuple(name for name, span in self._order.items() if span is None)

    @property
    def queued(self) -> tuple[str, ...]:
        """Groups accepted and not yet consumed, oldest first."""
        return tuple(name for name, span in self._order.items() if span is not None)

    @property
    def takeable(self) -> tuple[str, ...]:
        """The queued groups inside the window, oldest first."""
        window = tuple(self._order)[: self.schedule.window]
        return tuple(name for name in window if self._order[name] is not None)

    def counts(self) -> Counts:
        """The ledger."""
        return Counts(
            submitted=self._submitted,
            accepted=self._accepted,
            filtered=self._filtered,
            failed=self._failed,
            running=len(self.running),
            queued=len(self.queued),
        )

    def view(self) -> SchedulerView:
        """What the schedule decides on."""
        return SchedulerView(
            version=self._version,
            running=len(self.running),
            queued=len(self.queued),
            takeable=len(self.takeable),
            submitted_at_version=self._submitted_at_version,
        )

    def admissible(self) -> int:
        """How many groups may be submitted now."""
        return self.schedule.admit(self.view())

    def ready(self) -> bool:
        """True where `batch` should be called."""
        return self.schedule.ready(self.view())

    # --- what happens -----------------------------------------------------------------------------

    def submit(self, group_id: str) -> None:
        """A group starts. Raises `ScheduleError` without a free slot or for a name that is in flight."""
        if group_id in self._order:
            raise ScheduleError(f"group {group_id} is in flight already", where="Scheduler.submit")
        if self.admissible() < 1:
            raise ScheduleError(f"no slot is free for group {group_id}", where="Scheduler.submit")
        self._order[group_id] = None
        self._submitted += 1
        self._submitted_at_version += 1

    def finish(self, group_id: str, verdict: Verdict, span: VersionSpan | None = None) -> None:
        """A running group ended; `span` of its versions is needed where it is accepted."""
        self._require_running(group_id)
        if verdict is Verdict.ACCEPTED:
            if span is None:
                raise ScheduleError(f"accepted group {group_id} has no versions", where="Scheduler.finish")
            self._order[group_id] = span
            self._accepted += 1
            return
        del self._order[group_id]
        if verdict.filtered:
            self._filtered += 1
        else:
            self._failed += 1

    def drop(self, group_id: str) -> Verdict:
        """Give up a group before a delivery: a running one has failed, a queued one is filtered as stale."""
        if group_id not in self._order:
            raise ScheduleError(f"group {group_id} is not in flight", where="Scheduler.drop")
        if self._order.pop(group_id) is None:
            self._failed += 1
            return Verdict.FAILED
        self._accepted -= 1
        self._filtered += 1
        return Verdict.STALE

    def batch(self) -> tuple[str, ...]:
        """Consume the oldest takeable groups, at most P; empty where all of a round were left out.

        Raises `ScheduleError` before `ready`, `StalenessError` where a group breaks the bound (nothing is
        consumed).
        """
        if not self.ready():
            raise ScheduleError("no batch is ready", where=f"Scheduler.batch, {self.view()}")
        taken = self.takeable[: self.schedule.groups]
        check_staleness(
            {name: self._order[name] for name in taken},
            version=self._version,
            max_staleness=self.schedule.max_staleness,
        )
        for name in taken:
            del self._order[name]
        return taken

    def delivered(self, version: int) -> None:
        """The policy servers hold `version` now; versions only grow."""
        if version <= self._version:
            raise ScheduleError(f"version {version} was delivered after {self._version}", where="Scheduler.delivered")
        self._version = version
        self._submitted_at_version = 0

    def next_round(self) -> None:
        """Admit again without a delivery: all groups of the round were left out, nothing was trained."""
        if self._order:
            raise ScheduleError("groups are still in flight", where="Scheduler.next_round")
        self._submitted_at_version = 0

    def _require_running(self, group_id: str) -> None:
        if group_id not in self._order or self._order[group_id] is not None:
            raise ScheduleError(f"group {group_id} is not running", where="Scheduler.finish")


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

"""Schedules: when a group may start and when a batch is ready. Policies of the one `Scheduler`.

A schedule sees numbers only (`SchedulerView`) and holds no state, so that each rule is a unit test.
`SyncSchedule` is here. An asynchronous schedule with staleness bound S is another class with the same five
members and no change elsewhere:

* `max_staleness` = S and `slots` = (S + 1)·P, with P = `groups` per delivery: work in progress and queued
  never exceed it, which is what bounds staleness;
* `admit` = slots − running − queued: a new group for every slot that falls free, whatever the version;
* `ready` = at least P groups lie finished inside the window;
* `window` W ≥ P: a batch may only take groups among the W oldest unsettled ones, so that fast groups overtake
  slow ones by less than W places and slow (hard) tasks keep their share of training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """What a schedule may look at.

    version: of the policy that generates · running: groups in progress · queued: accepted and not yet
    consumed · takeable: those of them inside the window · submitted_at_version: groups submitted since the
    last delivery.
    """

    version: int
    running: int
    queued: int
    takeable: int
    submitted_at_version: int


class Schedule(Protocol):
    """Admission and batch readiness. Pure: the same view gives the same answer."""

    @property
    def groups(self) -> int:
        """P: groups per delivery."""
        ...

    @property
    def updates(self) -> int:
        """k: optimizer steps per delivery."""
        ...

    @property
    def max_staleness(self) -> int:
        """S: the batch's version minus the version of any of its tokens is at most this."""
        ...

    @property
    def window(self) -> int | None:
        """W of the windowed FIFO; None: no group waits for an older one."""
        ...

    def admit(self, view: SchedulerView) -> int:
        """How many groups may be submitted now (≥ 0)."""
        ...

    def ready(self, view: SchedulerView) -> bool:
        """True where a batch (at most P groups) should be formed now."""
        ...


@dataclass(frozen=True, slots=True)
class SyncSchedule:
    """Generate P groups with one version, then train k updates on what was accepted, then deliver.

    Nothing overlaps: S = 0. Groups that are filtered or fail are not replaced within the round, so that a
    step costs the same generation whatever their number; the batch is smaller, or empty
    (`Scheduler.next_round`).
    """

    groups: int
    updates: int = 1

    @property
    def max_staleness(self) -> int:
        return 0

    @property
    def window(self) -> int | None:
        return None

    def admit(self, view: SchedulerView) -> int:
        return max(0, self.groups - view.submitted_at_version)

    def ready(self, view: SchedulerView) -> bool:
        return view.running == 0 and view.submitted_at_version >= self.groups

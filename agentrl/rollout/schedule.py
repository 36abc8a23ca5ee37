"""The schedule: when a group may start and when a batch is ready, such that no trained token exceeds S.

P = `groups` per delivery, S = `max_staleness`, n = the policy's version now. A *place* is what a submitted group
holds until the delivery that follows its batch; a place is *settled* once its group has finished and it waits for
a batch (accepted, or spent: filtered or failed without being replaced). A group submitted at version v samples
no token older than v, so it must be in the batch of version v + S at the latest: its deadline.

The rules, with `oversample` = 1:

1. *One batch at a time*, of the oldest P settled places inside the window. Until its delivery (or, where it trained
   nothing, `Scheduler.next_round`, after which n is the same) there is no other.
2. *Admission*: at most (S + 1)·P places are held. Those of a batch stay held until its delivery.
3. *Readiness*: a batch is formed only if what it leaves can still be in time. With U(a) = places submitted at
   version a or before that wait for a batch, for each a in n − S … n:

       taken(≤ a)  ≥  U(a) − P·(a − (n − S))

   Places of version n − S or before are due now, so all of them are taken: slow groups are waited for.

Why nobody is late: let (I) be "U(a) ≤ P·(a − (n − S) + 1) for every a", that is, what is due by version a + S fits
into the batches of versions n … a + S. At the start nothing waits. Rule 3 leaves U(a) ≤ P·(a − (n − S)) for a ≤ n,
which is (I) for n + 1. Groups submitted later do not break it. Before the delivery they have version n, and by rule 2
the batch's P places leave room for S·P waiting ones, so U(n) ≤ P·S; after it they have version n + 1, and
U(n + 1) ≤ P·(S + 1). A place that falls free early (failed and replaced, dropped) only lowers U. Without a delivery n
stays, and (I) with it. A resumed run restores each place at its version, so (I) holds as it did. (I) with
a = n − S − 1 is U = 0: no group is ever past its deadline. A batch smaller than P is formed only where `total` says
that nothing else comes.

Why it never waits for ever: by (I) the oldest P places satisfy rule 3, and the window W ≥ P holds them. Once they
have finished, the batch is ready.

With S = 0 nothing is admitted between a batch and its delivery: P groups of version n, their batch, version n + 1.
That is the `sync` schedule, by construction.

With `oversample` > 1 more places are held, the first P settled make a batch whatever is due, and what could no longer
be in time is dropped before the delivery (`Scheduler.doomed`). Fast groups then crowd out slow ones.

A schedule sees numbers only and holds no state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentrl.errors import AgentRLError


class ScheduleError(AgentRLError):
    """An event that cannot happen in the scheduler's state, or a schedule that cannot be: a fault of the program."""


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """What a schedule may look at.

    version: of the policy that generates · waiting: the versions at which the places that wait for a batch were
    submitted, oldest first, their groups running or finished · takeable: those of them that are settled and inside
    the window · batched: places of the batch that is not delivered yet; None where no batch was formed since the
    last delivery · consumed: places that all batches so far took.
    """

    version: int
    waiting: tuple[int, ...]
    takeable: tuple[int, ...]
    batched: int | None
    consumed: int


@dataclass(frozen=True, slots=True)
class BoundedSchedule:
    """See the module's text. `sync` is S = 0. Raises `ScheduleError` for numbers that mean no schedule.

    groups: P · updates: k, optimizer steps per delivery · max_staleness: S · window: W ≥ P, how many of the oldest
    waiting places a batch looks at; None: all · oversample: places held per place that a batch takes ·
    replace_filtered: a group that is filtered or failed gives its place back at once, so that a batch is P accepted
    groups; otherwise its place is spent and the batch trains fewer · total: places that all batches together will
    take (P times the steps to come); None: no end.
    """

    groups: int
    updates: int = 1
    max_staleness: int = 0
    window: int | None = None
    oversample: float = 1.0
    replace_filtered: bool = False
    total: int | None = None

    def __post_init__(self) -> None:
        broken = [
            ("groups ≥ 1", self.groups >= 1),
            ("updates ≥ 1", self.updates >= 1),
            ("max_staleness ≥ 0", self.max_staleness >= 0),
            ("window ≥ groups", self.window is None or self.window >= self.groups),
            ("oversample ≥ 1", self.oversample >= 1),
            ("total ≥ 0", self.total is None or self.total >= 0),
        ]
        if rules := [rule for rule, holds in broken if not holds]:
            raise ScheduleError(f"no such schedule, it must have {', '.join(rules)}", where=f"{self}")

    @property
    def drops(self) -> bool:
        """True where groups that could no longer be in time are dropped instead of waited for."""
        return self.oversample > 1

    @property
    def places(self) -> int:
        """Most places held at once."""
        return self._oversampled((self.max_staleness + 1) * self.groups)

    def batch_size(self, view: SchedulerView) -> int:
        """Places that the next batch takes: P, fewer at the end of a run and 0 after it."""
        return self.groups if self.total is None else max(0, min(self.groups, self.total - view.consumed))

    def admit(self, view: SchedulerView) -> int:
        """How many groups may be submitted now (≥ 0)."""
        if view.batched is not None and self.max_staleness == 0:
            return 0  # with oversampling a dropped group's place is free, but the next version is too late
        waiting = len(view.waiting)
        free = self.places - waiting - (view.batched or 0)
        if self.total is not None:
            free = min(free, self._oversampled(self.total - view.consumed) - waiting)
        return max(0, free)

    def ready(self, view: SchedulerView) -> bool:
        """True where a batch, of `batch_size` places, should be formed now."""
        size = self.batch_size(view)
        if view.batched is not None or size == 0 or len(view.takeable) < size:
            return False
        return self.drops or self._leaves_in_time(view, view.takeable[:size])

    def oldest_in_time(self, view: SchedulerView) -> int:
        """The oldest version that the next batch may hold: groups below it can never be trained."""
        batch_version = view.version if view.batched is None else view.version + 1
        return batch_version - self.max_staleness

    def _leaves_in_time(self, view: SchedulerView, taken: tuple[int, ...]) -> bool:
        """Rule 3. A batch that holds nothing younger than a is all that can be done for a: a resumed run with a
        smaller S may have more that is due than fits, which is dropped after the batch."""
        due = view.version - self.max_staleness
        for version in range(due, view.version + 1):
            in_batch = sum(submitted <= version for submitted in taken)
            waiting = sum(submitted <= version for submitted in view.waiting)
            if in_batch < min(len(taken), waiting - self.groups * (version - due)):
                return False
        return True

    def _oversampled(self, places: int) -> int:
        """`places` times `oversample`, rounded up; without 1e-9, 1.1 · 50 would be 56."""
        return math.ceil(places * self.oversample - 1e-9)

"""A run with a fake clock: the real scheduler, played groups that take time, and a trainer that takes time.

It keeps its own books (which policy version each group sampled from, what became of each group) and holds the
scheduler against them at every event.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from agentrl.rollout.filters import Verdict
from agentrl.rollout.schedule import BoundedSchedule
from agentrl.rollout.scheduler import Scheduler, Taken, VersionSpan

# How a finished group may be judged: every verdict but `stale`, which dropping alone gives.
VERDICTS = (Verdict.ACCEPTED, Verdict.ZERO_VARIANCE, Verdict.TOO_FEW_VALID, Verdict.FAILED)


class DeadlockError(Exception):
    """Nothing will ever happen again, and the run is not at its end."""


@dataclass(frozen=True)
class Job:
    """How long a task's group runs, and how it is judged."""

    duration: float
    verdict: Verdict = Verdict.ACCEPTED
    slow: bool = False


@dataclass
class Group:
    """The world's own record of a group. `oldest` and `newest`: versions it sampled from, -1 where none yet."""

    task: int
    job: Job
    submitted: int
    oldest: int = -1
    newest: int = -1
    fate: str = "running"
    attempt: int = 0


@dataclass
class World:
    """`job_of(task)` says how the n-th task goes; `active`: groups in their episode at once (None: all).

    restarts: steps after which the run ends and is resumed; unfinished groups then run again, with their old place
    (`keep_places`) or as newly submitted. A dropped group's task goes to the end of the data, beyond the run.
    """

    schedule: BoundedSchedule
    job_of: Callable[[int], Job]
    steps: int
    train_s: float = 1.0
    active: int | None = None
    restarts: frozenset[int] = frozenset()
    keep_places: bool = True

    now: float = 0.0
    step: int = 0
    version: int = 0
    groups: dict[str, Group] = field(default_factory=dict)
    batches: list[Taken] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)  # of each trained group's oldest token
    dropped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.schedule)
        self._sitting: set[str] = set()  # groups that this scheduler knows
        self._waiting: deque[str] = deque()  # submitted, without a slot
        self._active: set[str] = set()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._ticket = itertools.count()
        self._next_task = itertools.count()

    def run(self) -> World:
        """To `steps`. Raises `DeadlockError`, or whatever check fails."""
        self._admit()
        while self.step < self.steps:
            if self.scheduler.ready():
                self._form_batch()
            elif not self._events:
                raise DeadlockError(f"at {self.now}, step {self.step}: {self.scheduler}")
            else:
                self.now, _, happen = heapq.heappop(self._events)
                happen()
                self._check()
            self._admit()
        return self

    def trained(self) -> list[Group]:
        """Groups that were trained, in the order of the batches."""
        return [self.groups[name] for batch in self.batches for name in batch.trained]

    # --- what happens -----------------------------------------------------------------------------

    def _admit(self) -> None:
        while self.scheduler.admissible():
            task = next(self._next_task)
            name = f"g{len(self.groups)}"
            self.scheduler.submit(name)
            self.groups[name] = Group(task, self.job_of(task), self.version)
            self._sitting.add(name)
            self._waiting.append(name)
            self._start_waiting()
            self._check()

    def _start_waiting(self) -> None:
        while self._waiting and (self.active is None or len(self._active) < self.active):
            name = self._waiting.popleft()
            group = self.groups[name]
            group.oldest = self.version
            group.attempt += 1
            self._active.add(name)
            attempt = group.attempt
            self._at(group.job.duration, lambda name=name, attempt=attempt: self._finish(name, attempt))  # type: ignore[misc]

    def _finish(self, name: str, attempt: int) -> None:
        group = self.groups[name]
        if group.fate != "running" or group.attempt != attempt:
            return  # dropped, or of an earlier sitting
        group.newest = self.version
        self._active.discard(name)
        self._tell(name)
        self._start_waiting()

    def _tell(self, name: str) -> None:
        group = self.groups[name]
        verdict = group.job.verdict
        span = VersionSpan(group.oldest, group.newest) if verdict is Verdict.ACCEPTED else None
        self.scheduler.finish(name, verdict, span)
        if verdict is Verdict.ACCEPTED:
            group.fate = "queued"
        else:
            group.fate = "failed" if verdict is Verdict.FAILED else "filtered"

    def _form_batch(self) -> None:
        taken = self.scheduler.batch()
        self.batches.append(taken)
        for name in taken.trained:
            group = self.groups[name]
            assert group.fate == "queued"
            assert group.submitted <= group.oldest <= group.newest <= self.version
            self.staleness.append(self.version - group.oldest)
            group.fate = "consumed"
        self._check()
        self._drop_doomed()
        if taken.trained:
            self._at(self.train_s, self._deliver)
            return
        self.scheduler.next_round()
        self._end_step()

    def _drop_doomed(self) -> None:
        for name in self.scheduler.doomed():
            group = self.groups[name]
            verdict = self.scheduler.drop(name)
            self._active.discard(name)
            if name in self._waiting:
                self._waiting.remove(name)
            if group.fate in ("running", "queued"):
                assert verdict is Verdict.STALE
                group.fate = "filtered"
            else:
                assert verdict is group.job.verdict
            self.dropped.append(name)
            self._check()
        self._start_waiting()

    def _deliver(self) -> None:
        self.version += 1
        self.scheduler.delivered(self.version)
        self._end_step()

    def _end_step(self) -> None:
        self.step += 1
        self._check()
        if self.step in self.restarts:
            self._restart()

    def _restart(self) -> None:
        """The run ends; another process takes up what the scheduler's state and the finished groups say."""
        state = self.scheduler.state()
        assert [self.groups[name].submitted for name, _ in state] == [version for _, version in state]
        left = None if self.schedule.total is None else self.schedule.groups * (self.steps - self.step)
        self.scheduler = Scheduler(replace(self.schedule, total=left), version=self.version)
        self._events.clear()
        self._waiting.clear()
        self._active.clear()
        self._sitting = {name for name, _ in state}
        for name, version in state:
            group = self.groups[name]
            finished = group.fate != "running"
            if finished or self.keep_places:
                self.scheduler.restore(name, version)
            elif self.scheduler.admissible():
                self.scheduler.submit(name)
                group.submitted = self.version
            else:  # of what oversampling had submitted, the steps that are left need no more
                group.fate = "forgotten"
                self._sitting.remove(name)
                continue
            if finished:
                group.fate = "running"
                self._tell(name)
            else:
                self._waiting.append(name)
        self._start_waiting()
        self._check()

    def _at(self, delay: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._ticket), happen))

    # --- what must hold at every event ------------------------------------------------------------

    def _check(self) -> None:
        counts = self.scheduler.counts()
        fates = Counter(self.groups[name].fate for name in self._sitting)
        assert counts.balanced, counts
        assert counts.submitted == len(self._sitting)
        assert counts.running == fates["running"]
        assert counts.queued == fates["queued"]
        assert counts.accepted == fates["queued"] + fates["consumed"]
        assert (counts.filtered, counts.failed) == (fates["filtered"], fates["failed"])
        assert counts.held <= self.schedule.places


def slow_share(groups: Iterable[Group]) -> float:
    """The share of slow tasks among `groups`."""
    found = [group.job.slow for group in groups]
    return sum(found) / len(found)

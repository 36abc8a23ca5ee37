"""Groups in progress: admitted one by one, taken one by one as they finish.

    prepare ─▶ set up ahead ─┐
                             ├─ start ─▶ running ─▶ finished ─▶ next
               (nothing)  ───┘     drop: gone from any of these, its requests closed

Invariants: a group that was started is taken exactly once, or dropped; nothing of a dropped group is ever taken.
Every rollout is one task. Its failure is its own record, while a fault of the program in any of them, in the
watchdog or in the sink of events, and whatever ends the run, is raised by the `next` that waits or comes next, or at
the end of the block. No event costs more than the group it concerns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from agentrl.errors import DeadlineError, RunFailedError
from agentrl.rollout.deadline import deadline
from agentrl.rollout.groups import GroupRequest, GroupResult
from agentrl.rollout.slots import Floor, Place
from agentrl.rollout.status import LEASES, Pulse, RolloutStatus, Watchdog
from agentrl.trajectory import Trajectory

_CLOSE_S = 120.0  # a cancelled rollout gives its sandbox back; a request may wait for a paused server to go on
_SANDBOX_PATIENCE_S = 2.0  # before who is set up ahead gives its sandbox to an admitted rollout


class RunRollout(Protocol):
    """`RolloutDriver.run` with the episode bound."""

    def __call__(
        self, request: GroupRequest, member: int, *, status: RolloutStatus, place: Place
    ) -> Awaitable[Trajectory]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all streams of an engine have in common. `finished` tells of a rollout that ended."""

    floor: Floor
    pulse: Pulse
    watchdog: Watchdog
    look_every_s: float
    monotonic: Callable[[], float]
    note: Callable[[str], None]
    finished: Callable[[Trajectory, RolloutStream], None]
    prefetch: Callable[[Sequence[GroupRequest]], None]


@dataclass(slots=True, eq=False)
class _Member:
    """One rollout of a group."""

    status: RolloutStatus
    place: Place
    task: asyncio.Task[None] | None = None
    trajectory: Trajectory | None = None


@dataclass(slots=True, eq=False)
class _Group:
    request: GroupRequest
    left: int
    started: bool = False
    members: list[_Member] = field(default_factory=list)


class RolloutStream:
    """The groups of one run, or of one evaluation. Made by `RolloutEngine.open`; one task at a time calls `next`.

    `step` is what events say; setting it begins a new count of `done` rollouts. `total` is how many rollouts there
    will be, None where that is not known.
    """

    def __init__(self, run: RunRollout, shared: Shared, *, step: int, total: int | None) -> None:
        self._run, self._shared = run, shared
        self._step, self.total, self.done = step, total, 0
        self._groups: dict[str, _Group] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._finished: deque[GroupResult] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._is_told = False
        self._is_closed = False
        self._started = 0  # groups that are started and not finished
        self._supervise(self._watch(), name="rollout watchdog")

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step, self.done = step, 0

    @property
    def running(self) -> tuple[str, ...]:
        """The groups that were started and not taken yet: `next` gives each of them, unless it is dropped."""
        going = [name for name, group in self._groups.items() if group.started]
        return (*(group.group_id for group in self._finished), *going)

    @property
    def prepared(self) -> tuple[str, ...]:
        """The groups that are set up ahead and have not been started."""
        return tuple(name for name, group in self._groups.items() if not group.started)

    @property
    def statuses(self) -> tuple[RolloutStatus, ...]:
        """What each rollout in progress is doing."""
        return tuple(member.status for member in self._members())

    def prepare(self, requests: Sequence[GroupRequest]) -> None:
        """Set these groups up ahead of their start, as far as there is room; those that are known stay as they are."""
        fresh = [request for request in requests if request.group_id not in self._groups]
        self._shared.prefetch(fresh)
        for request in fresh:
            self._open(request, admitted=False)

    def start(self, *requests: GroupRequest) -> None:
        """Admit groups, prepared before or not: their rollouts become active as slots are free, first come first."""
        known = self._groups
        if running := [r.group_id for r in requests if r.group_id in known and known[r.group_id].started]:
            raise ValueError(f"groups {running} are running already")
        self._shared.prefetch([request for request in requests if request.group_id not in known])
        self._shared.pulse.at = self._shared.monotonic()
        self._started += len(requests)
        for request in requests:
            if request.group_id not in known:
                self._open(request, admitted=True)
            else:
                self._admit(known[request.group_id])

    async def next(self, timeout_s: float | None) -> GroupResult:
        """The next group that is finished. Raises the first fault of any rollout, or what ended the run, at once;
        `DeadlineError` after `timeout_s` (None: the watchdog alone bounds the wait, while groups are running)."""
        if self._error is None and self._finished:
            return self._finished.popleft()
        if timeout_s is None:
            return await self._next()
        async with deadline(timeout_s, lambda: self._late(f"no group finished within {timeout_s:g} s")):
            return await self._next()

    async def drop(self, group_ids: Iterable[str]) -> tuple[str, ...]:
        """Cancel these groups and forget what of them has finished; returns when their requests are closed and their
        sandboxes given back, with the names of those that were still here."""
        wanted = dict.fromkeys(group_ids)
        finished = [group.group_id for group in self._finished if group.group_id in wanted]
        self._finished = deque(group for group in self._finished if group.group_id not in wanted)
        groups = [self._groups.pop(name) for name in wanted if name in self._groups]
        self._started -= sum(group.started for group in groups)
        tasks = [member.task for group in groups for member in group.members if member.task and not member.task.done()]
        for task in tasks:
            task.cancel()
        await self._ended(tasks)
        return (*finished, *(group.request.group_id for group in groups))

    async def close(self) -> None:
        """Cancel everything; returns when all sandboxes are given back."""
        self._is_closed = True
        self._groups, self._started = {}, 0
        for task in self._tasks:
            task.cancel()
        await self._ended(self._tasks)

    def raise_untold(self) -> None:
        """Raise the fault that no `next` has raised."""
        if self._error is not None and not self._is_told:
            raise self._error

    # --- groups -------------------------------------------------------------------------------------------------

    def _open(self, request: GroupRequest, *, admitted: bool) -> _Group:
        if self._is_closed:
            raise ValueError("the stream is closed")
        group = self._groups[request.group_id] = _Group(request, request.size, admitted)
        for number in range(request.size):
            name = request.trajectory_id(number)
            status = RolloutStatus(name, request.task.id, self._shared.monotonic(), self._shared.pulse)
            member = _Member(status, Place(self._shared.floor, admitted=admitted))
            group.members.append(member)
            member.task = self._supervise(self._rollout(group, number, member), name=name)
            member.task.add_done_callback(member.place.end)  # also of a task that was cancelled before it began
        return group

    def _admit(self, group: _Group) -> None:
        group.started = True
        for member in group.members:
            member.place.admit()
        self._settle(group)  # its set-up may have failed for good meanwhile

    async def _rollout(self, group: _Group, number: int, member: _Member) -> None:
        member.trajectory = await self._run(group.request, number, status=member.status, place=member.place)
        group.left -= 1
        self.done += 1
        self._shared.finished(member.trajectory, self)
        self._settle(group)

    def _settle(self, group: _Group) -> None:
        """Hand a group on that is started and complete."""
        request = group.request
        if group.left or not group.started or self._groups.pop(request.group_id, None) is not group:
            return
        self._started -= 1
        trajectories = tuple(member.trajectory for member in group.members if member.trajectory is not None)
        self._finished.append(GroupResult(request.group_id, request.task.id, request.index, trajectories))
        self._wake_up()

    async def _next(self) -> GroupResult:
        while True:
            if self._error is not None:
                self._is_told = True
                raise self._error
            if self._finished:
                return self._finished.popleft()
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None

    # --- supervision --------------------------------------------------------------------------------------------

    def _supervise(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._look_at)
        return task

    def _look_at(self, task: asyncio.Task[None]) -> None:
        """A task is over: what it raised reaches the foreground."""
        self._tasks.discard(task)
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                self._fail(error)
        elif not self._is_closed and not task.cancelling():
            self._fail(RuntimeError(f"{task.get_name()} was cancelled by something within it"))

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _ended(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        """Wait for cancelled tasks."""
        left = set(tasks)
        if left:
            _, left = await asyncio.wait(left, timeout=_CLOSE_S)
        if left:
            raise DeadlineError(
                f"{len(left)} cancelled rollouts did not end within {_CLOSE_S:g} s",
                where=", ".join(sorted(task.get_name() for task in left)[:3]),
                remedy="look for what hangs in the run folder's logs/",
            )

    async def _watch(self) -> None:
        """Look for what stands still, every `look_every_s`. Raises `RunFailedError` where all does."""
        shared = self._shared
        while True:
            await asyncio.sleep(shared.look_every_s)
            now = shared.monotonic()
            if self._started and shared.watchdog.is_stalled(shared.pulse, now=now):
                raise RunFailedError(
                    f"no rollout has made progress for {now - shared.pulse.at:.0f} s",
                    where=self._oldest(),
                    remedy="look for what hangs in the run folder's logs/, then go on with --resume; "
                    "rollout.stall_timeout_s is how long is waited",
                )
            self._look_after(now)

    def _look_after(self, now: float) -> None:
        """Fail the attempts that are stuck, and let who is set up ahead give way to who waits too long."""
        shared, waiting = self._shared, 0
        for member in self._members():
            status = member.status
            if shared.watchdog.is_stuck(status, now=now):
                error = DeadlineError(
                    f"no progress for {now - status.since:.0f} s",
                    where=str(status),
                    remedy="raise rollout.stuck_timeout_s, or look for what hangs in the run folder's logs/",
                )
                if member.place.block.interrupt(error):
                    shared.note(f"{error.what}: {status}")
            elif status.phase in LEASES and now - status.since >= _SANDBOX_PATIENCE_S:
                waiting += member.place.admitted
        shared.floor.make_room()
        shared.floor.make_way(waiting - shared.floor.leaving)

    def _members(self) -> Iterator[_Member]:
        """The rollouts in progress."""
        return (member for group in self._groups.values() for member in group.members if not member.trajectory)

    def _late(self, what: str) -> DeadlineError:
        return DeadlineError(what, where=self._oldest(), remedy="look for what hangs in the run folder's logs/")

    def _oldest(self) -> str:
        """Who has stood still for the longest, of those who may go on."""
        found = [member.status for member in self._members() if member.place.admitted]
        if not found:
            return "no group is running"
        oldest = min(found, key=lambda status: status.since)
        return f"{len(found)} rollouts in progress; for {self._shared.monotonic() - oldest.since:.0f} s: {oldest}"

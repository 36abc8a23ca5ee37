"""Groups of rollouts, concurrently: the thin asynchronous shell around driver, watchdog and meter.

Rollouts wait for one of `concurrency` slots in the order they were asked for (FIFO), so that no group is
overtaken at the door. Every rollout is a supervised task: its failure is its own status, while a fault of the
program in any of them, or in the watchdog, cancels all others at once and reaches the caller as itself.
Cancelling `run_groups` (Ctrl-C) gives every sandbox back before it returns.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.errors import first_error
from agentrl.rollout.driver import Limits, RolloutDriver
from agentrl.rollout.episode import EpisodeRunner
from agentrl.rollout.groups import GroupRequest, GroupResult
from agentrl.rollout.status import ConcurrencyMeter, RolloutStatus, Usage, Watchdog
from agentrl.trajectory import Trajectory
from agentrl.wire import Environment, Event, EventKind, Prefetching, SandboxPool

_STANDSTILL_S = 120.0
_LOOK_EVERY_S = 5.0


@dataclass(slots=True)
class _Run:
    """One call of `run_groups`."""

    episode: EpisodeRunner
    step: int
    total: int
    done: int = 0


class RolloutEngine:
    """Runs groups. `emit` takes events as they happen and must not block; `active` says what runs now."""

    def __init__(
        self,
        *,
        environment: Environment,
        pool: SandboxPool,
        limits: Limits,
        concurrency: int,
        emit: Callable[[Event], None],
        standstill_s: float = _STANDSTILL_S,
        look_every_s: float = _LOOK_EVERY_S,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._emit, self._monotonic, self._wall = emit, monotonic, wall
        self._environment, self._pool = environment, pool
        self._driver = RolloutDriver(environment, pool, limits, monotonic, wall, self._note)
        self._slots = asyncio.Semaphore(concurrency)
        self._active: dict[str, RolloutStatus] = {}
        self._meter = ConcurrencyMeter(now=monotonic())
        self._watchdog = Watchdog(standstill_s)
        self._look_every_s = look_every_s

    @property
    def active(self) -> tuple[RolloutStatus, ...]:
        """The rollouts that hold a slot, oldest first."""
        return tuple(self._active.values())

    def take_usage(self) -> Usage:
        """Concurrency since the last call, which begins a new interval."""
        return self._meter.read(now=self._monotonic())

    async def run_groups(
        self,
        requests: Sequence[GroupRequest],
        *,
        episode: EpisodeRunner,
        step: int = 0,
        on_group: Callable[[GroupResult], None] | None = None,
    ) -> list[GroupResult]:
        """Run all groups and return them in the order of `requests`; `on_group` takes each as it finishes.

        Training and evaluation alike: `episode` brings policy, tools and sampling. Raises the first fault of
        the program and whatever ends the run (`agentrl.rollout.driver.ENDS_RUN`), after all other rollouts
        are cancelled.
        """
        run = _Run(episode, step, sum(request.size for request in requests))
        self._prefetch(requests)
        try:
            async with asyncio.TaskGroup() as outer:
                watching = outer.create_task(self._watch(), name="rollout watchdog")
                async with asyncio.TaskGroup() as inner:
                    groups = [
                        inner.create_task(self._group(request, run, on_group), name=f"group {request.group_id}")
                        for request in requests
                    ]
                watching.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return [group.result() for group in groups]

    def _prefetch(self, requests: Sequence[GroupRequest]) -> None:
        """Tell the pool which images come, so that a slow pull is over when its rollout gets a slot."""
        if not isinstance(self._pool, Prefetching):
            return
        images = dict.fromkeys(self._environment.image(request.task) for request in requests)
        self._pool.prefetch(list(images))

    async def _group(
        self, request: GroupRequest, run: _Run, on_group: Callable[[GroupResult], None] | None
    ) -> GroupResult:
        async with asyncio.TaskGroup() as tasks:
            members = [
                tasks.create_task(self._member(request, member, run), name=request.trajectory_id(member))
                for member in range(request.size)
            ]
        trajectories = tuple(member.result() for member in members)
        result = GroupResult(request.group_id, request.task.id, request.index, trajectories)
        if on_group is not None:
            on_group(result)
        return result

    async def _member(self, request: GroupRequest, member: int, run: _Run) -> Trajectory:
        # The wait for a slot has no deadline of its own: each rollout that holds one has (Limits.rollout_s).
        async with self._slots:
            name = request.trajectory_id(member)
            status = RolloutStatus(name, request.task.id, self._monotonic())
            self._active[name] = status
            self._meter.change(+1, now=self._monotonic())
            try:
                trajectory = await self._driver.run(request, member, episode=run.episode, status=status)
            finally:
                del self._active[name]
                self._meter.change(-1, now=self._monotonic())
        run.done += 1
        self._finished(trajectory, run)
        return trajectory

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._look_every_s)
            for sentence in self._watchdog.look(self.active, now=self._monotonic()):
                self._note(sentence)

    def _finished(self, trajectory: Trajectory, run: _Run) -> None:
        data = {
            "step": run.step,
            "done": run.done,
            "total": run.total,
            "task": trajectory.task_id,
            "outcome": trajectory.outcome.kind.value,
            "reward": trajectory.reward,
        }
        self._emit(Event(kind=EventKind.ROLLOUT_FINISHED, time=self._wall(), data=data))

    def _note(self, text: str) -> None:
        self._emit(Event(kind=EventKind.NOTE, time=self._wall(), data={"text": text}))

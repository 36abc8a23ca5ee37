"""The rollout engine: what streams of groups share, and how one is opened.

Training keeps one stream open for the whole run and admits groups as the schedule allows; an evaluation runs a list
of groups through a stream of its own. All streams of an engine stand in the same two queues
(`agentrl.rollout.slots`), so that together they never hold more sandboxes and slots than asked for.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from agentrl.rollout.driver import Limits, RolloutDriver
from agentrl.rollout.episode import EpisodeRunner
from agentrl.rollout.groups import GroupRequest, GroupResult
from agentrl.rollout.scoring import Scorer
from agentrl.rollout.slots import Floor
from agentrl.rollout.status import Pulse, Usage, Watchdog
from agentrl.rollout.stream import RolloutStream, Shared
from agentrl.trajectory import Trajectory
from agentrl.wire import Environment, Event, EventKind, Prefetching, SandboxPool

_STUCK_S = 900.0
_STALL_S = 1800.0
_LOOK_EVERY_S = 1.0


class RolloutEngine:
    """Runs groups. `emit` takes events as they happen and must not block.

    `concurrency` is the most rollouts active at once; at most so many and `ready_ahead` hold a sandbox from their
    set-up to the end of their episode (`agentrl.rollout.slots`). A rollout that stays in one phase and turn for
    `stuck_timeout_s` is failed and tried again; where no rollout at all makes progress for `stall_timeout_s`, the run
    fails.
    """

    def __init__(
        self,
        *,
        environment: Environment,
        pool: SandboxPool,
        limits: Limits,
        concurrency: int,
        emit: Callable[[Event], None],
        ready_ahead: int = 0,
        stuck_timeout_s: float = _STUCK_S,
        stall_timeout_s: float = _STALL_S,
        look_every_s: float = _LOOK_EVERY_S,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._emit, self._wall = emit, wall
        self._environment, self._pool = environment, pool
        self._driver = RolloutDriver(environment, pool, limits, monotonic, wall, self._note)
        self._floor = Floor(concurrency=concurrency, ready_ahead=ready_ahead, monotonic=monotonic)
        self._shared = Shared(
            floor=self._floor,
            pulse=Pulse(monotonic()),
            watchdog=Watchdog(stuck_timeout_s, stall_timeout_s),
            look_every_s=look_every_s,
            monotonic=monotonic,
            note=self._note,
            finished=self._finished,
            prefetch=self._prefetch,
        )

    @property
    def limit(self) -> int:
        """How many rollouts may be active now: 1 … `concurrency`. Lowering it cancels none, it lets fewer start."""
        return self._floor.limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._floor.limit = limit

    @property
    def active(self) -> int:
        """How many rollouts are in their episode."""
        return self._floor.slots.held

    @property
    def waiting(self) -> int:
        """How many rollouts of started groups are being set up, or wait for that or for a slot."""
        return self._floor.waiting

    def take_usage(self) -> Usage:
        """Active rollouts since the last call, which begins a new interval."""
        return self._floor.take_usage()

    @asynccontextmanager
    async def open(
        self, episode: EpisodeRunner, *, step: int = 0, total: int | None = None, scorer: Scorer | None = None
    ) -> AsyncIterator[RolloutStream]:
        """A stream of groups whose rollouts run `episode`; `step` and `total` (rollouts) are for its events. With
        `scorer` a rollout is finished once its teacher's scores are there.

        Leaving the block, however, cancels what is in progress and gives its sandboxes back. A fault that nobody has
        been told of yet is raised at the end.
        """
        run = partial(self._driver.run, episode=episode, scorer=scorer)
        stream = RolloutStream(run, self._shared, step=step, total=total)
        try:
            yield stream
        finally:
            await stream.close()
        stream.raise_untold()

    async def run_groups(
        self,
        requests: Sequence[GroupRequest],
        *,
        episode: EpisodeRunner,
        step: int = 0,
        on_group: Callable[[GroupResult], None] | None = None,
    ) -> list[GroupResult]:
        """Run all groups and return them in the order of `requests`; `on_group` takes each as it finishes.

        Raises the first fault of the program and whatever ends the run (`agentrl.rollout.driver.ENDS_RUN`), after
        all other rollouts are cancelled.
        """
        done: dict[str, GroupResult] = {}
        async with self.open(episode, step=step, total=sum(request.size for request in requests)) as stream:
            stream.start(*requests)
            while len(done) < len(requests):
                group = await stream.next(timeout_s=None)
                done[group.group_id] = group
                if on_group is not None:
                    on_group(group)
        return [done[request.group_id] for request in requests]

    def _prefetch(self, requests: Sequence[GroupRequest]) -> None:
        """Tell the pool which images come, so that a slow pull is over when its rollout gets a slot."""
        if requests and isinstance(self._pool, Prefetching):
            self._pool.prefetch(list(dict.fromkeys(self._environment.image(request.task) for request in requests)))

    def _finished(self, trajectory: Trajectory, stream: RolloutStream) -> None:
        data = {
            "step": stream.step,
            "done": stream.done,
            "total": stream.total,
            "task": trajectory.task_id,
            "outcome": trajectory.outcome.kind.value,
            "reward": trajectory.reward,
        }
        self._emit(Event(kind=EventKind.ROLLOUT_FINISHED, time=self._wall(), data=data))

    def _note(self, text: str) -> None:
        self._emit(Event(kind=EventKind.NOTE, time=self._wall(), data={"text": text}))

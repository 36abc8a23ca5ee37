"""Recorded rollouts that are scored by teachers: a stand-in for the engine's stream of groups.

A group that is started is read and scored, and comes out of `next` once all its segments have their scores, in the
order in which they were started, whichever was scored first: the same seed trains the same data. Nothing is generated:
token ids, log-probabilities, versions and rewards are as recorded. The record of such a rollout is a new one, with the
name of its place in this run and an event that says where it comes from; what clocks said is left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Self

from agentrl.errors import AgentRLError, DeadlineError, first_error, handling
from agentrl.rollout.deadline import deadline
from agentrl.rollout.driver import ENDS_RUN
from agentrl.rollout.groups import GroupRequest, GroupResult
from agentrl.rollout.scoring import Scorer, SegmentScores
from agentrl.run.recorded import RecordedRun
from agentrl.trajectory import Outcome, OutcomeKind, TeacherScores, Trajectory, TurnTiming
from agentrl.wire import Event, EventKind

_CLOSE_S = 60.0
_CLOCKS = "_s"  # how the names of an episode's seconds end


class RecordedStream:
    """The groups in progress; leaving its block gives them up. One task at a time calls `next`. `step` is what events
    say; `limit_s` bounds the scoring of one rollout, waiting for its turn included; `concurrency` rollouts are scored
    at once."""

    def __init__(
        self,
        recorded: RecordedRun,
        scorer: Scorer,
        *,
        emit: Callable[[Event], None],
        step: int,
        limit_s: float,
        concurrency: int,
    ) -> None:
        self._recorded, self._scorer, self._emit = recorded, scorer, emit
        self._step, self._limit_s, self._done = step, limit_s, 0
        self._places = asyncio.Semaphore(concurrency)
        self._tasks: dict[str, asyncio.Task[GroupResult]] = {}  # as they were started
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step, self._done = step, 0

    @property
    def running(self) -> tuple[str, ...]:
        """The groups that were started and not taken yet."""
        return tuple(self._tasks)

    def prepare(self, requests: Sequence[GroupRequest]) -> None:
        """Nothing: a recorded group needs no sandbox, and one that is not started yet must not be scored, as its
        teacher may be the student's own weights."""

    def start(self, *requests: GroupRequest) -> None:
        """Begin to score these groups."""
        if running := [request.group_id for request in requests if request.group_id in self._tasks]:
            raise ValueError(f"groups {running} are running already")
        for request in requests:
            task = asyncio.create_task(self._group(request), name=request.group_id)
            self._tasks[request.group_id] = task
            task.add_done_callback(self._ended)

    async def next(self, timeout_s: float | None) -> GroupResult:
        """The next group that is scored. Raises what ended the run, or a fault of the program; `DeadlineError` after
        `timeout_s` (None: each rollout's own deadline bounds the wait, while groups are running)."""
        if timeout_s is None:
            return await self._next()
        async with deadline(timeout_s, lambda: self._late(f"no group was scored within {timeout_s:g} s", "offline")):
            return await self._next()

    async def drop(self, group_ids: Iterable[str]) -> tuple[str, ...]:
        """Give these groups up; the names of those that were still here."""
        tasks = {name: self._tasks.pop(name) for name in set(group_ids) if name in self._tasks}
        await _cancelled(tasks.values())
        return tuple(tasks)

    async def close(self) -> None:
        """Give everything up."""
        await self.drop(self.running)

    async def _next(self) -> GroupResult:
        while (task := self._ready()) is None:
            self._news.clear()
            await self._news.wait()
        del self._tasks[task.get_name()]
        if task.cancelled():
            raise RuntimeError(f"{task.get_name()} was cancelled by something within it")
        return task.result()

    def _ended(self, task: asyncio.Task[GroupResult]) -> None:
        if not task.cancelled():
            task.exception()  # looked at: one that nobody takes any more is no warning
        self._news.set()

    def _ready(self) -> asyncio.Task[GroupResult] | None:
        """The group to give next: one that failed, or the one that was started first, once it is done."""
        ended = [task for task in self._tasks.values() if task.done()]
        failed = next((task for task in ended if task.cancelled() or task.exception() is not None), None)
        first = next(iter(self._tasks.values()), None)
        return failed or (first if first is not None and first.done() else None)

    async def _group(self, request: GroupRequest) -> GroupResult:
        unit = self._recorded.at(request.index)
        found = await asyncio.to_thread(self._recorded.read, unit)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._rollout(request, number, t)) for number, t in enumerate(found)]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return GroupResult(request.group_id, request.task.id, request.index, tuple(task.result() for task in tasks))

    async def _rollout(self, request: GroupRequest, number: int, recorded: Trajectory) -> Trajectory:
        """A recorded rollout with its scores; without them it is lost, with the cause."""
        name, began = request.trajectory_id(number), time.time()
        scores: tuple[TeacherScores, ...] = ()
        cause = ""
        scoring = SegmentScores(self._scorer, task=request.task, trajectory_id=name)
        try:
            # Who waits for a place is not at the teacher yet: a segment's own deadline has not begun.
            async with (
                deadline(self._limit_s, lambda: self._late("its scores did not come in time", name)),
                self._places,
            ):
                scores = await scoring.all(recorded.segments, test_output=None)
        except AgentRLError as error:
            if handling(error) is None or isinstance(error, ENDS_RUN):
                raise
            cause = f"{type(error).__name__}: {' '.join(error.what.split())}"
            self._tell(EventKind.NOTE, text=f"rollout {name} is lost: {cause}")
        finally:
            await scoring.close()
        origin = {"kind": "recorded", "run": str(self._recorded.folder), "trajectory": recorded.trajectory_id}
        counts = {key: value for key, value in recorded.info.items() if not key.endswith(_CLOCKS)}
        trajectory = replace(
            recorded,
            trajectory_id=name,
            group_id=request.group_id,
            outcome=Outcome(OutcomeKind.INFRASTRUCTURE, cause) if cause else recorded.outcome,
            reward=None if cause else recorded.reward,
            turns=tuple(TurnTiming(finish_reason=turn.finish_reason) for turn in recorded.turns),
            started_at=began,
            ended_at=time.time(),
            info={**counts, "attempts": 1.0},
            events=(*recorded.events, origin, *({"kind": "unscored", "cause": why} for why in scoring.unscored)),
            scores=scores,
        )
        self._is_done(trajectory)
        return trajectory

    def _is_done(self, trajectory: Trajectory) -> None:
        self._done += 1
        self._tell(
            EventKind.ROLLOUT_FINISHED,
            step=self._step,
            done=self._done,
            total=None,
            task=trajectory.task_id,
            outcome=trajectory.outcome.kind.value,
            reward=trajectory.reward,
        )

    def _tell(self, kind: EventKind, **data: object) -> None:
        self._emit(Event(kind=kind, time=time.time(), data=data))

    def _late(self, what: str, where: str) -> DeadlineError:
        return DeadlineError(what, where=where, remedy="raise rollout.group_timeout_s, or look why the teacher is slow")


async def _cancelled(tasks: Iterable[asyncio.Task[GroupResult]]) -> None:
    """Cancel and wait. Raises `DeadlineError` for one that does not end."""
    left = set(tasks)
    for task in left:
        task.cancel()
    if left:
        _, left = await asyncio.wait(left, timeout=_CLOSE_S)
    if left:
        names = ", ".join(sorted(task.get_name() for task in left)[:3])
        raise DeadlineError(
            f"{len(left)} groups that were given up did not end within {_CLOSE_S:g} s",
            where=names,
            remedy="look for what hangs in the run folder's logs/",
        )

"""Teachers' scores of what the agent sampled, beside generation.

A segment is handed over when it is sealed and is scored while its sandbox is collected and graded and other rollouts
go on. The rollout is done once the scores of all its segments are there; without them it is lost, never trained.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from agentrl.errors import (
    AgentRLError,
    DeadlineError,
    NoTeacherError,
    PolicyRequestError,
    RecordError,
    SegmentUnfitError,
    TeacherDeadError,
    TeacherError,
    TeacherRequestError,
)
from agentrl.rollout.batching import trainable
from agentrl.trajectory import Segment, TeacherScores
from agentrl.wire import SAME_MODEL, ScoreRequest, Task, Teacher

Candidates = Callable[[Segment, np.ndarray], Awaitable[np.ndarray]]
"""int32 [N, K]: the tokens to be scored at each of the N positions of a mask [T], by the student's own choice."""


@dataclass(slots=True)
class _Meter:
    """Since the last `take`: how much was scored, and for how long at least one segment was being scored."""

    began: float
    segments: int = 0
    tokens: int = 0
    failures: int = 0
    busy_s: float = 0.0
    _running: int = field(default=0)
    _since: float = field(default=0.0)

    def enter(self, now: float) -> None:
        if self._running == 0:
            self._since = now
        self._running += 1

    def leave(self, now: float) -> None:
        self._running -= 1
        if self._running == 0:
            self.busy_s += now - self._since

    def take(self, now: float) -> tuple[_Meter, float]:
        """What the interval held, and its seconds; a new one begins."""
        if self._running:
            self.busy_s += now - self._since
            self._since = now
        taken, seconds = replace(self), now - self.began
        self.segments, self.tokens, self.failures, self.busy_s, self.began = 0, 0, 0, 0.0, now
        return taken, seconds


def routed(task: Task, route: str, names: Collection[str]) -> str:
    """Which of the teachers called `names` serves a task, by its environment or a field of its data. Raises
    `NoTeacherError`."""
    value = str(task.environment if route == "environment" else task.data.get(route))
    if value not in names:
        raise NoTeacherError.of(task.id, route=route, value=value, names=names)
    return value


class Scorer:
    """Which teacher scores what, and how well that goes.

    `route`: `environment`, or the field of a task's data, whose value names the teacher; None: there is one.
    `format_mask` gives bool [T] of tokens that are a tool call's format and are left out. `candidates` gives the tokens
    to be scored where the student chooses them. `after_grading`: a teacher reads what the tests printed. `timeout_s` is
    one segment's, its teacher's retries and its wait for a place included.
    """

    def __init__(
        self,
        teachers: Mapping[str, Teacher],
        *,
        route: str | None = None,
        format_mask: Callable[[Segment], np.ndarray] | None = None,
        candidates: Candidates | None = None,
        after_grading: bool = False,
        timeout_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._teachers = dict(teachers)
        self._route = route
        self._format_mask = format_mask
        self._candidates = candidates
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._meter = _Meter(began=monotonic())
        self._hits = 0
        self.after_grading = after_grading

    def begin(
        self, segment: Segment, *, task: Task, trajectory_id: str, index: int, test_output: str | None = None
    ) -> asyncio.Task[TeacherScores]:
        """Begin to score a sealed segment. The task raises `TeacherError`, or `NoTeacherError`; whoever gives
        the rollout up cancels it."""
        work = self._score(segment, task, trajectory_id, index, test_output)
        return asyncio.create_task(work, name=f"score {trajectory_id}, segment {index}")

    def take(self) -> dict[str, float]:
        """Metrics since the last call."""
        taken, seconds = self._meter.take(self._monotonic())
        hits = sum(getattr(teacher, "cache_hits", 0) for teacher in self._teachers.values())
        kept, self._hits = min(hits - self._hits, taken.segments), hits
        metrics = {"teacher/failures": float(taken.failures), "teacher/cache_hits": float(kept)}
        if seconds > 0:
            metrics["teacher/busy_fraction"] = taken.busy_s / seconds
        if taken.busy_s > 0:  # what came from disk was not computed
            computed = 1 - kept / taken.segments if taken.segments else 0.0
            metrics["teacher/tokens_per_s"] = computed * taken.tokens / taken.busy_s
        return metrics

    def teacher_of(self, task: Task) -> Teacher:
        """The teacher of a task. Raises `NoTeacherError` where none serves it."""
        if self._route is None:
            return next(iter(self._teachers.values()))
        return self._teachers[routed(task, self._route, self._teachers)]

    def mask(self, segment: Segment) -> np.ndarray:
        """bool [T]: the tokens to be scored."""
        wanted = trainable(segment)
        return wanted if self._format_mask is None else wanted & ~self._format_mask(segment)

    async def _score(
        self, segment: Segment, task: Task, trajectory_id: str, index: int, test_output: str | None
    ) -> TeacherScores:
        teacher, mask = self.teacher_of(task), self.mask(segment)
        if not mask.any():
            return TeacherScores(teacher.name, np.full(len(segment), np.nan, np.float32))
        request = ScoreRequest(
            trajectory_id=trajectory_id, index=index, segment=segment, mask=mask, task=task, test_output=test_output
        )
        self._meter.enter(self._monotonic())
        try:
            scores = await self._asked(teacher, request)
            _check(scores, request, teacher.name)
        except (DeadlineError, PolicyRequestError) as error:
            self._meter.failures += 1
            raise TeacherRequestError(error.what, where=error.where, remedy=error.remedy) from error
        except AgentRLError:
            self._meter.failures += 1
            raise
        finally:
            self._meter.leave(self._monotonic())
        self._meter.segments += 1
        self._meter.tokens += len(segment)
        return scores

    async def repeats(
        self, segment: Segment, scores: TeacherScores, *, task: Task, trajectory_id: str, index: int
    ) -> bool:
        """Whether the teacher that gave `scores` of a segment gives the same still. Raises `TeacherDeadError`."""
        request = ScoreRequest(
            trajectory_id=trajectory_id, index=index, segment=segment, mask=self.mask(segment), task=task
        )
        try:
            now = await self.teacher_of(task).score(request, timeout_s=self._timeout_s)
        except TeacherDeadError:
            raise
        except (TeacherError, DeadlineError):
            return False
        if not np.array_equal(now.mask, scores.mask):
            return False
        return bool(np.abs(now.logprobs - scores.logprobs)[scores.mask].max(initial=0.0) <= SAME_MODEL)

    async def _asked(self, teacher: Teacher, request: ScoreRequest) -> TeacherScores:
        """The teacher's answer within one deadline, the student's choice of candidates included."""
        began = self._monotonic()
        if self._candidates is not None:
            chosen = await self._candidates(request.segment, request.mask)
            request = replace(request, candidates=chosen)
        return await teacher.score(request, timeout_s=max(0.0, self._timeout_s - (self._monotonic() - began)))


def _check(scores: TeacherScores, request: ScoreRequest, name: str) -> None:
    """Raise `TeacherRequestError` unless the scores fit the segment; a token that was asked for may lack a score only
    where a teacher reads other tokens (`TeacherScores.spans`)."""
    try:
        scores.check(request.segment)
    except RecordError as error:
        raise TeacherRequestError(error.what, where=f"teacher {name}, {request.where}") from error
    wanted, given = request.mask, scores.mask
    missing = int((wanted & ~given).sum()) if scores.spans is None else 0
    if missing or (given & ~wanted).any():
        raise TeacherRequestError(
            f"{missing} of {int(wanted.sum())} tokens came without their score, {int((given & ~wanted).sum())} scores "
            "were not asked for",
            where=f"teacher {name}, {request.where}",
            remedy="the teacher must score exactly the tokens of `ScoreRequest.mask`",
        )


class SegmentScores:
    """The scores of one rollout's segments on their way. Make one per rollout; `close` it whatever happens.

    `unscored`: why segments were left without scores, for what they are.
    """

    def __init__(self, scorer: Scorer, *, task: Task, trajectory_id: str) -> None:
        self._scorer, self._task, self._trajectory_id = scorer, task, trajectory_id
        self._tasks: dict[int, asyncio.Task[TeacherScores]] = {}
        self.unscored: list[str] = []

    def sealed(self, index: int, segment: Segment) -> None:
        """A segment is complete: scored now, unless the teacher is to read what the tests printed."""
        if not self._scorer.after_grading:
            self._begin(index, segment, None)

    def _begin(self, index: int, segment: Segment, test_output: str | None) -> None:
        self._tasks[index] = self._scorer.begin(
            segment, task=self._task, trajectory_id=self._trajectory_id, index=index, test_output=test_output
        )

    async def all(self, segments: tuple[Segment, ...], *, test_output: str | None) -> tuple[TeacherScores, ...]:
        """The scores of all segments, in order. Raises the first `TeacherError`."""
        self.unscored.clear()
        for index, segment in enumerate(segments):
            if index not in self._tasks or self._tasks[index].cancelled():  # by an attempt that stood still
                self._begin(index, segment, test_output)
        return tuple([await self._scored(index, segment) for index, segment in enumerate(segments)])

    async def _scored(self, index: int, segment: Segment) -> TeacherScores:
        try:
            return await self._tasks[index]
        except SegmentUnfitError as error:
            self.unscored.append(error.what)
            return TeacherScores(
                self._scorer.teacher_of(self._task).name, np.full(len(segment), np.nan, dtype=np.float32)
            )

    async def close(self) -> None:
        """Give up what is still on its way. An error that nobody waited for is the lost rollout's, not the run's."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

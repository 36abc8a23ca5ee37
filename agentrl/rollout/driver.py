"""One rollout: sandbox → prepare → (slot) episode → collect → grade in *another* sandbox → (scores) → Trajectory.

This is the one boundary that turns an error into a rollout's status, by `agentrl.errors.handling`: an
infrastructure failure is tried again in a fresh sandbox within the retry budget (a failure while grading
repeats the grading alone) and then recorded with its cause and without a reward; an error that is no
rollout's status is a fault of the program and passes through, as do those that no rollout of the run can
survive (`ENDS_RUN`).

Every phase has its own deadline, grading too: its time does not depend on how long the episode took. The
whole rollout, retries included, ends within `Limits.rollout_s`, waits for its turn (`agentrl.rollout.slots`) not
counted. A slot is held during the episode alone: setting up, which a retry does again, holds none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentrl.config import RunConfig
from agentrl.errors import (
    AgentRLError,
    DeadlineError,
    GradingTimeoutError,
    NoSandboxBackendError,
    NoTeacherError,
    PolicyDeadError,
    TeacherDeadError,
    TrainerError,
    handling,
)
from agentrl.rollout.deadline import Deadline, being_cancelled, deadline
from agentrl.rollout.episode import EpisodeResult, EpisodeRunner
from agentrl.rollout.groups import GroupRequest
from agentrl.rollout.scoring import Scorer, SegmentScores
from agentrl.rollout.slots import Floor, GiveWay, Place
from agentrl.rollout.status import RolloutPhase, RolloutStatus
from agentrl.trajectory import Outcome, OutcomeKind, Segment, TeacherScores, Trajectory
from agentrl.wire import Environment, Grade, Sandbox, SandboxPool, Task

# After one of these every other rollout would fail the same way: the run ends and can be resumed.
ENDS_RUN = (PolicyDeadError, NoSandboxBackendError, NoTeacherError, TeacherDeadError, TrainerError)

_PREPARE_S = 120.0
_COLLECT_S = 60.0
# What the pool and the episode get beyond the deadline they keep by themselves, before we stop trusting them.
_GRACE_S = 30.0

_TRUNCATED = {
    "tokens": OutcomeKind.TRUNCATED_TOKENS,
    "turns": OutcomeKind.TRUNCATED_TURNS,
    "time": OutcomeKind.TRUNCATED_TIME,
}

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines in seconds and the number of retries of one rollout."""

    lease_s: float
    episode_s: float
    grade_s: float
    rollout_s: float
    retries: int
    prepare_s: float = _PREPARE_S
    collect_s: float = _COLLECT_S

    @classmethod
    def from_config(cls, config: RunConfig) -> Limits:
        """The limits that a configuration asks for."""
        return cls(
            # Gradings hold sandboxes too: in a full pool a rollout waits for another one's episode to end.
            lease_s=config.sandbox.start_timeout_s + config.agent.episode_timeout_s,
            episode_s=config.agent.episode_timeout_s,
            grade_s=config.rollout.grade_timeout_s,
            rollout_s=config.rollout.group_timeout_s,
            retries=config.rollout.infrastructure_retries,
        )


class _Lost(Exception):
    """The rollout cannot be had; the text is the cause."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What an episode left."""

    result: EpisodeResult
    patch: str


@dataclass(slots=True)
class _Rollout:
    """One rollout on its way: what was asked for, and what there is so far, so that a failure records it."""

    request: GroupRequest
    member: int
    episode: EpisodeRunner
    status: RolloutStatus
    place: Place
    whole: Deadline
    started_at: float = 0.0
    scoring: SegmentScores | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    work: _Work | None = None
    scores: tuple[TeacherScores, ...] = ()

    @property
    def task(self) -> Task:
        return self.request.task


@dataclass(frozen=True, slots=True)
class RolloutDriver:
    """Runs rollouts; holds no state between them. Two clocks; `note` takes a line for whoever watches."""

    environment: Environment
    pool: SandboxPool
    limits: Limits
    monotonic: Callable[[], float]
    wall: Callable[[], float]
    note: Callable[[str], None]

    async def run(
        self,
        request: GroupRequest,
        member: int,
        *,
        episode: EpisodeRunner,
        status: RolloutStatus,
        place: Place | None = None,
        scorer: Scorer | None = None,
    ) -> Trajectory:
        """The rollout's record, whatever a machine does. Raises faults of the program and `ENDS_RUN` only.

        `place` is where it stands among others; None: it is alone and waits for nobody. `scorer`: teachers whose
        scores the record is to have.
        """
        place = place or Place(Floor(concurrency=1, ready_ahead=0, monotonic=self.monotonic), admitted=True)
        grade: Grade | None = None
        cause = ""
        try:
            async with deadline(self.limits.rollout_s, lambda: self._late(status, "the whole rollout")) as whole:
                rollout = _Rollout(request, member, episode, status, place, whole)
                grade = await self._work_and_grade(rollout, scorer)
        except (_Lost, DeadlineError) as error:
            cause = str(error) if isinstance(error, _Lost) else describe(error, status)
            self.note(f"rollout {status.trajectory_id} is lost: {cause}")
        self._enter(status, RolloutPhase.DONE)
        return self._record(rollout, grade, cause)

    async def _work_and_grade(self, rollout: _Rollout, scorer: Scorer | None) -> Grade | None:
        """Episode, then grade (None where an episode without `submit` is not graded), then whatever of the teacher's
        scores is not there yet."""
        if scorer is None:
            return await self._graded(rollout)
        scoring = SegmentScores(scorer, task=rollout.task, trajectory_id=rollout.status.trajectory_id)
        rollout.scoring = scoring
        try:
            grade = await self._graded(rollout)
            self._enter(rollout.status, RolloutPhase.SCORE)
            rollout.scores = await self._retried(rollout, lambda: self._scores(rollout, scoring, grade))
            for cause in scoring.unscored:
                rollout.events.append({"kind": "unscored", "cause": cause})
                self.note(f"rollout {rollout.status.trajectory_id} has an unscored segment: {cause}")
            return grade
        finally:
            await scoring.close()

    async def _graded(self, rollout: _Rollout) -> Grade | None:
        work = rollout.work = await self._retried(rollout, lambda: self._episode(rollout))
        if not self._to_grade(work.result):
            return None
        return await self._retried(rollout, lambda: self._grade(rollout, work.patch))

    async def _scores(
        self, rollout: _Rollout, scoring: SegmentScores, grade: Grade | None
    ) -> tuple[TeacherScores, ...]:
        segments = () if rollout.work is None else tuple(rollout.work.result.segments)
        return await scoring.all(segments, test_output=None if grade is None else grade.output)

    def _to_grade(self, result: EpisodeResult) -> bool:
        return result.submitted or self.environment.grade_unsubmitted

    async def _episode(self, rollout: _Rollout) -> _Work:
        task, status, limits = rollout.task, rollout.status, self.limits
        async with self._room(rollout), self._lease(rollout, RolloutPhase.LEASE) as sandbox:
            self._enter(status, RolloutPhase.PREPARE, sandbox)
            async with deadline(limits.prepare_s, lambda: self._late(status, "preparing the work tree")):
                await self.environment.prepare(task, sandbox)
            async with self._slot(rollout, sandbox):
                result = await self._act(rollout, sandbox)
            if not self._to_grade(result):
                return _Work(result, "")
            self._enter(status, RolloutPhase.COLLECT, sandbox)
            async with deadline(limits.collect_s, lambda: self._late(status, "collecting the patch")):
                return _Work(result, await self.environment.collect(task, sandbox))

    async def _act(self, rollout: _Rollout, sandbox: Sandbox) -> EpisodeResult:
        status, scoring = rollout.status, rollout.scoring
        if scoring is not None:
            await scoring.close()  # of an attempt that failed
        rollout.started_at = rollout.started_at or self.wall()
        self._enter(status, RolloutPhase.EPISODE, sandbox)
        async with deadline(self.limits.episode_s + _GRACE_S, lambda: self._late(status, "the episode")):
            return await rollout.episode(
                rollout.task,
                sandbox,
                trajectory_id=status.trajectory_id,
                on_turn=lambda turn, doing: status.enter_turn(turn, doing, now=self.monotonic()),
                on_sealed=_unscored if scoring is None else scoring.sealed,
            )

    async def _grade(self, rollout: _Rollout, patch: str) -> Grade:
        def late() -> AgentRLError:
            return GradingTimeoutError(
                f"grading did not end within {self.limits.grade_s:g} s",
                where=str(rollout.status),
                remedy="raise rollout.grade_timeout_s, or leave the task out",
            )

        async with self._lease(rollout, RolloutPhase.GRADE_LEASE) as sandbox:
            self._enter(rollout.status, RolloutPhase.GRADE, sandbox)
            async with deadline(self.limits.grade_s, late):
                return await self.environment.grade(rollout.task, sandbox, patch)

    @asynccontextmanager
    async def _room(self, rollout: _Rollout) -> AsyncIterator[None]:
        """Room for a sandbox, waited for in line."""
        self._enter(rollout.status, RolloutPhase.QUEUED)
        with rollout.whole.paused():
            await rollout.place.enter_room()
        try:
            yield
        finally:
            rollout.place.leave_room()

    @asynccontextmanager
    async def _slot(self, rollout: _Rollout, sandbox: Sandbox) -> AsyncIterator[None]:
        """A slot among the active rollouts, waited for in line and, before that, until the group is admitted."""
        self._enter(rollout.status, RolloutPhase.READY, sandbox)
        with rollout.whole.paused():
            await rollout.place.become_active()
        try:
            yield
        finally:
            rollout.place.end_active()

    @asynccontextmanager
    async def _lease(self, rollout: _Rollout, phase: RolloutPhase) -> AsyncIterator[Sandbox]:
        """A fresh sandbox. The episode's is given back before grading asks: none waits holding one."""
        status, limits, admitted = rollout.status, self.limits, rollout.place.admitted
        self._enter(status, phase)
        image = self.environment.image(rollout.task)
        lease = self.pool.lease(
            image,
            timeout_s=limits.lease_s,
            label=status.trajectory_id,
            grading=phase is RolloutPhase.GRADE_LEASE,
        )
        async with AsyncExitStack() as stack:
            try:
                async with deadline(limits.lease_s + _GRACE_S, lambda: self._late(status, "a sandbox's start")):
                    with rollout.place.leasing():
                        sandbox = await stack.enter_async_context(lease)
            except DeadlineError as error:
                if admitted:
                    raise
                raise GiveWay from error  # others like it hold all sandboxes until they are admitted: no failure
            yield sandbox

    async def _retried(self, rollout: _Rollout, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """`attempt`, again while table and budget allow. Raises `_Lost`, `ENDS_RUN`, the program's faults."""
        status = rollout.status
        while True:
            try:
                async with rollout.place.block.entered():
                    return await attempt()
            except GiveWay:
                continue
            except Exception as error:
                if being_cancelled():
                    # A sandbox that fails while it is torn down must not swallow the cancellation.
                    raise asyncio.CancelledError from error
                row = handling(error)
                if row is None or isinstance(error, ENDS_RUN):
                    raise
                cause = describe(error, status)
                rollout.events.append({"kind": "failure", "attempt": status.attempt, "cause": cause})
                if not row.retry or status.attempt > self.limits.retries:
                    raise _Lost(cause) from error
            self.note(f"rollout {status.trajectory_id} is tried again in a fresh sandbox: {cause}")
            status.attempt += 1

    def _enter(self, status: RolloutStatus, phase: RolloutPhase, sandbox: Sandbox | None = None) -> None:
        status.enter(phase, now=self.monotonic(), sandbox_id=sandbox.id if sandbox else "")

    def _late(self, status: RolloutStatus, what: str) -> DeadlineError:
        return DeadlineError(
            f"{what} ran past its deadline",
            where=str(status),
            remedy="raise the phase's time limit, or look for what hangs in the run folder's logs/",
        )

    def _record(self, rollout: _Rollout, grade: Grade | None, cause: str) -> Trajectory:
        """The trajectory, from its first episode's begin. Of a lost rollout, what was sampled is kept where the
        episode itself had ended."""
        task, request, work = rollout.task, rollout.request, rollout.work
        resolved = grade is not None and grade.resolved
        ended_at = self.wall()
        if cause or work is None:
            outcome, reward = Outcome(OutcomeKind.INFRASTRUCTURE, cause), None
        else:
            kind = OutcomeKind.SOLVED if resolved else OutcomeKind.FAILED
            outcome = Outcome(_TRUNCATED.get(work.result.stop, kind))
            reward = 0.0 if grade is None else float(grade.reward)
        return Trajectory(
            trajectory_id=request.trajectory_id(rollout.member),
            group_id=request.group_id,
            task_id=task.id,
            environment=task.environment,
            split=task.split,
            segments=tuple(work.result.segments) if work else (),
            outcome=outcome,
            reward=reward,
            temperature=rollout.episode.temperature,
            image=self.environment.image(task),
            turns=tuple(work.result.turns) if work else (),
            started_at=rollout.started_at or ended_at,
            ended_at=ended_at,
            info=_info(rollout, graded=grade is not None, resolved=resolved),
            events=tuple(rollout.events),
            patch=work.patch if work else "",
            scores=rollout.scores,
        )


def _info(rollout: _Rollout, *, graded: bool, resolved: bool) -> dict[str, float]:
    """The episode's own counts, and the driver's."""
    status, work = rollout.status, rollout.work
    own = {} if work is None else dict(work.result.info)
    return {
        **own,
        "graded": float(graded),
        "resolved": float(resolved),
        "attempts": float(status.attempt),
        "wait_s": status.spent(RolloutPhase.QUEUED, RolloutPhase.READY),
        "setup_s": status.spent(RolloutPhase.LEASE, RolloutPhase.PREPARE),
        "episode_s": status.spent(RolloutPhase.EPISODE),
        "score_s": status.spent(RolloutPhase.COLLECT, RolloutPhase.GRADE_LEASE, RolloutPhase.GRADE),
        "teacher_wait_s": status.spent(RolloutPhase.SCORE),
    }


def _unscored(index: int, segment: Segment) -> None:
    """No teacher: a sealed segment is nobody's news."""


def describe(error: BaseException, status: RolloutStatus) -> str:
    """One line: which error, what happened, and where the rollout was."""
    what = error.what if isinstance(error, AgentRLError) else str(error)
    return f"{type(error).__name__}: {' '.join(what.split())} ({status})"

"""Recorded rollouts through teachers: scored as they are, lost with their cause, given up without a trace."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_runs import TINY, SayingTeacher, recorded_rollout, recorded_segment, write_recorded_run
from toy_parts import ToyEnvironment

from agentrl.config import RunConfig
from agentrl.errors import DeadlineError, TeacherDeadError, TeacherRequestError
from agentrl.rollout.groups import GroupRequest
from agentrl.rollout.scoring import Scorer
from agentrl.run.recorded import RecordedCursor, RecordedRun
from agentrl.run.recorded_stream import RecordedStream
from agentrl.trajectory import OutcomeKind
from agentrl.wire import Event, EventKind, ScoreRequest

Work = Callable[[RecordedStream, list[GroupRequest]], Awaitable[Any]]


class Offline:
    """A recorded run of four groups of two rollouts, the second of each with two segments."""

    def __init__(self, folder: Path, teacher: SayingTeacher, limit_s: float = 5.0) -> None:
        two = [recorded_segment(), recorded_segment(agent=4, version=8)]
        steps = [
            [r for g in range(4) for r in (recorded_rollout(g, 0, reward=0.0), recorded_rollout(g, 1, segments=two))]
        ]
        config = RunConfig.model_validate({"run_dir": str(folder / "mine")})
        self.run = RecordedRun.open(write_recorded_run(folder / "run", steps), model=TINY, config=config)
        self.teacher, self.limit_s = teacher, limit_s
        self.events: list[Event] = []

    def play(self, work: Work) -> Any:
        async def whole() -> Any:
            scorer = Scorer({"teacher": self.teacher}, timeout_s=5)
            requests = RecordedCursor(self.run, ToyEnvironment()).take(4, group_size=8)
            async with RecordedStream(
                self.run, scorer, emit=self.events.append, step=1, limit_s=self.limit_s, concurrency=8
            ) as stream:
                return await work(stream, requests)

        return asyncio.run(whole())


async def until(there: Callable[[], bool]) -> None:
    """Wait for it, 5 seconds at most."""
    for _ in range(5000):
        if there():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come")


def test_k38_every_segment_is_scored_and_all_else_is_as_recorded(tmp_path: Path) -> None:
    offline = Offline(tmp_path, SayingTeacher())

    async def work(stream: RecordedStream, requests: list[GroupRequest]) -> Any:
        stream.prepare(requests)
        assert stream.running == ()
        stream.start(*requests[:2])
        stream.start(requests[2])
        assert sorted(stream.running) == ["recorded-000000", "recorded-000001", "recorded-000002"]
        found = [await stream.next(timeout_s=None) for _ in range(3)]
        assert stream.running == ()
        return found

    groups = offline.play(work)
    assert len(offline.teacher.asked) == 9, "three segments a group"
    for group in groups:
        unit = offline.run.at(group.index)
        assert group.group_id == f"recorded-{group.index:06d}"
        assert group.task_id == unit.task_id
        assert [t.trajectory_id for t in group.trajectories] == [f"{group.group_id}-0", f"{group.group_id}-1"]
        assert group.rewards == (0.0, 1.0)
        for name, before, now in zip(unit.members, offline.run.read(unit), group.trajectories, strict=True):
            assert all(a.same_as(b) for a, b in zip(before.segments, now.segments, strict=True))
            assert [np.array_equal(s.mask, g.agent_mask) for s, g in zip(now.scores, now.segments, strict=True)]
            assert now.events[-1] == {"kind": "recorded", "run": str(offline.run.folder), "trajectory": name}
            assert (now.started_at > before.ended_at, now.turns[0].tool_s, now.turns[0].decode_s) == (True, 0, 0)
            assert {"submitted", "attempts"} == set(now.info), "recorded clocks are left out"
            assert now.info["attempts"] == 1
        assert group.versions is not None
        assert (group.versions.oldest, group.versions.newest) == (7, 8)


def test_events_count_the_step(tmp_path: Path) -> None:
    offline = Offline(tmp_path, SayingTeacher())

    async def work(stream: RecordedStream, requests: list[GroupRequest]) -> None:
        stream.start(requests[0])
        await stream.next(timeout_s=5)
        stream.step = 2
        stream.start(requests[1])
        await stream.next(timeout_s=5)

    offline.play(work)
    assert [(e.kind, e.data["step"], e.data["done"]) for e in offline.events] == [
        (EventKind.ROLLOUT_FINISHED, step, done) for step in (1, 2) for done in (1, 2)
    ]


def test_k36_a_rollout_without_its_scores_is_lost_with_the_cause(tmp_path: Path) -> None:
    """The other segment of the same rollout was scored, and counts no more than the missing one."""

    def refuse(request: ScoreRequest) -> None:
        if request.trajectory_id == "recorded-000001-1" and request.index == 1:
            raise TeacherRequestError("position 3 is NaN")

    offline = Offline(tmp_path, SayingTeacher(on_score=refuse))

    async def work(stream: RecordedStream, requests: list[GroupRequest]) -> Any:
        stream.start(requests[1])
        return await stream.next(timeout_s=5)

    good, lost = offline.play(work).trajectories
    assert good.outcome.kind is OutcomeKind.FAILED
    assert len(good.scores) == 1
    assert (lost.outcome.kind, lost.reward, lost.scores) == (OutcomeKind.INFRASTRUCTURE, None, ())
    assert lost.outcome.cause == "TeacherRequestError: position 3 is NaN"
    notes = [event.data["text"] for event in offline.events if event.kind is EventKind.NOTE]
    assert notes == ["rollout recorded-000001-1 is lost: TeacherRequestError: position 3 is NaN"]


def done(stream: RecordedStream) -> int:
    return sum(task.done() for task in stream._tasks.values())


def test_groups_come_in_the_order_of_the_data_whichever_is_scored_first(tmp_path: Path) -> None:
    def wait(request: ScoreRequest) -> Awaitable[None] | None:
        return asyncio.sleep(0.1) if request.trajectory_id.startswith("recorded-000000") else None

    offline = Offline(tmp_path, SayingTeacher(on_score=wait))

    async def work(stream: RecordedStream, requests: list[GroupRequest]) -> list[int]:
        stream.start(*requests[:3])
        await until(lambda: done(stream) == 2)
        return [(await stream.next(timeout_s=5)).index for _ in range(3)]

    assert offline.play(work) == [0, 1, 2]


def test_a_dead_teacher_ends_the_run_before_what_was_finished(tmp_path: Path) -> None:
    def die(request: ScoreRequest) -> None:
        if request.trajectory_id.startswith("recorded-000002"):
            raise TeacherDeadError("the teacher is gone")

    offline = Offline(tmp_path, SayingTeacher(on_score=die))

    async def work(stream: RecordedStream, requests: list[GroupRequest]) -> None:
        stream.start(*requests)
        await until(lambda: done(stream) == 4)
        with pytest.raises(TeacherDeadError):
            await stream.next(timeout_s=None)

    offline.play(work)


def test_a_slow_teacher_loses_the_rollout_not_the_run(tmp_path: Path) -> None:
    def wait(request: ScoreRequest) -> Awaitable[None] | None:
        return asyncio.sleep(60) if request.trajectory_id == "recorded-000000-0" else None

    offline = Offline(tmp_path, SayingTeacher(on_score=wait), limit_s=0.2)

    async def work(stream: RecordedStream, requests: list[GroupRequest]) -> Any:
        stream.start(requests[0])
        return await stream.next(timeout_s=None)

    slow, quick = offline.play(work).trajectories
    assert "did not come in time" in slow.outcome.cause
    assert quick.scores
    assert offline.teacher.cancelled == 1


def test_dropped_groups_are_gone_running_or_finished(tmp_path: Path) -> None:
    def wait(request: ScoreRequest) -> Awaitable[None] | None:
        return asyncio.sleep(60) if request.trajectory_id.startswith("recorded-000000") else None

    offline = Offline(tmp_path, SayingTeacher(on_score=wait))

    async def work(stream: RecordedStream, requests: list[GroupRequest]) -> Any:
        stream.start(*requests[:3])
        await until(lambda: done(stream) == 2 and len(offline.teacher.asked) == 9)
        dropped = await stream.drop(["recorded-000000", "recorded-000001", "recorded-000009"])
        assert set(dropped) == {"recorded-000000", "recorded-000001"}
        assert stream.running == ("recorded-000002",)
        left = await stream.next(timeout_s=5)
        stream.start(requests[0])  # again, and left running at the end of the block
        return left

    assert offline.play(work).group_id == "recorded-000002"
    assert offline.teacher.cancelled >= 3


def test_next_waits_for_groups_that_start_later(tmp_path: Path) -> None:
    offline = Offline(tmp_path, SayingTeacher())

    async def work(stream: RecordedStream, requests: list[GroupRequest]) -> Any:
        with pytest.raises(DeadlineError):
            await stream.next(timeout_s=0.01)
        waiting = asyncio.create_task(stream.next(timeout_s=5))
        await asyncio.sleep(0.01)
        stream.start(requests[3])
        with pytest.raises(ValueError, match="running already"):
            stream.start(requests[3])
        return await waiting

    assert offline.play(work).index == 3


def test_a_fault_that_nobody_takes_makes_no_noise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def die(request: ScoreRequest) -> None:
        raise TeacherDeadError("the teacher is gone")

    offline = Offline(tmp_path, SayingTeacher(on_score=die))

    async def work(stream: RecordedStream, requests: list[GroupRequest]) -> None:
        stream.start(*requests)
        await until(lambda: done(stream) == 4)

    offline.play(work)
    gc.collect()
    assert caplog.records == []

"""Which teacher scores which tokens of what, and that nothing of a teacher's answer is taken on trust."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from agentrl.errors import (
    DeadlineError,
    NoTeacherError,
    PolicyRequestError,
    SegmentUnfitError,
    TeacherDeadError,
    TeacherRequestError,
)
from agentrl.rollout.scoring import Scorer, SegmentScores
from agentrl.trajectory import Split, TeacherScores
from agentrl.wire import ScoreRequest, Task


class Teacher:
    """Says −1 of every token asked for."""

    def __init__(self, name: str = "t", *, answer: Any = None, error: Exception | None = None) -> None:
        self.name, self.answer, self.error = name, answer, error
        self.requests: list[ScoreRequest] = []
        self.cache_hits = 0

    async def probe(self, token_ids: Any, *, timeout_s: float) -> list[str]:
        return []

    async def score(self, request: ScoreRequest, *, timeout_s: float) -> TeacherScores:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        if self.answer is not None:
            return self.answer(request)
        return TeacherScores(self.name, np.where(request.mask, -1.0, np.nan).astype(np.float32))


def task(**data: Any) -> Task:
    return Task(id="task-1", environment="toy", split=Split.TRAIN, data=data)


def score(scorer: Scorer, segment: Any, *, of: Task | None = None) -> TeacherScores:
    async def body() -> TeacherScores:
        return await scorer.begin(segment, task=of or task(), trajectory_id="g0-0", index=0)

    return asyncio.run(body())


def test_the_sampled_tokens_are_scored_and_no_others(toys: Any) -> None:
    segment, teacher = toys.segment(), Teacher()
    scores = score(Scorer({"t": teacher}, timeout_s=1), segment)
    assert scores.mask.tolist() == segment.agent_mask.tolist()
    assert teacher.requests[0].mask.tolist() == segment.agent_mask.tolist()


def test_format_tokens_are_left_out_and_a_segment_of_nothing_else_is_not_sent(toys: Any) -> None:
    segment, teacher = toys.segment(), Teacher()
    first = np.flatnonzero(segment.agent_mask)[0]

    def only_first(s: Any) -> np.ndarray:
        return np.arange(len(s)) == first

    scores = score(Scorer({"t": teacher}, format_mask=only_first, timeout_s=1), segment)
    expected = segment.agent_mask
    expected[first] = False
    assert scores.mask.tolist() == expected.tolist()
    everything = Scorer({"t": teacher}, format_mask=lambda s: np.ones(len(s), np.bool_), timeout_s=1)
    assert not score(everything, segment).mask.any()
    assert len(teacher.requests) == 1


def test_the_student_chooses_candidates_where_it_is_asked_to(toys: Any) -> None:
    segment, teacher = toys.segment(), Teacher()
    chosen = np.arange(2 * int(segment.agent_mask.sum()), dtype=np.int32).reshape(-1, 2)

    async def candidates(s: Any, mask: np.ndarray) -> np.ndarray:
        assert mask.tolist() == s.agent_mask.tolist()
        return chosen

    score(Scorer({"t": teacher}, candidates=candidates, timeout_s=1), segment)
    assert teacher.requests[0].candidates is chosen


def test_several_teachers_are_chosen_by_a_field_or_by_the_environment(toys: Any) -> None:
    one, two = Teacher("functions"), Teacher("settings")
    scorer = Scorer({"functions": one, "settings": two}, route="family", timeout_s=1)
    assert score(scorer, toys.segment(), of=task(family="settings")).teacher == "settings"
    assert (len(one.requests), len(two.requests)) == (0, 1)
    with pytest.raises(NoTeacherError, match="no teacher is named 'prose', which task task-1 has as family"):
        score(scorer, toys.segment(), of=task(family="prose"))
    numbered = Scorer({"7": one, "8": two}, route="kind", timeout_s=1)
    assert score(numbered, toys.segment(), of=task(kind=8)).teacher == "settings"
    by_environment = Scorer({"toy": one, "other": two}, route="environment", timeout_s=1)
    assert score(by_environment, toys.segment()).teacher == "functions"


def test_a_student_that_cannot_choose_is_the_teachers_failure(toys: Any) -> None:
    """The policy server refuses, or is slow: the segment has no scores, and no sandbox is at fault."""

    async def refuse(s: Any, mask: np.ndarray) -> np.ndarray:
        raise PolicyRequestError("too many candidates", where="the student")

    scorer = Scorer({"t": Teacher()}, candidates=refuse, timeout_s=1)
    with pytest.raises(TeacherRequestError, match="too many candidates"):
        score(scorer, toys.segment())
    assert scorer.take()["teacher/failures"] == 1


def test_a_teacher_that_is_too_slow_fails_the_segment_and_no_sandbox_is_at_fault(toys: Any) -> None:
    """A deadline of its own: the rollout is not played again for it."""
    scorer = Scorer({"t": Teacher(error=DeadlineError("no answer within 1 s", where="t"))}, timeout_s=1)
    with pytest.raises(TeacherRequestError, match="no answer within 1 s"):
        score(scorer, toys.segment())
    assert scorer.take()["teacher/failures"] == 1


@pytest.mark.parametrize(
    ("by", "error", "same"),
    [
        (0.0, None, True),
        (-0.2, None, True),
        (-0.4, None, False),
        (np.nan, None, False),
        (0.0, TeacherRequestError("no"), False),
        (0.0, DeadlineError("late"), False),
    ],
)
def test_whether_a_teacher_is_still_who_it_was(toys: Any, by: float, error: Exception | None, same: bool) -> None:
    """0.3 nats are what another batch or device may make of it; one token that differs by more is enough."""
    segment = toys.segment()
    first = int(np.flatnonzero(segment.agent_mask)[0])
    before = TeacherScores("t", np.where(segment.agent_mask, -1.0, np.nan).astype(np.float32))

    def now(request: ScoreRequest) -> TeacherScores:
        logprobs = before.logprobs.copy()
        logprobs[first] += by
        return TeacherScores("t", logprobs)

    def repeats(teacher: Teacher) -> bool:
        scorer = Scorer({"t": teacher}, timeout_s=1)
        return asyncio.run(scorer.repeats(segment, before, task=task(), trajectory_id="g0-0", index=0))

    assert repeats(Teacher(answer=now, error=error)) is same
    with pytest.raises(TeacherDeadError):
        repeats(Teacher(error=TeacherDeadError("gone")))


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda lp: np.where(np.arange(len(lp)) == np.flatnonzero(np.isfinite(lp))[0], np.nan, lp), "1 of"),
        (lambda lp: lp[1:], "another length"),
        (lambda lp: np.where(np.isfinite(lp), np.inf, lp), "infinite"),
        (lambda lp: np.zeros_like(lp), "did not sample"),
    ],
)
def test_k36_an_answer_that_does_not_fit_is_an_error(toys: Any, spoil: Any, what: str) -> None:
    def answer(request: ScoreRequest) -> TeacherScores:
        return TeacherScores("t", spoil(np.where(request.mask, -1.0, np.nan)).astype(np.float32))

    with pytest.raises(TeacherRequestError, match=what) as caught:
        score(Scorer({"t": Teacher(answer=answer)}, timeout_s=1), toys.segment())
    assert "trajectory g0-0, segment 0" in caught.value.where


def test_a_teacher_of_other_tokens_may_leave_some_out(toys: Any) -> None:
    def answer(request: ScoreRequest) -> TeacherScores:
        kept = np.flatnonzero(request.mask)[:1]
        logprobs = np.full(len(request.mask), np.nan, np.float32)
        spans = np.full(len(request.mask), -1, np.int32)
        logprobs[kept], spans[kept] = -2.0, 0
        return TeacherScores("t", logprobs, spans=spans)

    assert score(Scorer({"t": Teacher(answer=answer)}, timeout_s=1), toys.segment()).mask.sum() == 1


def test_figures_are_of_the_interval(toys: Any) -> None:
    now = 0.0
    teacher = Teacher()
    scorer = Scorer({"t": teacher}, timeout_s=1, monotonic=lambda: now)
    segment = toys.segment()

    async def body() -> None:
        nonlocal now
        tasks = [scorer.begin(segment, task=task(), trajectory_id="g0-0", index=i) for i in range(2)]
        await asyncio.sleep(0)
        now = 2.0
        await asyncio.gather(*tasks)
        now = 8.0

    asyncio.run(body())
    teacher.cache_hits = 1  # one of the two: what it holds was not computed
    assert scorer.take() == {
        "teacher/failures": 0.0,
        "teacher/cache_hits": 1.0,
        "teacher/busy_fraction": 0.25,
        "teacher/tokens_per_s": len(segment) / 2,
    }
    now = 9.0
    assert scorer.take() == {"teacher/failures": 0.0, "teacher/cache_hits": 0.0, "teacher/busy_fraction": 0.0}


def test_scores_come_in_order_and_begin_when_a_segment_is_sealed(toys: Any) -> None:
    teacher = Teacher()
    segments = (toys.segment(), toys.segment())

    async def body() -> list[int]:
        scoring = SegmentScores(Scorer({"t": teacher}, timeout_s=1), task=task(), trajectory_id="g0-0")
        scoring.sealed(0, segments[0])
        await asyncio.sleep(0.01)
        before = [request.index for request in teacher.requests]
        await scoring.all(segments, test_output=None)
        return before

    assert asyncio.run(body()) == [0]
    assert [request.index for request in teacher.requests] == [0, 1]


def test_a_segment_that_does_not_fit_is_left_unscored_and_its_rollout_stays(toys: Any) -> None:
    segment = toys.segment()

    async def body() -> tuple[Any, list[str]]:
        scorer = Scorer({"t": Teacher(error=SegmentUnfitError("700 tokens are too many"))}, timeout_s=1)
        scoring = SegmentScores(scorer, task=task(), trajectory_id="g0-0")
        return await scoring.all((segment,), test_output=None), scoring.unscored

    (scores,), causes = asyncio.run(body())
    assert not scores.mask.any()
    assert len(scores.logprobs) == len(segment)
    assert causes == ["700 tokens are too many"]


def test_a_teacher_that_reads_test_output_is_asked_after_grading(toys: Any) -> None:
    teacher, segment = Teacher(), toys.segment()

    async def body() -> int:
        scorer = Scorer({"t": teacher}, timeout_s=1, after_grading=True)
        scoring = SegmentScores(scorer, task=task(), trajectory_id="g0-0")
        scoring.sealed(0, segment)
        await asyncio.sleep(0.01)
        before = len(teacher.requests)
        await scoring.all((segment,), test_output="1 failed")
        return before

    assert asyncio.run(body()) == 0
    assert [request.test_output for request in teacher.requests] == ["1 failed"]


def test_giving_up_ends_what_is_on_its_way_and_swallows_its_errors(toys: Any) -> None:
    async def body() -> None:
        scorer = Scorer({"t": Teacher(error=TeacherDeadError("gone"))}, timeout_s=1)
        scoring = SegmentScores(scorer, task=task(), trajectory_id="g0-0")
        scoring.sealed(0, toys.segment())
        await asyncio.sleep(0.01)
        await scoring.close()
        assert scorer.take()["teacher/failures"] == 1

    asyncio.run(body())

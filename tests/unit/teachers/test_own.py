"""The student as its own teacher: the prompt tells more, the tokens stay, and the scores come back to their places."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import byte_vocabularies
import numpy as np
import pytest
from teacher_toys import TINY, teacher_spec
from toy_parts import ToyEnvironment

from agentrl.chat import ChatFormat
from agentrl.errors import PolicyRequestError, TeacherRefusedError, TeacherRequestError
from agentrl.trajectory import Purpose, Segment, Span, SpanKind, Split, TeacherScores
from agentrl.wire import ChatMessage, ScoreRequest, Task, TeacherSpec, TokenScores
from agentrl_teachers.own import SelfTeacher, open_self, rewrite

CHAT = ChatFormat.load(TINY)
TASK = Task(id="t", environment="toy", split=Split.TRAIN, data={})
PROMPT = [ChatMessage(role="system", content="You fix bugs."), ChatMessage(role="user", content="total() is wrong.")]
SAID = CHAT.say("I look.")


class Environment(ToyEnvironment):
    def prompt(self, task: Task) -> list[ChatMessage]:
        return PROMPT

    def reference_patch(self, task: Task) -> str:
        return "-    return 1\n+    return 2\n"


class Hinting(Environment):
    def hint(self, task: Task) -> str:
        return f"Solve {task.id} so."


class Student:
    """What scores by the student's weights; `fails` times it does not."""

    def __init__(self, fails: int = 0) -> None:
        self.asked: list[list[int]] = []
        self.fails = fails

    async def __call__(self, token_ids: Sequence[int], *, top_k: int, timeout_s: float) -> TokenScores:
        self.asked.append([int(token) for token in token_ids])
        if len(self.asked) <= self.fails:
            raise PolicyRequestError("500", where="server")
        return byte_vocabularies.ruled_scores(token_ids, top_k=top_k)


def segment(prompt: list[int], said: list[int], rest: list[int] | None = None) -> Segment:
    ids = [*prompt, *said, *(rest or [])]
    stop = len(prompt) + len(said)
    spans = [Span(SpanKind.PROMPT, 0, len(prompt), 0), Span(SpanKind.AGENT, len(prompt), stop, 0, Purpose.ACT)]
    spans += [Span(SpanKind.ENVIRONMENT, stop, len(ids), 0)] if rest else []
    agent = np.arange(len(ids)) < stop
    agent &= np.arange(len(ids)) >= len(prompt)
    return Segment(
        token_ids=np.array(ids, np.int32),
        spans=tuple(spans),
        logprobs=np.where(agent, -1.0, np.nan).astype(np.float32),
        versions=np.where(agent, 3, -1).astype(np.int32),
    )


def spec(student: Student, environment: Environment | None = None, **changed: object) -> TeacherSpec:
    made = {
        "environment": environment or Environment(),
        "score_student": student,
        "open_chat": lambda task, messages: CHAT.open(messages),
    }
    return teacher_spec(Path("/nowhere"), **{**made, "model": "self", "max_model_len": 1024, "top_k": 0, **changed})


def score(teacher: SelfTeacher, made: Segment, **changed: object) -> TeacherScores:
    asked = ScoreRequest(trajectory_id="r", index=0, segment=made, mask=made.agent_mask, task=TASK)
    scores = asyncio.run(teacher.score(replace(asked, **changed), timeout_s=10))
    scores.check(made)
    return scores


def told(more: str) -> list[int]:
    """The prompt with more at its end."""
    return CHAT.open([PROMPT[0], ChatMessage(role="user", content=f"total() is wrong.\n\n{more}")])


@pytest.mark.parametrize(
    ("environment", "settings", "more"),
    [
        (Environment(), {}, "The patch that solves it:\n-    return 1\n+    return 2"),
        (Hinting(), {}, "Solve t so."),
        (Hinting(), {"privileged": "tests"}, "What the tests printed after your work on it:\n1 failed"),
    ],
    ids=["patch", "hint", "tests"],
)
def test_the_same_tokens_are_scored_after_a_prompt_that_tells_more(
    environment: Environment, settings: dict[str, object], more: str
) -> None:
    student = Student()
    made = segment(CHAT.open(PROMPT), SAID, CHAT.observe(["2 passed"]))
    scores = score(SelfTeacher(spec(student, environment, **settings)), made, test_output="1 failed\n")
    rest = made.token_ids.tolist()[len(CHAT.open(PROMPT)) :]
    assert student.asked == [[*told(more), *rest]]
    ruled = byte_vocabularies.ruled_scores(student.asked[0])
    at = np.arange(len(told(more)), len(told(more)) + len(SAID)) - 1
    assert scores.logprobs[made.agent_mask].tolist() == ruled.logprobs[at].tolist()
    assert scores.top1 is not None
    assert scores.top1[made.agent_mask].tolist() == ruled.top1[at].tolist()
    assert not scores.mask[~made.agent_mask].any()


def test_a_later_segment_keeps_its_conversation() -> None:
    """K38: its prompt holds more than the task, all of which stays."""
    turn = ChatMessage(role="assistant", content="I looked.")
    prompt = CHAT.open([*PROMPT, turn, ChatMessage(role="user", content="Go on.")])
    made, student = segment(prompt, SAID), Student()
    scores = score(SelfTeacher(spec(student, Hinting())), made)
    with_hint = [*PROMPT[:1], ChatMessage(role="user", content="total() is wrong.\n\nSolve t so."), turn]
    assert student.asked == [[*CHAT.open([*with_hint, ChatMessage(role="user", content="Go on.")]), *SAID]]
    assert np.array_equal(scores.mask, made.agent_mask)


def test_candidates_and_their_places_stay() -> None:
    made = segment(CHAT.open(PROMPT), SAID)
    scores = score(SelfTeacher(spec(Student(), Hinting(), top_k=2)), made)
    assert scores.candidate_ids is not None
    assert scores.candidate_ids[:, 0].tolist() == SAID
    assert scores.candidate_ids[:, 1].tolist() == [-1] * len(SAID)


def test_a_segment_that_no_longer_fits_is_refused_with_how_much_too_long_it_is() -> None:
    """K37: the window is the student's own."""
    made, student = segment(CHAT.open(PROMPT), SAID), Student()
    length = len(told("Solve t so.")) + len(SAID)
    assert score(SelfTeacher(spec(student, Hinting(), max_model_len=length + 1)), made).mask.any()
    with pytest.raises(TeacherRefusedError, match=r"lower agent\.max_tokens by 1 or more"):
        score(SelfTeacher(spec(student, Hinting(), max_model_len=length)), made)
    assert len(student.asked) == 1


def test_a_prompt_that_is_not_the_tasks_is_refused() -> None:
    made = segment(CHAT.open([ChatMessage(role="user", content="another task")]), SAID)
    with pytest.raises(TeacherRefusedError, match="does not begin with its task's prompt"):
        score(SelfTeacher(spec(Student(), Hinting())), made)


@pytest.mark.parametrize("output", [None, "  \n"])
def test_nothing_to_tell_is_refused(output: str | None) -> None:
    made = segment(CHAT.open(PROMPT), SAID)
    with pytest.raises(TeacherRefusedError, match="nothing to tell"):
        score(SelfTeacher(spec(Student(), privileged="tests")), made, test_output=output)


def test_of_a_long_output_the_end_is_told() -> None:
    student = Student()
    made = segment(CHAT.open(PROMPT), SAID)
    score(SelfTeacher(spec(student, privileged="tests", max_model_len=9000)), made, test_output="x" * 9000 + "1 failed")
    text = CHAT.decode(student.asked[0])
    assert "1 failed<|im_end|>" in text
    assert text.count("x") < 2000


def test_what_the_server_refuses_is_asked_again() -> None:
    student = Student(fails=1)
    made = segment(CHAT.open(PROMPT), SAID)
    assert score(SelfTeacher(spec(student, Hinting(), retries=1)), made).mask.any()
    with pytest.raises(TeacherRequestError, match="500"):
        score(SelfTeacher(spec(Student(fails=1), Hinting(), retries=0)), made)


def test_no_score_is_kept(tmp_path: Path) -> None:
    """The weights change with every delivery, and their scores with them."""
    student = Student()
    teacher = SelfTeacher(spec(student, Hinting(), cache=tmp_path))
    made = segment(CHAT.open(PROMPT), SAID)
    score(teacher, made)
    score(teacher, made)
    assert len(student.asked) == 2
    assert list(tmp_path.iterdir()) == []


def test_rewriting_moves_every_stream() -> None:
    made = segment([1, 2, 3, 4], [5, 6], [7])
    rewritten = rewrite(made, [1, 2, 3, 4], [1, 2, 9, 9, 3, 4], where="here")
    assert rewritten.segment.token_ids.tolist() == [1, 2, 9, 9, 3, 4, 5, 6, 7]
    assert [(span.start, span.stop) for span in rewritten.segment.spans] == [(0, 6), (6, 8), (8, 9)]
    assert rewritten.segment.versions.tolist() == [-1] * 6 + [3, 3, -1]


def test_the_probe_says_what_is_told() -> None:
    async def run() -> list[str]:
        async with open_self(spec(Student(), Hinting())) as teacher:
            return await teacher.probe([*CHAT.open(PROMPT), *SAID], timeout_s=10)

    notes = asyncio.run(run())
    name = "train-task-0-0"  # the first task's, which is in its hint
    more = len(told(f"Solve {name} so.")) - len(CHAT.open(PROMPT))
    assert f"in {more} tokens for task {name}, and leaves segments of more than {1023 - more} tokens" in notes[-1]

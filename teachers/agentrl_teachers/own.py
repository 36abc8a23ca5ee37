"""The student as its own teacher: its present weights, told more than the student was.

    the segment   | system, task             | agent, environment, agent …
    what is scored| system, task, what helps | agent, environment, agent …      (the same tokens from there on)

What helps stands at the end of the task's own message: what the environment's `hint` says (`Privileged`), else the
reference patch, or what the tests printed once the work was graded. Everything after it is as it was sampled, so the
scores are those of the student's own tokens, by a student that knows how the task is solved.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from agentrl.chat import common_prefix_len
from agentrl.errors import (
    PolicyRequestError,
    SegmentUnfitError,
    TeacherRefusedError,
    TeacherRequestError,
    TeacherUnfitError,
)
from agentrl.trajectory import Segment, Split, TeacherScores
from agentrl.wire import ChatMessage, Privileged, ScoreRequest, Task, Teacher, TeacherSpec, TokenScores
from agentrl_teachers.folder_text import FolderSource, FolderText
from agentrl_teachers.token_teacher import TokenTeacher

_PATCH = "The patch that solves it:"
_TESTS = "What the tests printed after your work on it:"
_TEST_OUTPUT_CHARS = 2000
"""Of what the tests printed, the end: it sums up what failed."""


@asynccontextmanager
async def open_self(spec: TeacherSpec) -> AsyncIterator[Teacher]:
    """Entry point of kind `self`; it starts nothing."""
    yield SelfTeacher(spec)


class StudentSource(FolderSource):
    """The student's present weights as a `Source`. Their scores change with each delivery, so none is kept."""

    def __init__(self, spec: TeacherSpec) -> None:
        super().__init__(FolderText(spec.student), name=spec.name)
        self._spec = spec

    @property
    def max_model_len(self) -> int:
        return self._spec.max_model_len

    async def score(
        self, token_ids: Sequence[int], *, top_k: int, timeout_s: float, positions: np.ndarray | None = None
    ) -> TokenScores:
        """See `Source`; every token is scored."""
        try:
            return await self._spec.score_student(token_ids, top_k=top_k, timeout_s=timeout_s)
        except PolicyRequestError as error:
            raise TeacherRequestError(error.what, where=error.where, remedy=error.remedy) from error


class SelfTeacher:
    """A `Teacher`: every segment is scored as if its prompt had told more."""

    def __init__(self, spec: TeacherSpec) -> None:
        self._spec = spec
        self._inner = TokenTeacher(StudentSource(spec), replace(spec, cache=None), identity="self")

    @property
    def name(self) -> str:
        return self._spec.name

    async def probe(self, token_ids: Sequence[int], *, timeout_s: float) -> list[str]:
        """See `Teacher.probe`; also tells how much room is left for a segment. Raises `TeacherUnfitError`."""
        notes = await self._inner.probe(token_ids, timeout_s=timeout_s)
        if self._spec.privileged == "tests":
            return [*notes, f"it is told the last {_TEST_OUTPUT_CHARS} characters that the tests printed"]
        (task,) = await asyncio.to_thread(self._spec.environment.tasks, Split.TRAIN, start=0, count=1)
        try:
            more_text = self._help(task, test_output=None, where=f"task {task.id}")
        except SegmentUnfitError as error:
            raise TeacherUnfitError(error.what, where=error.where, remedy=error.remedy) from error
        plain, told = self._prompts(task, more_text)
        more = len(told) - len(plain)
        room = self._spec.max_model_len - 1 - more
        return [
            *notes,
            f"it is told how a task is solved, in {more} tokens for task {task.id}, and leaves segments of more than "
            f"{room} tokens there unscored",
        ]

    async def score(self, request: ScoreRequest, *, timeout_s: float) -> TeacherScores:
        """The scores of the tokens of `request.mask`. Raises `TeacherError`, or `DeadlineError`."""
        more = self._help(request.task, test_output=request.test_output, where=request.where)
        rewritten = rewrite(request.segment, *self._prompts(request.task, more), where=request.where)
        length, window = len(rewritten.segment), self._spec.max_model_len
        if length >= window:
            raise SegmentUnfitError(
                f"a segment of {len(request.segment)} tokens has {length} with what teacher {self.name!r} is told, and "
                f"the student's window is {window}",
                where=request.where,
                remedy=f"lower agent.max_tokens by {length - window + 1} or more, or raise policy.max_model_len",
            )
        mask = np.zeros(length, dtype=np.bool_)
        mask[rewritten.start + rewritten.shift :] = request.mask[rewritten.start :]
        scores = await self._inner.score(replace(request, segment=rewritten.segment, mask=mask), timeout_s=timeout_s)
        return rewritten.back(scores)

    def _help(self, task: Task, *, test_output: str | None, where: str) -> str:
        """What is told beyond the student's own prompt."""
        environment = self._spec.environment
        if self._spec.privileged == "tests":
            text = (test_output or "").strip()[-_TEST_OUTPUT_CHARS:]
            found = f"{_TESTS}\n{text}" if text else ""
        elif isinstance(environment, Privileged):
            found = environment.hint(task).strip()
        else:
            patch = environment.reference_patch(task).strip()
            found = f"{_PATCH}\n{patch}" if patch else ""
        if not found:
            raise SegmentUnfitError(
                f"there is nothing to tell teacher {self.name!r} about task {task.id}",
                where=where,
                remedy="choose the other distill.privileged, or an environment that knows its tasks' solutions",
            )
        return found

    def _prompts(self, task: Task, more: str) -> tuple[list[int], list[int]]:
        """The task's prompt as the student sees it, and as the teacher does."""
        messages = self._spec.environment.prompt(task)
        return self._spec.open_chat(task, messages), self._spec.open_chat(task, with_help(messages, more))


def with_help(messages: Sequence[ChatMessage], more: str) -> list[ChatMessage]:
    """The messages, with `more` at the end of the last one."""
    *before, last = messages
    return [*before, msgspec.structs.replace(last, content=f"{last.content}\n\n{more}")]


@dataclass(frozen=True, slots=True, eq=False)
class Rewritten:
    """A segment whose prompt tells more: its token `start + shift` is the original's token `start`, and so on."""

    segment: Segment
    start: int
    shift: int
    length: int

    def back(self, scores: TeacherScores) -> TeacherScores:
        """Its scores, as those of the original of `length` tokens."""
        logprobs = np.full(self.length, np.nan, dtype=np.float32)
        logprobs[self.start :] = scores.logprobs[self.start + self.shift :]
        top1 = None
        if scores.top1 is not None:
            top1 = np.zeros(self.length, dtype=np.bool_)
            top1[self.start :] = scores.top1[self.start + self.shift :]
        return replace(scores, logprobs=logprobs, top1=top1)


def rewrite(segment: Segment, plain: Sequence[int], told: Sequence[int], *, where: str) -> Rewritten:
    """The segment with the prompt `told` in place of `plain`. Raises `TeacherRefusedError` where it does not begin so.

    What both prompts end in is the original's: in a segment after the first, whose prompt holds the whole conversation,
    other tokens stand there.
    """
    begins = common_prefix_len(plain, told)
    ends = common_prefix_len(plain[begins:][::-1], told[begins:][::-1])
    start, shift = len(plain) - ends, len(told) - len(plain)
    first = segment.spans[0]
    if segment.token_ids[:start].tolist() != list(plain[:start]) or first.stop < start:
        raise TeacherRefusedError(
            "the segment does not begin with its task's prompt, so its prompt cannot tell more",
            where=where,
            remedy="teacher `self` needs segments that begin with the task as it was given",
        )
    ids = np.concatenate([np.asarray(told[: start + shift], dtype=np.int32), segment.token_ids[start:]])
    added = start + shift
    moved = Segment(
        token_ids=ids,
        spans=(
            replace(first, stop=first.stop + shift),
            *(replace(span, start=span.start + shift, stop=span.stop + shift) for span in segment.spans[1:]),
        ),
        logprobs=np.concatenate([np.full(added, np.nan, dtype=np.float32), segment.logprobs[start:]]),
        versions=np.concatenate([np.full(added, -1, dtype=np.int32), segment.versions[start:]]),
        source=segment.source,
    )
    return Rewritten(segment=moved, start=start, shift=shift, length=len(segment))

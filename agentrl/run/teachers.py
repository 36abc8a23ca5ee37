"""The teachers of a run: found by entry point, opened, probed, and put behind one `Scorer`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from agentrl.agent.tools import tool_schemas
from agentrl.chat import ChatFormat
from agentrl.chat.format_mask import format_mask
from agentrl.config import RunConfig, TeacherConfig
from agentrl.config.distill import SELF
from agentrl.errors import DeadlineError, TeacherStartError
from agentrl.policy import PolicyRouter
from agentrl.rollout.deadline import deadline
from agentrl.rollout.scoring import Candidates, Scorer
from agentrl.run.folder import RunFolder
from agentrl.run.placement import Placement
from agentrl.run.routing import find_opener
from agentrl.trajectory import Segment, Split
from agentrl.wire import ChatMessage, Environment, Task, Teacher, TeacherSpec, TokenScores

_CACHE = "teacher_cache"
_PROBE_TIMEOUT_S = 120.0  # at least


class StudentScores:
    """Scores tokens by the student's present weights, once the policy servers are up (`router`)."""

    router: PolicyRouter | None = None

    async def __call__(self, token_ids: Sequence[int], *, top_k: int, timeout_s: float) -> TokenScores:
        if self.router is None:
            raise TeacherStartError(
                "the student's servers are not up yet",
                where="teacher `self`",
                remedy="ask for scores after the teacher has been opened",
            )
        return await self.router.score(token_ids, top_k=top_k, timeout_s=timeout_s)


@dataclass(frozen=True, slots=True)
class TeacherParts:
    """What teachers are opened from; everything is registered in `stack` to be closed."""

    stack: AsyncExitStack
    config: RunConfig
    folder: RunFolder
    environment: Environment
    chat: ChatFormat
    student: Path
    placement: Placement
    score_student: StudentScores

    async def open(self) -> dict[str, Teacher]:
        """All of them, side by side. Raises `ConfigError`, `TeacherStartError`."""
        async with asyncio.TaskGroup() as tasks:
            opened = [tasks.create_task(self._open(teacher)) for teacher in self.config.distill.teachers]
        return {teacher.name: task.result() for teacher, task in zip(self.config.distill.teachers, opened, strict=True)}

    async def _open(self, teacher: TeacherConfig) -> Teacher:
        opener = find_opener(teacher)
        return await self.stack.enter_async_context(opener(self._spec(teacher)))

    def _spec(self, teacher: TeacherConfig) -> TeacherSpec:
        config, wanted = self.config, self.config.distill
        return TeacherSpec(
            name=teacher.name,
            model=teacher.model,
            student=self.student,
            longest=config.agent.max_tokens,
            max_model_len=config.policy.max_model_len if teacher.resolved_kind == SELF else config.teacher_window,
            dtype=config.policy.dtype if teacher.resolved_kind == SELF else wanted.dtype,
            top_k=_top_k(config),
            any_token=_student_chooses(config) or _top_k(config) is None,
            align_bytes=wanted.align == "bytes",
            privileged=wanted.privileged,
            concurrency=wanted.concurrency,
            retries=wanted.retries,
            start_timeout_s=config.policy.start_timeout_s,
            device=self._device(teacher),
            logs=self.folder.logs,
            cache=self.folder.path / _CACHE if wanted.cache else None,
            environment=self.environment,
            score_student=self.score_student,
            open_chat=self._open_chat,
        )

    def _device(self, teacher: TeacherConfig) -> int | None:
        here = self.config.distill.started_here
        return self.placement.teachers[here.index(teacher)] if teacher in here else None

    def _open_chat(self, task: Task, messages: Sequence[ChatMessage]) -> list[int]:
        """As an episode opens: with the tools' schemas where the template is to name them."""
        by_template = self.config.agent.tools.described_by == "template"
        tools = tool_schemas(self.environment.tool_names(task)) if by_template else None
        return self.chat.open(messages, tools)


def _top_k(config: RunConfig) -> int | None:
    """How many candidates a teacher chooses itself (None: it gives the whole vocabulary)."""
    if config.train.divergence.name == "sampled" or _student_chooses(config):
        return 0
    return None if config.distill.support == "full" else config.distill.top_k


async def probe_teachers(
    teachers: dict[str, Teacher],
    chat: ChatFormat,
    environment: Environment,
    note: Callable[[str], None],
    *,
    timeout_s: float,
) -> None:
    """Prove that each can teach this student. `timeout_s` is one segment's in the run. Raises `TeacherUnfitError` with
    the reason and the remedy."""
    (task,) = environment.tasks(Split.TRAIN, start=0, count=1)
    conversation = _conversation(chat, environment, task)
    limit_s = max(_PROBE_TIMEOUT_S, timeout_s)
    for name, teacher in teachers.items():
        async with deadline(2 * limit_s, partial(_late, name, limit_s)):  # a kind of its own may keep none
            lines = await teacher.probe(conversation, timeout_s=limit_s)
        for line in lines:
            note(f"teacher {name}: {line}")


def _late(name: str, limit_s: float) -> DeadlineError:
    return DeadlineError(
        f"teacher {name} was to be probed within {limit_s:g} s, and after twice that it is not",
        where="distill.teachers",
        remedy="look at its log; a slow one: raise distill.timeout_s",
    )


def _conversation(chat: ChatFormat, environment: Environment, task: Task) -> list[int]:
    """A prompt, a turn of the agent, and an answer, as the student sees them."""
    return [*chat.open(environment.prompt(task)), *chat.say("I look at the files."), *chat.observe(["2 passed"])]


def make_scorer(config: RunConfig, teachers: dict[str, Teacher], chat: ChatFormat, student: StudentScores) -> Scorer:
    """The teachers as the engine sees them."""
    wanted = config.distill
    kinds = {teacher.resolved_kind for teacher in wanted.teachers}
    return Scorer(
        teachers,
        route=wanted.route,
        format_mask=partial(format_mask, chat) if wanted.mask_format else None,
        candidates=_student_candidates(student, wanted.top_k, wanted.timeout_s) if _student_chooses(config) else None,
        after_grading=SELF in kinds and wanted.privileged == "tests",
        timeout_s=wanted.timeout_s,
    )


def _student_chooses(config: RunConfig) -> bool:
    return config.train.divergence.name != "sampled" and config.distill.support == "student"


def _student_candidates(student: StudentScores, top_k: int, timeout_s: float) -> Candidates:
    """The student's own most likely tokens, under its present weights."""

    async def candidates(segment: Segment, mask: np.ndarray) -> np.ndarray:
        scores = await student(segment.token_ids.tolist(), top_k=top_k, timeout_s=timeout_s)
        return np.asarray(scores.top_ids, np.int32)[np.flatnonzero(mask) - 1]

    return candidates

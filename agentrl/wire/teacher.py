"""Teachers: what scores a student's own tokens.

A third party implements `Teacher` and registers a function of `TeacherSpec` that opens one, by entry point
(`agentrl.teachers`); its name is the teacher's kind.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from agentrl.trajectory import Segment, TeacherScores
from agentrl.wire.protocols import ChatMessage, Environment, Task

SAME_MODEL = 0.3
"""Nats by which a model may differ from itself, in another batch or on another device; another model differs by more
somewhere in a prompt."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Log-probabilities of given tokens [T] at temperature 1: logprobs float32 [T − 1] of tokens 1 … T − 1, top1 bool
    [T − 1] where the token is the most likely one, and the K most likely tokens (−1 and NaN where there are fewer):
    top_ids int32 [T − 1, K], top_logprobs float32 [T − 1, K]."""

    logprobs: np.ndarray
    top1: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class ScoreTokens(Protocol):
    """Scores token ids by some model: `VllmClient.score` and its like."""

    def __call__(self, token_ids: Sequence[int], *, top_k: int, timeout_s: float) -> Awaitable[TokenScores]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreRequest:
    """One sealed segment to be scored.

    `mask` bool [T]: the tokens to score, N of them. `candidates` int32 [N, K]: tokens whose log-probabilities are asked
    for at each of them, None: the teacher's own choice (`TeacherSpec`). `test_output`: what the tests printed, None
    before grading.
    """

    trajectory_id: str
    index: int
    segment: Segment
    mask: np.ndarray
    task: Task
    candidates: np.ndarray | None = None
    test_output: str | None = None

    @property
    def where(self) -> str:
        """For errors."""
        return f"trajectory {self.trajectory_id}, segment {self.index}"


class Teacher(Protocol):
    """What scores a student's tokens."""

    @property
    def name(self) -> str: ...

    async def probe(self, token_ids: Sequence[int], *, timeout_s: float) -> list[str]:
        """Show, before a run begins, that this teacher can teach this student: tokenizer, window, log-probabilities
        that are there, no more than probabilities allow, and the same when asked again. `token_ids`: a conversation as
        the student sees it. Returns what was found, in lines for the log; raises `TeacherUnfitError`."""
        ...

    async def score(self, request: ScoreRequest, *, timeout_s: float) -> TeacherScores:
        """The scores of exactly the tokens of `request.mask`; they pass `TeacherScores.check`. Raises `TeacherError`,
        or `DeadlineError` after `timeout_s`; never gives a score that the model did not give."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherSpec:
    """What a teacher is made from.

    `name` and `model` as configured (`distill.teachers`); `student`: the student's model folder (tokenizer, template);
    `longest`: most tokens of a segment; `max_model_len`: the window a server of ours is started with. `top_k`: how many
    candidates per token are wanted: 0: none, only log-probabilities of the segment's tokens; None: the whole
    vocabulary. `any_token`: it is asked for tokens that it did not choose (None, or `ScoreRequest.candidates`).
    `align_bytes`: the teacher has another tokenizer. `privileged`: `patch` or `tests`, for the student's
    own weights. `logs` and `cache`: folders (cache None: none is kept). `score_student` scores tokens by the student's
    present weights. `open_chat` renders a task's messages as the student's prompt ids. `concurrency`: segments at once.
    `device`: the CPU core or CUDA device to bind to (None: whatever there is).
    """

    name: str
    model: str
    student: Path
    longest: int
    max_model_len: int
    dtype: str
    top_k: int | None
    any_token: bool
    align_bytes: bool
    privileged: str
    concurrency: int
    retries: int
    start_timeout_s: float
    device: int | None
    logs: Path
    cache: Path | None
    environment: Environment
    score_student: ScoreTokens
    open_chat: Callable[[Task, Sequence[ChatMessage]], list[int]]

    @property
    def log_path(self) -> Path:
        """The log of a teacher that is started here. A name may hold anything; two names have two logs."""
        plain = _UNSAFE.sub("_", self.name)
        more = "" if plain == self.name else f"-{hashlib.sha256(self.name.encode()).hexdigest()[:6]}"
        return self.logs / f"teacher-{plain}{more}.log"


OpenTeacher = Callable[[TeacherSpec], AbstractAsyncContextManager[Teacher]]
"""An entry point of group `agentrl.teachers`. Raises `TeacherStartError` or `ConfigError`."""

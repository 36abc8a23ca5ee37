"""Where log-probabilities come from: what the teachers of this package have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from agentrl.errors import TeacherRequestError
from agentrl.wire import ChatMessage, TokenScores


class TeacherBusyError(TeacherRequestError):
    """The teacher has no room for a request now, and wants to be asked again, not before `after_s` (None: any time)."""

    def __init__(self, what: str, *, where: str = "", remedy: str = "", after_s: float | None = None) -> None:
        super().__init__(what, where=where, remedy=remedy)
        self.after_s = after_s


class Source(Protocol):
    """A model that scores token ids of its own tokenizer. Errors are `TeacherError`s (`TeacherBusyError`: asked again
    for as long as there is time); nothing is ever filled in."""

    @property
    def name(self) -> str: ...

    @property
    def max_model_len(self) -> int:
        """Tokens scored at once are fewer than this."""
        ...

    async def score(
        self, token_ids: Sequence[int], *, top_k: int, timeout_s: float, positions: np.ndarray | None = None
    ) -> TokenScores:
        """As `TokenScores`, with K = `top_k` (0: none). `positions` int [N] ≥ 1: the tokens that are asked for; the
        other rows of the answer mean nothing (None: every token)."""
        ...

    async def encode(self, text: str, *, timeout_s: float) -> list[int]:
        """The ids of `text`, control tokens recognised, none added."""
        ...

    async def token_bytes(self, token_ids: Sequence[int], *, timeout_s: float) -> list[bytes]:
        """The bytes each token stands for, a control token's those of its name; joined they are the text."""
        ...


@runtime_checkable
class CandidateSource(Source, Protocol):
    """A source that can score any token, not only its own most likely ones."""

    async def score_candidates(
        self, token_ids: Sequence[int], *, positions: np.ndarray, candidates: np.ndarray | None, timeout_s: float
    ) -> tuple[TokenScores, np.ndarray]:
        """`score` at `positions` with K = 0, and float32 [N, K]: log-probabilities of `candidates` int32 [N, K] (None:
        of the whole vocabulary, in order) at `positions` [N] ≥ 1."""
        ...


@runtime_checkable
class ChatSource(Protocol):
    """A source that knows its model's own chat template."""

    async def open_chat(self, messages: Sequence[ChatMessage], *, timeout_s: float) -> list[int]:
        """The template's rendering, generation prompt last, as ids. `ConfigError` where the template refuses them or
        there is none."""
        ...

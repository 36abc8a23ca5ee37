"""A frozen vLLM server of our own as a source: token ids in, prompt log-probabilities out."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from agentrl.errors import PolicyDeadError, PolicyError, TeacherDeadError, TeacherError, TeacherRequestError
from agentrl.policy import VllmClient
from agentrl.wire import TokenScores
from agentrl_teachers.folder_text import FolderSource, FolderText

_T = TypeVar("_T")


class VllmSource(FolderSource):
    """The server behind `client`, whose output is in `log`; its tokenizer and template are read from the model's
    folder."""

    def __init__(self, client: VllmClient, text: FolderText, *, name: str, log: Path) -> None:
        super().__init__(text, name=name)
        self._client, self._log = client, log

    @property
    def max_model_len(self) -> int:
        return self._client.max_model_len

    async def score(
        self, token_ids: Sequence[int], *, top_k: int, timeout_s: float, positions: np.ndarray | None = None
    ) -> TokenScores:
        return await self._told(self._client.score(token_ids, top_k=top_k, timeout_s=timeout_s, positions=positions))

    async def _told(self, asked: Awaitable[_T]) -> _T:
        """What went wrong, as a teacher's errors."""
        try:
            return await asked
        except PolicyError as error:
            raise self._error(error) from error

    def _error(self, error: PolicyError) -> TeacherError:
        if isinstance(error, PolicyDeadError):
            return TeacherDeadError(
                error.what,
                where=error.where,
                remedy=f"{self._log} says why it ended; then start the run again with --resume",
            )
        return TeacherRequestError(error.what, where=error.where, remedy=error.remedy)

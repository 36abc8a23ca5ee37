"""A teacher whose model runs in a process of ours: it can score any token, so candidates may be the student's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np

from agentrl.errors import ConfigError
from agentrl.policy import local_model
from agentrl.wire import Teacher, TeacherSpec, TokenScores
from agentrl_teachers.folder_text import FolderSource, FolderText, folder_identity
from agentrl_teachers.making import teacher_over
from agentrl_teachers.worker_messages import Scored
from agentrl_teachers.worker_process import WorkerProcess

_THREADS = "OMP_NUM_THREADS"


@asynccontextmanager
async def open_transformers(spec: TeacherSpec) -> AsyncIterator[Teacher]:
    """Entry point of kind `transformers`: a process is started for the model, and ended with the block.

    It computes on the CUDA device where there is one, else on as many threads as `OMP_NUM_THREADS` says, or one. Raises
    `TeacherStartError`, or `ConfigError` for a model that is not there.
    """
    try:
        folder = await asyncio.to_thread(local_model, spec.model)
    except ConfigError as error:
        raise ConfigError(error.what, where=f"distill.teachers, {spec.name}", remedy=error.remedy) from error
    process = await WorkerProcess.start(
        name=spec.name,
        model=folder,
        dtype=spec.dtype,
        threads=_threads(),
        log_path=spec.log_path,
        timeout_s=spec.start_timeout_s,
        device=spec.device,
    )
    try:
        identity = folder_identity(folder, "transformers", spec.dtype)
        yield teacher_over(LocalSource(process, FolderText(folder), name=spec.name), spec, identity=identity)
    finally:
        await process.close()


class LocalSource(FolderSource):
    """A scoring process as a `CandidateSource`; rows that were not asked for are NaN."""

    def __init__(self, process: WorkerProcess, text: FolderText, *, name: str) -> None:
        super().__init__(text, name=name)
        self._process = process

    @property
    def max_model_len(self) -> int:
        """One more than the model's window: nothing is sampled after what is scored."""
        return self._process.ready.window + 1

    async def score(
        self, token_ids: Sequence[int], *, top_k: int, timeout_s: float, positions: np.ndarray | None = None
    ) -> TokenScores:
        """See `Source`."""
        ids, places = _arrays(token_ids, positions)
        scored = await self._process.score(ids, positions=places, top_k=top_k, timeout_s=timeout_s)
        return _spread(scored, places, length=len(ids))

    async def score_candidates(
        self, token_ids: Sequence[int], *, positions: np.ndarray, candidates: np.ndarray | None, timeout_s: float
    ) -> tuple[TokenScores, np.ndarray]:
        """See `CandidateSource`."""
        ids, places = _arrays(token_ids, positions)
        scored = await self._process.score(
            ids, positions=places, candidates=candidates, vocabulary=candidates is None, timeout_s=timeout_s
        )
        assert scored.candidate_logprobs is not None
        return _spread(scored, places, length=len(ids)), scored.candidate_logprobs


def _threads() -> int:
    told = os.environ.get(_THREADS, "")
    return int(told) if told.isdecimal() and int(told) > 0 else 1


def _arrays(token_ids: Sequence[int], positions: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Ids and positions int32; all positions where none are given."""
    ids = np.asarray(token_ids, dtype=np.int32)
    return ids, np.arange(1, len(ids), dtype=np.int32) if positions is None else np.asarray(positions, dtype=np.int32)


def _spread(scored: Scored, positions: np.ndarray, *, length: int) -> TokenScores:
    """The scores at their rows of [length − 1]."""
    rows, width = positions - 1, scored.top_ids.shape[1]
    logprobs = np.full(length - 1, np.nan, dtype=np.float32)
    top1 = np.zeros(length - 1, dtype=np.bool_)
    top_ids = np.full((length - 1, width), -1, dtype=np.int32)
    top_logprobs = np.full((length - 1, width), np.nan, dtype=np.float32)
    logprobs[rows], top1[rows] = scored.logprobs, scored.top1
    top_ids[rows], top_logprobs[rows] = scored.top_ids, scored.top_logprobs
    return TokenScores(logprobs=logprobs, top1=top1, top_ids=top_ids, top_logprobs=top_logprobs)

"""A source as teachers use it: bounded in flight, tried again, remembered on disk, and every answer checked.

    score ──▶ on disk? ──▶ done
                │ no
                ▼
           a place among `spec.concurrency` ──▶ source ──▶ checks ──▶ kept on disk ──▶ done
                ▲                                 │
                └── wait, `spec.retries` times ◀──┘ TeacherRequestError (TeacherBusyError: until the deadline)

A refusal (`TeacherRefusedError`), a dead teacher and a deadline are final: what is asked again is what another try may
give. One deadline holds for all of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np

from agentrl.errors import (
    DeadlineError,
    SegmentUnfitError,
    TeacherError,
    TeacherRefusedError,
    TeacherRequestError,
)
from agentrl.wire import TeacherSpec, TokenScores
from agentrl_teachers.cache import ScoreCache, key_of
from agentrl_teachers.checks import check_candidates, check_scores
from agentrl_teachers.source import CandidateSource, Source, TeacherBusyError

log = logging.getLogger("agentrl.teachers")

_FIRST_WAIT_S = 0.25
_MOST_WAIT_S = 10.0  # for a busy source that does not say how long
_T = TypeVar("_T")


class CheckedSource:
    """`source` with all that; itself a `CandidateSource` where `source` is one. `identity` names what its scores depend
    on beside the tokens."""

    def __init__(self, source: Source, spec: TeacherSpec, *, identity: str) -> None:
        self._source = source
        self._retries = spec.retries
        self._places = asyncio.Semaphore(spec.concurrency)
        name = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._cache = None if spec.cache is None else ScoreCache(spec.cache / name)
        self._identity = identity
        self.cache_hits = 0
        """Answers that came from disk."""

    @property
    def name(self) -> str:
        return self._source.name

    @property
    def max_model_len(self) -> int:
        return self._source.max_model_len

    @property
    def source(self) -> Source:
        """What stands behind: asked without checks, retries and disk."""
        return self._source

    @property
    def cache(self) -> ScoreCache | None:
        return self._cache

    async def score(
        self,
        token_ids: Sequence[int],
        *,
        top_k: int,
        timeout_s: float,
        positions: np.ndarray | None = None,
        where: str = "",
    ) -> TokenScores:
        """As `Source.score`; `where` is for errors."""
        self._check_length(token_ids, where)

        async def ask(left_s: float) -> TokenScores:
            found = await self._source.score(token_ids, top_k=top_k, timeout_s=left_s, positions=positions)
            check_scores(found, token_ids, top_k=top_k, positions=positions, where=where)
            return found

        rows = None if positions is None else np.asarray(positions) - 1
        key = key_of(self._identity, "score", top_k, _int32(token_ids), _int32(positions))
        return await self._remembered(
            key,
            ask,
            pack=lambda found: _taken(found, rows),
            unpack=lambda arrays: _spread(arrays, rows, len(token_ids) - 1),
            timeout_s=timeout_s,
            where=where,
        )

    async def score_candidates(
        self,
        token_ids: Sequence[int],
        *,
        positions: np.ndarray,
        candidates: np.ndarray | None,
        timeout_s: float,
        where: str = "",
    ) -> tuple[TokenScores, np.ndarray]:
        """As `CandidateSource.score_candidates`. Of the whole vocabulary nothing is kept on disk: it would fill it."""
        self._check_length(token_ids, where)
        source = self._source
        if not isinstance(source, CandidateSource):
            raise TeacherRefusedError(
                "this teacher gives its own most likely tokens only",
                where=where,
                remedy="--teacher transformers:MODEL, or distill.support=teacher",
            )

        async def ask(left_s: float) -> tuple[TokenScores, np.ndarray]:
            scores, found = await source.score_candidates(
                token_ids, positions=positions, candidates=candidates, timeout_s=left_s
            )
            check_scores(scores, token_ids, top_k=0, positions=positions, where=where)
            width = found.shape[-1] if candidates is None else candidates.shape[1]
            check_candidates(found, shape=(len(positions), width), given=candidates, where=where)
            return scores, found

        rows = np.asarray(positions) - 1
        key = None
        if candidates is not None:
            key = key_of(self._identity, "candidates", _int32(token_ids), _int32(positions), _int32(candidates))
        return await self._remembered(
            key,
            ask,
            pack=lambda found: (*_taken(found[0], rows), found[1]),
            unpack=lambda arrays: (_spread(arrays[:4], rows, len(token_ids) - 1), arrays[4]),
            timeout_s=timeout_s,
            where=where,
        )

    async def encode(self, text: str, *, timeout_s: float) -> list[int]:
        return await self.tried(
            lambda left_s: self._source.encode(text, timeout_s=left_s), timeout_s=timeout_s, where="encoding"
        )

    async def token_bytes(self, token_ids: Sequence[int], *, timeout_s: float) -> list[bytes]:
        return await self.tried(
            lambda left_s: self._source.token_bytes(token_ids, timeout_s=left_s), timeout_s=timeout_s, where="decoding"
        )

    def _check_length(self, token_ids: Sequence[int], where: str) -> None:
        if not 2 <= len(token_ids) < self.max_model_len:
            raise SegmentUnfitError(
                f"{len(token_ids)} tokens cannot be scored in the window ({self.max_model_len}) of teacher {self.name}",
                where=where,
                remedy="lower agent.max_tokens, or a teacher with a longer window (distill.max_model_len)",
            )

    async def _remembered(
        self,
        key: str | None,
        ask: Callable[[float], Awaitable[_T]],
        *,
        pack: Callable[[_T], Sequence[np.ndarray]],
        unpack: Callable[[Sequence[np.ndarray]], _T],
        timeout_s: float,
        where: str,
    ) -> _T:
        """The answer on disk, or a new one, which is then kept. Both go the same way, so that they are the same."""
        cache = None if key is None else self._cache
        if cache is None or key is None:
            return unpack(pack(await self.tried(ask, timeout_s=timeout_s, where=where)))
        kept = await asyncio.to_thread(cache.read, key)
        if kept is not None:
            self.cache_hits += 1
            return unpack(kept)
        arrays = pack(await self.tried(ask, timeout_s=timeout_s, where=where))
        await asyncio.to_thread(cache.write, key, arrays)
        return unpack(arrays)

    async def tried(self, ask: Callable[[float], Awaitable[_T]], *, timeout_s: float, where: str) -> _T:
        """`ask` (given the seconds left) until it answers: at most `spec.retries` more times after failures, and for as
        long as there is time where the source is busy; past the disk."""
        deadline = time.monotonic() + timeout_s
        failed = busy = 0
        said = ""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        async with self._places:
                            return await ask(deadline - time.monotonic())
                    except TeacherBusyError as error:
                        if not busy:
                            log.warning("teacher %s, %s: %s; asking until it has room", self.name, where, error.what)
                        wait_s = max(error.after_s or 0.0, min(_FIRST_WAIT_S * 2.0 ** min(busy, 30), _MOST_WAIT_S))
                        busy, said = busy + 1, f" ({error.what})"
                    except TeacherError as error:
                        final = isinstance(error, TeacherRefusedError) or not isinstance(error, TeacherRequestError)
                        if final or failed == self._retries:
                            if where not in error.where:
                                error.where = ", ".join(filter(None, (where, error.where)))
                            raise
                        log.warning("teacher %s, %s: %s; asking again", self.name, where, error.what)
                        wait_s = _FIRST_WAIT_S * 2**failed
                        failed += 1
                    await asyncio.sleep(wait_s)
        except (TimeoutError, DeadlineError) as error:
            raise DeadlineError(
                f"teacher {self.name} did not answer within {timeout_s:g} s{said}",
                where=where,
                remedy="raise distill.timeout_s, or lower the load (distill.concurrency)",
            ) from error


def _int32(values: Sequence[int] | np.ndarray | None) -> np.ndarray | None:
    return None if values is None else np.asarray(values, dtype=np.int32)


def _taken(scores: TokenScores, rows: np.ndarray | None) -> tuple[np.ndarray, ...]:
    """The arrays at `rows` (None: all)."""
    arrays = (
        scores.logprobs.astype(np.float32, copy=False),
        scores.top1,
        scores.top_ids.astype(np.int32, copy=False),
        scores.top_logprobs.astype(np.float32, copy=False),
    )
    return arrays if rows is None else tuple(array[rows] for array in arrays)


def _spread(arrays: Sequence[np.ndarray], rows: np.ndarray | None, length: int) -> TokenScores:
    """Back to `length` rows; those that were not asked for are NaN and −1."""
    logprobs, top1, top_ids, top_logprobs = arrays
    if rows is None:
        return TokenScores(logprobs=logprobs, top1=top1, top_ids=top_ids, top_logprobs=top_logprobs)
    wide = TokenScores(
        logprobs=np.full(length, np.nan, dtype=np.float32),
        top1=np.zeros(length, dtype=np.bool_),
        top_ids=np.full((length, top_ids.shape[1]), -1, dtype=np.int32),
        top_logprobs=np.full((length, top_ids.shape[1]), np.nan, dtype=np.float32),
    )
    wide.logprobs[rows], wide.top1[rows], wide.top_ids[rows], wide.top_logprobs[rows] = arrays
    return wide

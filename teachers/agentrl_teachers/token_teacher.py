"""The teacher that reads the student's own token ids: both have one tokenizer."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from agentrl.errors import TeacherRefusedError
from agentrl.trajectory import TeacherScores
from agentrl.wire import ScoreRequest, TeacherSpec
from agentrl_teachers.checked import CheckedSource
from agentrl_teachers.folder_text import vocabulary_of
from agentrl_teachers.probe import check_template, check_tokenizer, check_window, probe_source
from agentrl_teachers.source import Source


class TokenTeacher:
    """Scores segments by `source`. `identity` names everything its scores depend on beside the tokens (kind, model,
    weights, dtype): a score kept on disk under one identity is never taken for another's."""

    def __init__(self, source: Source, spec: TeacherSpec, *, identity: str) -> None:
        self._spec = spec
        self._checked = CheckedSource(source, spec, identity=identity)
        self._top_k = spec.top_k
        self._vocabulary = vocabulary_of(spec.student)

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def cache_hits(self) -> int:
        """Segments whose scores came from disk."""
        return self._checked.cache_hits

    async def probe(self, token_ids: Sequence[int], *, timeout_s: float) -> list[str]:
        """See `Teacher`. Where the teacher gives fewer candidates than wanted, that many are asked for from then on."""
        spec, source = self._spec, self._checked.source
        deadline = time.monotonic() + timeout_s
        check_window(source, spec)
        same = await check_tokenizer(source, spec, timeout_s=timeout_s)
        template = await check_template(source, spec, timeout_s=deadline - time.monotonic())
        probed = await probe_source(self._checked, spec, token_ids, timeout_s=deadline - time.monotonic())
        self._top_k = probed.top_k
        return [same, template, *probed.notes]

    async def score(self, request: ScoreRequest, *, timeout_s: float) -> TeacherScores:
        """See `Teacher`."""
        token_ids, positions = request.segment.token_ids.tolist(), np.flatnonzero(request.mask)
        if len(positions) and positions[0] == 0:
            raise TeacherRefusedError("token 0 cannot be scored: nothing predicts it", where=request.where)
        if len(positions) == 0:
            return self._nothing(request)
        if request.candidates is None and self._top_k is not None:
            found = await self._checked.score(
                token_ids, top_k=self._top_k, timeout_s=timeout_s, positions=positions, where=request.where
            )
            at = positions - 1
            ids, logprobs = self._within(found.top_ids[at], found.top_logprobs[at]) if self._top_k else (None, None)
        else:
            at, ids = positions - 1, request.candidates
            found, logprobs = await self._checked.score_candidates(
                token_ids, positions=positions, candidates=ids, timeout_s=timeout_s, where=request.where
            )
            if ids is None:
                logprobs = self._whole(logprobs, request.where)
            else:
                logprobs = np.where(ids >= 0, logprobs, np.float32(np.nan))
        return self._scores(request, found.logprobs[at], found.top1[at], ids, logprobs)

    def _nothing(self, request: ScoreRequest) -> TeacherScores:
        """Of no token: nobody is asked."""
        width = self._top_k if request.candidates is None else request.candidates.shape[1]
        ids = None if width in (None, 0) else np.empty((0, width or 0), dtype=np.int32)
        candidates = None if width == 0 else np.empty((0, width or self._vocabulary or 0), dtype=np.float32)
        return self._scores(request, np.empty(0, np.float32), np.empty(0, np.bool_), ids, candidates)

    def _scores(
        self,
        request: ScoreRequest,
        own: np.ndarray,
        likeliest: np.ndarray,
        ids: np.ndarray | None,
        candidates: np.ndarray | None,
    ) -> TeacherScores:
        """Scores [N] of the asked tokens, put where they belong."""
        logprobs = np.full(len(request.segment), np.nan, dtype=np.float32)
        top1 = np.zeros(len(request.segment), dtype=np.bool_)
        logprobs[request.mask], top1[request.mask] = own, likeliest
        scores = TeacherScores(
            teacher=self.name, logprobs=logprobs, candidate_ids=ids, candidate_logprobs=candidates, top1=top1
        )
        scores.check(request.segment)
        return scores

    def _within(self, ids: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Candidates that the student has too: a vocabulary may be padded further than another."""
        if self._vocabulary is None or not (ids >= self._vocabulary).any():
            return ids, logprobs
        known = ids < self._vocabulary
        return np.where(known, ids, np.int32(-1)), np.where(known, logprobs, np.float32(np.nan))

    def _whole(self, logprobs: np.ndarray, where: str) -> np.ndarray:
        """The student's vocabulary out of the teacher's, which may be padded further."""
        wanted = logprobs.shape[1] if self._vocabulary is None else self._vocabulary
        if logprobs.shape[1] < wanted:
            raise TeacherRefusedError(
                f"the teacher's vocabulary has {logprobs.shape[1]} tokens and the student's {wanted}",
                where=where,
                remedy="distill.support=teacher",
            )
        return logprobs[:, :wanted]

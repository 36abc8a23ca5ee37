"""A teacher's scores on their way into micro-batches: what is refused, spans, candidates.

Of a sequence with N scored tokens (those of teacher weight above 0) the candidates are [N, K]; of a micro-batch with M
in all they are [M, K], in row-major order of its scored positions: nothing of [B, T, K] is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from agentrl.errors import RecordError
from agentrl.wire import TrainSequence

_MASS_TOLERANCE = 1e-2
"""How far a sum of probabilities may be off 1: above float32's and bfloat16's rounding, below any raw logits."""


def check_scores(sequence: TrainSequence, *, where: str, candidates: bool, vocabulary: int | None) -> None:
    """Raise `RecordError` unless a teacher's streams, whose lengths are right, hold exactly what is trained.

    `candidates`: the divergence is over candidates, so that every scored token needs its own. `vocabulary`: the width
    of the student's logits; None: not known here.
    """
    logprobs, weights = sequence.teacher_logprobs, sequence.teacher_weights
    if logprobs is None or weights is None:
        if not (logprobs is weights is sequence.teacher_spans is sequence.candidate_ids is sequence.candidate_logprobs):
            raise RecordError("a teacher's streams come together or not at all", where=where)
        return
    scored = weights != 0
    if not np.isfinite(logprobs[scored]).all():
        raise _missing("teacher_logprobs is not finite on a scored token", where)
    if sequence.teacher_spans is not None:
        _check_spans(sequence.teacher_spans, scored, where)
    if sequence.candidate_logprobs is not None:
        _check_candidates(sequence, sequence.candidate_logprobs, int(scored.sum()), where, vocabulary)
    elif sequence.candidate_ids is not None:
        raise _missing("candidate_ids without candidate_logprobs", where)
    elif candidates and scored.any():
        raise _missing("the divergence is over candidates and scored tokens have none", where)


def _missing(what: str, where: str) -> RecordError:
    return RecordError(what, where=where, remedy="give the teacher's scores, or take the token out of the stream")


def _check_spans(spans: np.ndarray, scored: np.ndarray, where: str) -> None:
    """Spans are exactly the scored tokens, each a run of neighbours: the chain rule needs every token of a span."""
    if not np.issubdtype(spans.dtype, np.integer) or not np.array_equal(spans >= 0, scored):
        raise RecordError("teacher_spans are not exactly the scored tokens", where=where)
    starts = scored & (spans != np.concatenate([[-1], spans[:-1]]))
    if len(np.unique(spans[scored])) != int(starts.sum()):
        raise RecordError("a span's tokens do not stand together", where=where)


def _check_candidates(
    sequence: TrainSequence, logprobs: np.ndarray, scored: int, where: str, vocabulary: int | None
) -> None:
    ids = sequence.candidate_ids
    if logprobs.ndim != 2 or logprobs.shape[0] != scored or (ids is not None and ids.shape != logprobs.shape):
        raise _missing(f"candidates {list(logprobs.shape)} for {scored} scored tokens", where)
    if sequence.teacher_spans is not None:
        raise RecordError("candidates of a teacher with another tokenizer", where=where)
    finite = np.isfinite(logprobs)
    mass = np.exp(np.where(finite, logprobs, -np.inf).astype(np.float64)).sum(-1)
    if ids is None:
        if vocabulary is not None and logprobs.shape[1] != vocabulary:
            raise RecordError(
                f"candidates are {logprobs.shape[1]} tokens without ids, and the student's vocabulary is {vocabulary}",
                where=where,
                remedy="score with a teacher of the student's tokenizer and width, or give candidate_ids",
            )
        if not finite.all() or (mass < 1 - _MASS_TOLERANCE).any():
            raise _missing("candidate_logprobs lack some of the vocabulary's probability", where)
    else:
        _check_ids(ids, finite, where, vocabulary)
    if (mass > 1 + _MASS_TOLERANCE).any():
        raise RecordError(
            f"the probabilities of a token's candidates sum to {mass.max():.3g}",
            where=where,
            remedy="candidate_logprobs are log-probabilities at temperature 1, not logits",
        )


def _check_ids(ids: np.ndarray, finite: np.ndarray, where: str, vocabulary: int | None) -> None:
    given = ids >= 0
    if not np.issubdtype(ids.dtype, np.integer) or not np.array_equal(given, finite):
        raise _missing("a candidate lacks its log-probability", where)
    if not given.any(-1).all():
        raise _missing("a scored token has no candidate", where)
    if vocabulary is not None and (ids >= vocabulary).any():
        raise RecordError(f"candidate {ids.max()} is not in the vocabulary of {vocabulary}", where=where)
    ordered = np.sort(ids, axis=-1)
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        raise RecordError("a candidate stands twice at one token", where=where)


def numbered_spans(sequence: TrainSequence) -> np.ndarray:
    """int64 [T]: the number of each scored token's span, 0, 1, 2 … in order, −1 elsewhere."""
    if sequence.teacher_weights is None:
        return np.full(len(sequence.token_ids), -1, np.int64)
    scored = sequence.teacher_weights != 0
    starts = scored
    if sequence.teacher_spans is not None:
        starts = scored & (sequence.teacher_spans != np.concatenate([[-1], sequence.teacher_spans[:-1]]))
    return np.where(scored, np.cumsum(starts) - 1, -1)


@dataclass(frozen=True, slots=True)
class PackedCandidates:
    """The teacher's, at the M scored tokens of a micro-batch: logprobs [M, K], 0 where `ids` [M, K] is −1; ids None:
    K is the vocabulary, in order."""

    ids: Int[Tensor, "M K"] | None
    logprobs: Float[Tensor, "M K"]


def pack_candidates(sequences: Sequence[TrainSequence]) -> PackedCandidates | None:
    """The candidates of `sequences` (checked; each with candidates, or without a scored token) below each other; None
    where no token is scored."""
    found = [
        (s.candidate_ids, s.candidate_logprobs)
        for s in sequences
        if s.candidate_logprobs is not None and len(s.candidate_logprobs)
    ]
    if not found:
        return None
    width = max(logprobs.shape[1] for _, logprobs in found)
    if all(ids is None for ids, _ in found):
        return PackedCandidates(ids=None, logprobs=_stack([logprobs for _, logprobs in found], width, torch.float32, 0))
    ids = [np.broadcast_to(np.arange(p.shape[1]), p.shape) if given is None else given for given, p in found]
    logprobs = [np.where(own >= 0, p, 0) for own, (_, p) in zip(ids, found, strict=True)]
    return PackedCandidates(ids=_stack(ids, width, torch.int64, -1), logprobs=_stack(logprobs, width, torch.float32, 0))


def _stack(parts: Sequence[np.ndarray], width: int, dtype: torch.dtype, fill: int) -> Tensor:
    """Arrays [N, K] below each other, filled on the right to one width."""
    out = torch.full((sum(len(part) for part in parts), width), fill, dtype=dtype)
    start = 0
    for part in parts:
        out[start : start + len(part), : part.shape[1]] = torch.from_numpy(np.array(part))
        start += len(part)
    return out

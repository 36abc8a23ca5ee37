"""What every teacher's scores must be before anything is made of them. A score is never mended."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentrl.errors import TeacherRequestError
from agentrl.wire import TokenScores

ABOVE_ZERO = 1e-4
"""Nats by which rounding may lift a log-probability above 0."""
MASS = 1e-3
"""By how much rounding may lift the sum of probabilities above 1."""
SAME = 1e-3
"""Nats by which one token's log-probability may differ between two places of one answer."""


def check_scores(
    scores: TokenScores, token_ids: Sequence[int], *, top_k: int, positions: np.ndarray | None, where: str
) -> None:
    """Raise `TeacherRequestError` unless the rows of `positions` (None: all) can be log-probabilities of tokens [T]."""
    rows = len(token_ids) - 1
    shapes = {
        "logprobs": (scores.logprobs.shape, (rows,)),
        "top1": (scores.top1.shape, (rows,)),
        "top_ids": (scores.top_ids.shape, (rows, top_k)),
        "top_logprobs": (scores.top_logprobs.shape, (rows, top_k)),
    }
    for name, (shape, expected) in shapes.items():
        if shape != expected:
            raise _wrong(f"{name} is {list(shape)} where {list(expected)} was asked for", where)
    at = np.arange(rows) if positions is None else np.asarray(positions) - 1
    own = scores.logprobs[at]
    if not np.isfinite(own).all():
        raise _wrong(f"no finite log-probability of token {int(at[~np.isfinite(own)][0]) + 1}", where)
    _check_range(own, where)
    if top_k and len(at):
        tokens = np.asarray(token_ids, dtype=np.int64)[at + 1]
        _check_likely(own, tokens, scores.top_ids[at], scores.top_logprobs[at], where)


def check_candidates(logprobs: np.ndarray, *, shape: tuple[int, int], given: np.ndarray | None, where: str) -> None:
    """The log-probabilities [N, K] of candidates that were named (`given` int32 [N, K], −1: none there), or of the
    whole vocabulary (None), whose probabilities make up 1."""
    if logprobs.shape != shape:
        raise _wrong(f"candidates are {list(logprobs.shape)} where {list(shape)} was asked for", where)
    wanted = np.ones(shape, dtype=np.bool_) if given is None else given >= 0
    if not np.isfinite(logprobs[wanted]).all():
        raise _wrong("a candidate has no finite log-probability", where)
    _check_range(logprobs[wanted], where)
    if given is None and len(logprobs):
        mass = np.exp(logprobs.astype(np.float64)).sum(axis=1)
        _check_mass(mass, where)
        if mass.min() < 1 - MASS:
            raise _wrong(f"probabilities of the whole vocabulary that make up {mass.min():.4f}", where)


def _check_likely(own: np.ndarray, tokens: np.ndarray, ids: np.ndarray, logprobs: np.ndarray, where: str) -> None:
    """The most likely tokens [N, K] beside the tokens [N] themselves."""
    there = ids >= 0
    if not np.array_equal(there, np.isfinite(logprobs)):
        raise _wrong("a candidate lacks its log-probability", where)
    if not there.any(axis=1).all():
        raise _wrong("a token has no candidate at all", where)
    _check_range(logprobs[there], where)
    values = np.where(there, logprobs.astype(np.float64), -np.inf)
    _check_mass(np.exp(values).sum(axis=1), where)
    ordered = np.sort(ids, axis=1)
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        raise _wrong("a candidate stands twice", where)
    among = (ids == tokens[:, None]) & there
    if np.abs(values - own[:, None])[among].max(initial=0.0) > SAME:
        raise _wrong("a token's own log-probability is another one among the candidates", where)
    if (own > values.max(axis=1) + SAME).any():
        raise _wrong("a token is more likely than the most likely one", where)


def _check_range(logprobs: np.ndarray, where: str) -> None:
    if logprobs.size and logprobs.max() > ABOVE_ZERO:
        raise _wrong(
            f"a log-probability of {logprobs.max():.4g} nats",
            where,
            remedy="log-probabilities are wanted, not logits: start the server with --logprobs-mode raw_logprobs",
        )


def _check_mass(mass: np.ndarray, where: str) -> None:
    if mass.max() > 1 + MASS:
        raise _wrong(
            f"probabilities that make up {mass.max():.4f}",
            where,
            remedy="log-probabilities at temperature 1 are wanted: start the server with --logprobs-mode raw_logprobs",
        )


def _wrong(what: str, where: str, *, remedy: str = "look at the teacher's log; nothing is trained on it") -> Exception:
    return TeacherRequestError(f"the teacher gave what cannot be scores: {what}", where=where, remedy=remedy)

"""Prompt log-probabilities in a vLLM server's JSON as `TokenScores`.

Position t of the answer maps token ids to entries: the prompt's own token first, then the k most likely ones by rank
(once where they are the same); position 0 is null. Nothing is filled in: what is not there, not a number or not finite
is a `ScoreFormatError`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from agentrl.wire import TokenScores

CLAMPED = -9998.0  # the server writes -9999 in place of -inf and NaN
_IDS = 1 << 31  # token ids are int32


class PromptLogprob(msgspec.Struct):
    """One token at one position. vLLM's JSON has null for NaN."""

    logprob: float | None = None
    rank: int | None = None


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class ScoreFormatError(ValueError):
    """The answer cannot be the scores of what was asked; its text says why."""


def token_scores(
    given: PromptLogprobs | None, token_ids: Sequence[int], *, top_k: int, positions: np.ndarray | None = None
) -> TokenScores:
    """The scores of tokens [T] with their `top_k` most likely ones; of `positions` ≥ 1 alone where they are given (the
    other rows are NaN and −1). Raises `ScoreFormatError`."""
    given = given or []
    if len(given) != len(token_ids):
        raise ScoreFormatError(f"{len(given)} prompt log-probabilities for {len(token_ids)} tokens")
    rows = len(token_ids) - 1
    logprobs, top1 = np.full(rows, np.nan, dtype=np.float32), np.zeros(rows, dtype=np.bool_)
    top_ids = np.full((rows, top_k), -1, dtype=np.int32)
    top_logprobs = np.full((rows, top_k), np.nan, dtype=np.float32)
    for position in range(1, len(token_ids)) if positions is None else positions.tolist():
        entries = given[position] or {}
        own = entries.get(int(token_ids[position]))
        if own is None:
            raise ScoreFormatError(f"no log-probability of prompt token {token_ids[position]} at {position}")
        if own.logprob is None or not math.isfinite(own.logprob) or own.logprob < CLAMPED:
            raise ScoreFormatError(f"log-probability {own.logprob} of prompt token {token_ids[position]} at {position}")
        logprobs[position - 1] = own.logprob
        top1[position - 1] = own.rank == 1
        if top_k:
            likely = _most_likely(entries, top_k, position)
            top_ids[position - 1, : len(likely)] = [token for token, _ in likely]
            top_logprobs[position - 1, : len(likely)] = [logprob for _, logprob in likely]
    return TokenScores(logprobs=logprobs, top1=top1, top_ids=top_ids, top_logprobs=top_logprobs)


def _most_likely(entries: dict[int, PromptLogprob], top_k: int, position: int) -> list[tuple[int, float]]:
    """(token, log-probability) by rank; tokens of probability 0 are none."""
    found = []
    for token, entry in entries.items():
        if entry.rank is None or entry.logprob is None or math.isnan(entry.logprob):
            raise ScoreFormatError(f"candidate {token} at {position} has rank {entry.rank} and {entry.logprob} nats")
        if entry.rank <= top_k and entry.logprob >= CLAMPED:
            if not 0 <= token < _IDS:
                raise ScoreFormatError(f"candidate {token} at {position} is no token id")
            found.append((entry.rank, token, entry.logprob))
    if len(found) > top_k:
        raise ScoreFormatError(f"{len(found)} candidates of rank {top_k} or better at {position}")
    found.sort()
    return [(token, logprob) for _, token, logprob in found]

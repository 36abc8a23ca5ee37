"""How far two token sequences agree: what decides whether a prompt continues a known segment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def common_prefix_len(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens the two share."""
    size = min(len(first), len(second))
    differ = np.asarray(first[:size]) != np.asarray(second[:size])
    return int(np.argmax(differ)) if differ.any() else size


def longest_known_prefix(known: Sequence[Sequence[int]], prompt: Sequence[int]) -> int | None:
    """Index of the longest of `known` that is a whole prefix of `prompt`; None where none is.

    A sequence that agrees only in part is never cut to fit: the prompt then opens a new segment.
    """
    best: int | None = None
    for index, ids in enumerate(known):
        whole = common_prefix_len(ids, prompt) == len(ids)
        if whole and (best is None or len(ids) > len(known[best])):
            best = index
    return best

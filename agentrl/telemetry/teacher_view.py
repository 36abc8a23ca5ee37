"""Student and teacher side by side, token by token: what the trajectory page shows of their disagreements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.trajectory.columns import Candidates

MOST_PREFERRED = 3


def preferred(
    candidates: Candidates, token_ids: Sequence[int], logprobs: Sequence[float | None]
) -> dict[int, list[tuple[int, float]]]:
    """Position → the candidates (id, log-probability) that the teacher finds likelier than the token that was sampled,
    the likeliest first, at most three. `logprobs` [T] are the teacher's of the segment's own `token_ids` [T]."""
    at = np.flatnonzero(candidates.mask)
    if not candidates.values:
        return {}
    own_ids, own = np.asarray(token_ids)[at, None], np.array(logprobs, np.float64)[at, None]
    ids = np.arange(candidates.logprobs.shape[1])[None, :] if candidates.ids is None else candidates.ids
    better = (candidates.logprobs > own) & (ids != own_ids)
    rank = np.where(better, candidates.logprobs, -np.inf)
    most = min(MOST_PREFERRED, rank.shape[1])
    top = np.argpartition(-rank, most - 1, axis=1)[:, :most]
    found: dict[int, list[tuple[int, float]]] = {}
    for row in np.flatnonzero(better.any(axis=1)):
        columns = sorted(top[row], key=lambda column: -rank[row, column])
        shown = [c for c in columns if better[row, c]]
        wide = np.broadcast_to(ids, rank.shape)
        found[int(at[row])] = [(int(wide[row, c]), float(candidates.logprobs[row, c])) for c in shown]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Sides:
    """What both said of a segment's T tokens; NaN where the teacher did not score.

    gap float64 [T]: log π_teacher − log π_student, of tokens that were scored together their sum, as it is trained.
    distance float64 [N]: log π_student − log π_teacher of each scored token, spans in equal shares.
    """

    gap: NDArray[np.float64]
    distance: NDArray[np.float64]


def sides(row: Mapping[str, Any]) -> Sides | None:
    """A segment's row as both see it; None where nobody scored it, or nothing was sampled."""
    if row.get("teacher_logprobs") is None or row.get("logprobs") is None:
        return None
    difference = np.array(row["teacher_logprobs"], np.float64) - np.array(row["logprobs"], np.float64)
    scored = np.isfinite(difference)
    gap = difference.copy()
    if row.get("teacher_spans") is not None:
        spans = np.array([-1 if number is None else number for number in row["teacher_spans"]])
        _, places = np.unique(spans[scored], return_inverse=True)
        gap[scored] = np.bincount(places, weights=difference[scored])[places] if scored.any() else 0.0
    return Sides(gap, -difference[scored])

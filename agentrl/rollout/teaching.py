"""How far the student is from its teachers, by the public metric names. Pure.

The distance is the Monte Carlo estimate of the reverse KL on what was sampled: the mean over scored tokens of
log π_behaviour − log π_teacher, in nats (Schulman, "Approximating KL divergence", k1). It is unbiased and may be
negative for few tokens. Tokens that a teacher scored together hold equal shares of their sum, so that means over them
are those of the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.rollout.batching import trainable
from agentrl.rollout.groups import GroupResult
from agentrl.trajectory import Purpose, Segment, TeacherScores, Trajectory

LAST_TURN = 10
"""Turns from this one on are measured together."""


@dataclass(frozen=True, slots=True, eq=False)
class _Scored:
    """The N scored tokens of some segments: gap float64 [N], log π_behaviour − log π_teacher; turn int64 [N]; summary
    bool [N], sampled to compress the context; teacher int64 [N], an index; top1 bool [M ≤ N], where it is known."""

    gap: NDArray[np.float64]
    turn: NDArray[np.int64]
    summary: NDArray[np.bool_]
    teacher: NDArray[np.int64]
    top1: NDArray[np.bool_]


def teaching_metrics(groups: Sequence[GroupResult]) -> dict[str, float]:
    """Metrics of the scored trajectories among the valid ones of `groups`, {} where none is scored."""
    taught = [trajectory for group in groups for trajectory in group.valid if trajectory.scores]
    pairs = [pair for t in taught for pair in zip(t.segments, t.scores, strict=True)]
    if not pairs:
        return {}
    names = sorted({scores.teacher for _, scores in pairs})
    scored = _join([_scored(segment, scores, names.index(scores.teacher)) for segment, scores in pairs])
    metrics = {"teacher/scored_tokens": float(scored.gap.size)}
    wanted = sum(int(trainable(segment).sum()) for segment, _ in pairs)
    if wanted:
        metrics["teacher/unscored_fraction"] = 1.0 - scored.gap.size / wanted
    if scored.top1.size:
        metrics["teacher/top1_agreement"] = float(scored.top1.mean())
    parts = {"teacher/kl": np.ones(scored.gap.size, np.bool_)}
    if len(names) > 1:
        parts |= {f"teacher/kl/{name}": scored.teacher == index for index, name in enumerate(names)}
    parts |= {f"teacher/kl_turn/{_turn_name(turn)}": scored.turn == turn for turn in range(LAST_TURN + 1)}
    parts["teacher/kl_purpose/act"] = ~scored.summary
    parts["teacher/kl_purpose/summarise"] = scored.summary
    metrics |= {name: float(scored.gap[part].mean()) for name, part in parts.items() if part.any()}
    return metrics | _waited(taught)


def _waited(taught: Sequence[Trajectory]) -> dict[str, float]:
    """The share of the rollouts' time, from their sandbox on, in which all but their scores was there."""
    waited = sum(t.info.get("teacher_wait_s", 0.0) for t in taught)
    lasted = waited + sum(t.info.get(name, 0.0) for t in taught for name in ("setup_s", "episode_s", "score_s"))
    return {"teacher/wait_fraction": waited / lasted} if lasted > 0 else {}


def _turn_name(turn: int) -> str:
    return f"{turn}+" if turn == LAST_TURN else str(turn)


def _scored(segment: Segment, scores: TeacherScores, teacher: int) -> _Scored:
    lengths = [span.stop - span.start for span in segment.spans]
    turns = np.repeat([min(span.turn, LAST_TURN) for span in segment.spans], lengths)
    summary = np.repeat([span.purpose is Purpose.SUMMARISE for span in segment.spans], lengths)
    mask = scores.mask & np.isfinite(segment.logprobs)
    gap = segment.logprobs[mask].astype(np.float64) - scores.logprobs[mask]
    top1 = np.zeros(0, np.bool_) if scores.top1 is None else scores.top1[mask]
    return _Scored(gap, turns[mask], summary[mask], np.full(gap.size, teacher), top1)


def _join(parts: Sequence[_Scored]) -> _Scored:
    return _Scored(
        gap=np.concatenate([part.gap for part in parts]),
        turn=np.concatenate([part.turn for part in parts]),
        summary=np.concatenate([part.summary for part in parts]),
        teacher=np.concatenate([part.teacher for part in parts]),
        top1=np.concatenate([part.top1 for part in parts]),
    )

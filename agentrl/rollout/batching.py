"""Groups and advantages → the trainer's Batch, and the trainer's StepResult → the record.

Streams are aligned at token t (`agentrl.wire.TrainSequence`), so token 0, which nothing predicts, is never
trained. Each sampled token of a valid member stands in exactly one trained place: segments hold it once, and
a segment enters a batch once.

A member whose advantage is 0 inside an accepted group (a middling reward) stays in the batch: its gradient is
0, but its tokens count in the loss's denominator, so that a group's weight does not depend on how its rewards
fall. Groups in which *every* advantage is 0 were filtered before. Members that infrastructure failed are left
out altogether.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from agentrl.errors import RecordError
from agentrl.rollout.filters import Verdict
from agentrl.rollout.groups import ScoredGroup
from agentrl.rollout.scheduler import check_staleness
from agentrl.trajectory import Segment, Source, TeacherScores, Trained, Trajectory
from agentrl.wire import Batch, StepResult, TrainedSequence, TrainSequence


def form_batch(
    groups: Sequence[ScoredGroup],
    *,
    step: int,
    version: int,
    updates: int,
    temperature: float,
    max_staleness: int | None = 0,
    reward_weight: float = 1.0,
) -> Batch:
    """The batch of a step. Deterministic: groups are taken by id, whatever order they finished in.

    `updates` shrinks to the number of groups where fewer were accepted, as a group is never split. Advantages are
    multiplied by `reward_weight`; with 0 the policy-gradient stream is empty. Where teachers have scored, each scored
    token has weight 1 in the divergence stream. `max_staleness` None: the tokens are of another run's versions.

    Raises `StalenessError` for a token out of bounds and `RecordError` for a group that must not be trained.
    """
    ordered = sorted(groups, key=lambda scored: scored.group.group_id)
    _check(ordered, version=version, max_staleness=max_staleness)
    updates = min(updates, len(ordered))
    place = assign_updates({s.group.group_id: trained_tokens(s) for s in ordered}, updates=updates)
    sequences = tuple(
        _sequence(
            trajectory,
            index,
            advantage=float(advantage) * reward_weight,
            rewarded=_is_rewarded(scored, reward_weight),
            update=place[scored.group.group_id],
        )
        for scored in ordered
        for trajectory, advantage in zip(scored.group.trajectories, scored.advantages, strict=True)
        if not np.isnan(advantage)
        for index, segment in enumerate(trajectory.segments)
        if trainable(segment).any()
    )
    return Batch(step=step, version=version, updates=updates, temperature=temperature, sequences=sequences)


def trainable(segment: Segment) -> np.ndarray:
    """bool [T]: the agent's tokens that something predicts (all but one at position 0)."""
    mask = segment.agent_mask
    mask[0] = False
    return mask


def trained_tokens(scored: ScoredGroup) -> int:
    """How many tokens of a group enter the policy-gradient loss."""
    return sum(int(trainable(segment).sum()) for t in scored.group.valid for segment in t.segments)


def assign_updates(tokens: Mapping[str, int], *, updates: int) -> dict[str, int]:
    """Which optimizer step trains each group: whole groups, token counts about equal, every step non-empty.

    Largest group first, to the step with the fewest tokens; ties: fewer groups, then the earlier step.
    """
    loads = [(0, 0, update) for update in range(updates)]
    place: dict[str, int] = {}
    for group_id in sorted(tokens, key=lambda name: (-tokens[name], name)):
        lightest = min(range(updates), key=loads.__getitem__)
        load, groups, _ = loads[lightest]
        loads[lightest] = (load + tokens[group_id], groups + 1, lightest)
        place[group_id] = lightest
    return place


def _is_rewarded(scored: ScoredGroup, reward_weight: float) -> bool:
    """Whether a group's tokens enter the policy-gradient stream. A group that a teacher alone speaks of, its rewards
    being equal, does not: it would only dilute the others."""
    values = scored.advantages[~np.isnan(scored.advantages)]
    return reward_weight > 0 and bool(np.any(values != 0))


def _sequence(trajectory: Trajectory, index: int, *, advantage: float, rewarded: bool, update: int) -> TrainSequence:
    segment = trajectory.segments[index]
    sampled = trainable(segment)
    mask = sampled if rewarded else np.zeros_like(sampled)
    return TrainSequence(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        segment=index,
        update=update,
        token_ids=segment.token_ids,
        pg_mask=mask,
        advantages=np.where(mask, np.float32(advantage), np.float32(0)),
        behaviour_logprobs=np.where(sampled, segment.logprobs, np.float32(0)),
        versions=segment.versions,
        **(_teacher_streams(trajectory.scores[index]) if trajectory.scores else {}),
    )


def _teacher_streams(scores: TeacherScores) -> dict[str, np.ndarray | None]:
    """The divergence stream of a segment; values off the scored tokens are 0 and weigh nothing."""
    scored = scores.mask
    return {
        "teacher_logprobs": np.where(scored, scores.logprobs, np.float32(0)),
        "teacher_weights": scored.astype(np.float32),
        "teacher_spans": scores.spans,
        "candidate_ids": scores.candidate_ids,
        "candidate_logprobs": scores.candidate_logprobs,
    }


def _check(groups: Sequence[ScoredGroup], *, version: int, max_staleness: int | None) -> None:
    seen: set[str] = set()
    for scored in groups:
        group = scored.group
        reason = _refusal(scored, seen)
        if reason:
            raise RecordError(reason, where=f"group {group.group_id}", remedy="train accepted groups, each once")
        seen.update(t.trajectory_id for t in group.trajectories)
    if max_staleness is None:
        return
    spans = {s.group.group_id: s.group.versions for s in groups if s.group.versions is not None}
    check_staleness(spans, version=version, max_staleness=max_staleness)


def _refusal(scored: ScoredGroup, seen: set[str]) -> str:
    if scored.verdict is not Verdict.ACCEPTED:
        return f"a group judged {scored.verdict.value} cannot be trained"
    for trajectory, advantage in zip(scored.group.trajectories, scored.advantages, strict=True):
        if trajectory.trajectory_id in seen:
            return f"trajectory {trajectory.trajectory_id} is in the batch twice"
        if trajectory.source is not Source.SAMPLED:
            return f"trajectory {trajectory.trajectory_id} is a demonstration, without log-probabilities"
        if (trajectory.reward is None) != bool(np.isnan(advantage)):
            return f"trajectory {trajectory.trajectory_id} has a reward without advantage or the reverse"
    return ""


def trained_records(batch: Batch, result: StepResult, groups: Sequence[ScoredGroup]) -> dict[str, list[Trained] | None]:
    """What training did to every trajectory of `groups`, by name; None where it was not in the batch.

    Joined by (trajectory, segment). Raises `RecordError` where the trainer's answer does not fit the batch.
    """
    answers = {(sequence.trajectory_id, sequence.segment): sequence for sequence in result.sequences}
    asked = {(sequence.trajectory_id, sequence.segment): sequence for sequence in batch.sequences}
    if result.step != batch.step or answers.keys() != asked.keys() or len(answers) != len(result.sequences):
        raise RecordError(
            f"the trainer's answer to step {batch.step} is for step {result.step} and names "
            f"{len(answers.keys() ^ asked.keys())} other segments",
            where=f"step {batch.step}",
        )
    names = {trajectory_id for trajectory_id, _ in asked}
    return {
        t.trajectory_id: [
            _trained(batch.step, segment, asked.get((t.trajectory_id, i)), answers.get((t.trajectory_id, i)))
            for i, segment in enumerate(t.segments)
        ]
        if t.trajectory_id in names
        else None
        for scored in groups
        for t in scored.group.trajectories
    }


def _trained(step: int, segment: Segment, asked: TrainSequence | None, answer: TrainedSequence | None) -> Trained:
    """The record of one segment; all off where a trained trajectory's segment has no sampled token."""
    if asked is None or answer is None:
        length = len(segment)
        empty = np.zeros(length, np.float32)
        return Trained(step, np.full(length, np.nan, np.float32), empty, np.zeros(length, np.bool_))
    mask = np.asarray(answer.mask, np.bool_)
    record = Trained(
        step,
        np.where(mask, asked.advantages, np.float32(np.nan)),
        np.where(mask, answer.weights, np.float32(0)),
        mask,
    )
    record.check(segment)
    return record

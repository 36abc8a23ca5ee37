"""Batches: alignment, whole groups per update, each token once, and the way back (K29, K30, K34)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import RecordError, StalenessError
from agentrl.rollout.batching import assign_updates, form_batch, trained_records
from agentrl.rollout.groups import GroupResult, ScoredGroup, score_group
from agentrl.trajectory import Source
from agentrl.wire import Batch, StepResult, TrainedSequence


def batch_of(groups: list[ScoredGroup], **changes: Any) -> Batch:
    settings: dict[str, Any] = {"step": 3, "version": 0, "updates": 1, "temperature": 1.0}
    return form_batch(groups, **{**settings, **changes})


def answer(batch: Batch) -> StepResult:
    """What a trainer says that masked each sequence's first trained token."""
    sequences = []
    for s in batch.sequences:
        mask = s.pg_mask.copy()
        mask[np.flatnonzero(mask)[0]] = False
        sequences.append(
            TrainedSequence(
                trajectory_id=s.trajectory_id,
                segment=s.segment,
                weights=np.full(len(mask), 1.5, np.float32),
                mask=mask,
            )
        )
    return StepResult(step=batch.step, updates=batch.updates, metrics={}, sequences=tuple(sequences))


def score_groups(groups: list[GroupResult], *, advantage: str) -> list[ScoredGroup]:
    return [score_group(group, advantage=advantage) for group in groups]


def test_streams_speak_of_their_own_token(toys: Any) -> None:
    batch = batch_of(score_groups([toys.group(rewards=[1.0, 0.0])], advantage="group_std"))
    first = batch.sequences[0]
    assert first.token_ids.tolist() == [10, 11, 12, 13, 14]
    assert first.pg_mask.tolist() == [False, False, True, True, False]
    assert first.advantages.tolist() == [0, 0, 1, 1, 0]
    assert first.behaviour_logprobs.tolist() == [0, 0, -0.125, -0.25, 0]
    assert first.versions.tolist() == [-1, -1, 0, 0, -1]
    assert first.advantages.dtype == first.behaviour_logprobs.dtype == np.float32
    assert batch.sequences[1].advantages.tolist() == [0, 0, -1, -1, 0]


def test_token_zero_is_never_trained(toys: Any) -> None:
    members = tuple(
        toys.trajectory(member=i, reward=r, segments=[toys.segment(3, prompt=0)]) for i, r in enumerate((1.0, 0.0))
    )
    batch = batch_of([score_group(GroupResult("g0", "task", 0, members), advantage="group_mean")])
    assert batch.sequences[0].pg_mask.tolist() == [False, True, True, False]


def test_k29_k30_every_segment_carries_its_rollouts_advantage_and_each_sampled_token_once(toys: Any) -> None:
    """The worked example: 3, 1, 2, 1 segments, rewards 1, 0, 0, 1."""
    members = tuple(
        toys.trajectory(member=i, reward=r, segments=[toys.segment(2 + i)] * n)
        for i, (n, r) in enumerate(zip((3, 1, 2, 1), (1.0, 0.0, 0.0, 1.0), strict=True))
    )
    group = GroupResult("g0", "task", 0, members)
    batch = batch_of([score_group(group, advantage="group_mean")])
    places = [(s.trajectory_id, s.segment) for s in batch.sequences]
    assert len(set(places)) == len(places) == 7
    assert {s.trajectory_id: set(s.advantages[s.pg_mask].tolist()) for s in batch.sequences} == {
        "g0-0": {0.5},
        "g0-1": {-0.5},
        "g0-2": {-0.5},
        "g0-3": {0.5},
    }
    assert sum(int(s.pg_mask.sum()) for s in batch.sequences) == sum(t.agent_tokens for t in members)


def test_failed_members_are_left_out_and_zero_advantages_kept_in_the_denominator(toys: Any) -> None:
    batch = batch_of([score_group(toys.group(rewards=[1.0, 0.5, None, 0.0]), advantage="group_mean")])
    assert [s.trajectory_id for s in batch.sequences] == ["g0-0", "g0-1", "g0-3"]
    assert batch.sequences[1].advantages.tolist() == [0] * 5
    assert batch.sequences[1].pg_mask.sum() == 2


def test_k34_the_order_groups_finish_in_changes_nothing(toys: Any) -> None:
    groups = score_groups([toys.group(f"g{i}", [1.0, 0.0]) for i in range(5)], advantage="group_std")
    forward, backward = batch_of(groups, updates=2), batch_of(groups[::-1], updates=2)
    assert [(s.trajectory_id, s.update) for s in forward.sequences] == [
        (s.trajectory_id, s.update) for s in backward.sequences
    ]


@settings(deadline=None)
@given(st.dictionaries(st.text("abcdef", min_size=1), st.integers(1, 500), min_size=1), st.integers(1, 5))
def test_updates_take_whole_groups_of_about_equal_tokens(tokens: dict[str, int], updates: int) -> None:
    updates = min(updates, len(tokens))
    place = assign_updates(tokens, updates=updates)
    assert place.keys() == tokens.keys()
    loads = [sum(n for g, n in tokens.items() if place[g] == u) for u in range(updates)]
    assert min(loads) > 0
    assert max(loads) - min(loads) <= max(tokens.values())
    assert assign_updates(dict(reversed(tokens.items())), updates=updates) == place


def test_the_largest_groups_are_placed_first() -> None:
    place = assign_updates({"a": 1, "b": 1, "c": 1, "d": 3}, updates=2)
    assert place == {"d": 0, "a": 1, "b": 1, "c": 1}


def test_updates_shrink_to_the_groups_there_are(toys: Any) -> None:
    groups = score_groups([toys.group(f"g{i}") for i in range(2)], advantage="group_std")
    batch = batch_of(groups, updates=4)
    assert batch.updates == 2
    assert {s.update for s in batch.sequences} == {0, 1}
    assert batch_of([], updates=2).sequences == ()


def test_what_must_not_be_trained_is_refused(toys: Any) -> None:
    equal = score_group(toys.group(rewards=[1.0, 1.0]), advantage="group_std")
    with pytest.raises(RecordError, match="zero_variance"):
        batch_of([equal])
    good = score_group(toys.group(), advantage="group_std")
    with pytest.raises(RecordError, match="twice"):
        batch_of([good, good])
    members = tuple(toys.trajectory(member=i, reward=r, source=Source.DEMONSTRATION) for i, r in enumerate((1.0, 0.0)))
    with pytest.raises(RecordError, match="demonstration"):
        batch_of([score_group(GroupResult("g0", "task", 0, members), advantage="group_std")])


def test_k14_one_token_of_another_version_refuses_the_batch(toys: Any) -> None:
    group = score_group(toys.group(version=4), advantage="group_std")
    assert batch_of([group], version=4).version == 4
    for version in (3, 5):
        with pytest.raises(StalenessError, match="g0"):
            batch_of([group], version=version)
    assert batch_of([group], version=5, max_staleness=1).version == 5


def test_the_record_of_training_comes_back_by_name(toys: Any) -> None:
    """The inverse, joined by id (K34): NaN and 0 off the mask, None for what was not trained."""
    empty = toys.segment(0)
    mixed = toys.trajectory("g1", 0, reward=1.0, segments=[toys.segment(2), empty])
    second = GroupResult("g1", "task", 1, (mixed, toys.trajectory("g1", 1, reward=0.0)))
    groups = score_groups([toys.group("g0", [1.0, None, 0.0]), second], advantage="group_mean")
    batch = batch_of(groups)
    result = answer(batch)
    shuffled = StepResult(step=3, updates=1, metrics={}, sequences=result.sequences[::-1])
    records = trained_records(batch, shuffled, groups)
    assert records.keys() == {"g0-0", "g0-1", "g0-2", "g1-0", "g1-1"}
    assert records["g0-1"] is None
    first = records["g0-0"]
    assert first is not None
    assert (first[0].step, first[0].mask.tolist()) == (3, [False, False, False, True, False])
    np.testing.assert_array_equal(first[0].advantages, np.array([np.nan, np.nan, np.nan, 0.5, np.nan], np.float32))
    assert first[0].weights.tolist() == [0, 0, 0, 1.5, 0]
    two = records["g1-0"]
    assert two is not None
    assert [record.mask.any() for record in two] == [True, False]
    for trajectory in second.trajectories:
        for segment, record in zip(trajectory.segments, records[trajectory.trajectory_id] or (), strict=True):
            record.check(segment)


@pytest.mark.parametrize("fault", ["step", "missing", "doubled", "prompt"])
def test_an_answer_that_does_not_fit_is_refused(toys: Any, fault: str) -> None:
    groups = score_groups([toys.group()], advantage="group_std")
    batch = batch_of(groups)
    good = answer(batch)
    sequences = good.sequences
    if fault == "missing":
        sequences = sequences[:1]
    elif fault == "doubled":
        sequences = (*sequences, sequences[0])
    elif fault == "prompt":
        sequences = tuple(
            TrainedSequence(trajectory_id=s.trajectory_id, segment=0, weights=s.weights, mask=np.ones(5, np.bool_))
            for s in sequences
        )
    step = 4 if fault == "step" else 3
    with pytest.raises(RecordError):
        trained_records(batch, StepResult(step=step, updates=1, metrics={}, sequences=sequences), groups)

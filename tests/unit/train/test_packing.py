"""Micro-batches: alignment, masks from streams and not from token values, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import RecordError
from agentrl.train.logprobs import token_logprobs
from agentrl.train.packing import check_batch, pack, plan_rows


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), max_size=30), budget=st.integers(1, 200))
def test_plan_holds_each_row_once_within_the_budget(lengths, budget):
    plan = plan_rows(lengths, tokens_per_microbatch=budget)
    assert sorted(i for rows in plan for i in rows) == list(range(len(lengths)))
    for rows in plan:
        assert len(rows) * max(lengths[i] for i in rows) <= budget or len(rows) == 1


def test_streams_stay_beside_their_tokens(make_sequence):
    sequences = [make_sequence(length=n, seed=n, ce=True, teacher=True) for n in (5, 9, 3)]
    (micro,) = pack(sequences, tokens_per_microbatch=1000)
    assert micro.rows == (1, 0, 2)
    assert micro.lengths.tolist() == [9, 5, 3]
    for b, row in enumerate(micro.rows):
        sequence, n = sequences[row], int(micro.lengths[b])
        assert micro.token_ids[b, :n].tolist() == sequence.token_ids.tolist()
        assert micro.pg_mask[b, :n].tolist() == sequence.pg_mask.tolist()
        for name, mask in (
            ("advantages", sequence.pg_mask),
            ("behaviour_logprobs", sequence.pg_mask),
            ("teacher_logprobs", sequence.teacher_weights > 0),
        ):
            expected = np.where(mask, getattr(sequence, name), 0)
            np.testing.assert_array_equal(getattr(micro, name)[b, :n].numpy(), expected)
        assert not micro.needed[b, n:].any()


def test_k5_pad_id_equal_to_a_sampled_token_changes_nothing(toy_model, make_sequence):
    """K5: the padding id is a token that the sequences really hold, as where pad equals end-of-turn."""
    ids = np.array([7, 0, 7, 0, 0, 7, 0], dtype=np.int32)
    mask = np.array([0, 0, 0, 1, 1, 1, 1], dtype=bool)
    short = make_sequence(
        length=7, trajectory_id="short", token_ids=ids, pg_mask=mask, advantages=np.ones(7, np.float32)
    )
    long = make_sequence(length=20, seed=3)
    model = toy_model()
    found = []
    for pad_id in (0, 7, 11):
        (micro,) = pack([short, long], tokens_per_microbatch=1000, pad_id=pad_id)
        row = micro.rows.index(0)
        assert micro.pg_mask[row].sum() == 4
        out = token_logprobs(model, token_ids=micro.token_ids, needed=micro.needed, temperature=1.0)
        found.append(out.logprobs[row, :7].detach())
    (alone,) = pack([short], tokens_per_microbatch=1000)
    found.append(token_logprobs(model, token_ids=alone.token_ids, needed=alone.needed, temperature=1.0).logprobs[0])
    assert (found[0] != 0).tolist() == mask.tolist()
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["pg_mask", "advantages", "behaviour_logprobs", "versions", "ce_weights"])
@pytest.mark.parametrize("change", [-1, 1])
def test_k4_unequal_lengths_name_the_trajectory(make_sequence, name, change):
    sequence = make_sequence(length=8, ce=True, trajectory_id="trajectory-17")
    wrong = np.resize(getattr(sequence, name), 8 + change)
    with pytest.raises(RecordError, match=name) as caught:
        pack(
            [make_sequence(length=8, ce=True, trajectory_id="trajectory-17", **{name: wrong})],
            tokens_per_microbatch=64,
        )
    assert "trajectory-17" in caught.value.where


def test_k36_missing_teacher_logprobs_are_refused(make_sequence):
    sequence = make_sequence(length=8, teacher=True)
    holed = sequence.teacher_logprobs.copy()
    holed[-1] = np.nan
    with pytest.raises(RecordError, match="teacher_logprobs is not finite"):
        pack([make_sequence(length=8, teacher=True, teacher_logprobs=holed)], tokens_per_microbatch=64)
    with pytest.raises(RecordError, match="come together"):
        pack([make_sequence(length=8, teacher_weights=sequence.teacher_weights)], tokens_per_microbatch=64)


def test_refusals(make_sequence, make_batch):
    good = make_sequence(length=6)
    first = good.pg_mask.copy()
    first[0] = True
    nan = np.where(good.pg_mask, np.nan, 0).astype(np.float32)
    for streams, words in (
        ({"pg_mask": first, "advantages": np.zeros(6, np.float32)}, "token 0"),
        ({"advantages": nan}, "advantages is not finite"),
        ({"ce_weights": -np.ones(6, np.float32)}, "negative"),
    ):
        with pytest.raises(RecordError, match=words):
            check_batch(make_batch([make_sequence(length=6, **streams)]))
    with pytest.raises(RecordError, match="update 1"):
        check_batch(make_batch([make_sequence(length=6, update=1)]))


def test_k30_a_segment_given_twice_is_refused(make_sequence, make_batch):
    """K30: each sampled token is trained exactly once."""
    with pytest.raises(RecordError, match="twice"):
        check_batch(make_batch([make_sequence(length=6, update=0), make_sequence(length=6, update=1)], updates=2))

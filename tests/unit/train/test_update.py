"""The gradient of one update: equal under any packing, on the right token, blind to nothing it should see."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import CorrectionConfig, DivergenceConfig, LossConfig, RejectionRule
from agentrl.train.correction import preset
from agentrl.train.logprobs import check_head, token_logprobs
from agentrl.train.losses import Counts
from agentrl.train.packing import pack
from agentrl.train.update import Objective, compute_gradient, correction_metrics

NAMES = ("ppo_clip", "cispo", "gspo", "reinforce")
MODES = ("decoupled", "bypass")


def objective(*, name="ppo_clip", mode="decoupled", correction="token-clamp-2", temperature=1.0, old=None) -> Objective:
    found = preset(correction) if isinstance(correction, str) else correction
    return Objective(
        loss=LossConfig(name=name, mode=mode),
        correction=found,
        temperature=temperature,
        old=old or {},
        divergence=DivergenceConfig(),
    )


def gradient(model, sequences, goal: Objective, *, budget: int = 10_000, pad_id: int = 0):
    """The update's summary and one flat float64 vector of all gradients."""
    summary = compute_gradient(model, pack(sequences, tokens_per_microbatch=budget, pad_id=pad_id), goal)
    return summary, torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def own_logprobs(model, sequence, *, temperature: float = 1.0) -> np.ndarray:
    """Plain recompute from the model's whole logits: log p of each token, 0 for the first."""
    ids = torch.tensor(sequence.token_ids, dtype=torch.int64)[None]
    with torch.no_grad():
        table = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
    return np.concatenate([[0.0], table.gather(-1, ids[0, 1:, None])[:, 0].numpy()])


REJECTING = CorrectionConfig(
    action="mask",
    lower=0.3,
    upper=3.0,
    reject=(RejectionRule(stat="k3", level="sequence", agg="mean", upper=0.25),),
)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=7),
    budget=st.integers(2, 120),
    pad_id=st.integers(0, 47),
    order=st.randoms(use_true_random=False),
    name=st.sampled_from(NAMES),
    mode=st.sampled_from(MODES),
    correction=st.sampled_from(["token-clamp-2", "token-mask-2", "rejecting"]),
    kinds=st.sampled_from([(True, False, False), (True, True, False), (True, True, True), (False, True, True)]),
)
def test_k31_loss_and_gradient_do_not_depend_on_packing(
    toy_model, make_sequence, lengths, budget, pad_id, order, name, mode, correction, kinds
):
    """K31: one global token count per stream, so any packing, order, padding and micro-batch size give the
    same."""
    model = toy_model(double=True)
    pg, ce, teacher = kinds
    sequences = [
        make_sequence(length=n, seed=i, pg=pg, ce=ce and i % 2 == 0, teacher=teacher) for i, n in enumerate(lengths)
    ]
    goal = objective(name=name, mode=mode, correction=REJECTING if correction == "rejecting" else correction)
    one, whole = gradient(model, sequences, goal)
    shuffled = list(sequences)
    order.shuffle(shuffled)
    other, split = gradient(model, shuffled, goal, budget=budget, pad_id=pad_id)
    assert one.counts == other.counts
    for field in ("policy_loss", "cross_entropy_loss", "divergence_loss", "reverse_kl", "entropy_sum"):
        assert getattr(one, field) == pytest.approx(getattr(other, field), abs=1e-6)
    scale = max(1.0, float(whole.norm()))
    assert float((whole - split).abs().max()) / scale < 1e-6
    records = [list(g.records.values()) for g in (one, other)]
    metrics = [correction_metrics(r, goal.correction) for r in records]
    assert metrics[0] == pytest.approx(metrics[1], abs=1e-6, rel=1e-6)


def test_k31_float32_too(toy_model, make_sequence):
    model = toy_model()
    sequences = [make_sequence(length=n, seed=n, ce=True, teacher=True) for n in (30, 3, 17, 8, 24, 2)]
    _, whole = gradient(model, sequences, objective())
    for budget in (1, 40, 90):
        _, split = gradient(model, sequences, objective(), budget=budget)
        assert float((whole - split).abs().max() / whole.norm()) < 1e-6


@pytest.mark.parametrize("streams", [(True, False), (True, True)])
def test_rejected_tokens_leave_the_denominator(toy_model, make_sequence, streams):
    """The gradient with a rejected sequence equals the gradient without that sequence at all."""
    model = toy_model(double=True)
    pg, ce = streams
    kept = [make_sequence(length=12, seed=i, pg=pg, ce=ce) for i in range(3)]
    kept = [
        make_sequence(length=12, seed=i, pg=pg, ce=ce, behaviour_logprobs=own_logprobs(model, s))
        for i, s in enumerate(kept)
    ]
    far = make_sequence(length=15, seed=9, behaviour_logprobs=np.full(15, -12.0, np.float32))
    rule = RejectionRule(stat="k1", level="sequence", agg="mean", upper=1.0)
    goal = objective(correction=CorrectionConfig(action="none", upper=None, reject=(rule,)))
    with_far, one = gradient(model, [*kept, far], goal)
    without, two = gradient(model, kept, goal)
    assert with_far.counts == without.counts
    torch.testing.assert_close(one, two, atol=1e-6, rtol=0)  # the model's norms are in float32
    assert with_far.policy_loss == pytest.approx(without.policy_loss, abs=1e-6)


def test_non_finite_behaviour_logprob_leaves_loss_and_denominator(toy_model, make_sequence):
    model = toy_model(double=True)
    sequence = make_sequence(length=12, seed=1)
    at = int(np.flatnonzero(sequence.pg_mask)[1])
    holed, reduced = sequence.behaviour_logprobs.copy(), sequence.pg_mask.copy()
    holed[at], reduced[at] = np.nan, False
    one, first = gradient(model, [make_sequence(length=12, seed=1, behaviour_logprobs=holed)], objective())
    two, second = gradient(model, [make_sequence(length=12, seed=1, pg_mask=reduced)], objective())
    assert one.counts == two.counts == Counts(policy=int(reduced.sum()))
    torch.testing.assert_close(first, second, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("name", "mode"), itertools.product(NAMES, MODES))
@pytest.mark.parametrize("position", ["first", "last"])
def test_k6_one_hot_gradient_at_first_and_last_sampled_token(toy_model, make_sequence, name, mode, position):
    """K6: advantage 1 at one token alone gives −∇ log π of exactly that token, computed here from the whole
    logits."""
    model = toy_model(double=True)
    length = 11
    at = 4 if position == "first" else length - 1  # the prompt is tokens 0-3
    pg_mask = np.arange(length) == at
    base = make_sequence(length=length, seed=2)
    behaviour = own_logprobs(model, base).astype(np.float32)
    sequence = make_sequence(
        length=length,
        seed=2,
        pg_mask=pg_mask,
        advantages=pg_mask.astype(np.float32),
        behaviour_logprobs=behaviour,
    )
    _, found = gradient(model, [sequence, make_sequence(length=20, seed=5, pg=False)], objective(name=name, mode=mode))
    model.zero_grad()
    ids = torch.tensor(sequence.token_ids, dtype=torch.int64)[None]
    (-model(input_ids=ids).logits[0, at - 1].log_softmax(-1)[ids[0, at]]).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("stream", ["ce", "teacher"])
@pytest.mark.parametrize("at", [1, 10])
def test_k6_the_other_streams_train_the_same_token(toy_model, make_sequence, stream, at):
    model = toy_model(double=True)
    one = (np.arange(11) == at).astype(np.float32)
    base = make_sequence(length=11, seed=2)
    behaviour = own_logprobs(model, base).astype(np.float32)
    streams = (
        {"ce_weights": one}
        if stream == "ce"
        else {
            "teacher_weights": one,
            "teacher_logprobs": behaviour + np.float32(2.0),
            "behaviour_logprobs": behaviour,
        }
    )
    _, found = gradient(model, [make_sequence(length=11, seed=2, pg=False, **streams)], objective())
    model.zero_grad()
    ids = torch.tensor(base.token_ids, dtype=torch.int64)[None]
    (-model(input_ids=ids).logits[0, at - 1].log_softmax(-1)[ids[0, at]]).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]) * (1 if stream == "ce" else 2)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_k6_teacher_equal_to_student_gives_no_divergence(toy_model, make_sequence):
    model = toy_model()
    base = make_sequence(length=20, seed=3, teacher=True)
    own = own_logprobs(model, base).astype(np.float32)
    sequence = make_sequence(length=20, seed=3, pg=False, teacher=True, teacher_logprobs=own, behaviour_logprobs=own)
    summary, flat = gradient(model, [sequence], objective())
    assert abs(summary.reverse_kl) < 1e-4
    assert float(flat.norm()) < 1e-3


def test_k35_gradient_depends_on_the_teacher(toy_model, make_sequence):
    model = toy_model()
    base = make_sequence(length=20, seed=3, teacher=True)
    found = []
    for shift in (0.0, 1.0, -1.0):
        teacher = base.teacher_logprobs + np.float32(shift) * np.linspace(-1, 1, 20).astype(np.float32)
        sequence = make_sequence(length=20, seed=3, pg=False, teacher=True, teacher_logprobs=teacher)
        found.append(gradient(model, [sequence], objective())[1])
    assert float((found[0] - found[1]).norm()) > 0.1 * float(found[0].norm())
    torch.testing.assert_close(found[1] + found[2], 2 * found[0], atol=1e-4, rtol=1e-3)  # linear in the teacher


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_k9_temperature_divides_the_logits(toy_model, make_sequence, temperature):
    """K9: behaviour log-probabilities after temperature give ratio 1 at T ≠ 1, and none other does."""
    model = toy_model()
    base = make_sequence(length=20, seed=3)
    behaviour = own_logprobs(model, base, temperature=temperature).astype(np.float32)
    sequence = make_sequence(length=20, seed=3, behaviour_logprobs=behaviour)
    goal = objective(temperature=temperature)
    summary, _ = gradient(model, [sequence], goal)
    metrics = correction_metrics(list(summary.records.values()), goal.correction)
    assert metrics["weight_mean"] == pytest.approx(1.0, abs=1e-4)
    assert abs(metrics["kl"]) < 1e-5
    if temperature != 1.0:
        off, _ = gradient(model, [sequence], objective())
        assert abs(correction_metrics(list(off.records.values()), goal.correction)["kl"]) > 0.01


def test_k29_a_trajectory_in_two_segments_weighs_as_much_as_in_one(toy_model, make_sequence):
    """K29: what counts is tokens. The same sampled tokens in one segment or split over two give the same
    gradient."""
    model = toy_model(double=True)
    other = make_sequence(length=9, seed=8)
    whole = make_sequence(length=16, seed=4)
    halves = []
    for low, high in ((0, 8), (8, 16)):
        part = whole.pg_mask & (np.arange(16) >= low) & (np.arange(16) < high)
        halves.append(make_sequence(length=16, seed=4, trajectory_id=f"t4-{low}", pg_mask=part))
    one, first = gradient(model, [whole, other], objective())
    two, second = gradient(model, [*halves, other], objective())
    assert one.counts == two.counts
    torch.testing.assert_close(first, second, atol=1e-6, rtol=0)


def test_old_logprobs_set_the_ratio(toy_model, make_sequence):
    """With π_old below π_θ by more than the clip, a positive advantage has no gradient left."""
    model = toy_model()
    base = make_sequence(length=12, seed=1)
    old = torch.tensor(own_logprobs(model, base) - 0.5)
    sequence = make_sequence(length=12, seed=1, advantages=np.ones(12, np.float32))
    summary, flat = gradient(model, [sequence], objective(old={0: old}))
    assert summary.clipped == summary.counts.policy
    assert float(flat.norm()) == 0


def test_entropy_and_logprobs_equal_those_of_the_whole_logits(toy_model, make_sequence):
    model = toy_model(double=True)
    check_head(model)
    sequence = make_sequence(length=14, seed=1)
    ids = torch.tensor(sequence.token_ids, dtype=torch.int64)[None]
    needed = torch.tensor(sequence.pg_mask)[None]
    out = token_logprobs(model, token_ids=ids, needed=needed, temperature=0.7, with_entropy=True)
    table = (model(input_ids=ids).logits[0, :-1] / 0.7).log_softmax(-1)
    expected = -(table.exp() * table).sum(-1)
    torch.testing.assert_close(out.entropy[0, 1:], torch.where(needed[0, 1:], expected, 0.0))
    np.testing.assert_allclose(
        out.logprobs[0].detach(),
        np.where(sequence.pg_mask, own_logprobs(model, sequence, temperature=0.7), 0),
        atol=1e-12,
    )

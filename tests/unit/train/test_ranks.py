"""K31: what several ranks train together equals what one trains alone; how sequences are shared out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import rank_contract, run_ranks

from agentrl.config import (
    CheckpointConfig,
    CorrectionConfig,
    DivergenceConfig,
    LossConfig,
    OptimizerConfig,
    RejectionRule,
    TrainConfig,
    correction_preset,
)
from agentrl.errors import RecordError, TrainerError
from agentrl.train.ranks import Alone, check_same_weights, share_out, sum_gradients
from agentrl.train.trainer import Trainer
from agentrl.wire import Batch, StepResult

EXACT = 1e-6
REJECTING = CorrectionConfig(
    action="mask",
    lower=0.3,
    upper=3.0,
    reject=(RejectionRule(stat="k3", level="sequence", agg="mean", upper=0.25),),
)
CORRECTIONS = {
    "clamp": correction_preset("token-clamp-2"),
    "mask": correction_preset("token-mask-2"),
    "rejecting": REJECTING,
}
STREAMS = {"policy": (True, False, False), "policy and ce": (True, True, False), "all": (True, True, True)}


def make_trainer(model, folder, config: TrainConfig, ranks=None) -> Trainer:
    return Trainer(
        model=model,
        model_folder=folder,
        config=config,
        checkpoint=CheckpointConfig(),
        checkpoint_folder=folder / "checkpoints",
        publish_folder=folder / "published",
        ranks=ranks,
    )


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in trainer.model.parameters()])


def train_all(
    batches: list[Batch], *, size: int, model, folder, config: TrainConfig
) -> tuple[list[StepResult], list[torch.Tensor]]:
    """Rank 0's results of the batches, and every rank's weights after them."""
    results: list[StepResult] = []
    models = [model() for _ in range(size)]  # not in the threads, which share torch's random numbers

    def work(ranks) -> torch.Tensor:
        trainer = make_trainer(models[ranks.rank], folder, config, ranks)
        if ranks.rank:
            trainer.follow()
        else:
            results.extend(trainer.train(batch) for batch in batches)
            trainer.dismiss()
        return weights(trainer)

    return results, run_ranks(size, work)


def assert_same(one: list[StepResult], other: list[StepResult], *, tolerance: float = EXACT) -> None:
    """Equal but for the time: counts, metrics, and the record of every token."""
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        assert (a.step, a.updates) == (b.step, b.updates)
        metrics = [{k: v for k, v in r.metrics.items() if k != "time/train_s"} for r in (a, b)]
        assert metrics[0] == pytest.approx(metrics[1], rel=tolerance, abs=tolerance)
        for x, y in zip(a.sequences, b.sequences, strict=True):
            assert (x.trajectory_id, x.segment) == (y.trajectory_id, y.segment)
            np.testing.assert_array_equal(x.mask, y.mask)
            np.testing.assert_allclose(x.weights, y.weights, rtol=tolerance, atol=tolerance)


def settings_of(*, name: str = "ppo_clip", mode: str = "decoupled", correction: str = "clamp", **rest) -> TrainConfig:
    rest.setdefault("optimizer", OptimizerConfig(learning_rate=1e-2, warmup_updates=2))
    loss = LossConfig(name=name, mode=mode)
    return TrainConfig(loss=loss, correction=CORRECTIONS[correction], **rest)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 24), min_size=0, max_size=7),
    updates=st.integers(1, 3),
    size=st.integers(2, 4),
    name=st.sampled_from(["ppo_clip", "cispo", "gspo", "reinforce"]),
    mode=st.sampled_from(["decoupled", "bypass"]),
    correction=st.sampled_from(sorted(CORRECTIONS)),
    streams=st.sampled_from(sorted(STREAMS)),
    budget=st.integers(64, 128),
)
def test_k31_any_number_of_ranks_trains_what_one_trains(
    toy_model,
    make_sequence,
    make_batch,
    tmp_path_factory,
    lengths,
    updates,
    size,
    name,
    mode,
    correction,
    streams,
    budget,
):
    """K31: result and weights to 1e-6, over batches with ranks that get nothing and updates that nobody gets."""
    pg, ce, teacher = STREAMS[streams]
    batches = [
        make_batch(
            [
                make_sequence(
                    length=n, seed=10 * step + i, update=i % updates, pg=pg, ce=ce and i % 2 == 0, teacher=teacher
                )
                for i, n in enumerate(lengths)
            ],
            updates=updates,
            step=step,
        )
        for step in (1, 2)
    ]
    config = settings_of(name=name, mode=mode, correction=correction, tokens_per_microbatch=budget)
    shared = {"model": lambda: toy_model(double=True), "folder": tmp_path_factory.getbasetemp(), "config": config}
    alone, (expected,) = train_all(batches, size=1, **shared)
    together, found = train_all(batches, size=size, **shared)
    assert_same(alone, together)
    for rank_weights in found:
        assert torch.equal(rank_weights, found[0])
        torch.testing.assert_close(rank_weights, expected, atol=EXACT, rtol=0)


@pytest.mark.parametrize("name", ["sampled", "reverse_kl", "forward_kl", "jsd"])
@pytest.mark.parametrize("correction", ["clamp", "rejecting"])
def test_k31_every_divergence_too(toy_model, make_sequence, make_batch, tmp_path, name, correction):
    """K31: candidates of several widths, spans and a discount; one sequence is not scored at all."""
    shape = {"spans": True} if name == "sampled" else {}
    widths = (1, 0, 5, 48, 3, 5) if name != "sampled" else (0,) * 6
    sequences = [
        make_sequence(length=6 + 3 * i, seed=i, update=i % 2, pg=i % 3 == 0, teacher=i != 1, candidates=k, **shape)
        if i != 1
        else make_sequence(length=20, seed=i, update=1)
        for i, k in enumerate(widths)
    ]
    config = settings_of(
        correction=correction,
        tokens_per_microbatch=64,
        divergence=DivergenceConfig(
            name=name, clamp=0.1 if name == "jsd" else 1.5, **({"discount": 0.9} if name == "sampled" else {})
        ),
    )
    shared = {"model": lambda: toy_model(double=True), "folder": tmp_path, "config": config}
    alone, (expected,) = train_all([make_batch(sequences, updates=2)], size=1, **shared)
    assert 0 < alone[0].metrics["teacher/clamped_fraction"] <= 1
    for size in (2, 3):
        together, found = train_all([make_batch(sequences, updates=2)], size=size, **shared)
        assert_same(alone, together)
        for rank_weights in found:
            torch.testing.assert_close(rank_weights, expected, atol=EXACT, rtol=0)


def test_k31_float32_too(toy_model, make_sequence, make_batch, tmp_path):
    """The first step's loss, gradient norm and records; later weights differ by what AdamW makes of rounding."""
    sequences = [make_sequence(length=4 + 3 * i, seed=i, ce=i == 2, teacher=i == 1) for i in range(8)]
    shared = {"model": toy_model, "folder": tmp_path, "config": settings_of()}
    alone, (expected,) = train_all([make_batch(sequences)], size=1, **shared)
    together, (found, other) = train_all([make_batch(sequences)], size=2, **shared)
    assert_same(alone, together)
    assert torch.equal(found, other)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_k31_rejection_on_one_rank_shrinks_the_denominator_of_all(toy_model, make_sequence, make_batch, tmp_path):
    """K31: the sequence that is rejected lies on one rank; both divide by what is left of all, with one stream
    (scaled) and with two (passed again)."""
    rule = RejectionRule(stat="k1", level="sequence", agg="mean", upper=1.0)
    config = settings_of().model_copy(
        update={"correction": CorrectionConfig(action="none", upper=None, reject=(rule,))}
    )
    far = make_sequence(length=15, seed=9, behaviour_logprobs=np.full(15, -12.0, np.float32))
    for ce in (False, True):
        kept = [make_sequence(length=12 - i, seed=i, ce=ce, behaviour_logprobs=np.full(12 - i, -3.0)) for i in range(3)]
        shared = {"model": lambda: toy_model(double=True), "folder": tmp_path, "config": config}
        (alone,), (expected,) = train_all([make_batch([far, *kept])], size=1, **shared)
        (together,), (found, _) = train_all([make_batch([far, *kept])], size=2, **shared)
        assert not together.sequences[0].mask.any()
        assert sum(int(s.mask.sum()) for s in together.sequences) > 0
        assert together.metrics["correction/masked_sequence_fraction"] == pytest.approx(0.25)
        assert_same([alone], [together])
        torch.testing.assert_close(found, expected, atol=EXACT, rtol=0)


def test_what_is_not_to_be_learnt_is_skipped_by_all(toy_model, make_sequence, make_batch, tmp_path):
    """An update without a sequence, one whose gradient is not finite on one rank, one of which a rank has nothing."""
    huge = make_sequence(length=9, update=1, advantages=np.full(9, 3e38, np.float32))
    fine = [make_sequence(length=12, seed=1, update=1), make_sequence(length=9, seed=3, update=2)]
    untrained = make_sequence(length=30, seed=5, pg=False)
    batch = make_batch([huge, untrained, *fine], updates=3)
    results, (first, second) = train_all([batch], size=2, model=toy_model, folder=tmp_path, config=settings_of())
    assert (results[0].updates, results[0].metrics["skipped_updates"]) == (1, 2)
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)
    assert not torch.equal(first, weights(make_trainer(toy_model(), tmp_path, settings_of())))
    assert not results[0].sequences[1].mask.any()


def test_a_malformed_batch_leaves_the_ranks_ready_for_the_next(toy_model, make_sequence, make_batch, tmp_path):
    good, bad = make_batch([make_sequence(length=9)]), make_batch([make_sequence(length=9)] * 2)
    models = [toy_model() for _ in range(2)]

    def work(ranks):
        trainer = make_trainer(models[ranks.rank], tmp_path, settings_of(), ranks)
        if ranks.rank:
            return trainer.follow()
        with pytest.raises(RecordError, match="twice"):
            trainer.train(bad)
        assert trainer.train(good).updates == 1
        return trainer.dismiss()

    run_ranks(2, work)


class TestShares:
    @given(sequences=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 2)), max_size=30), ranks=st.integers(1, 5))
    def test_each_sequence_once_and_the_excess_below_one_of_them(self, sequences, ranks):
        lengths, updates = [n for n, _ in sequences], [u for _, u in sequences]
        shares = share_out(lengths, updates, ranks=ranks)
        assert len(shares) == ranks
        assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
        assert all(share == sorted(share) for share in shares)
        for update in set(updates):
            loads = [sum(lengths[i] for i in share if updates[i] == update) for share in shares]
            longest = max(n for n, u in sequences if u == update)
            assert max(loads) - min(loads) <= longest

    def test_one_rank_gets_all_in_order(self):
        assert share_out([5, 9, 1], [0, 1, 0], ranks=1) == [[0, 1, 2]]

    def test_single_sequences_of_several_updates_are_spread(self):
        """Else one rank would recompute the old log-probabilities of all."""
        assert share_out([8, 8, 8, 8], [0, 1, 2, 3], ranks=2) == [[0, 2], [1, 3]]


class TestSums:
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_threads_keep_the_contract(self, size):
        run_ranks(size, rank_contract)

    def test_alone_keeps_it_too(self):
        rank_contract(Alone())

    def test_a_gradient_that_no_rank_has_stays_absent(self):
        """An optimizer moves a parameter whose gradient is 0, by momentum and decay."""

        def work(ranks):
            parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (2, 3, 4)]
            parameters[ranks.rank].grad = torch.full((2 + ranks.rank,), 1.0 + ranks.rank)
            sum_gradients(ranks, parameters)
            return [p.grad.tolist() if p.grad is not None else None for p in parameters]

        assert run_ranks(2, work) == [[[1.0, 1.0], [2.0, 2.0, 2.0], None]] * 2

    def test_gradients_travel_in_pieces(self, monkeypatch):
        monkeypatch.setattr("agentrl.train.ranks._BUCKET_BYTES", 16)

        def work(ranks):
            parameters = [torch.nn.Parameter(torch.zeros(2, n)) for n in (1, 2, 3, 1)]
            for n, parameter in enumerate(parameters):
                parameter.grad = torch.full_like(parameter, 10.0**n + ranks.rank)
            sum_gradients(ranks, parameters)
            return [sorted(set(p.grad.flatten().tolist())) for p in parameters]

        assert run_ranks(2, work) == [[[2.0 * 10**n + 1] for n in range(4)]] * 2

    def test_weights_that_went_apart_are_an_error_on_every_rank(self):
        told = []

        def work(ranks):
            weights = torch.nn.Parameter(torch.ones(5))
            check_same_weights(ranks, [weights])
            with torch.no_grad():
                weights[2] += 1e-6 * ranks.rank
            with pytest.raises(TrainerError, match="different weights"):
                check_same_weights(ranks, [weights])
            told.append(ranks.rank)

        run_ranks(2, work)
        assert sorted(told) == [0, 1]

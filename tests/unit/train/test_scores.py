"""A teacher's scores in the trainer: packing, refusals, student = teacher, and learning from them."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_qwen import VOCABULARY

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
from agentrl.errors import RecordError
from agentrl.train.packing import check_batch, pack
from agentrl.train.trainer import Trainer
from agentrl.train.update import Objective, compute_gradient, old_logprobs
from agentrl.wire import Batch
from agentrl.wire.codec import decode_to_trainer, encode

NAMES = ("sampled", "reverse_kl", "forward_kl", "jsd")
REJECTING = CorrectionConfig(
    action="mask",
    lower=0.3,
    upper=3.0,
    reject=(RejectionRule(stat="k3", level="sequence", agg="mean", upper=0.25),),
)


def gradient(model, sequences, config: DivergenceConfig, *, correction="off", budget: int = 10_000, pad_id: int = 0):
    """The update's summary and one flat float64 vector of all gradients."""
    goal = Objective(
        loss=LossConfig(),
        correction=correction_preset(correction) if isinstance(correction, str) else correction,
        temperature=1.0,
        old={},
        divergence=config,
    )
    micro = pack(sequences, tokens_per_microbatch=budget, candidates=config.name != "sampled", pad_id=pad_id)
    summary = compute_gradient(model, micro, goal)
    return summary, torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def scored_by(model, make_sequence, *, k: int, length: int = 20, seed: int = 3, pg: bool = False):
    """A sequence scored by `model`: its own log-probabilities, and its k most likely tokens at each scored one. The
    behaviour policy is the model too."""
    base = make_sequence(length=length, seed=seed, teacher=True)
    ids = torch.tensor(base.token_ids, dtype=torch.int64)[None]
    with torch.no_grad():
        table = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    own = np.concatenate([[0.0], table.gather(-1, ids[0, 1:, None])[:, 0].numpy()]).astype(np.float32)
    at = np.flatnonzero(base.teacher_weights) - 1
    top, which = table[at].topk(k, dim=-1)
    whole = k == VOCABULARY
    return make_sequence(
        length=length,
        seed=seed,
        pg=pg,
        teacher=True,
        teacher_logprobs=own,
        behaviour_logprobs=own,
        candidate_ids=None if whole else which.numpy().astype(np.int32),
        candidate_logprobs=(table[at] if whole else top).numpy(),
    )


@settings(max_examples=25, deadline=None)
@given(
    kinds=st.lists(st.tuples(st.integers(2, 30), st.sampled_from([0, 1, 3, 7, VOCABULARY])), min_size=1, max_size=7),
    budget=st.integers(2, 120),
    pad_id=st.integers(0, 47),
    order=st.randoms(use_true_random=False),
    name=st.sampled_from(NAMES),
    correction=st.sampled_from(["token-clamp-2", "rejecting"]),
    pg=st.booleans(),
)
def test_k31_loss_and_gradient_do_not_depend_on_packing(
    toy_model, make_sequence, kinds, budget, pad_id, order, name, correction, pg
):
    """K31: candidates of any widths side by side, sequences that are not scored, spans; 0 means not scored."""
    model = toy_model(double=True)
    streams = {"spans": True} if name == "sampled" else {}
    sequences = [
        make_sequence(length=n, seed=i, pg=pg, teacher=True, candidates=0 if name == "sampled" else k, **streams)
        if k
        else make_sequence(length=n, seed=i, pg=pg)
        for i, (n, k) in enumerate(kinds)
    ]
    clamp = 0.1 if name == "jsd" else 1.5
    config = DivergenceConfig(name=name, clamp=clamp, **({"discount": 0.8} if name == "sampled" else {}))
    rules = REJECTING if correction == "rejecting" else correction
    one, whole = gradient(model, sequences, config, correction=rules)
    shuffled = list(sequences)
    order.shuffle(shuffled)
    other, split = gradient(model, shuffled, config, correction=rules, budget=budget, pad_id=pad_id)
    assert (one.counts, one.clamped) == (other.counts, other.clamped)
    for field in ("policy_loss", "divergence_loss", "reverse_kl"):
        assert getattr(one, field) == pytest.approx(getattr(other, field), abs=1e-6)
    assert float((whole - split).abs().max()) / max(1.0, float(whole.norm())) < 1e-6


class TestStudentIsTeacher:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("k", [1, 5, VOCABULARY])
    def test_k6_nothing_to_learn(self, toy_model, make_sequence, name, k):
        """K6: float32; a score one place off would differ by nats."""
        model = toy_model()
        sequence = scored_by(model, make_sequence, k=k)
        if name == "sampled":
            (micro,) = pack([sequence], tokens_per_microbatch=64)
            own = old_logprobs(model, [micro], temperature=1.0)[0]
            assert float((own - micro.teacher_logprobs[0, : len(own)])[micro.scored[0]].abs().max()) < 1e-4
        summary, flat = gradient(model, [sequence], DivergenceConfig(name=name))
        assert abs(summary.divergence_loss) < 1e-4
        assert abs(summary.reverse_kl) < 1e-4
        assert summary.clamped == 0
        assert float(flat.norm()) < 1e-3

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("k", [5, VOCABULARY])
    def test_k35_another_teacher_teaches(self, toy_model, make_sequence, name, k):
        """K35: the same tokens scored by another model, and by a third."""
        model = toy_model()
        found = []
        for seed in (1, 2):
            sequence = scored_by(toy_model(seed=seed), make_sequence, k=k)
            _, flat = gradient(model, [sequence], DivergenceConfig(name=name))
            assert float(flat.norm()) > 0.1
            found.append(flat)
        assert float((found[0] - found[1]).norm()) > 0.3 * float(found[0].norm())

    def test_k6_candidates_one_place_off_are_far(self, toy_model, make_sequence):
        """That the two tests above can fail: scores moved by one position give a divergence of nats."""
        model = toy_model()
        right = scored_by(model, make_sequence, k=VOCABULARY)
        moved = np.roll(right.candidate_logprobs, 1, axis=0)
        wrong = make_sequence(length=20, seed=3, pg=False, teacher=True, candidate_logprobs=moved)
        assert gradient(model, [wrong], DivergenceConfig(name="reverse_kl"))[0].divergence_loss > 0.1


class TestPacking:
    def test_candidates_stand_in_the_order_of_the_scored_tokens(self, make_sequence):
        sequences = [
            make_sequence(length=n, seed=n, teacher=True, candidates=k) for n, k in ((5, 2), (9, 4), (3, VOCABULARY))
        ]
        sequences.append(make_sequence(length=7, seed=7))  # not scored
        (micro,) = pack(sequences, tokens_per_microbatch=1000, candidates=True)
        assert micro.candidate_ids.shape == (int(micro.scored.sum()), VOCABULARY)
        at = 0
        for row in micro.rows:
            sequence = sequences[row]
            if sequence.candidate_logprobs is None:
                continue
            n, k = sequence.candidate_logprobs.shape
            ids, logprobs = (x[at : at + n].numpy() for x in (micro.candidate_ids, micro.candidate_logprobs))
            own = np.tile(np.arange(k), (n, 1)) if sequence.candidate_ids is None else sequence.candidate_ids
            np.testing.assert_array_equal(ids[:, :k], own)
            assert (ids[:, k:] == -1).all()
            np.testing.assert_array_equal(logprobs[:, :k], np.nan_to_num(sequence.candidate_logprobs))
            assert not logprobs[:, k:].any()
            at += n
        assert at == len(micro.candidate_ids)

    def test_they_are_left_out_where_nobody_asks(self, make_sequence):
        (micro,) = pack([make_sequence(length=9, teacher=True, candidates=4)], tokens_per_microbatch=64)
        assert micro.candidate_ids is micro.candidate_logprobs is None

    def test_they_travel(self, make_sequence, make_batch):
        sequence = make_sequence(length=9, teacher=True, candidates=4)
        found = decode_to_trainer(encode(make_batch([sequence])))
        assert isinstance(found, Batch)
        np.testing.assert_array_equal(found.sequences[0].candidate_ids, sequence.candidate_ids)
        np.testing.assert_array_equal(found.sequences[0].candidate_logprobs, sequence.candidate_logprobs)


class TestRefusals:
    @pytest.fixture
    def scored(self, make_sequence):
        """Two candidates a token, of six tokens; tokens 2, 3 and 5 are scored."""
        mask = np.array([0, 0, 1, 1, 0, 1], bool)
        good = {
            "teacher_logprobs": np.where(mask, -1, np.nan).astype(np.float32),
            "teacher_weights": mask.astype(np.float32),
            "pg_mask": mask,
            "advantages": np.zeros(6, np.float32),
            "candidate_ids": np.array([[4, 7], [7, -1], [0, 1]], np.int32),
            "candidate_logprobs": np.log(np.array([[0.5, 0.2], [0.3, np.nan], [0.1, 0.1]], np.float32)),
        }
        return lambda **streams: make_sequence(length=6, trajectory_id="trajectory-17", **(good | streams))

    def test_the_good_one_is_taken(self, scored, make_batch):
        check_batch(make_batch([scored()]), candidates=True, vocabulary=48)
        spans = np.array([-1, -1, 5, 5, -1, 2], np.int32)
        check_batch(make_batch([scored(teacher_spans=spans, candidate_ids=None, candidate_logprobs=None)]))

    @pytest.mark.parametrize(
        ("streams", "words"),
        [
            ({"candidate_ids": None, "candidate_logprobs": None}, "have none"),
            ({"candidate_logprobs": None}, "without candidate_logprobs"),
            ({"candidate_logprobs": np.zeros((2, 2), np.float32)}, r"candidates \[2, 2\] for 3"),
            ({"candidate_ids": np.zeros((3, 3), np.int32)}, "candidates"),
            ({"candidate_logprobs": np.full((3, 2), -2, np.float32)}, "lacks its log-probability"),
            ({"candidate_logprobs": np.full((3, 2), np.nan, np.float32)}, "lacks its log-probability"),
            (
                {
                    "candidate_ids": np.array([[4, 7], [-1, -1], [0, 1]], np.int32),
                    "candidate_logprobs": np.log([[0.5, 0.2], [np.nan, np.nan], [0.1, 0.1]]),
                },
                "has no candidate",
            ),
            ({"candidate_ids": np.array([[4, 7], [7, -1], [1, 1]], np.int32)}, "twice"),
            ({"candidate_ids": np.array([[4, 48], [7, -1], [0, 1]], np.int32)}, "not in the vocabulary"),
            ({"candidate_ids": None, "candidate_logprobs": np.full((3, 40), -np.log(40))}, "vocabulary is 48"),
            ({"candidate_ids": None, "candidate_logprobs": np.full((3, 48), -np.log(96))}, "lack some"),
            ({"candidate_logprobs": np.array([[0.5, 2.0], [0.3, np.nan], [0.1, 0.1]])}, "not logits"),
            ({"teacher_spans": np.array([-1, -1, 0, 1, -1, 2], np.int32)}, "another tokenizer"),
        ],
    )
    def test_k36_malformed_candidates(self, scored, make_batch, streams, words):
        """K36: a scored token without its own candidates is an error that names the trajectory."""
        with pytest.raises(RecordError) as caught:
            check_batch(make_batch([scored(**streams)]), candidates=True, vocabulary=48)
        assert "trajectory-17" in caught.value.where
        assert re.search(words, f"{caught.value} {caught.value.remedy}")

    @pytest.mark.parametrize(
        ("spans", "words"),
        [
            ([-1, -1, 0, 0, 0, 1], "exactly the scored"),
            ([-1, -1, 0, 0, -1, -1], "exactly the scored"),
            ([-1, -1, 0, 1, -1, 1], "stand together"),
            ([-1, -1, 0, 1, -1, 0], "stand together"),
        ],
    )
    def test_malformed_spans(self, scored, make_batch, spans, words):
        sequence = scored(teacher_spans=np.array(spans, np.int32), candidate_ids=None, candidate_logprobs=None)
        with pytest.raises(RecordError, match=words):
            check_batch(make_batch([sequence]))

    def test_k37_another_temperature(self, make_sequence, make_batch):
        """K37: a divergence between a student at 0.7 and a teacher at 1 is between different things."""
        with pytest.raises(RecordError, match="temperature"):
            check_batch(make_batch([make_sequence(length=6, teacher=True)], temperature=0.7))
        check_batch(make_batch([make_sequence(length=6)], temperature=0.7))

    @pytest.mark.parametrize("stream", ["teacher_spans", "candidate_ids", "candidate_logprobs"])
    def test_scores_without_a_teacher(self, make_sequence, make_batch, stream):
        values = {"teacher_spans": np.full(6, -1, np.int32)}.get(stream, np.zeros((1, 1), np.float32))
        with pytest.raises(RecordError, match="come together"):
            check_batch(make_batch([make_sequence(length=6, **{stream: values})]))


class TestTrainer:
    @pytest.fixture
    def make_trainer(self, toy_model, tmp_path):
        def make(name: str, **settings) -> Trainer:
            return Trainer(
                model=toy_model(),
                model_folder=tmp_path / "none",
                config=TrainConfig(
                    divergence=DivergenceConfig(name=name, **settings),
                    optimizer=OptimizerConfig(learning_rate=5e-3, warmup_updates=1),
                ),
                checkpoint=CheckpointConfig(),
                checkpoint_folder=tmp_path,
                publish_folder=tmp_path,
            )

        return make

    @pytest.mark.parametrize("name", NAMES)
    def test_it_comes_nearer_to_its_teacher(self, make_trainer, make_sequence, make_batch, toy_model, name):
        """The whole divergence on the trained contexts, however it was learnt; sampled needs what it sampled itself,
        so that it is measured by the loss of its own tokens."""
        trainer, teacher = make_trainer(name), toy_model(seed=1)
        batch = make_batch([scored_by(teacher, make_sequence, k=VOCABULARY, seed=s) for s in range(4)])
        losses = [trainer.train(batch).metrics for _ in range(12)]
        assert {"loss/divergence", "teacher/reverse_kl", "teacher/clamped_fraction"} <= set(losses[0])
        if name == "sampled":
            assert abs(losses[-1]["teacher/reverse_kl"]) < 0.5 * abs(losses[0]["teacher/reverse_kl"])
        else:
            assert losses[-1]["loss/divergence"] < 0.7 * losses[0]["loss/divergence"]

    def test_k36_missing_candidates_change_nothing(self, make_trainer, make_sequence, make_batch):
        """K36: refused before the first step; without a divergence over candidates the same batch trains."""
        batch = make_batch([make_sequence(length=9, teacher=True)])
        trainer = make_trainer("forward_kl")
        before = [p.detach().clone() for p in trainer.model.parameters()]
        with pytest.raises(RecordError, match="have none"):
            trainer.train(batch)
        assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
        assert make_trainer("sampled").train(batch).updates == 1

    def test_reward_beside_the_teacher(self, make_trainer, make_sequence, make_batch):
        """Both streams at once; each over its own tokens."""
        sequences = [make_sequence(length=12, seed=i, teacher=True, candidates=4) for i in range(3)]
        metrics = make_trainer("jsd").train(make_batch(sequences)).metrics
        assert {"loss/policy", "loss/divergence"} <= set(metrics)
        alone = [make_sequence(length=12, seed=i, teacher=True, candidates=4, pg=False) for i in range(3)]
        assert make_trainer("jsd").train(make_batch(alone)).metrics["loss/divergence"] == pytest.approx(
            metrics["loss/divergence"], rel=1e-5
        )

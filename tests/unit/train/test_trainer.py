"""The trainer in process: steps, skips, metrics, checkpoints that go on as if never stopped, published
weights."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentrl.config import CheckpointConfig, LossConfig, OptimizerConfig, TrainConfig, correction_preset
from agentrl.errors import ConfigError, RecordError, WeightDeliveryError
from agentrl.train.trainer import Trainer


@pytest.fixture
def make_trainer(toy_model, tmp_path):
    def make(*, seed: int = 0, double: bool = False, folder: str = "run", **settings) -> Trainer:
        settings.setdefault("optimizer", OptimizerConfig(learning_rate=1e-2, warmup_updates=2))
        return Trainer(
            model=toy_model(seed=seed, double=double),
            model_folder=tmp_path / "none",
            config=TrainConfig(**settings),
            checkpoint=CheckpointConfig(keep=2),
            checkpoint_folder=tmp_path / folder,
            publish_folder=tmp_path / "published",
        )

    return make


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in trainer.model.parameters()])


def test_a_batch_trains_and_reports(make_trainer, make_sequence, make_batch):
    trainer = make_trainer()
    sequences = [make_sequence(length=n, seed=n) for n in (8, 20, 13)]
    before = weights(trainer)
    result = trainer.train(make_batch(sequences, step=7))
    assert (result.step, result.updates, trainer.state.updates) == (7, 1, 1)
    assert not torch.equal(before, weights(trainer))
    agent = sum(int(s.pg_mask.sum()) for s in sequences)
    metrics = result.metrics
    assert metrics["tokens/trained"] == agent
    assert metrics["lr"] == pytest.approx(5e-3)  # first of two warm-up updates
    assert metrics["skipped_updates"] == metrics["off_policy_updates"] == 0
    assert 0 < metrics["entropy"] <= math.log(48)
    assert all(math.isfinite(v) for v in metrics.values())
    names = {"loss/policy", "grad_norm", "correction/ess", "correction/kl", "correction/k3_kl"}
    names |= {f"correction/{k}" for k in ("clamped_fraction", "masked_token_fraction", "masked_sequence_fraction")}
    assert names <= set(metrics)
    assert "loss/ce" not in metrics  # no such stream in the batch
    for sequence, record in zip(sequences, result.sequences, strict=True):
        assert (record.trajectory_id, record.segment) == (sequence.trajectory_id, 0)
        np.testing.assert_array_equal(record.mask, sequence.pg_mask)
        assert not record.weights[~sequence.pg_mask].any()
        assert (record.weights[sequence.pg_mask] > 0).all()
        assert record.weights.max() <= 2


def test_all_streams_report_their_own_loss(make_trainer, make_sequence, make_batch):
    trainer = make_trainer()
    result = trainer.train(make_batch([make_sequence(length=12, seed=i, ce=True, teacher=True) for i in range(3)]))
    assert {"loss/policy", "loss/ce", "loss/divergence", "teacher/reverse_kl"} <= set(result.metrics)
    assert result.metrics["loss/ce"] == pytest.approx(0.5 * math.log(48), rel=0.3)


def test_the_same_batch_again_and_again_raises_what_was_good(make_trainer, make_sequence, make_batch):
    """Learning end to end: tokens with advantage +1 become likelier than tokens with −1."""
    trainer = make_trainer(correction=correction_preset("off"))
    good = make_sequence(length=16, seed=1, advantages=np.ones(16, np.float32))
    bad = make_sequence(length=16, seed=2, advantages=-np.ones(16, np.float32))
    before = trainer.train(make_batch([good, bad])).metrics["loss/policy"]
    for _ in range(5):
        trainer.train(make_batch([good, bad]))
    from agentrl.train.packing import pack
    from agentrl.train.update import old_logprobs

    micro = pack([good, bad], tokens_per_microbatch=999)
    found = old_logprobs(trainer.model, micro, temperature=1.0)
    means = [float(found[i][torch.tensor(s.pg_mask)].mean()) for i, s in enumerate((good, bad))]
    assert means[0] > means[1] + 1.0
    assert math.isfinite(before)


def test_bfloat16_passes_keep_float32_weights(make_trainer, make_sequence, make_batch):
    sequences = [make_sequence(length=20, seed=i, update=i % 2) for i in range(4)]
    exact = make_trainer().train(make_batch(sequences, updates=2)).metrics
    trainer = make_trainer(dtype="bfloat16")
    rough = trainer.train(make_batch(sequences, updates=2)).metrics
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert exact["entropy"] != rough["entropy"] == pytest.approx(exact["entropy"], abs=0.05)
    assert rough["grad_norm"] == pytest.approx(exact["grad_norm"], rel=0.1)


class TestUpdates:
    def test_k24_updates_after_the_first_are_counted_as_off_policy(self, make_trainer, make_sequence, make_batch):
        trainer = make_trainer()
        sequences = [make_sequence(length=12, seed=i, update=i % 3) for i in range(6)]
        result = trainer.train(make_batch(sequences, updates=3))
        assert (result.updates, trainer.state.updates) == (3, 3)
        assert (result.metrics["updates"], result.metrics["off_policy_updates"]) == (3, 2)

    def test_decoupled_old_policy_is_the_one_before_the_batch(self, make_trainer, make_sequence, make_batch):
        """The weights π_old/π_rollout of the second update are those of the policy *before* the first."""
        sequences = [make_sequence(length=12, seed=i, update=i) for i in range(2)]
        two = make_trainer().train(make_batch(sequences, updates=2))
        alone = make_trainer().train(make_batch([make_sequence(length=12, seed=1, update=0)]))
        np.testing.assert_allclose(two.sequences[1].weights, alone.sequences[0].weights, rtol=1e-5)
        bypass = make_trainer(loss=LossConfig(mode="bypass")).train(make_batch(sequences, updates=2))
        assert not np.allclose(bypass.sequences[1].weights, alone.sequences[0].weights, rtol=1e-5)

    def test_k31_a_batch_is_the_same_under_any_micro_batch_size(self, make_trainer, make_sequence, make_batch):
        sequences = [make_sequence(length=4 + i, seed=i, update=i % 2) for i in range(9)]
        found = []
        for budget in (64, 4096):
            trainer = make_trainer(double=True, tokens_per_microbatch=budget)
            result = trainer.train(make_batch(sequences, updates=2))
            result.metrics.pop("time/train_s")
            found.append((result.metrics, weights(trainer)))
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-6, abs=1e-9)
        torch.testing.assert_close(found[0][1], found[1][1], atol=1e-6, rtol=0)

    def test_a_golden_loss(self, make_trainer, make_sequence, make_batch):
        """A change that is not meant to be numerical leaves these figures as they are."""
        trainer = make_trainer(double=True, correction=correction_preset("token-mask-3"))
        sequences = [make_sequence(length=10 + i, seed=i, ce=i == 2, teacher=i == 1, update=i % 2) for i in range(4)]
        metrics = [trainer.train(make_batch(sequences, updates=2, step=s)).metrics for s in (1, 2)]
        names = ("loss/policy", "loss/ce", "loss/divergence", "grad_norm", "entropy", "correction/ess")
        found = [[m[n] for n in names] for m in metrics]
        np.testing.assert_allclose(found, GOLDEN, atol=1e-4)


GOLDEN = [
    [-0.195796, 2.059958, -0.109572, 3.271678, 3.552936, 0.283398],
    [0.010531, 1.542495, 0.030811, 3.965658, 3.442965, 0.293685],
]


class TestSkips:
    @pytest.mark.parametrize("name", ["ppo_clip", "cispo", "gspo", "reinforce"])
    @pytest.mark.parametrize("mode", ["decoupled", "bypass"])
    def test_every_weight_masked_is_a_counted_skip(self, make_trainer, make_sequence, make_batch, name, mode):
        """Loss exactly 0 and no step, not even by momentum."""
        config = {"loss": LossConfig(name=name, mode=mode), "correction": correction_preset("token-mask-2")}
        trainer = make_trainer(**config)
        trainer.train(make_batch([make_sequence(length=9, seed=1)]))
        before = weights(trainer)
        far = make_sequence(length=9, seed=1, behaviour_logprobs=np.full(9, -19.0, np.float32))
        result = trainer.train(make_batch([far]))
        assert torch.equal(before, weights(trainer))
        assert (result.updates, result.metrics["skipped_updates"]) == (0, 1)
        assert result.metrics["loss/policy"] == 0
        assert result.metrics["correction/masked_sequence_fraction"] == 1
        assert result.sequences[0].mask.sum() == far.pg_mask.sum()

    def test_a_denominator_of_zero_is_a_counted_skip(self, make_trainer, make_sequence, make_batch):
        trainer = make_trainer()
        before = weights(trainer)
        nothing = make_sequence(length=9, pg=False)
        lost = make_sequence(length=9, seed=1, behaviour_logprobs=np.full(9, np.nan, np.float32))
        for sequences in ([], [nothing], [lost]):
            result = trainer.train(make_batch(sequences))
            assert (result.updates, result.metrics["skipped_updates"]) == (0, 1)
        assert result.metrics["correction/nonfinite_tokens"] == lost.pg_mask.sum()
        assert torch.equal(before, weights(trainer))
        assert trainer.state.updates == 0

    def test_a_non_finite_gradient_is_a_counted_skip(self, make_trainer, make_sequence, make_batch):
        trainer = make_trainer()
        before = weights(trainer)
        huge = make_sequence(length=9, advantages=np.full(9, 3e38, np.float32))
        result = trainer.train(make_batch([huge, make_sequence(length=9, seed=3, update=1)], updates=2))
        assert (result.updates, result.metrics["updates"], result.metrics["skipped_updates"]) == (1, 1, 1)
        assert torch.isfinite(weights(trainer)).all()
        assert not torch.equal(before, weights(trainer))

    def test_a_malformed_batch_changes_nothing(self, make_trainer, make_sequence, make_batch):
        trainer = make_trainer()
        before = weights(trainer)
        broken = msgspec.structs.replace(make_sequence(length=9, seed=2), advantages=np.zeros(8, np.float32))
        with pytest.raises(RecordError, match="advantages"):
            trainer.train(make_batch([make_sequence(length=9), broken]))
        assert torch.equal(before, weights(trainer))


def test_k33_metrics_are_over_agent_tokens_whatever_surrounds_them(make_trainer, make_sequence, make_batch):
    """K33: a longer prompt's own tokens, padding rows and untrained sequences leave every metric as it is."""
    sequences = [make_sequence(length=12, seed=i) for i in range(3)]
    bystanders = [make_sequence(length=40, seed=50 + i, pg=False) for i in range(3)]
    one = make_trainer(double=True).train(make_batch(sequences)).metrics
    two = make_trainer(double=True).train(make_batch([*bystanders, *sequences])).metrics
    for metrics in (one, two):
        metrics.pop("time/train_s")
    assert one == pytest.approx(two, rel=1e-6)


class TestCheckpoints:
    def test_k49_resumed_equals_uninterrupted(self, make_trainer, make_sequence, make_batch, tmp_path):
        """K49: losses and weights after a resume are those of a run that never stopped, and so is the random
        state."""
        batches = [
            make_batch([make_sequence(length=12, seed=10 * b + i, update=i % 2) for i in range(4)], updates=2, step=b)
            for b in range(1, 6)
        ]
        whole = make_trainer()
        expected = [whole.train(batch).metrics["loss/policy"] for batch in batches]
        stopped = make_trainer()
        found = [stopped.train(batch).metrics["loss/policy"] for batch in batches[:2]]
        saved = stopped.save(2, b"orchestrator's own")
        drawn = float(torch.rand(())), float(np.random.rand())
        resumed = Trainer.load(
            model_folder=tmp_path / "unused",
            config=stopped.config,
            checkpoint=CheckpointConfig(),
            checkpoint_folder=tmp_path / "run",
            publish_folder=tmp_path / "published",
            resume=tmp_path / saved.path,
        )
        assert drawn == (float(torch.rand(())), float(np.random.rand()))
        assert (resumed.state.step, resumed.state.updates) == (2, 4)
        assert resumed.state.orchestrator == b"orchestrator's own"
        found += [resumed.train(batch).metrics["loss/policy"] for batch in batches[2:]]
        assert found == expected
        assert torch.equal(weights(resumed), weights(whole))

    def test_settings_after_a_resume_are_the_configuration_s(self, make_trainer, make_sequence, make_batch, tmp_path):
        trainer = make_trainer()
        trainer.train(make_batch([make_sequence(length=9)]))
        saved = trainer.save(1, b"")
        resumed = Trainer.load(
            model_folder=tmp_path,
            config=TrainConfig(optimizer=OptimizerConfig(learning_rate=3e-3, warmup_updates=0, beta2=0.9)),
            checkpoint=CheckpointConfig(),
            checkpoint_folder=tmp_path,
            publish_folder=tmp_path,
            resume=tmp_path / saved.path,
        )
        assert resumed.optimizer.param_groups[0]["betas"] == (0.9, 0.9)
        result = resumed.train(make_batch([make_sequence(length=9)], step=2))
        assert result.metrics["lr"] == 3e-3

    def test_a_checkpoint_is_a_model_folder(self, make_trainer, make_sequence, make_batch, tmp_path):
        trainer = make_trainer()
        trainer.train(make_batch([make_sequence(length=9)]))
        saved = trainer.save(3, b"")
        loaded = AutoModelForCausalLM.from_pretrained(saved.path)
        for name, value in trainer.model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], value)

    def test_a_missing_model_names_the_remedy(self, tmp_path):
        with pytest.raises(ConfigError, match=r"config\.json"):
            Trainer.load(
                model_folder=tmp_path / "nowhere",
                config=TrainConfig(),
                checkpoint=CheckpointConfig(),
                checkpoint_folder=tmp_path,
                publish_folder=tmp_path,
            )


class TestPublish:
    def test_k25_manifest_speaks_of_the_very_weights(self, make_trainer, make_sequence, make_batch, toy_model):
        """K25: another model given the published file says what the manifest says; before the update it does
        not."""
        trainer = make_trainer()
        first = trainer.publish(0)
        trainer.train(make_batch([make_sequence(length=20, seed=i) for i in range(4)]))
        manifest = trainer.publish(1)
        server = toy_model(seed=99)
        missing = server.load_state_dict(load_file(manifest.path), strict=False)
        assert (missing.missing_keys, missing.unexpected_keys) == (
            ["lm_head.weight"],
            [],
        )  # tied: written once
        server.tie_weights()
        ids = torch.tensor(manifest.probe_token_ids, dtype=torch.int64)[None]
        with torch.no_grad():
            table = server(input_ids=ids).logits[0, :-1].log_softmax(-1)
        found = table.gather(-1, ids[0, 1:, None])[:, 0].numpy()
        np.testing.assert_allclose(found, manifest.probe_logprobs, atol=1e-5)
        assert manifest.probe_logprobs.dtype == np.float32
        assert manifest.probe_logprobs.shape == (len(manifest.probe_token_ids) - 1,)
        np.testing.assert_array_equal(first.probe_token_ids, manifest.probe_token_ids)
        assert np.abs(first.probe_logprobs - manifest.probe_logprobs).max() > 1e-3

    def test_old_versions_are_removed_and_names_are_plain(self, make_trainer, tmp_path):
        trainer = make_trainer()
        for version in (0, 1, 2):
            manifest = trainer.publish(version)
        folder = tmp_path / "published"
        assert [p.name for p in folder.iterdir()] == ["policy-000002.safetensors"]
        tensors = load_file(manifest.path)
        assert len(tensors) == manifest.tensors
        assert manifest.num_bytes == (folder / "policy-000002.safetensors").stat().st_size
        assert set(tensors) == {n for n, _ in trainer.model.named_parameters()}

    def test_broken_weights_are_not_handed_on(self, make_trainer):
        trainer = make_trainer()
        with torch.no_grad():
            trainer.model.model.norm.weight.fill_(math.nan)
        with pytest.raises(WeightDeliveryError, match="non-finite"):
            trainer.publish(4)


def test_a_resumed_trainers_checkpoints_can_be_resumed_again_and_again(toy_model, tmp_path):
    """K49: a resumed run's model folder is its checkpoint, which is pruned once there are newer ones."""
    folder = tmp_path / "model"
    toy_model().save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    resume = None
    for first in (1, 4, 7):
        trainer = Trainer.load(
            model_folder=resume or folder,
            config=TrainConfig(),
            checkpoint=CheckpointConfig(keep=2),
            checkpoint_folder=tmp_path / "checkpoints",
            publish_folder=tmp_path / "published",
            resume=resume,
        )
        saved = [Path(trainer.save(step, b"").path) for step in range(first, first + 3)]
        assert [path.exists() for path in saved] == [False, True, True]
        assert resume is None or not resume.exists()
        resume = saved[-1]
        assert (resume / "tokenizer.json").read_text() == '{"a": 1}'

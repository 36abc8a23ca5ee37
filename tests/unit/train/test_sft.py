"""Supervised training, its optimizers, and the tiny policy's starting weights."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from agentrl.config import SftConfig
from agentrl.errors import DatasetError
from agentrl.train.muon import Muon, orthogonalise, split_parameters
from agentrl.train.sft import learning_rate_factor, segment_batches, segment_weights, train_supervised
from agentrl.train.tiny import build_tiny_model
from agentrl.trajectory import Purpose, Segment, Source, Span, SpanKind


def demonstration(token_ids: np.ndarray, *, agent_from: int) -> Segment:
    n = len(token_ids)
    spans = (
        Span(kind=SpanKind.PROMPT, start=0, stop=agent_from, turn=0),
        Span(kind=SpanKind.AGENT, start=agent_from, stop=n, turn=0, purpose=Purpose.ACT),
    )
    return Segment(token_ids, spans, np.full(n, np.nan), np.full(n, -1), source=Source.DEMONSTRATION)


def copying(draw: np.random.Generator, *, half: int = 24, vocabulary: int = 256) -> Segment:
    """Random tokens, then the same again: only copying predicts the second half."""
    first = draw.integers(0, vocabulary, half)
    return demonstration(np.concatenate([first, first]), agent_from=half)


class TestTiny:
    def test_the_circuit_copies_before_any_training(self):
        """Layer 0 attends one back; layer 1 to what followed the token's earlier occurrence; so the second half
        of a repeated text is likelier than the first."""
        model = build_tiny_model(1024, seed=0)
        assert 900_000 < model.num_parameters() < 1_000_000
        model.set_attn_implementation("eager")
        draw = torch.Generator().manual_seed(1)
        half = 32
        ids = torch.stack([torch.randperm(1024, generator=draw)[:half] for _ in range(8)]).repeat(1, 2)
        with torch.no_grad():
            out = model(input_ids=ids, output_attentions=True)
        previous = out.attentions[0][:, 0]
        assert float(previous.diagonal(-1, dim1=-2, dim2=-1).mean()) > 0.8
        after_match = out.attentions[1].diagonal(-(half - 1), dim1=-2, dim2=-1)[..., 1:]
        assert float(after_match.mean()) > 0.2  # of about 48 places to look at
        table = out.logits[:, :-1].log_softmax(-1)
        logprobs = table.gather(-1, ids[:, 1:, None])[..., 0]
        assert float(logprobs[:, half:].mean() - logprobs[:, : half - 1].mean()) > 0.3

    def test_the_same_seed_gives_the_same_weights(self):
        one, two, other = (build_tiny_model(64, seed=s).state_dict() for s in (5, 5, 6))
        assert all(torch.equal(one[k], two[k]) for k in one)
        assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])

    def test_learns_to_copy_within_some_tens_of_steps(self):
        draw = np.random.default_rng(0)
        segments = [copying(draw) for _ in range(400)]
        model = build_tiny_model(256, seed=0)
        config = SftConfig(steps=40, warmup_steps=10, observation_weight=0.0)
        result = train_supervised(
            model=model, batches=segment_batches(segments, sequences_per_batch=8, seed=0), config=config
        )
        assert result.steps[-1].agent_loss < 0.5  # chance: ln 256 = 5.5
        assert result.tokens == 40 * 8 * 24


class TestTrainSupervised:
    def test_weights_per_token_kind(self):
        segment = demonstration(np.arange(6), agent_from=3)
        weights = segment_weights(segment, config=SftConfig())
        np.testing.assert_allclose(weights, [0, 0.3, 0.3, 1, 1, 1])

    @pytest.mark.parametrize("optimizer", ["muon", "adamw"])
    def test_k31_micro_batches_do_not_change_a_step(self, toy_model, optimizer):
        draw = np.random.default_rng(1)
        batch = [demonstration(draw.integers(0, 48, n), agent_from=n // 2) for n in (9, 30, 14, 22)]
        found = []
        for budget in (64, 4096):
            model = toy_model(double=True)
            config = SftConfig(steps=2, optimizer=optimizer, tokens_per_microbatch=budget, warmup_steps=0)
            result = train_supervised(model=model, batches=[batch, batch], config=config)
            found.append([(s.loss, s.agent_loss, s.observation_loss, s.grad_norm) for s in result.steps])
        np.testing.assert_allclose(found[0], found[1], rtol=1e-4)
        assert found[0][1][0] < found[0][0][0]

    def test_schedule(self):
        config = SftConfig(steps=100, warmup_steps=40, decay_fraction=0.4)
        factors = [learning_rate_factor(s, config=config) for s in (1, 40, 60, 61, 81, 100)]
        np.testing.assert_allclose(factors, [1 / 40, 1, 1, 1, 0.5, 1 / 40])

    def test_batches_cover_every_segment_once_per_epoch(self):
        segments = [demonstration(np.arange(n), agent_from=1) for n in range(2, 42)]
        batches = segment_batches(segments, sequences_per_batch=8, seed=0)
        first = [len(s) for batch in islice(batches, 5) for s in batch]
        assert sorted(first) == list(range(2, 42))
        second = [len(s) for batch in islice(batches, 5) for s in batch]
        assert sorted(second) == list(range(2, 42))
        assert first != second

    def test_too_few_demonstrations(self, toy_model):
        with pytest.raises(DatasetError, match="do not fill"):
            next(segment_batches([], sequences_per_batch=8, seed=0))
        batch = [demonstration(np.arange(5), agent_from=2)]
        with pytest.raises(DatasetError, match="ended after 1"):
            train_supervised(model=toy_model(), batches=[batch], config=SftConfig(steps=2))

    def test_k52_options_without_effect_are_refused(self):
        with pytest.raises(ValidationError, match="no effect"):
            SftConfig(optimizer="adamw", matrix_learning_rate=0.1)
        with pytest.raises(ValidationError, match="nothing is trained"):
            SftConfig(agent_weight=0.0, observation_weight=0.0)


class TestMuon:
    @pytest.mark.parametrize("shape", [(16, 48), (48, 16), (24, 24)])
    def test_orthogonalised_update_has_singular_values_near_one(self, shape):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        found = orthogonalise(matrix)
        assert found.shape == matrix.shape
        assert float(torch.linalg.svdvals(found).min()) > 0.4
        assert float(torch.linalg.svdvals(found).max()) < 1.3
        assert float(((left @ right) * found).sum() / (left @ right).norm() / found.norm()) > 0.95
        assert float(values.max() / values.min()) > 2

    def test_step_size_does_not_depend_on_the_gradient_s_scale(self):
        moves = []
        for scale in (1e-3, 1e3):
            parameter = torch.nn.Parameter(torch.zeros(8, 8))
            parameter.grad = scale * torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
            Muon([parameter], lr=0.1).step()
            moves.append(parameter.detach().clone())
        torch.testing.assert_close(moves[0], moves[1], rtol=1e-2, atol=1e-3)
        assert float(moves[0].norm()) == pytest.approx(0.1 * 8**0.5, rel=0.3)

    def test_parameters_are_split_without_loss(self, toy_model):
        model = toy_model()
        matrices, others = split_parameters(model)
        assert len(matrices) == 2 * 7
        assert sum(p.numel() for p in [*matrices, *others]) == model.num_parameters()
        assert all(p is not model.model.embed_tokens.weight for p in matrices)

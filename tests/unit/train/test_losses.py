"""Losses by hand-computed values, and where their gradient goes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from agentrl.config import CorrectionConfig, DivergenceConfig, LossConfig
from agentrl.train.correction import correct, preset
from agentrl.train.losses import (
    Counts,
    cross_entropy_loss,
    loss_weights,
    policy_gradient_loss,
    stream_losses,
)
from agentrl.train.packing import pack

NAMES = ("ppo_clip", "cispo", "gspo", "reinforce")
MODES = ("decoupled", "bypass")

LOGP = [[-1.0, -2.0, -0.5], [-1.5, -1.0, -3.0]]
OLD = [[-1.5, -1.9, -0.5], [-1.0, -1.6, -3.0]]
ADVANTAGE = [[1.0, 1.0, -2.0], [1.0, -1.0, 5.0]]
WEIGHT = [[2.0, 1.0, 0.5], [1.0, 0.5, 1.0]]
LOSS_MASK = [[1, 1, 1], [1, 1, 0]]


def golden_loss(name: str):
    logprobs = torch.tensor(LOGP, dtype=torch.float64, requires_grad=True)
    found = policy_gradient_loss(
        logprobs=logprobs,
        old_logprobs=torch.tensor(OLD, dtype=torch.float64),
        advantages=torch.tensor(ADVANTAGE, dtype=torch.float64),
        weights=torch.tensor(WEIGHT, dtype=torch.float64),
        mask=torch.tensor(LOSS_MASK, dtype=torch.bool),
        config=LossConfig(name=name),
    )
    found.loss.sum().backward()
    return found, logprobs.grad


class TestGolden:
    """log-ratios [.5, −.1, 0 | −.5, .6]; clip [.8, 1.2]; the last token is masked."""

    def test_ppo_clip(self):
        found, grad = golden_loss("ppo_clip")
        expected = [[-2 * 1.2, -math.exp(-0.1), 0.5 * 2], [-math.exp(-0.5), 0.5 * math.exp(0.6), 0]]
        np.testing.assert_allclose(found.loss.detach(), expected, rtol=1e-12)
        # no gradient where the clip holds the gain; a loss (negative advantage, growing ratio) is never held
        np.testing.assert_allclose(grad, [[0, -math.exp(-0.1), 1], [-math.exp(-0.5), 0.5 * math.exp(0.6), 0]])
        assert found.clipped.tolist() == [[True, False, False], [False, False, False]]

    def test_cispo(self):
        found, grad = golden_loss("cispo")
        ratio = [[1.2, math.exp(-0.1), 1], [0.8, 1.2, 0]]
        coefficient = -np.array(ratio) * np.array(ADVANTAGE) * np.array(WEIGHT)
        np.testing.assert_allclose(grad, coefficient, rtol=1e-12)
        np.testing.assert_allclose(found.loss.detach(), coefficient * np.array(LOGP), rtol=1e-12)
        assert found.clipped.tolist() == [[True, False, False], [True, True, False]]

    def test_gspo(self):
        found, grad = golden_loss("gspo")
        first, second = math.exp(0.4 / 3), math.exp(0.1 / 2)
        expected = [[-2 * first, -first, 0.5 * 2 * first], [-second, 0.5 * second, 0]]
        np.testing.assert_allclose(found.loss.detach(), expected, rtol=1e-12)
        np.testing.assert_allclose(grad, expected, rtol=1e-12)

    def test_reinforce(self):
        found, grad = golden_loss("reinforce")
        coefficient = -np.array(ADVANTAGE) * np.array(WEIGHT) * np.array(LOSS_MASK)
        np.testing.assert_allclose(grad, coefficient)
        np.testing.assert_allclose(found.loss.detach(), coefficient * np.array(LOGP))

    def test_cross_entropy(self):
        found = cross_entropy_loss(
            logprobs=torch.tensor([[-1.0, math.nan, -3.0]]), ce_weights=torch.tensor([[1.0, 0.0, 0.3]])
        )
        np.testing.assert_allclose(found, [[1.0, 0.0, 0.9]], rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_masked_tokens_give_exactly_zero_whatever_they_hold(name):
    junk = torch.tensor([[math.nan, 1e9, -math.inf, -1e9]])
    logprobs = torch.tensor([[-1.0, -1.0, -1.0, -2.0]], requires_grad=True)
    mask = torch.tensor([[False, False, False, True]])
    found = policy_gradient_loss(
        logprobs=torch.where(mask, logprobs, junk),
        old_logprobs=torch.where(mask, -2.0, junk),
        advantages=torch.where(mask, 1.0, junk),
        weights=torch.where(mask, 1.0, junk),
        mask=mask,
        config=LossConfig(name=name),
    )
    assert found.loss[0, :3].tolist() == [0, 0, 0]
    found.loss.sum().backward()
    assert logprobs.grad.tolist() == [[0, 0, 0, -1]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("action", ["none", "clamp", "mask"])
def test_k52_every_listed_choice_builds_and_trains_the_right_direction(make_sequence, name, mode, level, action):
    """Every loss × mode × level × action: a positive advantage raises exactly the sampled tokens'
    log-probability."""
    config = LossConfig(name=name, mode=mode)
    correction = (
        CorrectionConfig(action="none", upper=None)
        if action == "none"
        else CorrectionConfig(level=level, action=action, lower=0.1 if action == "mask" else None, upper=4.0)
    )
    sequence = make_sequence(length=9, advantages=np.ones(9, np.float32))
    (micro,) = pack([sequence], tokens_per_microbatch=64)
    logprobs = torch.where(micro.pg_mask, micro.behaviour_logprobs + 0.1, 0.0).requires_grad_()
    old = micro.behaviour_logprobs if mode == "bypass" else logprobs.detach()
    corrected = correct(logprobs, micro.behaviour_logprobs, micro.sampled, correction)
    found = stream_losses(
        micro=micro,
        logprobs=logprobs,
        old_logprobs=old,
        candidates=None,
        correction=corrected,
        config=config,
        divergence=DivergenceConfig(),
        counts=Counts(policy=int(micro.pg_mask.sum())),
    )
    found.total.backward()
    n = int(micro.pg_mask.sum())
    assert found.counts == Counts(policy=n)
    assert ((logprobs.grad < 0) == micro.pg_mask).all()
    # the ratio e^.1 enters once and only once, by π_old in bypass mode and by the weight in decoupled mode
    once = {"token": 0.1, "geometric": 0.1, "sequence": 0.1 * n}[level]
    if mode == "decoupled" or name == "reinforce":
        expected = 1.0 if action == "none" else math.exp(once)
    elif action == "none" or math.exp(once) <= 4:
        expected = math.exp(0.1)
    np.testing.assert_allclose(logprobs.grad[micro.pg_mask], -expected / n, rtol=1e-5)


def test_bypass_clamp_shortens_the_ratio_to_its_bound():
    train, rollout, mask = torch.tensor([[0.0, -1.0]]), torch.tensor([[-3.0, -1.0]]), torch.ones(1, 2)
    corrected = correct(train, rollout, mask, preset("token-clamp-2"))
    factor = loss_weights(corrected, LossConfig(name="cispo", mode="bypass"))
    np.testing.assert_allclose(factor * (train - rollout).exp(), [[2.0, 1.0]], rtol=1e-6)
    whole = loss_weights(corrected, LossConfig(name="reinforce", mode="bypass"))
    np.testing.assert_allclose(whole, [[2.0, 1.0]], rtol=1e-6)
    masked = correct(train, rollout, mask, preset("token-mask-2"))
    np.testing.assert_allclose(loss_weights(masked, LossConfig(mode="bypass")), [[0.0, 1.0]])

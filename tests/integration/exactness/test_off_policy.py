"""Rollout correction on real records: nothing to correct on-policy, the formulas' values one delivery behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.bubblewrap]


def ess(weights: np.ndarray) -> float:
    return float(1 / np.mean((weights / weights.mean()) ** 2))


def test_on_policy_every_ratio_is_one(loop: Any) -> None:
    loop.play(2, 4)
    batch = loop.batch(1, version=loop.version)
    result = loop.trainer.train(batch)
    for trained, sequence in zip(result.sequences, batch.sequences, strict=True):
        assert trained.mask.tolist() == sequence.pg_mask.tolist()
        assert np.abs(trained.weights[trained.mask] - 1).max() < 1e-4
    metrics = result.metrics
    assert metrics["correction/ess"] == pytest.approx(1.0, abs=1e-6)
    assert abs(metrics["correction/kl"]) < 1e-5
    assert metrics["correction/weight_min"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["correction/weight_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["correction/clamped_fraction"] == 0
    assert metrics["correction/masked_token_fraction"] == 0


@pytest.mark.parametrize("preset", ["token-clamp-2", "token-mask-2"])
def test_one_delivery_behind(loop: Any, start_trainer: Callable[..., Any], preset: str) -> None:
    """Tokens of version n trained at n + 1: weights and metrics are those that numpy makes of the recorded streams."""
    loop.trainer = start_trainer(correction=preset, optimizer={"learning_rate": 3e-3})
    loop.play(2, 4)
    old = loop.version
    loop.trainer.train(loop.batch(1, version=old))
    loop.deliver()
    batch = loop.batch(2, version=loop.version, max_staleness=loop.version - old)
    assert {int(v) for s in batch.sequences for v in s.versions[s.pg_mask]} == {old}

    lr = loop.errors(batch).astype(np.float64)
    raw = np.exp(lr)
    expected = np.minimum(raw, 2.0) if preset == "token-clamp-2" else raw * ((raw >= 0.5) & (raw <= 2.0))
    result = loop.trainer.train(batch)
    weights = np.concatenate([t.weights[s.pg_mask] for t, s in zip(result.sequences, batch.sequences, strict=True)])
    mask = np.concatenate([t.mask[s.pg_mask] for t, s in zip(result.sequences, batch.sequences, strict=True)])
    metrics = {k.removeprefix("correction/"): v for k, v in result.metrics.items() if k.startswith("correction/")}

    assert np.abs(raw - 1).max() > 0.5
    assert mask.all()  # an action changes weights; only rejection leaves the denominator
    np.testing.assert_allclose(weights, expected, rtol=1e-3, atol=1e-5)
    assert metrics["ess"] == pytest.approx(ess(expected), abs=1e-3)
    assert metrics["ess"] < 0.99
    assert metrics["kl"] == pytest.approx(-lr.mean(), abs=1e-4)
    assert metrics["k3_kl"] == pytest.approx((raw - 1 - lr).mean(), rel=1e-3)
    assert metrics["k3_kl"] > 0
    assert metrics["weight_max"] == pytest.approx(raw.max(), rel=1e-3)
    over, under = (raw > 2).mean(), (raw < 0.5).mean()
    assert over > 0
    if preset == "token-clamp-2":
        assert metrics["clamped_fraction"] == pytest.approx(over)
        assert metrics["masked_token_fraction"] == 0
    else:
        assert metrics["clamped_fraction"] == 0
        assert metrics["masked_token_fraction"] == pytest.approx(over + under)

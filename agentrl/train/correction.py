"""Rollout correction: importance weights of π_train / π_rollout, and rejection of what is too far off.

The direction is fixed once: ratio = π_train / π_rollout, so lr = logp_train − logp_rollout per token.
`logp_train` is the trainer's recomputed log-probability (π_old in decoupled mode, π_θ in bypass mode),
`logp_rollout` what the policy server reported for the token it sampled.

    token weight       w = exp(lr)
    sequence weight    w = exp(Σ_t mask·lr), the same on every token of the sequence
    geometric weight   w = exp(mean_t mask·lr)
    `clamp` (TIS)      w ← min(w, upper), and max(w, lower) where `lower` is given
    `mask` (IcePop)    w ← w · 1[lower ≤ w ≤ upper]; a missing `lower` means 0
    rejection          a token stays where lower ≤ stat ≤ upper for every rule; the mask changes, never a weight

What stays in the loss's denominator is `Correction.mask` and nothing else: a weight that action `mask` set to
0 stays, a rejected token leaves. Masked positions and tokens with a non-finite log-probability have weight
exactly 0 and leave.

Sources: truncated importance sampling for rollout mismatch, Yao et al. 2025 ("Your efficient RL framework
secretly brings you off-policy RL training"); IcePop, Ling team 2025; the estimators k1-k3, Schulman 2020
("Approximating KL divergence"); the effective sample size, Kish 1965.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from agentrl.config import CorrectionConfig, RejectionRule, correction_preset
from agentrl.errors import RecordError

EXPONENT_BOUND = 20.0
"""Log-ratios are clipped to ± this before any exp: e^20 ≈ 4.9e8 is beyond every bound and still finite in
float32."""


@dataclass(frozen=True, slots=True)
class Correction:
    """What a batch is corrected by; nothing carries a gradient.

    weights [B, T]: 0 off the input mask and on non-finite tokens · mask [B, T]: what the loss's denominator
    counts · metrics by name · action_factor [B, T]: what the action alone changed, w / w_raw (1, a clamp's
    shortening or lengthening, or 0), with the support of `weights`.
    """

    weights: Float[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    metrics: dict[str, float]
    action_factor: Float[Tensor, "B T"]


def preset(name: str) -> CorrectionConfig:
    """The preset of that name, from `agentrl.config`. Raises ValueError that lists the names."""
    return correction_preset(name)


@torch.no_grad()
def correct(logp_train: Any, logp_rollout: Any, mask: Any, config: CorrectionConfig) -> Correction:
    """Weights, mask and metrics of a batch. All inputs [B, T]: tensors, arrays or nested lists.

    Computed in float64 where an input is, else in float32. Raises `RecordError` where shapes differ.
    """
    train, rollout, agent = _inputs(logp_train, logp_rollout, mask)
    finite = torch.isfinite(train) & torch.isfinite(rollout)
    valid = agent & finite
    # `where` and not a product: NaN · 0 is NaN.
    zero = torch.zeros((), dtype=train.dtype, device=train.device)
    train, rollout = torch.where(valid, train, zero), torch.where(valid, rollout, zero)
    log_ratio = (train - rollout).clamp(-EXPONENT_BOUND, EXPONENT_BOUND)

    raw = torch.where(valid, _raw_weights(log_ratio, valid, config), zero)
    weights = _apply_action(raw, valid, config)
    kept = valid
    for rule in config.reject:
        kept = kept & _keeps(log_ratio, valid, rule)
    metrics = _metrics(train=train, rollout=rollout, raw=raw, weights=weights, valid=valid, kept=kept, config=config)
    metrics["nonfinite_tokens"] = float((agent & ~finite).sum())
    factor = weights if config.action == "none" else torch.where(valid, weights / raw, zero)
    return Correction(weights=weights, mask=kept, metrics=metrics, action_factor=factor)


def _inputs(logp_train: Any, logp_rollout: Any, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The three inputs as tensors of one shape [B, T] on one device; log-probabilities of one float type."""
    train, rollout, agent = (
        x.detach() if isinstance(x, Tensor) else torch.from_numpy(np.array(x)) for x in (logp_train, logp_rollout, mask)
    )
    shapes = {"logp_train": train.shape, "logp_rollout": rollout.shape, "mask": agent.shape}
    if len(set(shapes.values())) != 1 or train.ndim != 2:
        raise RecordError(
            "inputs of the correction differ in shape: " + ", ".join(f"{k} {list(v)}" for k, v in shapes.items()),
            where="agentrl.train.correction.correct",
            remedy="give [B, T] streams of one shape; never pad or truncate one of them alone",
        )
    wide = torch.float64 if torch.float64 in (train.dtype, rollout.dtype) else torch.float32
    return train.to(wide), rollout.to(device=train.device, dtype=wide), agent.to(train.device) != 0


def _exp(x: Tensor) -> Tensor:
    return x.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()


def _row_mean(x: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"]) -> Float[Tensor, "B 1"]:
    """Mean over each row's valid tokens; 0 for a row without any. `x` is 0 off `valid`."""
    return (x * valid).sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)


def _raw_weights(
    log_ratio: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"], config: CorrectionConfig
) -> Float[Tensor, "B T"]:
    if config.level == "token":
        return _exp(log_ratio)
    total = log_ratio.sum(-1, keepdim=True) if config.level == "sequence" else _row_mean(log_ratio, valid)
    return _exp(total).expand_as(log_ratio)


def _apply_action(
    raw: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"], config: CorrectionConfig
) -> Float[Tensor, "B T"]:
    """Weights after the action; 0 off `valid` (a lower clamp must not lift them)."""
    if config.action == "none":
        return valid.to(raw.dtype)
    if config.action == "clamp":
        return raw.clamp(min=config.lower, max=config.upper) * valid
    upper = torch.inf if config.upper is None else config.upper
    return raw * ((raw >= (config.lower or 0.0)) & (raw <= upper))


def _keeps(log_ratio: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"], rule: RejectionRule) -> Bool[Tensor, "B T"]:
    """Where `rule` keeps a token: lower ≤ stat ≤ upper, per token or per sequence."""
    ratio = _exp(log_ratio)
    stat = {
        "ratio": ratio,
        "k1": log_ratio,
        "k2": log_ratio.square() / 2,
        "k3": ratio - 1 - log_ratio,
    }[rule.stat]
    if rule.agg == "max":
        stat = torch.where(valid, stat, -torch.inf).amax(-1, keepdim=True)
    elif rule.agg == "sum":
        stat = (stat * valid).sum(-1, keepdim=True)
    elif rule.agg == "mean":
        stat = _row_mean(stat, valid)
    keep = torch.ones_like(stat, dtype=torch.bool)
    if rule.lower is not None:
        keep &= stat >= rule.lower
    if rule.upper is not None:
        keep &= stat <= rule.upper
    return keep.expand_as(log_ratio)


def effective_sample_size(weights: Float[Tensor, " N"]) -> float:
    """1 / mean((w / mean w)²), as a fraction of N; 0 where every weight is 0 or there is none."""
    if weights.numel() == 0 or float(weights.abs().max()) == 0:
        return 0.0
    return float(1 / (weights / weights.mean()).square().mean())


def _metrics(
    *,
    train: Float[Tensor, "B T"],
    rollout: Float[Tensor, "B T"],
    raw: Float[Tensor, "B T"],
    weights: Float[Tensor, "B T"],
    valid: Bool[Tensor, "B T"],
    kept: Bool[Tensor, "B T"],
    config: CorrectionConfig,
) -> dict[str, float]:
    """Figures over the valid tokens (agent's, finite) and over the rows that hold any; 0 where there is none.

    A token is *masked* where the action zeroed its weight or a rule rejected it. `weight_*` are of the raw
    weights, `applied_weight_*` of those the loss sees.
    """
    rows = valid.any(-1)
    if not bool(rows.any()):
        return dict.fromkeys(METRIC_NAMES, 0.0)
    delta = train - rollout
    tokens = delta[valid]
    ratio = _exp(tokens)
    raw_tokens, applied = raw[valid], weights[valid]
    outside = raw_tokens > config.upper if config.upper is not None else torch.zeros_like(raw_tokens, dtype=torch.bool)
    if config.lower is not None:
        outside |= raw_tokens < config.lower
    trained = kept & ~((weights == 0) & (raw > 0)) if config.action == "mask" else kept
    row = {name: _row_mean(x, valid)[rows, 0] for name, x in (("train", train), ("rollout", rollout), ("lr", delta))}
    row_total = delta.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).sum(-1)[rows]
    return {
        "ess": effective_sample_size(applied),
        "clamped_fraction": float(outside.double().mean()) if config.action == "clamp" else 0.0,
        "masked_token_fraction": float((~trained[valid]).double().mean()),
        "masked_sequence_fraction": float((~trained.any(-1))[rows].double().mean()),
        "weight_mean": float(raw_tokens.mean()),
        "weight_max": float(raw_tokens.max()),
        "weight_min": float(raw_tokens.min()),
        "weight_std": float(raw_tokens.std(correction=0)),
        "applied_weight_mean": float(applied.mean()),
        "applied_weight_std": float(applied.std(correction=0)),
        "kl": float(-tokens.mean()),
        "k3_kl": float((ratio - 1 - tokens.clamp(-EXPONENT_BOUND, EXPONENT_BOUND)).mean()),
        "train_ppl": float(_exp(-row["train"]).mean()),
        "rollout_ppl": float(_exp(-row["rollout"]).mean()),
        "ppl_ratio": float(_exp(-row["lr"]).mean()),
        "chi2_token": float(ratio.square().mean() - 1),
        "chi2_sequence": float(_exp(row_total).square().mean() - 1),
    }


METRIC_NAMES = (
    "ess",
    "clamped_fraction",
    "masked_token_fraction",
    "masked_sequence_fraction",
    "weight_mean",
    "weight_max",
    "weight_min",
    "weight_std",
    "applied_weight_mean",
    "applied_weight_std",
    "kl",
    "k3_kl",
    "train_ppl",
    "rollout_ppl",
    "ppl_ratio",
    "chi2_token",
    "chi2_sequence",
)

"""The three streams' losses. Pure functions on [B, T]; what is eligible arrives ready as a mask.

With r = π_θ/π_old (gradient flows), A the advantage, w the detached rollout-correction weight, per token:

    ppo_clip    −w · min(r·A, clip(r, 1−low, 1+high)·A)
                Schulman et al. 2017, arXiv 1707.06347
    cispo       −w · sg[clip(r, 1−low, 1+high)] · A · log π_θ
                MiniMax-M1 2025, arXiv 2506.13585
    gspo        ppo_clip with r := sg[s] · π_θ/sg[π_θ], s = exp(mean_t log r) over the sequence
                Zheng et al. 2025, arXiv 2507.18071 (GSPO-token)
    reinforce   −w · A · log π_θ
                Williams 1992

Modes. *decoupled* (Hilton et al. 2021, arXiv 2110.00641): π_old is the trainer's own policy before the batch's
first update, w = π_old/π_rollout. *bypass*: π_old := π_rollout. Then r itself is the importance ratio, so what
multiplies the loss is only what the correction's action changed, w / w_raw (1, a clamp's shortening, or 0);
`reinforce` has no ratio and takes w = π_θ/π_rollout whole.

The other streams:

    cross-entropy   −ce_weight · log π_θ
    divergence      the policy-gradient loss above with A := teacher_weight · sg[log π_teacher − log π_θ], bounded:
                    the sampled-token reverse KL. Back-propagating the difference itself would lose the teacher,
                    whose term has no gradient (Lu 2025, "On-policy distillation").

The denominator's contract stands at `Counts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from agentrl.config import LossConfig
from agentrl.train.correction import EXPONENT_BOUND, Correction
from agentrl.train.packing import MicroBatch

DIVERGENCE_BOUND = 5.0
"""Nats. A token the teacher rules out must not outweigh the rest of a trajectory."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens that each stream's loss is divided by.

    The contract: a stream's loss is Σ over *all* tokens of the update ÷ the number of its tokens in the
    *whole update* (every micro-batch of every rank), so loss and gradient do not depend on packing, padding,
    micro-batch size or number of ranks. A token counts where its stream takes it in and it was not rejected
    and its log-probabilities are finite; weight 0 by the correction's action `mask`, or advantage 0, still
    counts. A stream without tokens has loss 0.
    """

    policy: int = 0
    cross_entropy: int = 0
    divergence: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            policy=self.policy + other.policy,
            cross_entropy=self.cross_entropy + other.cross_entropy,
            divergence=self.divergence + other.divergence,
        )

    @property
    def streams(self) -> int:
        """How many streams have tokens."""
        return sum(n > 0 for n in (self.policy, self.cross_entropy, self.divergence))


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token loss [B, T] (0 off the mask) and where the clip took the gradient away or held the ratio [B,
    T]."""

    loss: Float[Tensor, "B T"]
    clipped: Bool[Tensor, "B T"]


Surrogate = Callable[[Float[Tensor, "B T"], Float[Tensor, "B T"], Float[Tensor, "B T"], LossConfig], TokenLoss]


def _clip_surrogate(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    ratio = log_ratio.exp()
    plain = ratio * advantages
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    return TokenLoss(loss=-torch.minimum(plain, bounded), clipped=bounded < plain)


def _cispo_surrogate(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    ratio = log_ratio.detach().exp()
    bounded = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return TokenLoss(loss=-bounded * advantages * logprobs, clipped=bounded != ratio)


def _reinforce_surrogate(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: LossConfig) -> TokenLoss:
    return TokenLoss(loss=-advantages * logprobs, clipped=torch.zeros_like(logprobs, dtype=torch.bool))


_SURROGATES: dict[str, Surrogate] = {
    "ppo_clip": _clip_surrogate,
    "cispo": _cispo_surrogate,
    "gspo": _clip_surrogate,
    "reinforce": _reinforce_surrogate,
}


def policy_gradient_loss(
    *,
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    weights: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    config: LossConfig,
) -> TokenLoss:
    """Per-token loss on `mask`, exactly 0 off it whatever the inputs hold there. A row is one sequence (for
    GSPO).

    `old_logprobs`, `advantages` and `weights` carry no gradient.
    """
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    logprobs = torch.where(mask, logprobs, zero)
    log_ratio = logprobs - torch.where(mask, old_logprobs.detach().to(logprobs.dtype), zero)
    log_ratio = log_ratio.clamp(-EXPONENT_BOUND, EXPONENT_BOUND)
    if config.name == "gspo":
        mean = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
        # Value of the sequence's ratio, gradient of each token's own log-probability.
        log_ratio = torch.where(mask, mean.detach() + logprobs - logprobs.detach(), zero)
    advantages = torch.where(mask, advantages.detach().to(logprobs.dtype), zero)
    token = _SURROGATES[config.name](log_ratio, logprobs, advantages, config)
    scale = torch.where(mask, weights.detach().to(logprobs.dtype), zero)
    return TokenLoss(loss=scale * token.loss, clipped=token.clipped & mask)


def loss_weights(correction: Correction, config: LossConfig) -> Float[Tensor, "B T"]:
    """What multiplies the policy-gradient loss: w, or in bypass mode with a ratio in the loss, w / w_raw."""
    if config.mode == "decoupled" or config.name == "reinforce":
        return correction.weights
    return correction.action_factor


def cross_entropy_loss(*, logprobs: Float[Tensor, "B T"], ce_weights: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """−ce_weight · log π_θ per token; exactly 0 where the weight is 0."""
    zero = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    return -ce_weights * torch.where(ce_weights != 0, logprobs, zero)


def divergence_advantages(
    *,
    logprobs: Float[Tensor, "B T"],
    teacher_logprobs: Float[Tensor, "B T"],
    teacher_weights: Float[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """teacher_weight · clip(log π_teacher − log π_θ, ± bound), detached; 0 where the weight is 0."""
    gap = teacher_logprobs - logprobs.detach()
    zero = torch.zeros((), dtype=gap.dtype, device=gap.device)
    return teacher_weights * torch.where(teacher_weights != 0, gap.clamp(-DIVERGENCE_BOUND, DIVERGENCE_BOUND), zero)


@dataclass(frozen=True, slots=True)
class StreamLosses:
    """One micro-batch's share. `total` (with gradient) is the sum of the streams' sums, each over its global
    count; the
    *_sum are plain sums over tokens, `counts` this micro-batch's own tokens, `contributing` those whose
    weight is not 0."""

    total: Float[Tensor, ""]
    policy_sum: float
    cross_entropy_sum: float
    divergence_sum: float
    reverse_kl_sum: float
    clipped: int
    contributing: int
    counts: Counts


def stream_losses(
    *,
    micro: MicroBatch,
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    correction: Correction,
    config: LossConfig,
    counts: Counts,
) -> StreamLosses:
    """All streams of a micro-batch, normalised by `counts`, the update's global ones (see `Counts`)."""
    weights = loss_weights(correction, config)
    policy_mask = micro.pg_mask & correction.mask
    divergence_mask = (micro.teacher_weights != 0) & correction.mask

    def gradient_loss(advantages: Tensor, mask: Tensor) -> TokenLoss:
        return policy_gradient_loss(
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            advantages=advantages,
            weights=weights,
            mask=mask,
            config=config,
        )

    policy = gradient_loss(micro.advantages, policy_mask)
    teacher_gap = divergence_advantages(
        logprobs=logprobs, teacher_logprobs=micro.teacher_logprobs, teacher_weights=micro.teacher_weights
    )
    divergence = gradient_loss(teacher_gap, divergence_mask)
    cross_entropy = cross_entropy_loss(logprobs=logprobs, ce_weights=micro.ce_weights)
    total = (
        policy.loss.sum() / max(counts.policy, 1)
        + cross_entropy.sum() / max(counts.cross_entropy, 1)
        + divergence.loss.sum() / max(counts.divergence, 1)
    )
    live = (policy_mask | divergence_mask) & (weights != 0)
    reverse_kl = torch.where(divergence_mask, logprobs.detach() - micro.teacher_logprobs, 0.0)
    return StreamLosses(
        total=total,
        policy_sum=float(policy.loss.detach().sum()),
        cross_entropy_sum=float(cross_entropy.detach().sum()),
        divergence_sum=float(divergence.loss.detach().sum()),
        reverse_kl_sum=float(reverse_kl.sum()),
        clipped=int((policy.clipped | divergence.clipped).sum()),
        contributing=int((live | (micro.ce_weights != 0)).sum()),
        counts=Counts(
            policy=int(policy_mask.sum()),
            cross_entropy=int((micro.ce_weights != 0).sum()),
            divergence=int(divergence_mask.sum()),
        ),
    )

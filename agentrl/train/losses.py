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
    divergence      `sampled`: the policy-gradient loss above with A := teacher_weight · the teacher's advantage;
                    else teacher_weight · w · D, the divergence over candidates (`agentrl.train.divergence`). D has no
                    ratio in it, so that w = π_old/π_rollout stands whole in either mode.

The denominator's contract stands at `Counts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from agentrl.config import DivergenceConfig, LossConfig
from agentrl.train.correction import EXPONENT_BOUND, Correction
from agentrl.train.divergence import Disagreement, candidate_divergence, sampled_advantages
from agentrl.train.logprobs import CandidateLogprobs
from agentrl.train.packing import MicroBatch


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


def _sampled(micro: MicroBatch, logprobs: Float[Tensor, "B T"], config: DivergenceConfig) -> Disagreement:
    return sampled_advantages(
        logprobs=logprobs,
        teacher_logprobs=micro.teacher_logprobs,
        teacher_weights=micro.teacher_weights,
        teacher_spans=micro.teacher_spans,
        config=config,
    )


def _over_candidates(
    micro: MicroBatch, student: CandidateLogprobs | None, config: DivergenceConfig, *, like: Float[Tensor, "B T"]
) -> Disagreement:
    """The scored tokens' divergences and clamps at their places [B, T], 0 and False elsewhere."""
    values, clamped = torch.zeros_like(like), torch.zeros_like(micro.scored)
    if student is None or micro.candidate_logprobs is None:
        return Disagreement(values=values, clamped=clamped)
    found = candidate_divergence(student=student, teacher_logprobs=micro.candidate_logprobs, config=config)
    return Disagreement(
        values=values.masked_scatter(micro.scored, found.values),
        clamped=clamped.masked_scatter(micro.scored, found.clamped),
    )


def _weighted(values: Float[Tensor, "B T"], *, weights: Float[Tensor, "B T"], mask: Bool[Tensor, "B T"]) -> TokenLoss:
    """weight · value on `mask`, exactly 0 off it; nothing is clipped."""
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    loss = torch.where(mask, weights.detach().to(values.dtype) * values, zero)
    return TokenLoss(loss=loss, clipped=torch.zeros_like(mask))


@dataclass(frozen=True, slots=True)
class StreamLosses:
    """One micro-batch's share. `total` (with gradient) is the sum of the streams' sums, each over its global
    count; the
    *_sum are plain sums over tokens, `counts` this micro-batch's own tokens, `contributing` those whose
    weight is not 0, `clamped` those of the divergence that its clamp cut."""

    total: Float[Tensor, ""]
    policy_sum: float
    cross_entropy_sum: float
    divergence_sum: float
    reverse_kl_sum: float
    clipped: int
    clamped: int
    contributing: int
    counts: Counts


def stream_losses(
    *,
    micro: MicroBatch,
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    candidates: CandidateLogprobs | None,
    correction: Correction,
    config: LossConfig,
    divergence: DivergenceConfig,
    counts: Counts,
) -> StreamLosses:
    """All streams of a micro-batch, normalised by `counts`, the update's global ones (see `Counts`).

    `candidates`: the student's, at the micro-batch's scored tokens; None where it has none, or with the divergence of
    the sampled token.
    """
    weights = loss_weights(correction, config)
    policy_mask = micro.pg_mask & correction.mask
    scored_mask = micro.scored & correction.mask

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
    if divergence.name == "sampled":
        found = _sampled(micro, logprobs, divergence)
        taught = gradient_loss(found.values, scored_mask)
    else:
        found = _over_candidates(micro, candidates, divergence, like=logprobs)
        taught = _weighted(found.values, weights=micro.teacher_weights * correction.weights, mask=scored_mask)
    cross_entropy = cross_entropy_loss(logprobs=logprobs, ce_weights=micro.ce_weights)
    total = (
        policy.loss.sum() / max(counts.policy, 1)
        + cross_entropy.sum() / max(counts.cross_entropy, 1)
        + taught.loss.sum() / max(counts.divergence, 1)
    )
    # The action that a mode multiplies by is 0 exactly where the weight itself is.
    live = (policy_mask | scored_mask) & (weights != 0)
    reverse_kl = torch.where(scored_mask, logprobs.detach() - micro.teacher_logprobs, 0.0)
    return StreamLosses(
        total=total,
        policy_sum=float(policy.loss.detach().sum()),
        cross_entropy_sum=float(cross_entropy.detach().sum()),
        divergence_sum=float(taught.loss.detach().sum()),
        reverse_kl_sum=float(reverse_kl.sum()),
        clipped=int((policy.clipped | taught.clipped).sum()),
        clamped=int((found.clamped & scored_mask).sum()),
        contributing=int((live | (micro.ce_weights != 0)).sum()),
        counts=Counts(
            policy=int(policy_mask.sum()),
            cross_entropy=int((micro.ce_weights != 0).sum()),
            divergence=int(scored_mask.sum()),
        ),
    )

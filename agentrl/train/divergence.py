"""How far the student is from its teacher on the tokens that the teacher scored.

p = π_θ is the student, q the teacher, both given the tokens before, at temperature 1; y_t is the token that was
sampled; sg[·] carries no gradient; c is `train.divergence.clamp`.

    sampled      advantage A_t = Σ_{j ≥ 0} γ^j · clip(g_{t+j}, ± c),  g_t = sg[log q(y_t) − log p(y_t)], for the
                 policy-gradient loss (`agentrl.train.losses`); j counts the scored tokens that follow in the segment.
                 In the mean over y_t ~ p its gradient at γ = 0 is that of reverse_kl over the whole vocabulary (Lu
                 2025, "On-policy distillation"); γ = 1 is the return of MiniLLM (Gu et al. 2023, arXiv 2306.08543).
    reverse_kl   KL(p ‖ q) = Σ_v p_v (log p_v − log q_v): seeks the teacher's modes (MiniLLM)
    forward_kl   KL(q ‖ p) = Σ_v q_v (log q_v − log p_v): covers the teacher (Hinton et al. 2015, arXiv 1503.02531)
    jsd          β KL(q ‖ m) + (1 − β) KL(p ‖ m), m = β q + (1 − β) p: the generalised Jensen-Shannon divergence of
                 GKD (Agarwal et al. 2023, arXiv 2306.13649); at most log 2

**The sampled one is detached**: back-propagating the difference itself would lose the teacher, whose term has no
gradient. The other three are differentiated through p; the prefix is taken as given, as GKD does.

**Candidates.** v runs over the K candidates, and where they are not the whole vocabulary over one outcome more, the
*tail*: any other token, with 1 − Σ q and 1 − Σ p. Merging outcomes never raises a divergence of this kind (data
processing), so what is trained is a lower bound of the whole one and is 0 at p = q. The student's tail is summed over
its logits and exact. The teacher's is a difference, so it is held above `TAIL_FLOOR`; then q is made to sum to 1.

**Spans.** Tokens that were scored together, by a teacher with another tokenizer, have one gap, by the chain rule the
sum over *all* of them: g = Σ_{t ∈ span} (log q − log p), given to each of its tokens. γ then counts spans.

**Clamp.** sampled: a gap is cut at ± c before it is summed with those that follow. The others: a token's divergence D
above c is multiplied by c / sg[D], so that its value is c and its gradient keeps its direction at c / D of its length;
a plain cut would leave the tokens of largest disagreement without any gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from agentrl.config import DivergenceConfig
from agentrl.train.logprobs import CandidateLogprobs

TAIL_FLOOR = 1e-6
"""Least probability of the teacher's tail: about what float32 log-probabilities leave uncertain of 1 − Σ q."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """values: advantages [B, T] without gradient, or divergences [M] with gradient, in nats · clamped, of the same
    shape: where the clamp cut."""

    values: Float[Tensor, " *S"]
    clamped: Bool[Tensor, " *S"]


def sampled_advantages(
    *,
    logprobs: Float[Tensor, "B T"],
    teacher_logprobs: Float[Tensor, "B T"],
    teacher_weights: Float[Tensor, "B T"],
    teacher_spans: Int[Tensor, "B T"],
    config: DivergenceConfig,
) -> Disagreement:
    """teacher_weight · A per token, detached; 0 where the weight is 0, whatever the log-probabilities hold there.

    `teacher_spans` number each row's spans 0, 1, 2 … in order, −1 where the weight is 0.
    """
    scored = teacher_weights != 0
    gaps = teacher_logprobs - logprobs.detach()
    zero = torch.zeros((), dtype=gaps.dtype, device=gaps.device)
    gaps = torch.where(scored, gaps, zero)
    spans = teacher_spans.clamp(min=0)  # an unscored token adds its gap of 0 to the first span
    per_span = torch.zeros_like(gaps).scatter_add_(1, spans, gaps)
    cut = per_span.clamp(-config.clamp, config.clamp)
    advantages = _discounted(cut, config.discount).gather(1, spans)
    return Disagreement(
        values=teacher_weights * torch.where(scored, advantages, zero),
        clamped=scored & (cut != per_span).gather(1, spans),
    )


def _discounted(values: Float[Tensor, "B S"], discount: float) -> Float[Tensor, "B S"]:
    """Σ_{j ≥ 0} discount^j · values[:, s + j], by doubling: the sum over 2n terms is that over n and, n later, that
    over n again."""
    total, taken = values, 1
    while discount > 0 and taken < values.shape[1]:
        later = torch.nn.functional.pad(total[:, taken:], (0, taken))
        total = total + discount**taken * later
        taken *= 2
    return total


def candidate_divergence(
    *,
    student: CandidateLogprobs,
    teacher_logprobs: Float[Tensor, "M K"],
    config: DivergenceConfig,
) -> Disagreement:
    """The divergence [M] of `config.name` at each scored token, clamped, with gradient through the student's."""
    log_q = _teacher(teacher_logprobs.to(student.logprobs.dtype), student.present)
    values = _DIVERGENCES[config.name](student.logprobs, log_q, config)
    above = values.detach() > config.clamp
    scale = torch.where(above, config.clamp / values.detach(), torch.ones_like(values))
    return Disagreement(values=values * scale, clamped=above)


def _teacher(logprobs: Float[Tensor, "M K"], present: Bool[Tensor, "M K+1"] | None) -> Float[Tensor, "M C"]:
    """log q of the candidates and, where `present` is given, of the tail; sums to 1; 0 where not present, as the
    student's."""
    if present is None:
        return logprobs - logprobs.logsumexp(-1, keepdim=True)
    known = logprobs.masked_fill(~present[:, :-1], -torch.inf)
    tail = (1 - known.double().logsumexp(-1, keepdim=True).exp()).clamp(min=TAIL_FLOOR).log()
    whole = torch.cat([known, tail.to(known.dtype)], dim=-1).masked_fill(~present, -torch.inf)
    whole = whole - whole.logsumexp(-1, keepdim=True)
    return whole.masked_fill(~present, 0.0)


def _kl(log_a: Float[Tensor, "M C"], log_b: Float[Tensor, "M C"]) -> Float[Tensor, " M"]:
    """KL(a ‖ b). An outcome that is not there has log 0 := 0 on both sides and adds nothing."""
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def _jsd(log_p: Float[Tensor, "M C"], log_q: Float[Tensor, "M C"], config: DivergenceConfig) -> Float[Tensor, " M"]:
    beta = config.jsd_beta
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    return beta * _kl(log_q, log_m) + (1 - beta) * _kl(log_p, log_m)


_DIVERGENCES: dict[
    str, Callable[[Float[Tensor, "M C"], Float[Tensor, "M C"], DivergenceConfig], Float[Tensor, " M"]]
] = {
    "reverse_kl": lambda log_p, log_q, config: _kl(log_p, log_q),
    "forward_kl": lambda log_p, log_q, config: _kl(log_q, log_p),
    "jsd": _jsd,
}

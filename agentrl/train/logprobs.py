"""Log-probabilities and entropy of given tokens, at the positions that are asked for and nowhere else.

The head (hidden × vocabulary) runs on the gathered positions [N] only, so [B, T, V] is never made. Where a divergence
over candidates asks for them, the log-probabilities of other tokens come from the same logits.
Log-softmax is in float32 or better whatever the model computes in, and logits are divided by the sampling
temperature first, as the policy server's processed log-probabilities are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that could stand at the M positions of `mask`, in row-major order: `ids` [M, K], each at most once a row,
    −1 where a row has fewer; None: the whole vocabulary, in order."""

    mask: Bool[Tensor, "B T"]
    ids: Int[Tensor, "M K"] | None


@dataclass(frozen=True, slots=True)
class CandidateLogprobs:
    """log π of the candidates, with gradient.

    logprobs [M, K + 1]: in the last column all tokens that are no candidate, taken together (the tail); 0 where
    `present` [M, K + 1] is False: a row has fewer candidates, or none but candidates. `present` None: logprobs [M, V]
    are the whole vocabulary's.
    """

    logprobs: Float[Tensor, "M C"]
    present: Bool[Tensor, "M C"] | None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """logprobs [B, T] with gradient and entropy [B, T] without, in nats; 0 where not needed (or not asked
    for). `candidates` is None unless asked for.

    Position t speaks of token t, predicted from tokens < t.
    """

    logprobs: Float[Tensor, "B T"]
    entropy: Float[Tensor, "B T"]
    candidates: CandidateLogprobs | None = None


def token_logprobs(
    model: PreTrainedModel,
    *,
    token_ids: Int[Tensor, "B T"],
    needed: Bool[Tensor, "B T"],
    temperature: float,
    with_entropy: bool = False,
    candidates: Candidates | None = None,
    dtype: torch.dtype = torch.float32,
) -> TokenLogprobs:
    """log π(token t | tokens < t) at the given temperature wherever `needed[:, t]`; `needed[:, 0]` is
    ignored. The positions of `candidates.mask` are among the needed ones, and position 0 is none of them.

    `with_entropy` costs another pass over the gathered logits. `dtype` bfloat16 is for the matrix products alone:
    weights, their gradients and everything after the head stay in float32.
    """
    ahead = needed[:, 1:]
    with torch.autocast(token_ids.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        hidden = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        logits = model.get_output_embeddings()(hidden[:, :-1][ahead])
    if logits.dtype != torch.float64:
        logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    log_norm = logits.logsumexp(-1)
    chosen = logits.gather(-1, token_ids[:, 1:][ahead].unsqueeze(-1)).squeeze(-1) - log_norm
    entropy = _entropy(logits.detach(), log_norm.detach()) if with_entropy else torch.zeros_like(log_norm)
    return TokenLogprobs(
        logprobs=_scatter(chosen, ahead),
        entropy=_scatter(entropy.detach(), ahead),
        candidates=_candidates(logits, log_norm, candidates, ahead) if candidates is not None else None,
    )


def _candidates(
    logits: Float[Tensor, "N V"], log_norm: Float[Tensor, " N"], asked: Candidates, ahead: Bool[Tensor, "B T-1"]
) -> CandidateLogprobs:
    rows = asked.mask[:, 1:][ahead]
    if not bool(rows.all()):
        logits, log_norm = logits[rows], log_norm[rows]
    log_norm = log_norm.unsqueeze(-1)
    if asked.ids is None:
        return CandidateLogprobs(logprobs=logits - log_norm, present=None)
    vocabulary = logits.shape[-1]
    given = asked.ids >= 0
    rest = given.sum(-1, keepdim=True) < vocabulary
    chosen = logits.gather(-1, asked.ids.clamp(min=0))
    # The tail is summed over its own logits: 1 − Σ p would be rounding noise where p is nearly all of it, and its
    # gradient the quotient of two such differences. A row that leaves nothing over keeps its logits, since the
    # gradient of an empty sum is NaN even where it is not used.
    taken = torch.zeros(len(logits), vocabulary + 1, dtype=torch.bool, device=logits.device)
    taken = taken.scatter_(-1, asked.ids.masked_fill(~given, vocabulary), True)[:, :-1]
    tail = logits.masked_fill(taken & rest, -torch.inf).logsumexp(-1, keepdim=True)
    present = torch.cat([given, rest], dim=-1)
    logprobs = torch.cat([chosen, tail], dim=-1) - log_norm
    return CandidateLogprobs(logprobs=logprobs.masked_fill(~present, 0.0), present=present)


def _entropy(logits: Float[Tensor, "N V"], log_norm: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """−Σ p log p = log Z − Σ p · logit, in nats."""
    probabilities = (logits - log_norm.unsqueeze(-1)).exp_()
    return log_norm - probabilities.mul_(logits).sum(-1)


def _scatter(values: Float[Tensor, " N"], ahead: Bool[Tensor, "B T-1"]) -> Float[Tensor, "B T"]:
    """Values back at their tokens: [N] → [B, T], 0 elsewhere."""
    out = torch.zeros(ahead.shape[0], ahead.shape[1] + 1, dtype=values.dtype, device=values.device)
    taken = torch.nn.functional.pad(ahead, (1, 0))
    return out.masked_scatter(taken, values)


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raise `ConfigError` where the model's logits are more than head(hidden): soft-capped or scaled
    logits."""
    ids = torch.arange(8, device=model.device).unsqueeze(0) % model.config.vocab_size
    whole = model(input_ids=ids, use_cache=False).logits
    parts = model.get_output_embeddings()(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    if not torch.allclose(whole.float(), parts.float(), atol=1e-3, rtol=1e-3):
        raise ConfigError(
            f"{type(model).__name__} changes its logits after the output head (scaling or soft cap)",
            where="policy.model",
            remedy="use a model whose logits are its output head's, such as Qwen2/Qwen3 or Llama",
        )

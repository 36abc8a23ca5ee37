"""One optimizer step's gradient over micro-batches and ranks, exact under any packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.config import CorrectionConfig, DivergenceConfig, LossConfig
from agentrl.train.correction import Correction, correct
from agentrl.train.logprobs import Candidates, token_logprobs
from agentrl.train.losses import Counts, StreamLosses, stream_losses
from agentrl.train.packing import MicroBatch, pad_rows
from agentrl.train.ranks import Alone, Ranks, sum_gradients, sum_numbers


@dataclass(frozen=True, slots=True)
class RowRecord:
    """What training saw of one sequence, [T] each, on the CPU: the correction's inputs and its results."""

    train_logprobs: Float[Tensor, " T"]
    behaviour_logprobs: Float[Tensor, " T"]
    sampled: Float[Tensor, " T"]
    weights: Float[Tensor, " T"]
    mask: Float[Tensor, " T"]


@dataclass(frozen=True, slots=True)
class Gradient:
    """The update's gradient lies in the parameters; here is what went into it, on all ranks together.

    `*_loss` are normalised by `counts`. `records[i]` belongs to sequence i of what *this* rank was given of the
    update. `entropy_sum` is over `loss_tokens`, the tokens of any stream's denominator (each once).
    """

    counts: Counts
    policy_loss: float
    cross_entropy_loss: float
    divergence_loss: float
    reverse_kl: float
    clipped: int
    clamped: int
    contributing: int
    entropy_sum: float
    loss_tokens: int
    records: dict[int, RowRecord]


@dataclass(frozen=True, slots=True)
class Objective:
    """What the update's loss is made of. `objective.old` holds π_old per row (see `compute_gradient`)."""

    loss: LossConfig
    correction: CorrectionConfig
    temperature: float
    old: dict[int, Float[Tensor, " T"]]
    divergence: DivergenceConfig
    dtype: torch.dtype = torch.float32


def old_logprobs(
    model: PreTrainedModel,
    micro_batches: Sequence[MicroBatch],
    *,
    temperature: float,
    dtype: torch.dtype = torch.float32,
) -> dict[int, Float[Tensor, " T"]]:
    """log π of the sampled tokens under the weights as they are, per row: π_old of a batch's later
    updates."""
    found: dict[int, Float[Tensor, " T"]] = {}
    with torch.no_grad():
        for micro in micro_batches:
            out = token_logprobs(
                model, token_ids=micro.token_ids, needed=micro.sampled, temperature=temperature, dtype=dtype
            )
            for b, row in enumerate(micro.rows):
                found[row] = out.logprobs[b, : int(micro.lengths[b])]
    return found


def compute_gradient(
    model: PreTrainedModel, micro_batches: Sequence[MicroBatch], objective: Objective, *, ranks: Ranks | None = None
) -> Gradient:
    """Set every parameter's `.grad` to the gradient of the update's loss; `micro_batches` are this rank's, maybe none.

    `objective.old` holds π_old per row; a row that is absent takes the current weights' own (the batch's
    first update). Rejection and non-finite tokens shrink a denominator only once the forward pass has shown
    them. The pass starts from the counts without them; where they differ afterwards the gradient is scaled,
    which is exact for a single stream, and with several streams the pass is made again with the true counts.
    Both counts are those of all ranks, so that every rank decides alike.
    """
    ranks = ranks or Alone()
    expected = _sum_counts(ranks, _counts_before_correction(micro_batches))
    found = _accumulate(model, micro_batches, objective, counts=expected, ranks=ranks)
    if found.counts != expected and expected.streams > 1:
        found = _accumulate(model, micro_batches, objective, counts=found.counts, ranks=ranks)
    elif found.counts != expected:
        before, after = (c.policy + c.cross_entropy + c.divergence for c in (expected, found.counts))
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(before / max(after, 1))
    sum_gradients(ranks, list(model.parameters()))
    return found


def _counts_before_correction(micro_batches: Sequence[MicroBatch]) -> Counts:
    counts = Counts()
    for micro in micro_batches:
        finite = torch.isfinite(micro.behaviour_logprobs)
        counts += Counts(
            policy=int((micro.pg_mask & finite).sum()),
            cross_entropy=int((micro.ce_weights != 0).sum()),
            divergence=int((micro.scored & finite).sum()),
        )
    return counts


def _sum_counts(ranks: Ranks, own: Counts) -> Counts:
    policy, cross_entropy, divergence = sum_numbers(ranks, [own.policy, own.cross_entropy, own.divergence])
    return Counts(policy=int(policy), cross_entropy=int(cross_entropy), divergence=int(divergence))


def _accumulate(
    model: PreTrainedModel,
    micro_batches: Sequence[MicroBatch],
    objective: Objective,
    *,
    counts: Counts,
    ranks: Ranks,
) -> Gradient:
    for parameter in model.parameters():
        parameter.grad = None
    parts: list[StreamLosses] = []
    records: dict[int, RowRecord] = {}
    entropy_sum, loss_tokens = 0.0, 0
    for micro in micro_batches:
        out = token_logprobs(
            model,
            token_ids=micro.token_ids,
            needed=micro.needed,
            temperature=objective.temperature,
            with_entropy=True,
            candidates=_asked(micro, objective.divergence),
            dtype=objective.dtype,
        )
        current = out.logprobs.detach()
        if objective.loss.mode == "bypass":
            reference, before = current, micro.behaviour_logprobs
        else:
            reference = before = _rows_of(micro, objective.old, current)
        corrected = correct(reference, micro.behaviour_logprobs, micro.sampled, objective.correction)
        part = stream_losses(
            micro=micro,
            logprobs=out.logprobs,
            old_logprobs=before,
            candidates=out.candidates,
            correction=corrected,
            config=objective.loss,
            divergence=objective.divergence,
            counts=counts,
        )
        part.total.backward()
        parts.append(part)
        in_loss = corrected.mask | (micro.ce_weights != 0)
        entropy_sum += float(out.entropy[in_loss].sum())
        loss_tokens += int(in_loss.sum())
        _record(records, micro=micro, reference=reference, corrected=corrected)
    return _summed(parts, records, entropy_sum=entropy_sum, loss_tokens=loss_tokens, ranks=ranks)


def _asked(micro: MicroBatch, divergence: DivergenceConfig) -> Candidates | None:
    """Which of the student's log-probabilities the divergence needs besides the sampled tokens'."""
    if divergence.name == "sampled" or micro.candidate_logprobs is None:
        return None
    return Candidates(mask=micro.scored, ids=micro.candidate_ids)


def _summed(
    parts: Sequence[StreamLosses],
    records: dict[int, RowRecord],
    *,
    entropy_sum: float,
    loss_tokens: int,
    ranks: Ranks,
) -> Gradient:
    """The parts of every rank together."""
    counts = _sum_counts(ranks, sum((part.counts for part in parts), Counts()))
    policy, cross_entropy, divergence, reverse_kl, clipped, clamped, contributing, entropy, tokens = sum_numbers(
        ranks,
        [
            sum(part.policy_sum for part in parts),
            sum(part.cross_entropy_sum for part in parts),
            sum(part.divergence_sum for part in parts),
            sum(part.reverse_kl_sum for part in parts),
            sum(part.clipped for part in parts),
            sum(part.clamped for part in parts),
            sum(part.contributing for part in parts),
            entropy_sum,
            loss_tokens,
        ],
    )
    return Gradient(
        counts=counts,
        policy_loss=policy / max(counts.policy, 1),
        cross_entropy_loss=cross_entropy / max(counts.cross_entropy, 1),
        divergence_loss=divergence / max(counts.divergence, 1),
        reverse_kl=reverse_kl / max(counts.divergence, 1),
        clipped=int(clipped),
        clamped=int(clamped),
        contributing=int(contributing),
        entropy_sum=entropy,
        loss_tokens=int(tokens),
        records=records,
    )


def _rows_of(
    micro: MicroBatch, old: dict[int, Float[Tensor, " T"]], current: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """π_old's log-probabilities [B, T]: the stored row where there is one, else the current weights' own."""
    out = current.clone()
    for b, row in enumerate(micro.rows):
        if row in old:
            out[b, : len(old[row])] = old[row]
    return out


def _record(
    records: dict[int, RowRecord],
    *,
    micro: MicroBatch,
    reference: Float[Tensor, "B T"],
    corrected: Correction,
) -> None:
    sampled = micro.sampled
    for b, row in enumerate(micro.rows):
        stop = int(micro.lengths[b])
        records[row] = RowRecord(
            train_logprobs=reference[b, :stop].cpu(),
            behaviour_logprobs=micro.behaviour_logprobs[b, :stop].cpu(),
            sampled=sampled[b, :stop].cpu(),
            weights=corrected.weights[b, :stop].cpu(),
            mask=corrected.mask[b, :stop].cpu(),
        )


def correction_metrics(records: Sequence[RowRecord], config: CorrectionConfig) -> dict[str, float]:
    """The correction's metrics over every sampled token of the batch: the tensors the loss saw, not
    micro-batch means."""
    rows = [r for r in records if bool(r.sampled.any())]
    if not rows:
        return {}
    width = max(len(r.sampled) for r in rows)

    def stack(name: str, dtype: torch.dtype) -> Tensor:
        return pad_rows([getattr(r, name).numpy() for r in rows], width=width, dtype=dtype)

    wide = rows[0].train_logprobs.dtype
    return correct(
        stack("train_logprobs", wide), stack("behaviour_logprobs", wide), stack("sampled", torch.bool), config
    ).metrics

"""Supervised training on recorded segments: the warm start, and any imitation of demonstrations.

The loss is the trainer's cross-entropy stream: weight `agent_weight` on the agent's tokens and
`observation_weight` on all others (prompt and environment: reading is learned beside acting, which is what
teaches a tiny model to copy), over the count of its tokens. Learning rates warm up linearly and fall linearly
to 0 over the last `decay_fraction` of the steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.config import SftConfig
from agentrl.errors import DatasetError, RunFailedError
from agentrl.train.logprobs import token_logprobs
from agentrl.train.losses import cross_entropy_loss
from agentrl.train.muon import Muon, adamw, split_parameters
from agentrl.train.packing import pad_rows, plan_rows
from agentrl.trajectory import Segment

_BATCHES_PER_BUCKET = 8


@dataclass(frozen=True, slots=True)
class SftStep:
    """One optimizer step: `agent_loss` and `observation_loss` are means in nats per token, NaN where there is
    none."""

    step: int
    loss: float
    agent_loss: float
    observation_loss: float
    grad_norm: float
    tokens: int


@dataclass(frozen=True, slots=True)
class SftResult:
    """All steps, and how many tokens took part."""

    steps: tuple[SftStep, ...]
    tokens: int


def segment_batches(segments: Sequence[Segment], *, sequences_per_batch: int, seed: int) -> Iterator[list[Segment]]:
    """Batches without end: shuffled each epoch, batches of like lengths (less padding) in shuffled order.

    Every segment comes once per epoch but for a remainder shorter than a batch. Raises `DatasetError` for too
    few.
    """
    if len(segments) < sequences_per_batch:
        raise DatasetError(
            f"{len(segments)} demonstrations do not fill one batch of {sequences_per_batch}",
            where="supervised training",
            remedy="make more demonstrations, or lower sft.sequences_per_batch",
        )
    order = random.Random(seed)
    bucket = sequences_per_batch * _BATCHES_PER_BUCKET
    indices = list(range(len(segments)))
    while True:
        order.shuffle(indices)
        for start in range(0, len(indices), bucket):
            near = sorted(indices[start : start + bucket], key=lambda i: len(segments[i]))
            batches = [near[i : i + sequences_per_batch] for i in range(0, len(near), sequences_per_batch)]
            batches = [batch for batch in batches if len(batch) == sequences_per_batch]
            order.shuffle(batches)
            for batch in batches:
                yield [segments[i] for i in batch]


def train_supervised(
    *,
    model: PreTrainedModel,
    batches: Iterable[Sequence[Segment]],
    config: SftConfig,
    on_step: Callable[[SftStep], None] | None = None,
) -> SftResult:
    """Train `model` in place for `config.steps` steps, one batch each. `on_step` hears of every step.

    Raises `DatasetError` where the batches run out, `RunFailedError` where a gradient is not finite.
    """
    model.eval()  # no dropout, as in the trainer
    optimizers = _optimizers(model, config)
    done: list[SftStep] = []
    for number, segments in enumerate(islice(batches, config.steps), start=1):
        factor = learning_rate_factor(number, config=config)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
        step = _step(model, segments, optimizers=optimizers, number=number, config=config)
        done.append(step)
        if on_step is not None:
            on_step(step)
    if len(done) < config.steps:
        raise DatasetError(f"batches ended after {len(done)} of {config.steps} steps", where="supervised training")
    return SftResult(steps=tuple(done), tokens=sum(step.tokens for step in done))


def learning_rate_factor(step: int, *, config: SftConfig) -> float:
    """Factor in (0, 1] for step 1 … config.steps: linear warm-up, then 1, then linear decay."""
    rise = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
    decay_steps = config.decay_fraction * config.steps
    fall = min(1.0, (config.steps - step + 1) / decay_steps) if decay_steps else 1.0
    return rise * fall


def _optimizers(model: PreTrainedModel, config: SftConfig) -> list[torch.optim.Optimizer]:
    matrices, others = split_parameters(model)
    optimizers: list[torch.optim.Optimizer]
    if config.optimizer == "muon":
        optimizers = [Muon(matrices, lr=config.matrix_learning_rate), adamw(others, lr=config.learning_rate)]
    else:
        optimizers = [adamw([*matrices, *others], lr=config.learning_rate)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


def segment_weights(segment: Segment, *, config: SftConfig) -> np.ndarray:
    """float32 [T]: the cross-entropy weight of each token; 0 for token 0, which nothing predicts."""
    agent, other = np.float32(config.agent_weight), np.float32(config.observation_weight)
    weights = np.where(segment.agent_mask, agent, other)
    weights[0] = 0
    return weights


def _step(
    model: PreTrainedModel,
    segments: Sequence[Segment],
    *,
    optimizers: Sequence[torch.optim.Optimizer],
    number: int,
    config: SftConfig,
) -> SftStep:
    """Gradient over micro-batches, each sum over the whole batch's token count; then clip and step."""
    weights = [segment_weights(segment, config=config) for segment in segments]
    tokens = sum(int((w != 0).sum()) for w in weights)
    sums = np.zeros(3)  # loss, agent's nats, others' nats
    counts = np.zeros(2)
    for rows in plan_rows([len(s) for s in segments], tokens_per_microbatch=config.tokens_per_microbatch):
        width = len(segments[rows[0]])
        ids = pad_rows([segments[i].token_ids for i in rows], width=width, dtype=torch.int64).to(model.device)
        ce = pad_rows([weights[i] for i in rows], width=width, dtype=torch.float32).to(model.device)
        agent = pad_rows([segments[i].agent_mask for i in rows], width=width, dtype=torch.bool).to(model.device)
        out = token_logprobs(model, token_ids=ids, needed=ce != 0, temperature=1.0)
        loss = cross_entropy_loss(logprobs=out.logprobs, ce_weights=ce).sum() / max(tokens, 1)
        loss.backward()
        nats = -out.logprobs.detach()
        parts = [(ce != 0) & agent, (ce != 0) & ~agent]
        sums += [float(loss.detach()), *(float(nats[part].sum()) for part in parts)]
        counts += [int(part.sum()) for part in parts]
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip))
    if not np.isfinite(norm):
        raise RunFailedError(
            "the gradient is not finite", where=f"supervised step {number}", remedy="lower sft.learning_rate"
        )
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    agent_loss, observation_loss = (float(s / c) if c else float("nan") for s, c in zip(sums[1:], counts, strict=True))
    return SftStep(
        step=number,
        loss=float(sums[0]),
        agent_loss=agent_loss,
        observation_loss=observation_loss,
        grad_norm=norm,
        tokens=tokens,
    )

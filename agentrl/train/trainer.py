"""The trainer: weights, optimizer and counters, and what one batch does to them. Needs no process of its own.

    batch → check → share out ─▶ π_old of later updates → each update: gradient → clip → step (or skip) ─▶ StepResult
                                 └─────────────── on every rank, each with its share ────────────────┘

With several ranks (`agentrl.train.ranks`) only rank 0 is asked: for batches, weights and checkpoints.

It sees token rows with per-token streams and knows no algorithm: reinforcement learning, distillation, their
mixture and supervised warm-up differ in who filled the streams.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.config import CheckpointConfig, OptimizerConfig, TrainConfig
from agentrl.errors import ConfigError
from agentrl.train import checkpoint as checkpoints
from agentrl.train.logprobs import check_head
from agentrl.train.packing import MicroBatch, check_batch, pack
from agentrl.train.publish import publish_weights
from agentrl.train.ranks import Alone, Ranks, check_same_weights, share_out, takes_part
from agentrl.train.update import (
    Gradient,
    Objective,
    RowRecord,
    compute_gradient,
    correction_metrics,
    old_logprobs,
)
from agentrl.wire import Batch, Saved, StepResult, TrainedSequence, TrainSequence, WeightManifest


@dataclass(slots=True)
class TrainerState:
    """Counters that a checkpoint carries. `updates` counts optimizer steps taken (skipped ones do not
    count)."""

    step: int = 0
    updates: int = 0
    orchestrator: bytes = b""


@dataclass(slots=True)
class _StepLog:
    """What the updates of one batch added up to. `records[i]` belongs to sequence i of this rank's share."""

    gradients: list[Gradient] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: int = 0
    off_policy: int = 0
    records: dict[int, RowRecord] = field(default_factory=dict)


class Trainer:
    """Weights, optimizer and counters. Not thread-safe; every method runs to its end before the next."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        model_folder: Path,
        config: TrainConfig,
        checkpoint: CheckpointConfig,
        checkpoint_folder: Path,
        publish_folder: Path,
        ranks: Ranks | None = None,
    ) -> None:
        """`model` is trained in place; tokenizer files for the checkpoints come from `model_folder`."""
        self.model = model.eval()  # no dropout: the server samples without it
        self.config = config
        self.state = TrainerState()
        self._ranks = ranks or Alone()
        self._checkpoint_config = checkpoint
        self._checkpoint_folder = checkpoint_folder
        self._tokenizer = checkpoints.read_tokenizer(model_folder)
        self._publish_folder = publish_folder
        self._dtype = getattr(torch, config.dtype)
        self._candidates = config.divergence.name != "sampled"
        self._vocabulary = int(model.get_output_embeddings().weight.shape[0])
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = _adamw(self._parameters, config.optimizer)

    @classmethod
    def load(
        cls,
        *,
        model_folder: Path,
        config: TrainConfig,
        checkpoint: CheckpointConfig,
        checkpoint_folder: Path,
        publish_folder: Path,
        resume: Path | None = None,
        ranks: Ranks | None = None,
    ) -> Trainer:
        """A trainer of the model at `model_folder`, or of the checkpoint at `resume`; on every rank the same.

        Raises `ConfigError` (no such model), `RunFolderError` (torn checkpoint), `TrainerError` (the ranks found
        different weights).
        """
        found = checkpoints.read_checkpoint(resume) if resume is not None else None
        trainer = cls(
            model=load_model(found.path if found else model_folder),
            model_folder=model_folder,
            config=config,
            checkpoint=checkpoint,
            checkpoint_folder=checkpoint_folder,
            publish_folder=publish_folder,
            ranks=ranks,
        )
        check_head(trainer.model)
        if found is not None:
            trainer._restore(found)
        check_same_weights(trainer._ranks, trainer._parameters)
        return trainer

    @property
    def parameters(self) -> int:
        """How many parameters are trained."""
        return sum(p.numel() for p in self._parameters)

    # --- training ---------------------------------------------------------------------------------

    def train(self, batch: Batch) -> StepResult:
        """Take `batch.updates` optimizer steps, on all ranks; rank 0's to call. Raises `RecordError` for a malformed
        batch, before anything changes."""
        check_batch(batch, candidates=self._candidates, vocabulary=self._vocabulary)
        started = time.monotonic()
        rows = [i for i, s in enumerate(batch.sequences) if takes_part(s)]
        shares = share_out(
            [len(batch.sequences[i].token_ids) for i in rows],
            [batch.sequences[i].update for i in rows],
            ranks=self._ranks.size,
        )
        shares = [[rows[k] for k in share] for share in shares]
        done = self._train_share(self._ranks.hand_out([_part(batch, share) for share in shares]))
        records = {
            share[k]: record
            for share, found in zip(shares, self._ranks.collect(done.records), strict=True)
            for k, record in found.items()
        }
        metrics = self._metrics(done, [records[i] for i in sorted(records)])
        metrics["time/train_s"] = time.monotonic() - started
        return StepResult(
            step=batch.step,
            updates=batch.updates - done.skipped,
            metrics=metrics,
            sequences=tuple(_trained(s, records.get(i)) for i, s in enumerate(batch.sequences)),
        )

    def follow(self) -> None:
        """Train what rank 0 hands out until it hands out nothing more; what every other rank does."""
        while (share := self._next_share()) is not None:
            self._ranks.collect(self._train_share(share).records)

    def dismiss(self) -> None:
        """Let the other ranks' `follow` return; rank 0's to call, once."""
        self._ranks.hand_out([None] * self._ranks.size)

    def _next_share(self) -> Batch | None:
        return self._ranks.hand_out(None)

    def _train_share(self, share: Batch) -> _StepLog:
        old = self._old_logprobs(share)
        done = _StepLog()
        for update in range(share.updates):
            self._update(share, update=update, old=old, done=done)
        self.state.step = share.step
        check_same_weights(self._ranks, self._parameters)
        return done

    def _old_logprobs(self, share: Batch) -> dict[int, torch.Tensor]:
        """π_old of the sequences whose update is not the first, before the first step. The first update's π_old is
        its own forward pass; bypass mode has none."""
        later = [i for i, s in enumerate(share.sequences) if s.update > 0]
        if self.config.loss.mode == "bypass" or not later:
            return {}
        micro_batches = self._pack([share.sequences[i] for i in later])
        found = old_logprobs(self.model, micro_batches, temperature=share.temperature, dtype=self._dtype)
        return {later[row]: logprobs for row, logprobs in found.items()}

    def _update(self, share: Batch, *, update: int, old: dict[int, torch.Tensor], done: _StepLog) -> None:
        rows = [i for i, s in enumerate(share.sequences) if s.update == update]
        gradient = compute_gradient(
            self.model,
            self._pack([share.sequences[i] for i in rows]),
            Objective(
                loss=self.config.loss,
                correction=self.config.correction,
                temperature=share.temperature,
                old={k: old[i] for k, i in enumerate(rows) if i in old},
                divergence=self.config.divergence,
                dtype=self._dtype,
            ),
            ranks=self._ranks,
        )
        done.records.update({rows[k]: record for k, record in gradient.records.items()})
        done.gradients.append(gradient)
        # Nothing to learn from, or a gradient that would spoil the weights: no step, since AdamW's momentum
        # moves the weights even where the gradient is 0.
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.config.optimizer.grad_clip)
        if gradient.contributing == 0 or not bool(torch.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            done.skipped += 1
            return
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        done.off_policy += bool(done.norms)  # K24: an earlier step of this batch has already moved the policy
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.state.updates += 1
        done.norms.append(float(norm))

    def _learning_rate(self) -> float:
        """Linear warm-up over the optimizer steps taken, constant after."""
        optimizer = self.config.optimizer
        return optimizer.learning_rate * min(1.0, (self.state.updates + 1) / max(optimizer.warmup_updates, 1))

    def _pack(self, sequences: list[TrainSequence]) -> list[MicroBatch]:
        budget = self.config.tokens_per_microbatch
        device = self.model.device
        return pack(sequences, tokens_per_microbatch=budget, candidates=self._candidates, device=device)

    def _metrics(self, done: _StepLog, records: list[RowRecord]) -> dict[str, float]:
        """Public names → figures, of all ranks. A stream's loss is there only where it had tokens in the batch."""
        metrics = {
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            "grad_norm": float(np.mean(done.norms)) if done.norms else 0.0,
            "updates": float(len(done.norms)),
            "skipped_updates": float(done.skipped),
            "off_policy_updates": float(done.off_policy),
            "tokens/trained": float(sum(g.loss_tokens for g in done.gradients)),
        }
        for name, count in (("policy", "policy"), ("ce", "cross_entropy"), ("divergence", "divergence")):
            found = [(getattr(g, f"{count}_loss"), getattr(g.counts, count)) for g in done.gradients]
            metrics |= _weighted(f"loss/{name}", found)
        metrics |= _weighted("teacher/reverse_kl", [(g.reverse_kl, g.counts.divergence) for g in done.gradients])
        metrics |= _weighted(
            "teacher/clamped_fraction",
            [(g.clamped / max(g.counts.divergence, 1), g.counts.divergence) for g in done.gradients],
        )
        metrics |= _weighted(
            "entropy", [(g.entropy_sum / max(g.loss_tokens, 1), g.loss_tokens) for g in done.gradients]
        )
        sampled = [(g.counts.policy + g.counts.divergence, g) for g in done.gradients]
        metrics |= _weighted("loss/clip_fraction", [(g.clipped / max(n, 1), n) for n, g in sampled])
        measured = correction_metrics(records, self.config.correction)
        return metrics | {f"correction/{name}": value for name, value in measured.items()}

    # --- weights and checkpoints ------------------------------------------------------------------

    def publish(self, version: int) -> WeightManifest:
        """Write the current weights as `version`. Raises `DiskFullError`, `WeightDeliveryError`."""
        return publish_weights(self.model, version=version, folder=self._publish_folder)

    def save(self, step: int, state: bytes, *, score: float | None = None) -> Saved:
        """Write a checkpoint that a new trainer resumes from as if never stopped. Raises `DiskFullError`."""
        self.state.step, self.state.orchestrator = step, state
        written, is_best = checkpoints.write_checkpoint(
            folder=self._checkpoint_folder,
            step=step,
            updates=self.state.updates,
            model=self.model,
            tokenizer=self._tokenizer,
            trainer_state={"optimizer": self.optimizer.state_dict(), "random": checkpoints.random_state()},
            state=state,
            score=score,
            keep=self._checkpoint_config.keep,
        )
        return Saved(step=step, path=str(written.path), is_best=is_best)

    def _restore(self, found: checkpoints.Checkpoint) -> None:
        stored = checkpoints.read_trainer_state(found)
        self.optimizer.load_state_dict(stored["optimizer"])
        for group in self.optimizer.param_groups:  # settings come from the configuration, moments from the checkpoint
            group.update(_adamw_settings(self.config.optimizer))
        checkpoints.restore_random_state(stored["random"])
        self.state = TrainerState(step=found.step, updates=found.updates, orchestrator=found.state)


def load_model(folder: Path) -> PreTrainedModel:
    """The causal language model at `folder` in float32, on the GPU where there is one. Raises
    `ConfigError`."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            "no model folder (config.json is missing)",
            where=str(folder),
            remedy="set policy.model to a Hugging Face folder",
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def _adamw_settings(config: OptimizerConfig) -> dict[str, Any]:
    return {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }


def _adamw(parameters: list[torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, fused=True, **_adamw_settings(config))


def _part(batch: Batch, rows: list[int]) -> Batch:
    """The batch with these of its sequences."""
    return msgspec.structs.replace(batch, sequences=tuple(batch.sequences[i] for i in rows))


def _weighted(name: str, values: list[tuple[float, int]]) -> dict[str, float]:
    """{name: mean of the values weighted by their token counts}; {} where no token counts."""
    total = sum(count for _, count in values)
    return {name: sum(value * count for value, count in values) / total} if total else {}


def _trained(sequence: TrainSequence, record: RowRecord | None) -> TrainedSequence:
    length = len(sequence.token_ids)
    if record is None:
        weights, mask = np.zeros(length, dtype=np.float32), np.zeros(length, dtype=np.bool_)
    else:
        weights, mask = record.weights.numpy().astype(np.float32), record.mask.numpy()
    return TrainedSequence(trajectory_id=sequence.trajectory_id, segment=sequence.segment, weights=weights, mask=mask)

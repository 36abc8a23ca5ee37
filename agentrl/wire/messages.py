"""Messages between roles. Typed, immutable, no torch; arrays travel as raw buffers (`agentrl.wire.codec`).

Orchestrator → trainer: Batch, Publish, Save, Shutdown. Trainer → orchestrator: TrainerReady, StepResult,
WeightManifest, Saved, TrainerFailed. Each request has exactly one answer, in order.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of every message."""


class TrainSequence(Message, frozen=True, kw_only=True):
    """One segment as the trainer sees it: token ids and per-token streams, all of one length T.

    A stream that a token does not take part in is 0 in its *mask* or *weight*, whatever its value holds:

    * policy gradient: `pg_mask` bool [T], `advantages` float32 [T], `behaviour_logprobs` float32 [T];
    * cross-entropy: `ce_weights` float32 [T], None where no demonstration is trained;
    * divergence to a teacher: `teacher_logprobs` float32 [T] and `teacher_weights` float32 [T], None without teacher;
      `teacher_spans` int32 [T], None where each token is scored by itself: those of one number ≥ 0 are scored together;
      `candidate_logprobs` float32 [N, K], the teacher's, of K tokens that could stand at each of the N positions of
      teacher weight > 0, in order, with their `candidate_ids` int32 [N, K] (−1 and NaN where there are fewer; ids None:
      K is the vocabulary, in order); None where the divergence is of the sampled token alone.

    Position t of every stream speaks of *token t* (the one predicted from tokens < t), so token 0 is never trained.
    `update` in [0, Batch.updates) is the optimizer step that trains it.
    """

    trajectory_id: str
    group_id: str
    segment: int
    update: int
    token_ids: np.ndarray
    pg_mask: np.ndarray
    advantages: np.ndarray
    behaviour_logprobs: np.ndarray
    versions: np.ndarray
    ce_weights: np.ndarray | None = None
    teacher_logprobs: np.ndarray | None = None
    teacher_weights: np.ndarray | None = None
    teacher_spans: np.ndarray | None = None
    candidate_ids: np.ndarray | None = None
    candidate_logprobs: np.ndarray | None = None


class Batch(Message, frozen=True, kw_only=True):
    """What one delivery's training consumes. `version` is the policy version the trainer holds at its first update."""

    step: int
    version: int
    updates: int
    temperature: float
    sequences: tuple[TrainSequence, ...]


class TrainedSequence(Message, frozen=True, kw_only=True):
    """Per token [T], aligned with the sequence: correction weight and whether it entered the denominator."""

    trajectory_id: str
    segment: int
    weights: np.ndarray
    mask: np.ndarray


class StepResult(Message, frozen=True, kw_only=True):
    """What training a batch did: metrics by their public names, and the record of each sequence."""

    step: int
    updates: int
    metrics: dict[str, float]
    sequences: tuple[TrainedSequence, ...]


class Publish(Message, frozen=True, kw_only=True):
    """Write the current weights as policy version `version` to where the policy servers read them."""

    version: int


class WeightManifest(Message, frozen=True, kw_only=True):
    """Published weights: where, how many, and what a probe prompt must give under them.

    `probe_logprobs[i]` is log p(probe_token_ids[i + 1] | probe_token_ids[: i + 1]) at temperature 1, float32.
    """

    version: int
    path: str
    tensors: int
    num_bytes: int
    probe_token_ids: np.ndarray
    probe_logprobs: np.ndarray


class Delivery(Message, frozen=True, kw_only=True):
    """A policy server took a version: seconds paused and in all, largest probe difference in nats."""

    version: int
    paused_s: float
    total_s: float
    probe_max_abs: float


class Save(Message, frozen=True, kw_only=True):
    """Write a checkpoint for `step`; `state` is the orchestrator's own (data position, version, counters), opaque.

    `score` is the figure that `best` is chosen by; None keeps the best as it is.
    """

    step: int
    state: bytes
    score: float | None = None


class Saved(Message, frozen=True, kw_only=True):
    """A checkpoint lies complete at `path`."""

    step: int
    path: str
    is_best: bool


class TrainerReady(Message, frozen=True, kw_only=True):
    """The trainer is up. `step` and `state` come from the checkpoint it resumed from; step 0 and empty without one."""

    step: int
    updates: int
    parameters: int
    state: bytes


class TrainerFailed(Message, frozen=True, kw_only=True):
    """The trainer cannot go on. `kind` is the error's class name, so that a typed error arrives as itself."""

    what: str
    where: str
    remedy: str
    traceback: str
    kind: str = ""


class Shutdown(Message, frozen=True, kw_only=True):
    """End in good order."""


class Event(Message, frozen=True, kw_only=True):
    """Something that happened in a run, for telemetry. `kind` is dotted (`rollout.finished`), `data` is small."""

    kind: str
    time: float
    data: dict[str, Any] = {}


ToTrainer = Batch | Publish | Save | Shutdown
FromTrainer = TrainerReady | StepResult | WeightManifest | Saved | TrainerFailed

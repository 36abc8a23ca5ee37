"""Toy models and sequences, as factories."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from toy_qwen import VOCABULARY, toy_config
from transformers import Qwen3ForCausalLM

from agentrl.wire import Batch, TrainSequence

torch.set_num_threads(1)  # toy sizes: threads only wait for each other


def _toy_model(*, seed: int = 0, double: bool = False) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(toy_config(positions=128)).eval()
    return model.double() if double else model.float()


def _make_sequence(
    *,
    length: int,
    seed: int = 0,
    trajectory_id: str | None = None,
    update: int = 0,
    pg: bool = True,
    ce: bool = False,
    teacher: bool = False,
    candidates: int = 0,
    spans: bool = False,
    **streams: np.ndarray,
) -> TrainSequence:
    """A random sequence whose agent tokens are about half of the tokens after the first; NaN off the agent's
    tokens. `candidates`: K of each scored token, the vocabulary where K is its size; `spans`: a scored token shares
    its span with a scored neighbour."""
    draw = np.random.default_rng(seed)
    agent = draw.random(length) < 0.5
    agent[0] = False
    agent[-1] = length > 1
    behaviour = np.where(agent, -np.abs(draw.normal(3.5, 0.7, length)), np.nan).astype(np.float32)
    values: dict[str, np.ndarray | None] = {
        "token_ids": draw.integers(0, VOCABULARY, length).astype(np.int32),
        "pg_mask": agent & pg,
        "advantages": np.where(agent, draw.normal(size=length), np.nan).astype(np.float32),
        "behaviour_logprobs": behaviour,
        "versions": np.where(agent, 0, -1).astype(np.int32),
        "ce_weights": np.where(np.arange(length) > 0, 0.5, 0.0).astype(np.float32) if ce else None,
        "teacher_logprobs": np.where(agent, -3.0, np.nan).astype(np.float32) if teacher else None,
        "teacher_weights": agent.astype(np.float32) if teacher else None,
    }
    if candidates:
        values |= _candidates(draw, int(agent.sum()), candidates)
    if spans:
        values["teacher_spans"] = _spans(agent)
    values |= streams
    name = trajectory_id or f"t{seed}"
    return TrainSequence(trajectory_id=name, group_id="g", segment=0, update=update, **values)


def _candidates(draw: np.random.Generator, scored: int, k: int) -> dict[str, np.ndarray | None]:
    """A random distribution per scored token, given for its K random candidates, the last one missing at every other
    token."""
    logits = draw.normal(0, 2, (scored, VOCABULARY))
    logprobs = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
    if k == VOCABULARY:
        return {"candidate_ids": None, "candidate_logprobs": logprobs}
    ids = np.argsort(draw.random((scored, VOCABULARY)), axis=-1)[:, :k].astype(np.int32)
    found = np.take_along_axis(logprobs, ids, axis=-1)
    if k > 1:
        ids[::2, -1], found[::2, -1] = -1, np.nan
    return {"candidate_ids": ids, "candidate_logprobs": found}


def _spans(scored: np.ndarray) -> np.ndarray:
    """Neighbours 2i and 2i + 1 in one span where both are scored; numbers with gaps, −1 off the scored tokens."""
    at = np.arange(len(scored))
    alone = ~np.roll(scored, -1)[at // 2 * 2] | ~scored[at // 2 * 2]
    return np.where(scored, np.where(alone, 3 * at, 3 * (at // 2 * 2)), -1).astype(np.int32)


def _make_batch(sequences: list[TrainSequence], *, updates: int = 1, step: int = 1, temperature: float = 1.0) -> Batch:
    return Batch(step=step, version=0, updates=updates, temperature=temperature, sequences=tuple(sequences))


@pytest.fixture(scope="session")
def toy_model() -> Callable[..., Qwen3ForCausalLM]:
    return _toy_model


@pytest.fixture(scope="session")
def make_sequence() -> Callable[..., TrainSequence]:
    return _make_sequence


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    return _make_batch

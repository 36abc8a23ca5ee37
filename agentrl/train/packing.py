"""Sequences → padded micro-batches, every stream beside its tokens.

Rows are sequences, padded on the right. Attention is causal, so a real token never sees padding and neither
masks nor position ids are needed; logits of a row do not depend on what it is packed with. Which positions
take part comes from the streams and their lengths, never from token values: the padding id may equal any
token, the end-of-turn's too.

Position t of every stream speaks of token t (predicted from tokens < t), so position 0 never takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from agentrl.errors import RecordError
from agentrl.train.scores import check_scores, numbered_spans, pack_candidates
from agentrl.wire import Batch, TrainSequence

_OPTIONAL = ("ce_weights", "teacher_logprobs", "teacher_weights", "teacher_spans")


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass. `rows[b]` is the index of row b's sequence in the list that was packed; lengths [B].

    Off a stream's own positions its values are 0: advantages off `pg_mask`, teacher_logprobs where
    `teacher_weights` is 0, behaviour_logprobs off `sampled`. `teacher_spans` number each row's spans 0, 1, 2 … in order
    (a token that was scored by itself is one), −1 where `teacher_weights` is 0. `candidate_*` [M, K] belong to the M
    positions of `scored`, row by row (`agentrl.train.scores.PackedCandidates`); None where they are not asked for.
    """

    rows: tuple[int, ...]
    token_ids: Int[Tensor, "B T"]
    lengths: Int[Tensor, " B"]
    pg_mask: Bool[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    behaviour_logprobs: Float[Tensor, "B T"]
    ce_weights: Float[Tensor, "B T"]
    teacher_logprobs: Float[Tensor, "B T"]
    teacher_weights: Float[Tensor, "B T"]
    teacher_spans: Int[Tensor, "B T"]
    candidate_ids: Int[Tensor, "M K"] | None = None
    candidate_logprobs: Float[Tensor, "M K"] | None = None

    @property
    def scored(self) -> Bool[Tensor, "B T"]:
        """Tokens of the divergence stream."""
        return self.teacher_weights != 0

    @property
    def sampled(self) -> Bool[Tensor, "B T"]:
        """Tokens of the policy-gradient or divergence stream: those that carry a behaviour
        log-probability."""
        return self.pg_mask | self.scored

    @property
    def needed(self) -> Bool[Tensor, "B T"]:
        """Tokens whose log-probability any stream asks for."""
        return self.sampled | (self.ce_weights != 0)


def check_batch(batch: Batch, *, candidates: bool = False, vocabulary: int | None = None) -> None:
    """Raise `RecordError` unless every sequence is well formed, named once, and trained by exactly one
    update. `candidates` and `vocabulary` as for `check_sequence`."""
    seen: set[tuple[str, int]] = set()
    for sequence in batch.sequences:
        check_sequence(sequence, candidates=candidates, vocabulary=vocabulary)
        _check_temperature(batch, sequence)
        key = (sequence.trajectory_id, sequence.segment)
        if key in seen:
            raise RecordError(
                "a segment stands twice in one batch, so its tokens would be trained twice",
                where=f"trajectory {key[0]}, segment {key[1]}",
                remedy="give each sampled token exactly one trained place",
            )
        seen.add(key)
        if not 0 <= sequence.update < batch.updates:
            raise RecordError(
                f"update {sequence.update} is not in [0, {batch.updates})",
                where=f"trajectory {key[0]}, segment {key[1]}",
            )


def _check_temperature(batch: Batch, sequence: TrainSequence) -> None:
    if batch.temperature != 1 and sequence.teacher_weights is not None and sequence.teacher_weights.any():
        raise RecordError(
            f"a teacher scored tokens that were sampled at temperature {batch.temperature:g}, and it scores at 1",
            where=f"trajectory {sequence.trajectory_id}, segment {sequence.segment}",
            remedy="rollout.temperature=1",
        )


def check_sequence(sequence: TrainSequence, *, candidates: bool = False, vocabulary: int | None = None) -> None:
    """Raise `RecordError` naming the trajectory where streams differ in length or hold what cannot be
    trained.

    `candidates`: the divergence is over candidates; `vocabulary`: the width of the student's logits, where it is known.
    """
    where = f"trajectory {sequence.trajectory_id}, segment {sequence.segment}"
    length = sequence.token_ids.shape
    streams: dict[str, np.ndarray] = {
        "pg_mask": sequence.pg_mask,
        "advantages": sequence.advantages,
        "behaviour_logprobs": sequence.behaviour_logprobs,
        "versions": sequence.versions,
        **{name: getattr(sequence, name) for name in _OPTIONAL if getattr(sequence, name) is not None},
    }
    wrong = {name: list(x.shape) for name, x in streams.items() if x.shape != length}
    if wrong or len(length) != 1 or length[0] == 0:
        raise RecordError(
            f"streams differ in length from token_ids {list(length)}: {wrong}",
            where=where,
            remedy="never pad or truncate",
        )
    mask = sequence.pg_mask != 0
    _finite(sequence.advantages[mask], "advantages", "on a policy-gradient token", where)
    for name in ("ce_weights", "teacher_weights"):
        weights = streams.get(name)
        if weights is not None:
            _finite(weights, name, "anywhere", where)
            if (weights < 0).any():
                raise RecordError(f"{name} holds a negative weight", where=where)
    check_scores(sequence, where=where, candidates=candidates, vocabulary=vocabulary)
    first = [n for n in ("pg_mask", "ce_weights", "teacher_weights") if n in streams and streams[n][0] != 0]
    if first:
        raise RecordError(
            f"{', '.join(first)} takes in token 0, which nothing predicts",
            where=where,
            remedy="position t of a stream speaks of token t; give token 0 no weight",
        )


def _finite(values: np.ndarray, name: str, place: str, where: str) -> None:
    if not np.isfinite(values).all():
        raise RecordError(
            f"{name} is not finite {place}",
            where=where,
            remedy="give the value, or take the token out of the stream",
        )


def plan_rows(lengths: Sequence[int], *, tokens_per_microbatch: int) -> list[list[int]]:
    """Indices of `lengths` in micro-batches of at most `tokens_per_microbatch` padded tokens, longest first.

    Sorting by length keeps padding small, and longest first shows a memory shortage at once. A sequence above
    the budget stands alone. Ties keep their order, so the plan is the same for the same lengths.
    """
    plan: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if plan and (len(plan[-1]) + 1) * lengths[plan[-1][0]] <= tokens_per_microbatch:
            plan[-1].append(index)
        else:
            plan.append([index])
    return plan


def pack(
    sequences: Sequence[TrainSequence],
    *,
    tokens_per_microbatch: int,
    candidates: bool = False,
    device: torch.device | str = "cpu",
    pad_id: int = 0,
) -> list[MicroBatch]:
    """Micro-batches that hold each sequence once, with the teacher's candidates where they are asked for. Raises
    `RecordError` for a malformed sequence."""
    for sequence in sequences:
        check_sequence(sequence, candidates=candidates)
    lengths = [len(s.token_ids) for s in sequences]
    plan = plan_rows(lengths, tokens_per_microbatch=tokens_per_microbatch)
    return [
        _microbatch([sequences[i] for i in rows], tuple(rows), candidates=candidates, device=device, pad_id=pad_id)
        for rows in plan
    ]


def pad_rows(
    rows: Sequence[np.ndarray | None], *, width: int, dtype: torch.dtype, fill: float = 0
) -> Float[Tensor, "B T"]:
    """Rows [T_b] → [B, width], filled on the right; a row that is None holds `fill` only."""
    out = torch.full((len(rows), width), fill, dtype=dtype)
    for b, row in enumerate(rows):
        if row is not None:
            out[b, : len(row)] = torch.from_numpy(np.array(row))
    return out


def _microbatch(
    sequences: Sequence[TrainSequence],
    rows: tuple[int, ...],
    *,
    candidates: bool,
    device: torch.device | str,
    pad_id: int,
) -> MicroBatch:
    width = max(len(s.token_ids) for s in sequences)

    def stream(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return pad_rows([getattr(s, name) for s in sequences], width=width, dtype=dtype)

    pg_mask = stream("pg_mask", torch.bool)
    teacher_weights = stream("teacher_weights")
    zero = torch.zeros(())
    found = pack_candidates(sequences) if candidates else None
    # Values off their stream (NaN in the record) become 0 here, once, so that no later product can spread
    # them.
    parts = MicroBatch(
        rows=rows,
        token_ids=pad_rows([s.token_ids for s in sequences], width=width, dtype=torch.int64, fill=pad_id),
        lengths=torch.tensor([len(s.token_ids) for s in sequences]),
        pg_mask=pg_mask,
        advantages=torch.where(pg_mask, stream("advantages"), zero),
        behaviour_logprobs=torch.where(pg_mask | (teacher_weights != 0), stream("behaviour_logprobs"), zero),
        ce_weights=stream("ce_weights"),
        teacher_logprobs=torch.where(teacher_weights != 0, stream("teacher_logprobs"), zero),
        teacher_weights=teacher_weights,
        teacher_spans=pad_rows([numbered_spans(s) for s in sequences], width=width, dtype=torch.int64, fill=-1),
        candidate_ids=found.ids if found else None,
        candidate_logprobs=found.logprobs if found else None,
    )
    if torch.device(device).type == "cpu":
        return parts
    held = {name: getattr(parts, name) for name in MicroBatch.__slots__ if name != "rows"}
    moved: dict[str, Any] = {name: None if x is None else x.to(device) for name, x in held.items()}
    return MicroBatch(rows=rows, **moved)

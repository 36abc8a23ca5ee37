"""What the pages' scripts are fed with: a trajectory, and the lines of the table, as small JSON.

Per-token streams are sent for agent tokens only (nothing else is sampled or trained) and texts once per
vocabulary entry, with exceptions where a character is cut between tokens: about 8 bytes a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl.telemetry.teacher_view import sides
from agentrl.telemetry.tokens import TokenDecoder
from agentrl.telemetry.trajectories import Summary, json_of, text_of

_STREAMS = ("logprobs", "versions", "advantages", "weights", "trained_mask", "teacher_logprobs", "teacher_spans")
PATCH_LIMIT_CHARS = 40_000


def table_payload(summaries: Sequence[Summary], *, run: int = 0) -> list[list[Any]]:
    """Lines for table.js, in the order of its columns' constants."""
    return [
        [
            run,
            s.trajectory_id,
            s.step,
            s.task_id,
            s.split,
            s.reward,
            s.outcome,
            s.turns,
            s.tokens,
            _rounded(s.agent_share),
            s.oldest_version,
            s.trained,
            _rounded(s.teacher_kl),
        ]
        for s in summaries
    ]


def trajectory_payload(
    rows: Sequence[Mapping[str, Any]], decoder: TokenDecoder, vocab: dict[int, str], special: set[int]
) -> dict[str, Any]:
    """One trajectory for trajectory.js. Adds the texts and special ids it needs to `vocab` and `special`."""
    first = rows[0]
    patch = text_of(first.get("patch"))
    return {
        "id": first["trajectory_id"],
        "group": first["group_id"],
        "task": first["task_id"],
        "environment": first["environment"],
        "split": first["split"],
        "source": first["source"],
        "temperature": first["temperature"],
        "image": first["image"],
        "reward": first["reward"],
        "outcome": first["outcome"],
        "cause": first.get("outcome_cause") or "",
        "seconds": _rounded((first["ended_at"] or 0.0) - (first["started_at"] or 0.0)),
        "trained_at_step": first.get("trained_at_step"),
        "teacher": first.get("teacher"),
        **_teaching(rows),
        "info": json_of(first.get("info"), {}),
        "turns": [{k: _rounded(v) for k, v in turn.items()} for turn in first["turns"] or ()],
        "patch": patch[:PATCH_LIMIT_CHARS],
        "patch_cut": max(0, len(patch) - PATCH_LIMIT_CHARS),
        "has_text": decoder.has_text,
        "segments": [_segment(row, decoder, vocab, special) for row in rows if row["token_ids"]],
    }


def _teaching(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Distance to the teacher in nats per scored token, and share of them that are its first choice; null: unknown."""
    distances = [found.distance for row in rows if (found := sides(row)) is not None]
    joined = np.concatenate(distances) if distances else np.zeros(0)
    agreed = [agrees for row in rows for agrees in _first_choices(row) or () if agrees is not None]
    return {
        "teacher_kl": _rounded(float(joined.mean())) if joined.size else None,
        "teacher_agreement": _rounded(sum(agreed) / len(agreed)) if agreed else None,
    }


def _first_choices(row: Mapping[str, Any]) -> list[bool | None] | None:
    """Whether each token is the teacher's first choice; null where it was not scored."""
    top1, logprobs = row.get("teacher_top1"), row.get("teacher_logprobs")
    if top1 is None or logprobs is None:
        return None
    return [None if value is None else agrees for agrees, value in zip(top1, logprobs, strict=True)]


def _segment(row: Mapping[str, Any], decoder: TokenDecoder, vocab: dict[int, str], special: set[int]) -> dict[str, Any]:
    ids: list[int] = row["token_ids"]
    pieces = decoder.pieces(ids)
    preferred: Mapping[int, Sequence[tuple[int, float]]] = row.get("teacher_preferred") or {}
    shown = {token_id for chosen in preferred.values() for token_id, _ in chosen}
    for token_id in (set(ids) | shown) - vocab.keys():
        vocab[token_id] = decoder.alone(token_id)
        if decoder.special(token_id):
            special.add(token_id)
    spans = row["spans"] or []
    agent = [i for span in spans if span["kind"] == "agent" for i in range(span["start"], span["stop"])]
    streams = {name: _on_agent(row.get(name), agent) for name in _STREAMS}
    both = sides(row)
    streams["teacher_gap"] = None if both is None else _on_agent(both.gap.tolist(), agent)
    streams["teacher_top1"] = _on_agent(_first_choices(row), agent)
    return {
        "ids": ids,
        "cut": {i: piece for i, piece in enumerate(pieces) if not decoder.whole(ids[i])},
        "spans": [[s["kind"], s["purpose"] or "", s["turn"], s["start"], s["stop"]] for s in spans],
        **{name: values for name, values in streams.items() if values is not None},
        **({"preferred": _preferred(preferred)} if shown else {}),
    }


def _preferred(found: Mapping[int, Sequence[tuple[int, float]]]) -> dict[int, list[list[float]]]:
    return {at: [[token_id, _rounded(logprob)] for token_id, logprob in chosen] for at, chosen in found.items()}


def _on_agent(values: Sequence[float | None] | None, agent: Sequence[int]) -> list[float | None] | None:
    """The stream at the agent's tokens; None where it holds nothing there."""
    if values is None:
        return None
    picked = [_rounded(values[i]) for i in agent]
    return picked if any(value is not None for value in picked) else None


def _rounded(value: Any) -> Any:
    """Five significant digits of a number; what is not finite is null, all else passes."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None

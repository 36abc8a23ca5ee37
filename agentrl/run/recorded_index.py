"""What a recorded run's files say of each rollout, without reading its tokens, and which tokenizer they are of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.errors import ConfigError, DatasetError
from agentrl.trajectory import OutcomeKind, Source, SpanKind, Split

_FACTS = ("trajectory_id", "group_id", "task_id", "environment", "split", "source", "outcome", "temperature")
# Parts of a tokenizer.json that change no id of a text.
_NO_MATTER = ("version", "padding", "truncation")


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """One rollout of a file. `sampled`: by a policy, with log-probabilities; `usable`: it holds a token that could be
    scored, and no machine failed it; `longest` is its longest segment in tokens."""

    trajectory_id: str
    group_id: str
    task_id: str
    environment: str
    split: Split
    temperature: float
    sampled: bool
    usable: bool
    longest: int


def read_rollouts(file: Path) -> list[RecordedRollout]:
    """The rollouts of a trajectory file, in its order. Raises `DatasetError` for a file that is none of ours."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(file, columns=[*_FACTS, "spans"])
    except (pa.ArrowInvalid, KeyError, OSError) as error:
        raise DatasetError(
            f"not a readable trajectory file: {error}", where=str(file), remedy="name a run folder of agentrl"
        ) from error
    taught, lengths = _agent_tokens(table.column("spans"))
    rows = zip(*(table.column(name).to_pylist() for name in _FACTS), taught, lengths, strict=True)
    found: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        found.setdefault(row[0], []).append(row)
    return [_rollout(segments) for segments in found.values()]


def _agent_tokens(spans: Any) -> tuple[list[bool], list[int]]:
    """Of each row of the column: whether an agent's token is predicted by others before it, and how long it is."""
    import pyarrow.compute as pc

    whole = spans.combine_chunks()
    flat, row = whole.flatten(), np.asarray(pc.list_parent_indices(whole))
    start, stop = (np.asarray(flat.field(name)) for name in ("start", "stop"))
    agent = np.asarray(pc.equal(flat.field("kind"), SpanKind.AGENT.value)) & (stop > np.maximum(start, 1))
    taught, lengths = np.zeros(len(whole), np.bool_), np.zeros(len(whole), np.int64)
    np.logical_or.at(taught, row, agent)
    np.maximum.at(lengths, row, stop)
    return taught.tolist(), lengths.tolist()


def _rollout(segments: list[tuple[Any, ...]]) -> RecordedRollout:
    name, group_id, task_id, environment, split, source, outcome, temperature, _, _ = segments[0]
    sampled = source == Source.SAMPLED.value
    return RecordedRollout(
        trajectory_id=name,
        group_id=group_id,
        task_id=task_id,
        environment=environment,
        split=Split(split),
        temperature=temperature,
        sampled=sampled,
        usable=sampled and outcome != OutcomeKind.INFRASTRUCTURE.value and any(row[-2] for row in segments),
        longest=max(row[-1] for row in segments),
    )


def check_same_tokenizer(recorded: Path, model: Path) -> None:
    """Raise `ConfigError` unless the recorded token ids mean to the model in `model` what they meant when sampled."""
    before, now = _tokenizer(recorded, "the recorded run"), _tokenizer(model, "the student")
    parts = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if parts:
        raise ConfigError(
            f"the run was recorded with another tokenizer than the student's: {', '.join(parts)} differ",
            where=f"distill.from_run ({recorded}, {model})",
            remedy="name a run of a policy with the student's tokenizer, or let the student play (no --from-run)",
        )


def _tokenizer(folder: Path, whose: str) -> Mapping[str, Any]:
    """The parts of a tokenizer.json that decide ids, merges in one notation."""
    path = folder / "tokenizer.json"
    try:
        tables = json.loads(path.read_text(encoding="utf-8"))
        found = {name: part for name, part in tables.items() if name not in _NO_MATTER}
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{whose} has no readable tokenizer.json, so that its tokens cannot be compared: {error}",
            where=str(path),
            remedy="name a run folder with its tokenizer/, and a model folder with a tokenizer.json",
        ) from error
    model = found.get("model")
    if isinstance(model, dict) and isinstance(model.get("merges"), list):
        merges = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
        found["model"] = {**model, "merges": merges}
    return found

"""Trajectory files: one Parquet row per segment, exactly reversible. A public interface.

    write_rows(path, [(trajectory, None), (trajectory, [trained, …])], run="…")
    for trajectory, trained in read_trajectories([path, …]): …

Facts of a trajectory (reward, outcome, turns, patch, …) stand in each of its rows, so that one row can be
read by itself; dictionary encoding makes the repetition cheap. NaN and −1 are written as null. A trajectory
without a segment (its machine failed before anything was sampled) has one row with `segments` 0 and no
tokens, so that no rollout is missing from the files. `patch` is binary: UTF-8, with undecodable bytes of the
diff kept as they were (surrogateescape).

pyarrow is imported at first use: the record is imported everywhere, its files are not.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from agentrl.errors import DatasetError, RecordError, disk_full_is_typed
from agentrl.trajectory.record import (
    FinishReason,
    Float32,
    Outcome,
    OutcomeKind,
    Purpose,
    Segment,
    Source,
    Span,
    SpanKind,
    Split,
    Trained,
    Trajectory,
    TurnTiming,
)

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1
TrajectoryItem = tuple[Trajectory, list[Trained] | None]
_ROWS_PER_BATCH = 256


@cache
def schema() -> pa.Schema:
    """The columns of a trajectory file, in order."""
    import pyarrow as pa

    spans = pa.struct(
        [
            ("kind", pa.string()),
            ("purpose", pa.string()),
            ("turn", pa.int32()),
            ("start", pa.int32()),
            ("stop", pa.int32()),
        ]
    )
    seconds = [(name, pa.float64()) for name in ("queue_s", "prefill_s", "decode_s", "tool_s")]
    candidate = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])
    text = ("run", "split", "source", "image", "trajectory_id", "group_id", "task_id", "environment")
    return pa.schema(
        [
            ("schema_version", pa.int32()),
            *((name, pa.string()) for name in text),
            ("temperature", pa.float64()),
            ("segment", pa.int32()),
            ("segments", pa.int32()),
            ("token_ids", pa.list_(pa.int32())),
            ("spans", pa.list_(spans)),
            ("logprobs", pa.list_(pa.float32())),
            ("versions", pa.list_(pa.int32())),
            ("reward", pa.float64()),
            ("outcome", pa.string()),
            ("outcome_cause", pa.string()),
            ("started_at", pa.float64()),
            ("ended_at", pa.float64()),
            ("turns", pa.list_(pa.struct([*seconds, ("finish_reason", pa.string())]))),
            ("info", pa.string()),
            ("events", pa.string()),
            ("patch", pa.binary()),
            ("trained_at_step", pa.int64()),
            ("advantages", pa.list_(pa.float32())),
            ("weights", pa.list_(pa.float32())),
            ("trained_mask", pa.list_(pa.bool_())),
            ("teacher", pa.string()),
            ("teacher_logprobs", pa.list_(pa.float32())),
            ("teacher_topk", pa.list_(pa.list_(candidate))),
        ]
    )


# --- out ------------------------------------------------------------------------------------------


def write_rows(path: str | os.PathLike[str], items: Iterable[TrajectoryItem], *, run: str) -> int:
    """Write a trajectory file whole or not at all (temporary file, then rename); the number of rows.

    The second of an item is what training did, one `Trained` per segment, or None where it was not trained.
    Raises `RecordError` where the two do not fit, `DiskFullError` where there is no room.
    """
    path = Path(path)
    data, rows = to_bytes(items, run=run)
    with disk_full_is_typed(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    return rows


def to_bytes(items: Iterable[TrajectoryItem], *, run: str) -> tuple[bytes, int]:
    """A trajectory file's bytes and its number of rows. Raises `RecordError`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [row for trajectory, trained in items for row in _rows(trajectory, trained, run)]
    arrays = [_column([row.get(field.name) for row in rows], field.type) for field in schema()]
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema()), sink, compression="zstd")
    return sink.getvalue(), len(rows)


def _rows(trajectory: Trajectory, trained: list[Trained] | None, run: str) -> Iterator[dict[str, Any]]:
    if trained is not None and len(trained) != len(trajectory.segments):
        raise RecordError(
            f"{len(trained)} training records for {len(trajectory.segments)} segments",
            where=f"trajectory {trajectory.trajectory_id}",
            remedy="give one `Trained` per segment, or None",
        )
    common = _trajectory_fields(trajectory, run)
    if not trajectory.segments:
        yield {**common, "segment": 0, "token_ids": np.zeros(0, np.int32), "spans": []}
    for index, segment in enumerate(trajectory.segments):
        training = {} if trained is None else _trained_fields(segment, trained[index])
        yield {**common, "segment": index, **_segment_fields(segment), **training}


def _trajectory_fields(t: Trajectory, run: str) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "run": run,
        "split": t.split.value,
        "source": t.source.value,
        "image": t.image,
        "trajectory_id": t.trajectory_id,
        "group_id": t.group_id,
        "task_id": t.task_id,
        "environment": t.environment,
        "temperature": t.temperature,
        "segments": len(t.segments),
        "reward": t.reward,
        "outcome": t.outcome.kind.value,
        "outcome_cause": t.outcome.cause or None,
        "started_at": t.started_at,
        "ended_at": t.ended_at,
        "turns": msgspec.to_builtins(t.turns),
        "info": json.dumps(dict(t.info)),
        "events": json.dumps([dict(event) for event in t.events]),
        "patch": t.patch.encode("utf-8", "surrogateescape"),
    }


def _segment_fields(segment: Segment) -> dict[str, Any]:
    return {
        "token_ids": segment.token_ids,
        "spans": msgspec.to_builtins(segment.spans),
        "logprobs": segment.logprobs,
        "versions": segment.versions,
    }


def _trained_fields(segment: Segment, trained: Trained) -> dict[str, Any]:
    trained.check(segment)
    return {
        "trained_at_step": trained.step,
        "advantages": np.asarray(trained.advantages, np.float32),
        "weights": np.asarray(trained.weights, np.float32),
        "trained_mask": np.asarray(trained.mask, np.bool_),
    }


# Columns that are long and numeric; a field that a row lacks (training, teacher) is null.
_STREAMS = ("token_ids", "logprobs", "versions", "advantages", "weights", "trained_mask")


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    """One column; numpy streams are joined and cut by offsets, all else goes through Python values."""
    import pyarrow as pa

    if not any(isinstance(value, np.ndarray) for value in values):
        return pa.array(values, type=kind)
    lengths = [0 if value is None else len(value) for value in values]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    flat = np.concatenate([value for value in values if value is not None])
    absent = pa.array([value is None for value in values])
    items = pa.array(flat, type=kind.value_type, mask=_null_mask(flat))
    return pa.ListArray.from_arrays(offsets, items, type=kind, mask=absent)


def _null_mask(flat: np.ndarray) -> np.ndarray | None:
    if flat.dtype == np.float32:
        return np.isnan(flat)
    return flat == -1 if flat.dtype == np.int32 else None


# --- in -------------------------------------------------------------------------------------------


def read_trajectories(paths: Iterable[str | os.PathLike[str]]) -> Iterator[TrajectoryItem]:
    """The trajectories of the files, in order, equal to those written.

    Raises `DatasetError` for a file that is none of ours (missing column, other schema version, missing
    segment) and `RecordError` where a row breaks an invariant of the record.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in paths:
        try:
            file = pq.ParquetFile(os.fspath(path))
        except (pa.ArrowInvalid, OSError) as error:
            raise DatasetError(f"not a readable Parquet file: {error}", where=os.fspath(path)) from error
        with file:
            yield from _from_file(file, os.fspath(path))


def from_bytes(data: bytes, *, where: str) -> list[TrajectoryItem]:
    """The trajectories of a file's bytes (`to_bytes`). Errors as `read_trajectories`."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(io.BytesIO(data)) as file:
        return list(_from_file(file, where))


def _from_file(file: Any, where: str) -> Iterator[TrajectoryItem]:
    missing = [name for name in schema().names if name not in file.schema_arrow.names]
    if missing:
        raise DatasetError(
            f"columns are missing: {', '.join(missing)}",
            where=where,
            remedy="give a file of a run folder's trajectories/, written by this version of agentrl",
        )
    pending: list[dict[str, Any]] = []
    for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=schema().names):
        for row in _batch_rows(batch):
            if row["schema_version"] != SCHEMA_VERSION:
                raise DatasetError(
                    f"schema version {row['schema_version']}, this version of agentrl reads {SCHEMA_VERSION}",
                    where=where,
                    remedy="read the file with the version of agentrl that wrote it",
                )
            pending.append(row)
            _check_order(pending, where)
            if len(pending) >= row["segments"]:
                yield _trajectory(pending)
                pending = []
    if pending:
        raise _torn(pending, where)


def _check_order(pending: Sequence[dict[str, Any]], where: str) -> None:
    first, last = pending[0], pending[-1]
    if last["trajectory_id"] != first["trajectory_id"] or last["segment"] != len(pending) - 1:
        raise _torn(pending, where)


def _torn(pending: Sequence[dict[str, Any]], where: str) -> DatasetError:
    first = pending[0]
    return DatasetError(
        f"the {first['segments']} segments of trajectory {first['trajectory_id']} do not follow one another",
        where=where,
        remedy="give the file as it was written: rows must be neither sorted nor filtered",
    )


def _batch_rows(batch: Any) -> Iterator[dict[str, Any]]:
    plain = {name: batch.column(name).to_pylist() for name in schema().names if name not in _STREAMS}
    streams = {name: _numpy_lists(batch.column(name)) for name in _STREAMS}
    for index in range(batch.num_rows):
        row = {name: values[index] for name, values in plain.items()}
        yield {**row, **{name: values[index] for name, values in streams.items()}}


def _numpy_lists(column: Any) -> list[np.ndarray | None]:
    """A list column as numpy arrays; null lists as None, null items as NaN or −1."""
    import pyarrow as pa

    items = column.flatten()
    if pa.types.is_boolean(items.type):
        flat: np.ndarray = items.to_numpy(zero_copy_only=False).astype(np.bool_)
    elif pa.types.is_floating(items.type):
        flat = items.fill_null(float("nan")).to_numpy()
    else:
        flat = items.fill_null(-1).to_numpy()
    lengths = column.value_lengths().to_pylist()
    ends = np.cumsum([length or 0 for length in lengths])
    return [
        None if length is None else flat[end - length : end].copy() for length, end in zip(lengths, ends, strict=True)
    ]


def _trajectory(rows: Sequence[dict[str, Any]]) -> TrajectoryItem:
    first = rows[0]
    source = Source(first["source"])
    present = [row for row in rows if row["segments"] > 0]
    trajectory = Trajectory(
        trajectory_id=first["trajectory_id"],
        group_id=first["group_id"],
        task_id=first["task_id"],
        environment=first["environment"],
        split=Split(first["split"]),
        segments=tuple(_segment(row, source) for row in present),
        outcome=Outcome(OutcomeKind(first["outcome"]), first["outcome_cause"] or ""),
        reward=first["reward"],
        temperature=first["temperature"],
        image=first["image"],
        source=source,
        turns=tuple(
            TurnTiming(**{**turn, "finish_reason": FinishReason(turn["finish_reason"])}) for turn in first["turns"]
        ),
        started_at=first["started_at"],
        ended_at=first["ended_at"],
        info=json.loads(first["info"]),
        events=tuple(json.loads(first["events"])),
        patch=first["patch"].decode("utf-8", "surrogateescape"),
    )
    if not present or present[0]["trained_at_step"] is None:
        return trajectory, None
    return trajectory, [_trained(row) for row in present]


def _segment(row: dict[str, Any], source: Source) -> Segment:
    spans = tuple(
        Span(
            kind=SpanKind(span["kind"]),
            start=span["start"],
            stop=span["stop"],
            turn=span["turn"],
            purpose=None if span["purpose"] is None else Purpose(span["purpose"]),
        )
        for span in row["spans"]
    )
    return Segment(row["token_ids"], spans, _floats(row["logprobs"]), row["versions"], source)


def _trained(row: dict[str, Any]) -> Trained:
    return Trained(row["trained_at_step"], _floats(row["advantages"]), _floats(row["weights"]), row["trained_mask"])


def _floats(values: np.ndarray) -> Float32:
    return values.astype(np.float32, copy=False)

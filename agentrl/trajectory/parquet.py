"""Trajectory files: one Parquet row per segment, exactly reversible. A public interface.

    write_rows(path, [(trajectory, None), (trajectory, [trained, …])], run="…")
    for trajectory, trained in read_trajectories([path, …]): …

Facts of a trajectory (reward, outcome, turns, patch, …) stand in each of its rows, so that one row can be
read by itself; dictionary encoding makes the repetition cheap. NaN and −1 are written as null. A trajectory
without a segment (its machine failed before anything was sampled) has one row with `segments` 0 and no
tokens, so that no rollout is missing from the files. `patch` is binary: UTF-8, with undecodable bytes of the
diff kept as they were (surrogateescape). Candidates of a segment without a scored token come back as [0, 0].

pyarrow is imported at first use: the record is imported everywhere, its files are not.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from agentrl.errors import DatasetError, RecordError, disk_full_is_typed
from agentrl.trajectory.columns import Candidates, candidate_column, read_candidates, read_streams, stream_column
from agentrl.trajectory.record import (
    FinishReason,
    Outcome,
    OutcomeKind,
    Purpose,
    Segment,
    Source,
    Span,
    SpanKind,
    Split,
    TeacherScores,
    Trained,
    Trajectory,
    TurnTiming,
)
from agentrl.trajectory.schema import CANDIDATES, LATER, SCHEMA_VERSION, STREAMS, schema

if TYPE_CHECKING:
    import pyarrow as pa

TrajectoryItem = tuple[Trajectory, list[Trained] | None]
_ROWS_PER_BATCH = 256
_CANDIDATES_PER_ROW_GROUP = 2**24
"""A row group is what is in memory at once when a file is read: about 128 MiB of candidates."""
_LIST_LIMIT = 2**31 - 1


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
    import pyarrow.parquet as pq

    rows = [row for trajectory, trained in items for row in _rows(trajectory, trained, run)]
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, schema(), compression="zstd") as writer:
        for group in _row_groups(rows):
            writer.write_table(_table(group))
    return sink.getvalue(), len(rows)


def _row_groups(rows: Sequence[dict[str, Any]]) -> Iterator[Sequence[dict[str, Any]]]:
    """Rows in order, cut where their candidates would be more than a row group's; all at once without candidates."""
    start = held = 0
    for index, row in enumerate(rows):
        values = row[CANDIDATES].values if row.get(CANDIDATES) is not None else 0
        if values > _LIST_LIMIT:
            raise RecordError(
                f"a segment has {values} candidates of a teacher, more than a column holds",
                where=f"trajectory {row['trajectory_id']}, segment {row['segment']}",
                remedy="distill.support=teacher with a small distill.top_k",
            )
        if held and held + values > _CANDIDATES_PER_ROW_GROUP:
            yield rows[start:index]
            start, held = index, 0
        held += values
    yield rows[start:]


def _table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    import pyarrow as pa

    columns = []
    for field in schema():
        values = [row.get(field.name) for row in rows]
        if field.name == CANDIDATES:
            columns.append(candidate_column(values, field.type))
        elif field.name in STREAMS and any(value is not None for value in values):
            columns.append(stream_column(values, field.type))
        else:
            columns.append(pa.array(values, type=field.type))
    return pa.Table.from_arrays(columns, schema=schema())


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
        teaching = _score_fields(trajectory.scores[index]) if trajectory.scores else {}
        yield {**common, "segment": index, **_segment_fields(segment), **training, **teaching}


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


def _score_fields(scores: TeacherScores) -> dict[str, Any]:
    found: dict[str, Any] = {
        "teacher": scores.teacher,
        "teacher_logprobs": np.asarray(scores.logprobs, np.float32),
        "teacher_spans": None if scores.spans is None else np.asarray(scores.spans, np.int32),
        "teacher_top1": None if scores.top1 is None else np.asarray(scores.top1, np.bool_),
    }
    if scores.candidate_logprobs is not None:
        ids = None if scores.candidate_ids is None else np.asarray(scores.candidate_ids, np.int32)
        found[CANDIDATES] = Candidates(scores.mask, np.asarray(scores.candidate_logprobs, np.float32), ids)
    return found


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
    present = [name for name in schema().names if name in file.schema_arrow.names]
    missing = [name for name in schema().names if name not in present and name not in LATER]
    if missing:
        raise DatasetError(
            f"columns are missing: {', '.join(missing)}",
            where=where,
            remedy="give a file of a run folder's trajectories/, written by this version of agentrl",
        )
    pending: list[dict[str, Any]] = []
    for row in _file_rows(file, present):
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


def _file_rows(file: Any, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows in order, no more than a row group at once: batches would join what was cut for its size."""
    for group in range(file.num_row_groups):
        for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, row_groups=[group], columns=columns):
            yield from _batch_rows(batch)


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
    columns = {name: _read_column(name, batch.column(name)) for name in batch.schema.names}
    for index in range(batch.num_rows):
        yield {name: values[index] for name, values in columns.items()}


def _read_column(name: str, column: Any) -> Sequence[Any]:
    if name == CANDIDATES:
        return read_candidates(column)
    return read_streams(column) if name in STREAMS else column.to_pylist()


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
        scores=tuple(_scores(row) for row in present if row["teacher"] is not None),
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
    return Segment(row["token_ids"], spans, row["logprobs"], row["versions"], source)


def _trained(row: dict[str, Any]) -> Trained:
    return Trained(row["trained_at_step"], row["advantages"], row["weights"], row["trained_mask"])


def _scores(row: dict[str, Any]) -> TeacherScores:
    candidates: Candidates | None = row[CANDIDATES]
    if row["teacher_logprobs"] is None:
        raise RecordError("a teacher is named, and its scores are missing", where=f"trajectory {row['trajectory_id']}")
    return TeacherScores(
        teacher=row["teacher"],
        logprobs=row["teacher_logprobs"],
        spans=row.get("teacher_spans"),
        candidate_ids=None if candidates is None else candidates.ids,
        candidate_logprobs=None if candidates is None else candidates.logprobs,
        top1=row.get("teacher_top1"),
    )

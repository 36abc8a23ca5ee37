"""Trajectory files as the pages need them: a light index of all, and the full record of a few.

The files are read column by column with pyarrow: a table of ten thousand trajectories needs a handful of
columns, and a page one trajectory. Unlike the record's own reader this one forgives: pages are for looking
at runs that went wrong, so an unreadable file is named in `problems` and the rest is shown.
"""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.errors import RunFolderError
from agentrl.telemetry.teacher_view import preferred
from agentrl.trajectory.columns import read_candidates, read_streams

_STEP = re.compile(r"step_(\d+)")
_LIGHT = (
    *("trajectory_id", "group_id", "task_id", "split", "outcome", "outcome_cause", "reward", "segment"),
    *("token_ids", "spans", "versions", "started_at", "ended_at", "turns", "trained_at_step"),
    *("logprobs", "teacher_logprobs"),
)
_LONG = ("token_ids", "versions", "logprobs", "teacher_logprobs")


@dataclass(frozen=True, slots=True)
class Summary:
    """One trajectory's line in a table. `step` is where it was trained, else the step whose file holds it; `teacher_kl`
    the mean of log π − log π_teacher over scored tokens, in nats, None without any."""

    trajectory_id: str
    group_id: str
    task_id: str
    split: str
    step: int | None
    trained: bool
    reward: float | None
    outcome: str
    turns: int
    tokens: int
    agent_tokens: int
    segments: int
    oldest_version: int | None
    ended_at: float
    teacher_kl: float | None = None

    @property
    def agent_share(self) -> float | None:
        """Agent tokens over all tokens; None for a trajectory without tokens."""
        return self.agent_tokens / self.tokens if self.tokens else None


class TrajectoryStore:
    """Trajectories of one run folder. Ids are looked up in the index, never made into paths."""

    def __init__(self, run_dir: Path) -> None:
        if not run_dir.is_dir():
            raise RunFolderError(
                "no run folder there", where=str(run_dir), remedy="give the folder that `agentrl train` wrote"
            )
        self.run_dir = run_dir
        self.problems: list[str] = []
        self._lock = threading.Lock()
        self._files: dict[Path, list[Summary]] = {}
        self._where: dict[str, Path] = {}

    def summaries(self) -> list[Summary]:
        """All trajectories, in the order of files and rows. New files of a live run are picked up."""
        with self._lock:
            self._refresh()
            return [summary for found in self._files.values() for summary in found]

    def load(self, ids: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
        """Rows (one per segment, in order) of each id that exists; unknown ids are left out.

        Of a teacher's candidates there is `teacher_preferred` (`teacher_view.preferred`) instead of `teacher_topk`.
        """
        with self._lock:
            self._refresh()
            by_file: dict[Path, list[str]] = defaultdict(list)
            for trajectory_id in ids:
                if trajectory_id in self._where:
                    by_file[self._where[trajectory_id]].append(trajectory_id)
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for path, wanted in by_file.items():
            for row in _full_rows(path, wanted):
                found[row["trajectory_id"]].append(row)
        return {key: sorted(rows, key=lambda row: row["segment"]) for key, rows in found.items()}

    def _refresh(self) -> None:
        present = sorted((self.run_dir / "trajectories").glob("*.parquet"))
        for path in present:
            if path in self._files:
                continue
            try:
                self._files[path] = _index(path)
            except (pa.ArrowException, OSError, KeyError) as error:
                self._files[path] = []
                self.problems.append(f"{path.name}: {error}")
            self._where |= {summary.trajectory_id: path for summary in self._files[path]}
        for gone in self._files.keys() - set(present):
            for summary in self._files.pop(gone):
                self._where.pop(summary.trajectory_id, None)


def _full_rows(path: Path, wanted: Sequence[str]) -> Iterable[dict[str, Any]]:
    """All columns of the trajectories `wanted`, row group by row group: candidates may be many."""
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            names = file.read_row_group(group, columns=["trajectory_id"])["trajectory_id"]
            mask = pa.compute.is_in(names, pa.array(wanted, pa.string()))
            if not pa.compute.any(mask).as_py():
                continue
            table = file.read_row_group(group).filter(mask)
            candidates = read_candidates(table["teacher_topk"].combine_chunks())
            for row, found in zip(table.drop_columns(["teacher_topk"]).to_pylist(), candidates, strict=True):
                chosen = {} if found is None else preferred(found, row["token_ids"], row["teacher_logprobs"])
                yield row | {"teacher_preferred": chosen}


def _index(path: Path) -> list[Summary]:
    file = pq.ParquetFile(path)
    match = _STEP.search(path.name)
    step = int(match[1]) if match else None
    rows: dict[str, list[dict[str, Any]]] = {}
    columns = [name for name in _LIGHT if name in file.schema_arrow.names]
    for batch in file.iter_batches(batch_size=512, columns=columns):
        for row in _light_rows(batch):
            rows.setdefault(row["trajectory_id"], []).append(row)
    return [_summary(segments, step) for segments in rows.values()]


def _light_rows(batch: pa.RecordBatch) -> Iterable[dict[str, Any]]:
    """Rows without the long lists: their lengths and extremes instead."""
    lengths = batch.column("token_ids").value_lengths().fill_null(0).to_pylist()
    versions = batch.column("versions")
    plain = {n: batch.column(n).to_pylist() for n in batch.schema.names if n not in _LONG}
    distances = _distances(batch)
    for i in range(batch.num_rows):
        row = {name: values[i] for name, values in plain.items()}
        row["tokens"] = lengths[i]
        sampled = versions[i].values.drop_null().to_numpy() if versions[i].is_valid else np.zeros(0, np.int32)
        row["oldest"] = int(sampled.min()) if sampled.size else None
        row["distance"], row["scored"] = distances[i]
        yield row


def _distances(batch: pa.RecordBatch) -> list[tuple[float, int]]:
    """(sum of log π − log π_teacher, scored tokens) of each row."""
    teacher = batch.column("teacher_logprobs")
    if teacher.null_count == batch.num_rows:
        return [(0.0, 0)] * batch.num_rows
    found = []
    for own, told in zip(read_streams(batch.column("logprobs")), read_streams(teacher), strict=True):
        difference = np.zeros(0) if own is None or told is None else own.astype(np.float64) - told
        scored = np.isfinite(difference)
        found.append((float(difference[scored].sum()), int(scored.sum())))
    return found


def _summary(rows: Sequence[Mapping[str, Any]], file_step: int | None) -> Summary:
    first = rows[0]
    oldest = [row["oldest"] for row in rows if row["oldest"] is not None]
    trained = first.get("trained_at_step")
    outcome, cause = first["outcome"], first.get("outcome_cause")
    scored = sum(row["scored"] for row in rows)
    agent = sum(s["stop"] - s["start"] for row in rows for s in row["spans"] or () if s["kind"] == "agent")
    return Summary(
        trajectory_id=first["trajectory_id"],
        group_id=first["group_id"],
        task_id=first["task_id"],
        split=first["split"],
        step=file_step if trained is None else trained,
        trained=trained is not None,
        reward=first["reward"],
        outcome=f"{outcome}: {cause}" if cause else outcome,
        turns=len(first["turns"] or ()),
        tokens=sum(row["tokens"] for row in rows),
        agent_tokens=agent,
        segments=sum(1 for row in rows if row["tokens"]),
        oldest_version=min(oldest, default=None),
        ended_at=first["ended_at"] or 0.0,
        teacher_kl=sum(row["distance"] for row in rows) / scored if scored else None,
    )


def latest_with_mates(summaries: Sequence[Summary], count: int) -> list[Summary]:
    """Whole groups, the latest first, until at least `count` trajectories are chosen.

    Up to two thirds are trained ones, the rest others (evaluations, filtered groups); each fills up where the
    other has too few.
    """
    groups: dict[str, list[Summary]] = defaultdict(list)
    for summary in summaries:
        groups[summary.group_id].append(summary)
    latest = sorted(groups.values(), key=lambda g: max((s.step or 0, s.ended_at) for s in g), reverse=True)
    trained = [group for group in latest if any(s.trained for s in group)]
    others = [group for group in latest if not any(s.trained for s in group)]
    chosen = _take(trained, count * 2 // 3)
    chosen += _take(others, count - sum(map(len, chosen)))
    chosen += _take([group for group in trained if group not in chosen], count - sum(map(len, chosen)))
    return [summary for group in chosen for summary in group]


def _take(groups: Sequence[list[Summary]], count: int) -> list[list[Summary]]:
    """The first groups that together hold at least `count`."""
    taken: list[list[Summary]] = []
    for group in groups:
        if sum(map(len, taken)) >= count:
            break
        taken.append(group)
    return taken


def text_of(value: bytes | str | None) -> str:
    """A text column that may be binary (a patch); bytes that are no UTF-8 are shown escaped."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value or ""


def json_of(value: str | None, default: Any) -> Any:
    """A JSON column, or `default` where it is missing or broken."""
    try:
        return json.loads(value) if value else default
    except ValueError:
        return default

"""Trajectory files: exact round trip, the public columns, whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.errors import DatasetError, DiskFullError, RecordError
from agentrl.trajectory import (
    FinishReason,
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
    read_trajectories,
    write_rows,
)
from agentrl.trajectory.parquet import from_bytes, to_bytes

PUBLIC_COLUMNS = [
    "schema_version",
    "run",
    "split",
    "source",
    "temperature",
    "image",
    "trajectory_id",
    "group_id",
    "task_id",
    "environment",
    "segment",
    "segments",
    "token_ids",
    "spans",
    "logprobs",
    "versions",
    "reward",
    "outcome",
    "started_at",
    "ended_at",
    "turns",
    "trained_at_step",
    "advantages",
    "weights",
    "trained_mask",
    "teacher",
    "teacher_logprobs",
    "teacher_topk",
]

finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
seconds = st.floats(0, 1e6)
# Any text, lone surrogates of undecodable bytes in a diff included.
patches = st.binary(max_size=40).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@st.composite
def segments(draw: st.DrawFn, source: Source) -> Segment:
    kinds = draw(st.lists(st.tuples(st.sampled_from(SpanKind), st.integers(1, 5)), min_size=1, max_size=6))
    spans, at = [], 0
    for turn, (kind, length) in enumerate(kinds):
        purpose = draw(st.sampled_from(Purpose)) if kind is SpanKind.AGENT else None
        spans.append(Span(kind, at, at + length, turn, purpose))
        at += length
    logprobs = np.full(at, np.nan, np.float32)
    versions = np.full(at, -1, np.int32)
    for span in spans:
        if span.kind is SpanKind.AGENT and source is Source.SAMPLED:
            for position in range(span.start, span.stop):
                logprobs[position] = draw(finite32)
                versions[position] = draw(st.integers(0, 2**31 - 1))
    ids = np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=at, max_size=at)), np.int32)
    return Segment(ids, tuple(spans), logprobs, versions, source)


@st.composite
def items(draw: st.DrawFn, number: int) -> tuple[Trajectory, list[Trained] | None]:
    source = draw(st.sampled_from(Source))
    failed = draw(st.booleans())
    found = draw(st.lists(segments(source), min_size=0 if failed else 1, max_size=3))
    kind = OutcomeKind.INFRASTRUCTURE if failed else draw(st.sampled_from(list(OutcomeKind)[:-1]))
    turns = st.builds(TurnTiming, seconds, seconds, seconds, seconds, st.sampled_from(FinishReason))
    trajectory = Trajectory(
        trajectory_id=f"t{number}",
        group_id=draw(names),
        task_id=draw(names),
        environment=draw(names),
        split=draw(st.sampled_from(Split)),
        segments=tuple(found),
        outcome=Outcome(kind, draw(names) if failed else ""),
        reward=None if failed else draw(st.floats(allow_nan=False, allow_infinity=False)),
        temperature=draw(st.floats(0, 2)),
        image=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=9)),
        source=source,
        turns=tuple(draw(st.lists(turns, max_size=3))),
        started_at=draw(seconds),
        ended_at=draw(seconds),
        info=draw(st.dictionaries(names, st.integers(0, 9) | seconds, max_size=3)),
        events=tuple(draw(st.lists(st.dictionaries(names, names, max_size=2), max_size=2))),
        patch=draw(patches),
    )
    if not found or draw(st.booleans()):
        return trajectory, None
    return trajectory, [_trained(draw, segment) for segment in found]


def _trained(draw: st.DrawFn, segment: Segment) -> Trained:
    mask = segment.agent_mask & np.array([draw(st.booleans()) for _ in range(len(segment))])
    values = np.array([draw(finite32) for _ in range(len(segment))], np.float32)
    return Trained(draw(st.integers(0, 10**6)), np.where(mask, values, np.nan).astype(np.float32), values * mask, mask)


def assert_same(left: tuple[Trajectory, Any], right: tuple[Trajectory, Any]) -> None:
    a, b = left[0], right[0]
    for name in Trajectory.__slots__:
        if name not in ("segments", "events", "info"):
            assert getattr(a, name) == getattr(b, name), name
    assert dict(a.info) == dict(b.info)
    assert [dict(event) for event in a.events] == [dict(event) for event in b.events]
    assert len(a.segments) == len(b.segments)
    assert all(x.same_as(y) for x, y in zip(a.segments, b.segments, strict=True))
    assert (left[1] is None) == (right[1] is None)
    for x, y in zip(left[1] or (), right[1] or (), strict=True):
        assert x.step == y.step
        np.testing.assert_array_equal(x.advantages, y.advantages)
        np.testing.assert_array_equal(x.weights, y.weights)
        np.testing.assert_array_equal(x.mask, y.mask)


def example(name: str = "t0", *, segments: int = 2) -> Trajectory:
    spans = (Span(SpanKind.PROMPT, 0, 2, 0), Span(SpanKind.AGENT, 2, 4, 0, Purpose.ACT))
    one = Segment(
        np.array([5, 6, 7, 8]),
        spans,
        np.array([np.nan, np.nan, -0.5, -1]),
        np.array([-1, -1, 3, 3]),
        Source.SAMPLED,
    )
    return Trajectory(
        trajectory_id=name,
        group_id="g",
        task_id="task",
        environment="swe-gym",
        split=Split.TRAIN,
        segments=(one,) * segments,
        outcome=Outcome(OutcomeKind.SOLVED),
        reward=1.0,
        turns=(TurnTiming(0.1, 0.2, 0.3, 0.4),),
    )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_round_trip_is_exact(data: st.DataObject) -> None:
    written = [data.draw(items(number)) for number in range(data.draw(st.integers(0, 4)))]
    raw, rows = to_bytes(written, run="run")
    assert rows == sum(max(1, len(t.segments)) for t, _ in written)
    read = from_bytes(raw, where="memory")
    assert len(read) == len(written)
    for left, right in zip(written, read, strict=True):
        assert_same(left, right)


def test_rows_are_readable_with_datasets_and_carry_the_public_columns(tmp_path: Path) -> None:
    import datasets

    t = example()
    trained = Trained(
        7,
        np.array([np.nan, np.nan, 0.5, 0.5], np.float32),
        np.array([0, 0, 1, 2], np.float32),
        np.array([False, False, True, True]),
    )
    path = tmp_path / "trajectories" / "step_000007-train.parquet"
    assert write_rows(path, [(t, [trained, trained])], run="r1") == 2
    rows = datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert set(PUBLIC_COLUMNS) <= set(rows.column_names)
    row = rows[1]
    assert (row["schema_version"], row["run"], row["segment"], row["segments"]) == (1, "r1", 1, 2)
    assert row["token_ids"] == [5, 6, 7, 8]
    assert row["logprobs"] == [None, None, -0.5, -1.0]
    assert row["versions"] == [None, None, 3, 3]
    assert row["spans"][1] == {"kind": "agent", "purpose": "act", "turn": 0, "start": 2, "stop": 4}
    assert row["turns"][0] == {
        "queue_s": 0.1,
        "prefill_s": 0.2,
        "decode_s": 0.3,
        "tool_s": 0.4,
        "finish_reason": "stop",
    }
    assert (row["trained_at_step"], row["trained_mask"]) == (7, [False, False, True, True])
    assert row["advantages"] == [None, None, 0.5, 0.5]
    assert row["weights"] == [0.0, 0.0, 1.0, 2.0]
    assert row["teacher"] is row["teacher_logprobs"] is row["teacher_topk"] is None


def test_an_infrastructure_failure_without_segments_has_one_row(tmp_path: Path) -> None:
    t = Trajectory(
        trajectory_id="t",
        group_id="g",
        task_id="x",
        environment="e",
        split=Split.TRAIN,
        segments=(),
        outcome=Outcome(OutcomeKind.INFRASTRUCTURE, "sandbox gone"),
        reward=None,
    )
    path = tmp_path / "a.parquet"
    assert write_rows(path, [(t, None)], run="r") == 1
    row = pq.read_table(path).to_pylist()[0]
    assert (row["reward"], row["segments"], row["token_ids"], row["outcome_cause"]) == (
        None,
        0,
        [],
        "sandbox gone",
    )
    assert_same(next(read_trajectories([path])), (t, None))


@pytest.mark.parametrize("change", ["version", "column", "order", "garbage"])
def test_a_foreign_or_torn_file_is_refused_with_a_remedy(tmp_path: Path, change: str) -> None:
    path = tmp_path / "a.parquet"
    write_rows(path, [(example(segments=3), None)], run="r")
    table = pq.read_table(path)
    if change == "version":
        table = table.set_column(0, "schema_version", pa.array([9] * 3, pa.int32()))
    elif change == "column":
        table = table.drop_columns(["spans"])
    elif change == "order":
        table = table.take([0, 2, 1])
    pq.write_table(table, path)
    if change == "garbage":
        path.write_bytes(b"not parquet")
    with pytest.raises(DatasetError, match=r"version 9|spans|do not follow|not a readable") as caught:
        list(read_trajectories([path]))
    assert caught.value.where == str(path)
    assert caught.value.remedy or change == "garbage"


def test_training_records_must_fit_their_segments(tmp_path: Path) -> None:
    zeros = np.zeros(4, np.float32)
    with pytest.raises(RecordError, match="1 training records for 2 segments"):
        write_rows(tmp_path / "a.parquet", [(example(), [Trained(0, zeros, zeros, zeros > 0)])], run="r")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_file_and_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    write_rows(path, [(example("old"), None)], run="r")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFullError, match="no space left") as caught:
        write_rows(path, [(example("new"), None)], run="r")
    assert "--resume" in caught.value.remedy
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]
    assert next(read_trajectories([path]))[0].trajectory_id == "old"

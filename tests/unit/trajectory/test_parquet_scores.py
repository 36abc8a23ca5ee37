"""A teacher's scores in trajectory files: exact round trip, public columns, files without them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.errors import RecordError
from agentrl.trajectory import (
    Outcome,
    OutcomeKind,
    Purpose,
    Segment,
    Span,
    SpanKind,
    Split,
    TeacherScores,
    Trajectory,
    parquet,
    read_trajectories,
    write_rows,
)
from agentrl.trajectory.parquet import from_bytes, to_bytes

STREAMS = ("logprobs", "spans", "top1", "candidate_ids", "candidate_logprobs")
finite32 = st.floats(-40, 0, width=32)


def segment(prompt: int, agent: int) -> Segment:
    """`prompt` tokens read (0: none), then `agent` sampled ones."""
    total = prompt + agent
    sampled = np.arange(total) >= prompt
    spans = [Span(SpanKind.PROMPT, 0, prompt, 0)] if prompt else []
    if agent:
        spans.append(Span(SpanKind.AGENT, prompt, total, 0, Purpose.ACT))
    return Segment(np.arange(total) + 3, tuple(spans), np.where(sampled, -0.5, np.nan), np.where(sampled, 1, -1))


def trajectory(segments: list[Segment], scores: list[TeacherScores], name: str = "t0") -> Trajectory:
    return Trajectory(
        trajectory_id=name,
        group_id="g",
        task_id="task",
        environment="swe-gym",
        split=Split.TRAIN,
        segments=tuple(segments),
        outcome=Outcome(OutcomeKind.SOLVED),
        reward=1.0,
        scores=tuple(scores),
    )


@st.composite
def scores_of(draw: st.DrawFn, one: Segment) -> TeacherScores:
    """Any scores that pass the record's check: all, some or no tokens scored; spans, candidates, top-1 or none."""
    allowed = one.agent_mask
    allowed[0] = False
    mask = allowed & np.array(draw(st.lists(st.booleans(), min_size=len(one), max_size=len(one))))
    count = int(mask.sum())
    logprobs = np.full(len(one), np.nan, np.float32)
    logprobs[mask] = draw(st.lists(finite32, min_size=count, max_size=count))
    spans = np.full(len(one), -1, np.int32)
    spans[mask] = np.sort(draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
    ids = candidates = None
    kind = draw(st.sampled_from(["none", "ids", "vocabulary"]))
    if kind != "none":
        k = draw(st.integers(1, 4)) if count else 0
        candidates = np.array(draw(st.lists(finite32, min_size=count * k, max_size=count * k)), np.float32)
        candidates = candidates.reshape(count, k)
        if kind == "ids":
            ids = np.array(draw(st.lists(st.integers(0, 99), min_size=count * k, max_size=count * k)), np.int32)
            fewer = np.array(draw(st.lists(st.booleans(), min_size=count * k, max_size=count * k)), bool)
            ids = np.where(fewer, -1, ids).astype(np.int32).reshape(count, k)
            candidates[ids == -1] = np.nan
        elif not count:
            ids = np.zeros((0, 0), np.int32)  # of no candidate at all nobody can say which they were
    top1 = mask & np.array(draw(st.lists(st.booleans(), min_size=len(one), max_size=len(one))))
    return TeacherScores(
        draw(st.sampled_from(["teacher", "x/y ✓"])),
        logprobs,
        spans if draw(st.booleans()) else None,
        ids,
        candidates,
        top1 if draw(st.booleans()) else None,
    )


@st.composite
def trajectories(draw: st.DrawFn, number: int) -> Trajectory:
    sizes = st.tuples(st.integers(0, 3), st.integers(0, 5)).filter(any)
    segments = [segment(*size) for size in draw(st.lists(sizes, min_size=1, max_size=3))]
    scores = [draw(scores_of(one)) for one in segments] if draw(st.booleans()) else []
    return trajectory(segments, scores, f"t{number}")


def assert_same_scores(left: Trajectory, right: Trajectory) -> None:
    assert [s.teacher for s in left.scores] == [s.teacher for s in right.scores]
    for a, b in zip(left.scores, right.scores, strict=True):
        for name in STREAMS:
            x, y = getattr(a, name), getattr(b, name)
            assert (x is None) == (y is None), name
            if x is not None:
                assert (x.dtype, x.shape) == (y.dtype, y.shape), name
                np.testing.assert_array_equal(x, y, name)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_round_trip_is_exact(data: st.DataObject) -> None:
    """Also where some trajectories of a file have scores, spans or candidates and others have none."""
    written = [data.draw(trajectories(number)) for number in range(data.draw(st.integers(0, 4)))]
    raw, _ = to_bytes([(t, None) for t in written], run="run")
    read = [t for t, _ in from_bytes(raw, where="memory")]
    assert len(read) == len(written)
    for left, right in zip(written, read, strict=True):
        assert_same_scores(left, right)
        assert all(a.same_as(b) for a, b in zip(left.segments, right.segments, strict=True))


def scored(agent: int = 3, k: int = 2, *, whole: bool = False) -> Trajectory:
    """Two prompt tokens and `agent` scored ones, the last of them unscored, k candidates at each."""
    one = segment(2, agent)
    mask = one.agent_mask
    mask[-1] = False
    count = int(mask.sum())
    logprobs = np.where(mask, -1.5, np.nan).astype(np.float32)
    ids = np.tile(np.arange(k, dtype=np.int32) + 7, (count, 1))
    candidates = np.tile(-np.arange(1, k + 1, dtype=np.float32), (count, 1))
    spans = np.where(mask, 4, -1).astype(np.int32)
    scores = TeacherScores(
        "big", logprobs, spans, None if whole else ids, candidates, mask & (np.arange(len(one)) == 2)
    )
    return trajectory([one], [scores])


def row_of(path: Path) -> dict[str, Any]:
    return dict(pq.read_table(path).to_pylist()[0])


def test_public_columns(tmp_path: Path) -> None:
    """Every list stands on the tokens of the segment, null where nothing was scored."""
    path = tmp_path / "a.parquet"
    t = scored()
    t.scores[0].candidate_ids[1, 1] = -1  # type: ignore[index]
    t.scores[0].candidate_logprobs[1, 1] = np.nan  # type: ignore[index]
    write_rows(path, [(t, None)], run="r")
    row = row_of(path)
    assert row["teacher"] == "big"
    assert row["teacher_logprobs"] == [None, None, -1.5, -1.5, None]
    assert row["teacher_spans"] == [None, None, 4, 4, None]
    assert row["teacher_top1"] == [False, False, True, False, False]
    first = [{"token_id": 7, "logprob": -1.0}, {"token_id": 8, "logprob": -2.0}]
    second = [{"token_id": 7, "logprob": -1.0}, {"token_id": None, "logprob": None}]
    assert row["teacher_topk"] == [None, None, first, second, None]


def test_of_a_whole_vocabulary_the_place_is_the_id(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_rows(path, [(scored(whole=True), None)], run="r")
    assert row_of(path)["teacher_topk"][2] == [
        {"token_id": None, "logprob": -1.0},
        {"token_id": None, "logprob": -2.0},
    ]
    (read, _), *_ = read_trajectories([path])
    assert read.scores[0].candidate_ids is None
    assert read.scores[0].candidate_logprobs is not None
    assert read.scores[0].candidate_logprobs.tolist() == [[-1.0, -2.0]] * 2


def test_a_file_from_before_is_read_as_without(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_rows(path, [(trajectory([segment(2, 2)], []), None)], run="r")
    table = pq.read_table(path).drop_columns(["teacher_spans", "teacher_top1"])
    pq.write_table(table, path)
    (read, _), *_ = read_trajectories([path])
    assert read.scores == ()


def test_row_groups_bound_what_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are cut by their candidates, read back across the cuts, and left whole without candidates."""
    monkeypatch.setattr(parquet, "_CANDIDATES_PER_ROW_GROUP", 10)
    path = tmp_path / "a.parquet"
    many = [replace(scored(4, 3), trajectory_id=f"t{i}") for i in range(5)]  # 9 candidates each
    plain = [replace(t, scores=(), trajectory_id=f"p{i}") for i, t in enumerate(many)]
    double = replace(many[0], segments=many[0].segments * 2, scores=many[0].scores * 2, trajectory_id="d")
    write_rows(path, [(t, None) for t in [*plain, *many, double]], run="r")
    assert pq.ParquetFile(path).num_row_groups == 7
    read = [t for t, _ in read_trajectories([path])]
    assert [t.trajectory_id for t in read] == [t.trajectory_id for t in [*plain, *many, double]]
    for left, right in zip([*plain, *many, double], read, strict=True):
        assert_same_scores(left, right)
    write_rows(path, [(t, None) for t in plain], run="r")
    assert pq.ParquetFile(path).num_row_groups == 1


def test_more_candidates_than_a_column_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_LIST_LIMIT", 5)
    with pytest.raises(RecordError, match="6 candidates") as caught:
        to_bytes([(scored(4, 2), None)], run="r")
    assert "distill.top_k" in caught.value.remedy


@pytest.mark.parametrize("change", ["scores of one segment", "ragged", "no scores"])
def test_rows_that_break_the_record_are_refused(tmp_path: Path, change: str) -> None:
    """K38: a trajectory in which only one segment is scored is none of ours."""
    path = tmp_path / "a.parquet"
    t = scored()
    write_rows(path, [(replace(t, segments=t.segments * 2, scores=t.scores * 2), None)], run="r")
    table = pq.read_table(path)
    if change == "scores of one segment":
        column, values = "teacher", ["big", None]
    elif change == "ragged":
        column, values = "teacher_topk", table["teacher_topk"].to_pylist()
        values[0][2] = values[0][2][:1]
    else:
        column, values = "teacher_logprobs", [None, None]
    place = table.schema.get_field_index(column)
    table = table.set_column(place, column, pa.array(values, table.schema.field(column).type))
    pq.write_table(table, path)
    with pytest.raises(RecordError, match=r"1 scores for 2|differ in their number|scores are missing"):
        list(read_trajectories([path]))


def test_tokens_never_become_python_objects() -> None:
    """2 million candidates there and back; one dict each would take some ten seconds."""
    t = scored(2001, 1000)
    started = time.process_time()
    raw, _ = to_bytes([(t, None)], run="r")
    ((read, _),) = from_bytes(raw, where="memory")
    assert time.process_time() - started < 3
    assert_same_scores(t, read)

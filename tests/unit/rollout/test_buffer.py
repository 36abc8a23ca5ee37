"""The buffer: its rows' life, kill -9, a full disk (K49)."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.errors import DiskFullError, RecordError, RunFolderError
from agentrl.rollout.buffer import GroupBuffer
from agentrl.rollout.groups import GroupResult
from agentrl.trajectory import TeacherScores


def names(groups: list[Any]) -> list[str]:
    return [group.group_id for group in groups]


def put_many(buffer: GroupBuffer, groups: list[Any]) -> None:
    for group in groups:
        buffer.put(group)


def test_a_group_comes_back_as_it_was(tmp_path: Path, toys: Any) -> None:
    group = toys.group("g7", [1.0, None, 0.0], index=7, version=3)
    with GroupBuffer(tmp_path / "buffer.sqlite") as buffer:
        buffer.put(group)
    with GroupBuffer(tmp_path / "buffer.sqlite") as buffer:
        (found,) = buffer.waiting()
    assert (found.group_id, found.task_id, found.index, found.rewards) == (
        "g7",
        "task-g7",
        7,
        (1.0, None, 0.0),
    )
    assert found.versions == group.versions
    assert found.trajectories[0].segments[0].same_as(group.trajectories[0].segments[0])
    assert found.trajectories[1].outcome == group.trajectories[1].outcome


def test_a_teachers_scores_wait_with_their_group(tmp_path: Path, toys: Any) -> None:
    """A resumed run does not ask the teacher again."""
    member = toys.trajectory("g0", 0)
    (segment,) = member.segments
    mask = segment.agent_mask
    logprobs = np.where(mask, -1.25, np.nan).astype(np.float32)
    ids = np.full((int(mask.sum()), 2), 9, np.int32)
    scores = TeacherScores("big", logprobs, None, ids, np.full(ids.shape, -0.75, np.float32), mask)
    group = GroupResult("g0", "task", 0, (replace(member, scores=(scores,)), toys.trajectory("g0", 1)))
    with GroupBuffer(tmp_path / "b.sqlite") as buffer:
        buffer.put(group)
    with GroupBuffer(tmp_path / "b.sqlite") as buffer:
        (found,) = buffer.waiting()
    (read,) = found.trajectories[0].scores
    assert (read.teacher, read.spans, found.trajectories[1].scores) == ("big", None, ())
    for name in ("logprobs", "candidate_ids", "candidate_logprobs", "top1"):
        np.testing.assert_array_equal(getattr(read, name), getattr(scores, name))


def test_k49_rows_settled_after_the_checkpoint_are_taken_back(tmp_path: Path, toys: Any) -> None:
    with GroupBuffer(tmp_path / "b.sqlite") as buffer:
        for i in (3, 1, 2, 0):
            buffer.put(toys.group(f"g{i}", index=i))
        assert names(buffer.waiting()) == ["g0", "g1", "g2", "g3"]
        buffer.settle(["g0"], step=4)
        buffer.settle(["g1", "g2"], step=5)
        assert names(buffer.waiting()) == ["g3"]
        assert names(buffer.settled(5)) == ["g1", "g2"]
        assert buffer.take_back(after_step=4) == 2
        assert names(buffer.waiting()) == ["g1", "g2", "g3"]
        assert buffer.prune(through_step=4) == 1
        assert names(buffer.settled(4)) == []


def test_groups_outside_the_bound_are_dropped_and_named(tmp_path: Path, toys: Any) -> None:
    with GroupBuffer(tmp_path / "b.sqlite") as buffer:
        mixed = [toys.trajectory("mixed", i, segments=[toys.segment(version=v)]) for i, v in enumerate((2, 3))]
        buffer.put(type(toys.group())("mixed", "task", 0, tuple(mixed)))
        buffer.put(toys.group("old", version=1, index=1))
        buffer.put(toys.group("now", version=2, index=2))
        buffer.put(toys.group("failed", [None], index=3))
        buffer.put(toys.group("settled", version=1, index=4))
        buffer.settle(["settled"], step=1)
        assert buffer.drop_outside(oldest=1, newest=2) == ["failed", "mixed"]
        assert names(buffer.waiting()) == ["old", "now"]
        assert buffer.drop_outside(oldest=2, newest=2) == ["old"]
        assert names(buffer.waiting()) == ["now"]
        assert names(buffer.settled(1)) == ["settled"]


def test_rows_are_written_once_and_settled_all_or_none(tmp_path: Path, toys: Any) -> None:
    with GroupBuffer(tmp_path / "b.sqlite") as buffer:
        buffer.put(toys.group("g0"))
        with pytest.raises(RecordError, match="g0 is in the buffer already"):
            buffer.put(toys.group("g0"))
        with pytest.raises(RecordError, match="g9 does not wait"):
            buffer.settle(["g0", "g9"], step=1)
        assert names(buffer.waiting()) == ["g0"]
        buffer.settle(["g0"], step=1)
        with pytest.raises(RecordError, match="g0 does not wait"):
            buffer.settle(["g0"], step=2)


WRITER = """
import sys, time
sys.path[:0] = sys.argv[2:]
import numpy as np
from agentrl.rollout.buffer import GroupBuffer
from agentrl.rollout.groups import GroupResult
from agentrl.trajectory import *
buffer = GroupBuffer(sys.argv[1])
segment = Segment(np.arange(400), (Span(SpanKind.PROMPT, 0, 400, 0),), np.full(400, np.nan), np.full(400, -1))
for i in range(10_000):
    t = Trajectory(trajectory_id=f"g{i}-0", group_id=f"g{i}", task_id="t", environment="e", split=Split.TRAIN,
                   segments=(segment,), outcome=Outcome(OutcomeKind.FAILED), reward=0.0)
    buffer.put(GroupResult(f"g{i}", "t", i, (t,)))
    print(i, flush=True)
"""


def test_k49_what_was_put_is_there_after_kill_9(tmp_path: Path) -> None:
    """Every group whose `put` returned is there, whole, and at most the one in flight besides."""
    path = tmp_path / "b.sqlite"
    source_roots = [os.getcwd(), *filter(None, sys.path)]
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), *source_roots], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        seen = [int(writer.stdout.readline()) for _ in range(20)]
    finally:
        writer.send_signal(signal.SIGKILL)
        rest = writer.communicate(timeout=30)[0]
    last = int(rest.split()[-1]) if rest.split() else seen[-1]
    with GroupBuffer(path) as buffer:
        found = [group.index for group in buffer.waiting()]
    assert found in (list(range(last + 1)), list(range(last + 2)))


def test_a_full_disk_is_a_typed_error_and_the_rows_before_it_stay(tmp_path: Path, toys: Any) -> None:
    with GroupBuffer(tmp_path / "b.sqlite") as buffer:
        buffer.put(toys.group("g0"))
        buffer._db.execute("PRAGMA max_page_count = 8")
        with pytest.raises(DiskFullError, match="no space left") as caught:
            put_many(buffer, [toys.group(f"g{i}", index=i) for i in range(1, 50)])
        assert "--resume" in caught.value.remedy
        assert caught.value.where.endswith("b.sqlite")
        assert "g0" in names(buffer.waiting())


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    path.write_bytes(b"this is not a database" * 100)
    with pytest.raises(RunFolderError, match="no database"):
        GroupBuffer(path)


def test_a_group_larger_than_a_row_may_be_is_a_typed_error(tmp_path: Path, toys: Any) -> None:
    """A teacher's whole vocabulary for long rollouts; SQLite's own limit is 10⁹ bytes."""
    with GroupBuffer(tmp_path / "b.sqlite") as buffer:
        buffer._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2000)
        with pytest.raises(RecordError, match="too large for the buffer") as caught:
            buffer.put(toys.group("g0"))
        assert "distill.top_k" in caught.value.remedy
        assert buffer.waiting() == []

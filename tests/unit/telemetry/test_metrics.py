"""metrics.jsonl and events.jsonl: whole lines, plain JSON, resumable."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from agentrl.errors import DiskFullError, RunFolderError
from agentrl.telemetry.metrics import EventWriter, MetricsWriter, read_events, read_metrics
from agentrl.wire import Event, EventKind


def test_one_flat_object_per_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        assert writer.write(1, {"solve/train": 0.25, "tokens/agent": 7}, time=10.0) == {}
        writer.write(2, {"solve/train": float(np.float32(0.5))}, time=11.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"step": 1, "time": 10.0, "solve/train": 0.25, "tokens/agent": 7.0},
        {"step": 2, "time": 11.0, "solve/train": 0.5},
    ]
    assert [(row.step, row.time, dict(row.values)) for row in read_metrics(path)][1] == (
        2,
        11.0,
        {"solve/train": 0.5},
    )


def test_flushed_before_the_call_returns(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(1, {"a": 1.0})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    writer.close()


def test_not_finite_is_omitted_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        omitted = writer.write(1, {"correction/kl": math.nan, "x": math.inf, "y": 1.0}, time=0)
    assert omitted == {"correction/kl": "nan", "x": "inf"}
    row = read_metrics(path)[0]
    assert dict(row.values) == {"y": 1.0}
    assert row.omitted == omitted
    assert "NaN" not in path.read_text()


def test_steps_increase_and_a_resume_takes_back(tmp_path: Path) -> None:
    """K49: metrics after the checkpoint are taken back, and the same step may then be written again."""
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(1, 6):
            writer.write(step, {"a": step})
    with MetricsWriter(path) as writer:
        with pytest.raises(RunFolderError, match="step 5 after those of step 5"):
            writer.write(5, {"a": 0.0})
        assert writer.truncate_after(3) == 2
        writer.write(4, {"a": 40.0})
        assert writer.truncate_after(9) == 0
    assert [(row.step, row.values["a"]) for row in read_metrics(path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    assert not (tmp_path / "metrics.tmp").exists()


def test_reserved_names_are_refused(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer, pytest.raises(ValueError, match="time"):
        writer.write(1, {"time": 2.0})


@pytest.mark.parametrize("tail", ['{"step": 2, "ti', '{"step": 2, "time": 2.0', "\x00\x00"])
def test_torn_last_line_is_skipped_then_cut(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 1.0, "a": 1.0}\n' + tail)
    assert [row.step for row in read_metrics(path)] == [1]
    with MetricsWriter(path) as writer:
        writer.write(2, {"a": 2.0}, time=3.0)
    assert path.read_text() == '{"step": 1, "time": 1.0, "a": 1.0}\n{"step": 2, "time": 3.0, "a": 2.0}\n'


def test_events_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sent = Event(kind=EventKind.STEP_FINISHED, time=5.0, data={"step": 1, "metrics": {"solve/train": 0.5}})
    with EventWriter(path) as writer:
        writer.write(sent)
        writer.write(Event(kind="later.kind", time=6.0, data={"x": np.float32(0.5), "nan": math.nan, "p": tmp_path}))
    with path.open("a") as file:
        file.write('{"kind": "torn')
    first, second = read_events(path)
    assert first == sent
    assert second.data == {"x": 0.5, "nan": None, "p": str(tmp_path)}
    assert read_events(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("cls", [MetricsWriter, EventWriter])
def test_disk_full_names_file_and_remedy(tmp_path: Path, cls: type) -> None:
    """The kernel's own 'no space left', from /dev/full."""
    path = tmp_path / "run.jsonl"
    path.symlink_to("/dev/full")
    writer = cls(path)
    line = (1, {"a": 1.0}) if cls is MetricsWriter else (Event(kind="note", time=0.0),)
    with pytest.raises(DiskFullError) as caught:
        writer.write(*line)
    assert str(path) in str(caught.value)
    assert "--resume" in caught.value.remedy

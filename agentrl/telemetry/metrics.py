"""`metrics.jsonl` and `events.jsonl`: writers that never leave half a line behind, readers that forgive one.

A line of `metrics.jsonl` is one step: `{"step": 3, "time": 1712.5, "solve/train": 0.41, …}` with steps
strictly increasing. A number that is not finite is left out and named in `"omitted": {"correction/kl":
"nan"}`, so that every line is plain JSON and nobody averages a NaN. A process killed while writing leaves a
torn last line: readers skip it and the next writer cuts it off before it appends.
"""

from __future__ import annotations

import json
import math
import os
import time as clock
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from agentrl.errors import RunFolderError, disk_full_is_typed
from agentrl.wire import Event

_RESERVED = frozenset({"step", "time", "omitted"})


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """One step's metrics. `time` is seconds since the epoch; `omitted` names what was not finite, and how."""

    step: int
    time: float
    values: Mapping[str, float]
    omitted: Mapping[str, str] = field(default_factory=dict)


class _LineWriter:
    """Whole lines appended to one file, each flushed before the call returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _cut_torn_line(path)
        self._file = path.open("ab", buffering=0)

    def append(self, line: bytes) -> None:
        """Append `line` and a newline. Raises `DiskFullError`; other operating-system errors pass."""
        data = memoryview(line + b"\n")
        with disk_full_is_typed(self.path):
            while data:
                data = data[self._file.write(data) :]

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class MetricsWriter(_LineWriter):
    """Appends steps to `metrics.jsonl`. Invariant: steps in the file strictly increase."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        rows = read_metrics(path)
        self._last = rows[-1].step if rows else None

    def write(self, step: int, metrics: Mapping[str, float], *, time: float | None = None) -> dict[str, str]:
        """Append one step and return what was left out because it is not finite.

        Raises `RunFolderError` where `step` is not above the last one written, `DiskFullError` on a full
        disk.
        """
        if self._last is not None and step <= self._last:
            raise RunFolderError(
                f"metrics of step {step} after those of step {self._last}",
                where=str(self.path),
                remedy="call truncate_after(step of the checkpoint) when a run resumes",
            )
        clash = _RESERVED & metrics.keys()
        if clash:
            raise ValueError(f"metric names {sorted(clash)} are reserved for the line itself")
        values = {name: float(value) for name, value in metrics.items()}
        omitted = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
        line: dict[str, Any] = {"step": step, "time": clock.time() if time is None else time}
        line |= {name: value for name, value in values.items() if name not in omitted}
        if omitted:
            line["omitted"] = omitted
        self.append(json.dumps(line).encode())
        self._last = step
        return omitted

    def truncate_after(self, step: int) -> int:
        """Take back every step above `step` (a resume); returns how many lines went. Atomic."""
        rows = [line for line in _lines(self.path) if _as_row(line) is not None]
        kept = [line for line in rows if json.loads(line)["step"] <= step]
        scratch = self.path.with_suffix(".tmp")
        with disk_full_is_typed(scratch):
            scratch.write_bytes(b"".join(line + b"\n" for line in kept))
        self._file.close()
        os.replace(scratch, self.path)
        self._file = self.path.open("ab", buffering=0)
        self._last = json.loads(kept[-1])["step"] if kept else None
        return len(rows) - len(kept)


class EventWriter(_LineWriter):
    """Appends events to `events.jsonl`; a number that is not finite becomes null."""

    def write(self, event: Event) -> None:
        """Append one event. Raises `DiskFullError` on a full disk."""
        line = {"kind": event.kind, "time": event.time, "data": event.data}
        self.append(msgspec.json.encode(line, enc_hook=_plain))


def read_metrics(path: Path) -> list[MetricsRow]:
    """Rows of `metrics.jsonl` in order; a torn or foreign line is skipped. Empty where there is no file."""
    return [row for line in _lines(path) if (row := _as_row(line)) is not None]


def read_events(path: Path) -> list[Event]:
    """Events of `events.jsonl` in order; a torn or foreign line is skipped. Empty where there is no file."""
    found = []
    for line in _lines(path):
        try:
            row = msgspec.json.decode(line, type=_EventLine)
        except (msgspec.DecodeError, msgspec.ValidationError):
            continue
        found.append(Event(kind=row.kind, time=row.time, data=row.data))
    return found


class _EventLine(msgspec.Struct):
    kind: str
    time: float
    data: dict[str, Any] = {}


def _lines(path: Path) -> list[bytes]:
    if not path.is_file():
        return []
    return [line for line in path.read_bytes().split(b"\n") if line.strip()]


def _as_row(line: bytes) -> MetricsRow | None:
    try:
        row = json.loads(line)
        step, at = int(row.pop("step")), float(row.pop("time"))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    omitted = row.pop("omitted", {})
    return MetricsRow(step, at, {k: float(v) for k, v in row.items() if isinstance(v, int | float)}, omitted)


def _cut_torn_line(path: Path) -> None:
    """Cut what follows the last newline: the process that wrote it died before it was whole."""
    if not path.is_file():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def _plain(value: Any) -> Any:
    """Numpy scalars and paths, as JSON knows them."""
    return value.item() if hasattr(value, "item") else str(value)

"""A run folder as the report reads it: configuration, metrics, events, and the minutes the run was alive."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from agentrl.errors import RunFolderError
from agentrl.telemetry.metrics import MetricsRow, read_events, read_metrics
from agentrl.telemetry.statistics import Interval, wilson
from agentrl.wire import Event, EventKind

SPLITS = ("train", "fresh", "unseen")


@dataclass(frozen=True, slots=True)
class SolvePoint:
    """A solve rate at a step, `minutes` into the run; `interval` None where n is unknown."""

    step: int
    minutes: float | None
    value: float
    interval: Interval | None


@dataclass(frozen=True)
class RunData:
    """One run. `name` is unique among the runs of a report."""

    run_dir: Path
    name: str
    config: Mapping[str, Any]
    metrics: Sequence[MetricsRow]
    events: Sequence[Event]

    def setting(self, dotted: str, default: Any = None) -> Any:
        """The configuration's value at `a.b.c`, or `default`."""
        value: Any = self.config
        for key in dotted.split("."):
            if not isinstance(value, Mapping) or key not in value:
                return default
            value = value[key]
        return value

    def of_kind(self, kind: EventKind) -> list[Event]:
        """Events of one kind, in order."""
        return [event for event in self.events if event.kind == kind]

    @cached_property
    def _pauses(self) -> list[tuple[float, float]]:
        """(end, length) of each stretch in which the run was not alive: before each start but the first."""
        pauses, before = [], None
        for event in self.events:
            if event.kind == EventKind.RUN_STARTED and before is not None:
                pauses.append((event.time, max(0.0, event.time - before)))
            before = event.time
        return pauses

    @cached_property
    def started_at(self) -> float | None:
        """Seconds since the epoch; the first metric's time where no event says so."""
        started = self.of_kind(EventKind.RUN_STARTED)
        if started:
            return started[0].time
        return self.metrics[0].time if self.metrics else None

    def minutes_at(self, time: float) -> float | None:
        """Minutes the run had been alive at `time`: what lies between an end and a resume does not count."""
        if self.started_at is None:
            return None
        asleep = sum(length for end, length in self._pauses if end <= time)
        return (time - self.started_at - asleep) / 60

    @cached_property
    def load(self) -> list[tuple[float, Mapping[str, Any]]]:
        """(minutes, data) of every load event, by time."""
        found = [(self.minutes_at(event.time), event.data) for event in self.of_kind(EventKind.LOAD)]
        return sorted(((m, data) for m, data in found if m is not None), key=lambda look: look[0])

    @cached_property
    def device_hours(self) -> Mapping[int, float]:
        """Device-hours spent on steps up to and including each step; {} where a step's devices are not known."""
        spent, hours = 0.0, {0: 0.0}
        for row in self.metrics:
            seconds, devices = row.values.get("time/step_s", 0.0), row.values.get("throughput/devices")
            if seconds and devices is None:
                return {}
            spent += seconds * (devices or 0.0) / 3600
            hours[row.step] = spent
        return hours

    def series(self, name: str) -> list[tuple[MetricsRow, float]]:
        """(row, value) of every step that has the metric."""
        return [(row, row.values[name]) for row in self.metrics if name in row.values]

    def solve(self, split: str) -> list[SolvePoint]:
        """The learning curve of a split, by step. Evaluations bring their own interval; the last one of a
        step counts (a resumed run may evaluate a step twice). Other steps get Wilson's, from the number of
        rollouts.
        """
        points = {row.step: self._from_metrics(row, value, split) for row, value in self.series(f"solve/{split}")}
        for event in self.of_kind(EventKind.EVAL_FINISHED):
            data = event.data
            if data.get("split") == split and isinstance(data.get("solve"), int | float):
                step = int(data.get("step") or 0)
                points[step] = SolvePoint(step, self.minutes_at(event.time), data["solve"], _interval(data))
        return [points[step] for step in sorted(points)]

    def _from_metrics(self, row: MetricsRow, value: float, split: str) -> SolvePoint:
        interval = None
        rollouts = row.values.get(f"solve/{split}_n")
        if rollouts is None and split == "train":
            rollouts = (self.setting("rollout.groups") or 0) * (self.setting("rollout.group_size") or 0)
        if rollouts and 0 <= value <= 1:
            interval = wilson(value * rollouts, round(rollouts))
        return SolvePoint(row.step, self.minutes_at(row.time), value, interval)


def _interval(data: Mapping[str, Any]) -> Interval | None:
    if isinstance(data.get("low"), int | float) and isinstance(data.get("high"), int | float):
        return Interval(data["solve"], data["low"], data["high"])
    n = data.get("n")
    return wilson(data["solve"] * n, n) if isinstance(n, int) and n > 0 and 0 <= data["solve"] <= 1 else None


def load_runs(run_dirs: Sequence[Path]) -> list[RunData]:
    """The runs of those folders. Raises `RunFolderError` for a folder that is none."""
    names = _unique_names(run_dirs)
    return [_load(path, name) for path, name in zip(run_dirs, names, strict=True)]


def _load(run_dir: Path, name: str) -> RunData:
    if not run_dir.is_dir() or not any(
        (run_dir / f).exists() for f in ("config.toml", "metrics.jsonl", "trajectories")
    ):
        raise RunFolderError(
            "no run folder there: neither config.toml nor metrics.jsonl nor trajectories/",
            where=str(run_dir),
            remedy="give a folder that `agentrl train` wrote",
        )
    config: dict[str, Any] = {}
    path = run_dir / "config.toml"
    if path.is_file():
        try:
            config = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RunFolderError(f"its configuration is not TOML: {error}", where=str(path)) from error
    return RunData(
        run_dir=run_dir,
        name=name,
        config=config,
        metrics=read_metrics(run_dir / "metrics.jsonl"),
        events=read_events(run_dir / "events.jsonl"),
    )


def _unique_names(run_dirs: Sequence[Path]) -> list[str]:
    """Folder names, with as many parents before them as tell the runs apart."""
    resolved = [path.resolve() for path in run_dirs]
    if len(set(resolved)) != len(resolved):
        raise RunFolderError("the same run folder is given twice", where=", ".join(map(str, run_dirs)))
    for depth in range(1, max((len(path.parts) for path in resolved), default=1) + 1):
        names = ["/".join(path.parts[-depth:]) for path in resolved]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in resolved]

"""One run folder of a comparison → its figures. Reads `config.toml`, `metrics.jsonl` and `events.jsonl`, nothing else.

A run's *time* is the sum of its steps' `time/step_s`: start-up, evaluation and checkpoints are left out. Figures of a
step's time (throughput, concurrency, KV use, idle shares) are weighted by the step's seconds, so that a run's tokens
per device and minute are its tokens by its device-minutes; the others are means over the steps that have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.errors import RunFolderError
from agentrl.run.bench_plan import MEASURE
from agentrl.telemetry.metrics import MetricsRow
from agentrl.telemetry.run_data import RunData, load_runs
from agentrl.wire import EventKind

TOKENS = "throughput/tokens_per_device_minute"
CONCURRENCY = "concurrency/per_replica_mean"
DEVICES = "throughput/devices"
STEP_S, TAIL_S, OUTSIDE_TAIL = "time/step_s", "time/tail_s", "idle/outside_tail_fraction"
BY_TIME = (
    *(f"throughput/{what}_per_device_minute" for what in ("tokens", "agent_tokens", "environment_tokens")),
    "throughput/trajectories_per_device_hour",
    *("concurrency/mean", CONCURRENCY, "concurrency/limit", "kv/used_fraction_mean"),
    *("idle/trainer_fraction", "idle/inference_fraction", "idle/device_fraction"),
)
BY_STEP = (
    *("staleness/mean", "staleness/in_flight", "staleness/in_queue", "fairness/slow_share_ratio"),
    *("correction/ess", "correction/affected_token_fraction", "tokens/effective_fraction"),
)
PHASES = ("generate", "tool", "score", "setup", "train", "deliver", "tail")
CURVES = ("solve/train", "correction/affected_token_fraction", "tokens/effective_fraction")
_LOAD_POINTS = 400


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What one run did in its `deliveries`.

    `figures` has public metric names, `phases` mean seconds per delivery (`step` the whole), `curve` a row per step
    (`step`, `device_hours` at its end, and those of `CURVES` that it has), `load` (minutes, requests per replica).
    """

    schedule: str
    seed: int
    deliveries: int
    updates: float
    devices: int
    device_hours: float
    solve_start: float
    solve_end: float
    figures: Mapping[str, float]
    phases: Mapping[str, float]
    curve: Sequence[Mapping[str, float]]
    load: Sequence[tuple[float, float]]

    @property
    def gain(self) -> float:
        return self.solve_end - self.solve_start

    @property
    def gain_per_100_updates(self) -> float:
        return 100 * self.gain / self.updates

    @property
    def gain_per_device_hour(self) -> float:
        return self.gain / self.device_hours


def read_run(folder: Path, *, schedule: str, seed: int) -> RunFigures:
    """The figures of a finished run. Raises `RunFolderError` where it lacks what they are made of."""
    (run,) = load_runs([folder])
    rows = [row for row in run.metrics if row.step > 0]
    ends = [row.values.get(MEASURE) for row in (run.metrics[0], run.metrics[-1])] if rows else [None, None]
    if ends[0] is None or ends[1] is None:
        raise RunFolderError(
            f"it lacks {MEASURE} at its first or its last step",
            where=str(folder / "metrics.jsonl"),
            remedy="run the bench command again: it goes on with what is unfinished",
        )
    updates = _updates(rows)
    if not updates:
        raise RunFolderError(
            "it trained nothing: no step had a group to learn from", where=str(folder), remedy="see its report.html"
        )
    hours = device_hours(run, rows)
    return RunFigures(
        schedule=schedule,
        seed=seed,
        deliveries=len(rows),
        updates=updates,
        devices=devices_of(run),
        device_hours=hours[-1],
        solve_start=ends[0],
        solve_end=ends[1],
        figures=run_figures(run, rows),
        phases=phase_means(rows),
        curve=_curve(rows, hours),
        load=_load(run),
    )


def with_common_start(runs: Sequence[RunFigures]) -> list[RunFigures]:
    """Every run begins with the same policy and evaluates it on the same tasks, so that the mean of all their first
    evaluations is the start of each, measured that many times as well."""
    start = sum(run.solve_start for run in runs) / max(1, len(runs))
    return [replace(run, solve_start=start) for run in runs]


def devices_of(run: RunData) -> int:
    """Devices that the run's throughput is divided by. Raises `RunFolderError` where its last step lacks them."""
    return int(_required(run.metrics[-1], DEVICES, run.run_dir))


def device_hours(run: RunData, rows: Sequence[MetricsRow]) -> list[float]:
    """Device-hours at the end of each step. Raises `RunFolderError` for a step without time or devices."""
    for row in rows:
        _required(row, STEP_S, run.run_dir)
        _required(row, DEVICES, run.run_dir)
    return [run.device_hours[row.step] for row in rows]


def run_figures(run: RunData, rows: Sequence[MetricsRow]) -> dict[str, float]:
    """Figures over all steps by their public names; one that no step has is left out."""
    seconds = [_required(row, STEP_S, run.run_dir) for row in rows]
    found = {name: _weighted(rows, name, seconds) for name in BY_TIME}
    outside = [s - row.values.get(TAIL_S, 0.0) for row, s in zip(rows, seconds, strict=True)]
    found[OUTSIDE_TAIL] = _weighted(rows, OUTSIDE_TAIL, outside)
    found |= {name: _weighted(rows, name, [1.0] * len(rows)) for name in BY_STEP}
    for name, over in (("staleness/max", max), ("kv/preemptions", sum)):
        values = [row.values[name] for row in rows if name in row.values]
        found[name] = float(over(values)) if values else None
    return {name: value for name, value in found.items() if value is not None}


def phase_means(rows: Sequence[MetricsRow]) -> dict[str, float]:
    """Mean seconds per delivery, the whole step's among them."""
    names = {"step": STEP_S} | {phase: f"time/{phase}_s" for phase in PHASES}
    return {
        phase: sum(row.values.get(name, 0.0) for row in rows) / len(rows)
        for phase, name in names.items()
        if any(name in row.values for row in rows)
    }


def _required(row: MetricsRow, name: str, folder: Path) -> float:
    if name not in row.values:
        raise RunFolderError(
            f"step {row.step} lacks {name}",
            where=str(folder / "metrics.jsonl"),
            remedy="run it again with this version of agentrl, in another folder",
        )
    return row.values[name]


def _weighted(rows: Sequence[MetricsRow], name: str, weights: Sequence[float]) -> float | None:
    """The weighted mean over the rows that have it, None where none has."""
    pairs = [(row.values[name], weight) for row, weight in zip(rows, weights, strict=True) if name in row.values]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total > 0 else None


def _updates(rows: Sequence[MetricsRow]) -> float:
    """Optimizer steps taken; a step that trained nothing has none."""
    return sum(row.values.get("updates", 0.0) for row in rows)


def _curve(rows: Sequence[MetricsRow], hours: Sequence[float]) -> list[dict[str, float]]:
    return [
        {"step": float(row.step), "device_hours": at}
        | {name: row.values[name] for name in CURVES if name in row.values}
        for row, at in zip(rows, hours, strict=True)
    ]


def _load(run: RunData) -> list[tuple[float, float]]:
    """(minutes into training, requests in flight per replica), thinned to `_LOAD_POINTS`; evaluations left out."""
    spans, open_since = [], None
    for event in run.events:
        if event.kind == EventKind.STEP_FINISHED:
            # The next step begins with this event; the last one's evaluation lies between its delivery and its event.
            open_since = event.time
        elif event.kind == EventKind.DELIVERY_FINISHED and open_since is not None:
            spans.append((open_since, event.time))
            open_since = None
        elif event.kind == EventKind.RUN_STARTED:
            open_since = None  # the step that an interruption cut short
    points, passed, at = [], 0.0, 0
    looks = [event for event in run.of_kind(EventKind.LOAD) if event.data.get("running")]
    for start, end in spans:
        while at < len(looks) and looks[at].time < start:
            at += 1
        while at < len(looks) and looks[at].time <= end:
            running = looks[at].data["running"]
            points.append(((passed + looks[at].time - start) / 60, sum(running) / len(running)))
            at += 1
        passed += end - start
    return points[:: max(1, len(points) // _LOAD_POINTS)]

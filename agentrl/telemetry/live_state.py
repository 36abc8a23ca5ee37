"""What the live display knows: a pure state fed with events, and the columns it shows. No terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.wire import Event, EventKind

Metrics = Mapping[str, float]
_BESIDE = ("train", "deliver", "checkpoint")
"""Phases that have no rollouts of their own: those that finish meanwhile are the next batch's."""


@dataclass(frozen=True, slots=True)
class Row:
    """One finished step."""

    step: int
    metrics: Metrics


@dataclass(slots=True)
class LiveState:
    """The last steps, the phase in progress and the alarms of the last step. Changes by `apply` alone."""

    steps_total: int
    rows: deque[Row] = field(default_factory=lambda: deque(maxlen=64))
    run: str = ""
    phase: str = ""
    step: int = 0
    done: int = 0
    total: int | None = None
    phase_started: float = 0.0
    alarms: list[str] = field(default_factory=list)
    note: str = ""
    finished: str = ""
    load: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Take one event in; an unknown kind changes nothing."""
        data = event.data
        self.step = int(data.get("step", self.step) or 0)
        match event.kind:
            case EventKind.RUN_STARTED:
                self.run = str(data.get("run", ""))
                self.steps_total = int(data.get("steps") or self.steps_total)
                self.step = int(data.get("resumed_from") or 0)
            case EventKind.PHASE_STARTED:
                self.phase = str(data.get("phase", ""))
                self.total = data.get("total")
                self.done, self.phase_started = 0, event.time
            case EventKind.ROLLOUT_FINISHED if self.phase not in _BESIDE:
                self.done = int(data.get("done", self.done + 1))
                # Training's rollouts come one by one, without an end; then the phase's own number stands.
                self.total = self.total if data.get("total") is None else data["total"]
            case EventKind.STEP_FINISHED:
                self.rows.append(Row(self.step, dict(data.get("metrics", {}))))
                self.note = ""
            case EventKind.ALARM:
                # Alarms of an earlier step go when a later one raises its own or ends without any.
                self.alarms = [a for a in self.alarms if a.startswith(f"step {self.step} ")]
                self.alarms.append(f"step {self.step} {alarm_text(data)}")
            case EventKind.NOTE:
                self.note = str(data.get("text", ""))
            case EventKind.LOAD:
                self.load = dict(data)
            case EventKind.RUN_FINISHED:
                self.load = {}
                self.finished = str(data.get("outcome", "done"))
                self.note = str(data.get("reason", "") or "")
        if event.kind == EventKind.STEP_FINISHED:
            self.alarms = [a for a in self.alarms if a.startswith(f"step {self.step} ")]


def load_text(load: Mapping[str, Any]) -> str:
    """One line of a load event's data; what it lacks is left out."""
    parts = []
    if "active" in load:
        limit = f" of {load['limit']}" if "limit" in load else ""
        parts.append(f"{load['active']}{limit} active")
    if load.get("waiting"):
        parts.append(f"{load['waiting']} waiting")
    if load.get("running"):
        parts.append(f"{' + '.join(map(str, load['running']))} requests")
    if load.get("kv"):
        parts.append(f"kv {max(load['kv']):.0%}")
    if "in_flight" in load:
        parts.append(f"groups: {load['in_flight']} running, {load.get('queued', 0)} queued")
    if load.get("training"):
        parts.append("training")
    return " · ".join(parts)


def alarm_text(data: Mapping[str, object]) -> str:
    """`name value (bound b): advice` of an alarm event's data."""
    value, bound = data.get("value"), data.get("bound")
    number = f" {value:.3g} (bound {bound:g})" if isinstance(value, float) and isinstance(bound, int | float) else ""
    return f"{data.get('name', '?')}{number}: {data.get('advice', '')}"


# --- columns --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """One column: header, cell text, characters it needs, and its rank: the highest rank is dropped first."""

    header: str
    cell: Callable[[Row], str]
    width: int
    rank: int
    plain: str = ""


def _number(name: str, pattern: str, scale: float = 1.0) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = row.metrics.get(name)
        return "–" if value is None else pattern.format(value * scale)

    return cell


def _percent(name: str, digits: int = 0) -> Callable[[Row], str]:
    return _number(name, f"{{:.{digits}f}}%", 100.0)


def agent_share(metrics: Metrics) -> float | None:
    """Agent tokens over all tokens of the step; None where either count is missing."""
    agent, environment = metrics.get("tokens/agent"), metrics.get("tokens/environment")
    if agent is None or environment is None or agent + environment == 0:
        return None
    return agent / (agent + environment)


def _share_cell(row: Row) -> str:
    share = agent_share(row.metrics)
    return "–" if share is None else f"{share:.0%}"


def _staleness_cell(row: Row) -> str:
    mean, most = row.metrics.get("staleness/mean"), row.metrics.get("staleness/max")
    return "–" if mean is None or most is None else f"{mean:.1f}/{most:.0f}"


def _idle_cell(row: Row) -> str:
    trainer, inference = row.metrics.get("idle/trainer_fraction"), row.metrics.get("idle/inference_fraction")
    return "–" if trainer is None or inference is None else f"{100 * trainer:.0f}/{inference:.0%}"


def _waiting_staleness_cell(row: Row) -> str:
    """Versions that went by in flight, and in the queue."""
    flight, queue = row.metrics.get("staleness/in_flight"), row.metrics.get("staleness/in_queue")
    return "–" if flight is None or queue is None else f"{flight:.1f}/{queue:.1f}"


COLUMNS: tuple[Column, ...] = (
    Column("step", lambda row: str(row.step), 4, 0),
    Column("solve", _percent("solve/train"), 5, 0, "solve"),
    Column("fresh", _percent("solve/fresh"), 5, 1, "fresh"),
    Column("unseen", _percent("solve/unseen"), 6, 4, "unseen"),
    Column("reward", _number("reward/mean", "{:.2f}"), 6, 2, "reward"),
    Column("tok/min", _number("throughput/tokens_per_device_minute", "{:,.0f}"), 7, 3, "tokens/device/min"),
    Column("traj/h", _number("throughput/trajectories_per_device_hour", "{:,.0f}"), 6, 12, "trajectories/device/h"),
    Column("agent", _share_cell, 5, 8, "agent tokens"),
    Column("conc", _number("concurrency/mean", "{:.0f}"), 4, 5, "concurrency"),
    Column("kv", _percent("kv/used_fraction_mean"), 4, 7, "kv"),
    Column("idle", _idle_cell, 7, 6, "idle trainer/inference"),
    Column("stale", _staleness_cell, 6, 7, "staleness"),
    Column("fly/q", _waiting_staleness_cell, 7, 13, "staleness in flight/in queue"),
    Column("eff", _percent("tokens/effective_fraction"), 4, 13, "effective tokens"),
    Column("fair", _number("fairness/slow_share_ratio", "{:.2f}"), 4, 11, "fairness"),
    Column("ess", _number("correction/ess", "{:.2f}"), 4, 3, "ess"),
    Column("clamp", _percent("correction/clamped_fraction", 1), 5, 8, "clamped"),
    Column("kl", _number("correction/kl", "{:.0e}"), 6, 4, "kl"),
    Column("gen", _number("time/generate_s", "{:.1f}"), 5, 5, "generate s"),
    Column("tool", _number("time/tool_s", "{:.1f}"), 5, 9, "tool s"),
    Column("score", _number("time/score_s", "{:.1f}"), 5, 10, "score s"),
    Column("train", _number("time/train_s", "{:.1f}"), 5, 6, "train s"),
    Column("dlvr", _number("time/deliver_s", "{:.1f}"), 4, 9, "deliver s"),
)


def _teacher_time_cell(row: Row) -> str:
    busy, wait = row.metrics.get("teacher/busy_fraction"), row.metrics.get("teacher/wait_fraction")
    if busy is None:
        return "–"
    return f"{100 * busy:.0f}/" + ("–" if wait is None else f"{wait:.0%}")


TEACHER_COLUMNS: tuple[Column, ...] = (
    Column("t-kl", _number("teacher/kl", "{:.3f}"), 6, 2, "teacher kl"),
    Column("top1", _percent("teacher/top1_agreement"), 4, 3, "teacher agrees"),
    Column("t-tok/s", _number("teacher/tokens_per_s", "{:,.0f}"), 7, 8, "teacher tokens/s"),
    Column("t-b/w", _teacher_time_cell, 7, 4, "teacher busy/waited for"),
    Column("unscd", _percent("teacher/unscored_fraction", 1), 5, 9, "unscored"),
)
"""Shown where a teacher scores, after the rates."""
_RATES = 5


def columns_of(rows: Iterable[Row]) -> tuple[Column, ...]:
    """The columns of a run with these steps: a teacher's only where one has scored."""
    taught = any("teacher/scored_tokens" in row.metrics for row in rows)
    return (*COLUMNS[:_RATES], *TEACHER_COLUMNS, *COLUMNS[_RATES:]) if taught else COLUMNS


def fitting_columns(width: int, columns: Sequence[Column] = COLUMNS, *, gap: int = 2) -> tuple[Column, ...]:
    """Those of `columns` that fit `width` characters, least important dropped first; the first two always stay."""
    chosen = list(columns)
    while len(chosen) > 2 and sum(c.width + gap for c in chosen) > width:
        chosen.remove(max(chosen, key=lambda c: c.rank))
    return tuple(chosen)


def plain_line(row: Row, steps_total: int) -> str:
    """One readable line of a finished step; what was not measured is left out."""
    parts = [f"step {row.step}/{steps_total}"]
    for column in columns_of([row])[1:]:
        text = column.cell(row)
        if text != "–":
            parts.append(f"{column.plain} {text}")
    return " · ".join(parts)

"""Plots of distillation: how far the student is from its teachers, where, and what the teachers do with their time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agentrl.telemetry.chart_parts import Chart, Line, lines, make_chart
from agentrl.telemetry.metrics import MetricsRow
from agentrl.telemetry.run_data import RunData

_TURN = re.compile(r"teacher/kl_turn/(\d+)\+?")
_ONE_TEACHER = "teacher/kl/"
_ENDS = 5
"""Steps at either end of a run that a mean is taken over; fewer where the run is short."""


def is_taught(runs: Sequence[RunData]) -> bool:
    """True where a teacher scored something in one of the runs."""
    return any("teacher/scored_tokens" in row.values for run in runs for row in run.metrics)


def teacher_charts(runs: Sequence[RunData]) -> list[Chart]:
    """The section's plots, in reading order."""
    several = [each_teacher(runs)] if _teachers(runs) else []
    return [distance(runs), *several, by_turn(runs), by_purpose(runs), agreement(runs), *_training(runs), *_time(runs)]


def distance(runs: Sequence[RunData]) -> Chart:
    """The student's distance to its teachers, as sampled and as trained."""
    return lines(
        runs,
        "teacher_kl",
        "Distance to the teacher",
        "Reverse KL on what was sampled, in nats per token: mean of log π − log π_teacher, by the policy that sampled "
        "and by the one that is trained.",
        (Line("teacher/kl", "as sampled"), Line("teacher/reverse_kl", "as trained")),
    )


def each_teacher(runs: Sequence[RunData]) -> Chart:
    """The distance to each of several teachers, on the tasks that it scored."""
    wanted = [Line(name, name.removeprefix(_ONE_TEACHER)) for name in _teachers(runs)]
    return lines(
        runs,
        "teacher_kl_each",
        "Distance to each teacher",
        "The same, over the tasks that each teacher scored.",
        wanted,
    )


def _teachers(runs: Sequence[RunData]) -> list[str]:
    names = {name for run in runs for row in run.metrics for name in row.values}
    return sorted(name for name in names if name.startswith(_ONE_TEACHER))


def by_turn(runs: Sequence[RunData]) -> Chart:
    """The distance over an episode's turns, when the run began and at its end."""
    traces: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        rows = [row for row in run.metrics if any(_TURN.fullmatch(name) for name in row.values)]
        ends = min(_ENDS, max(1, len(rows) // 2))
        parts = {"first": rows[:ends], "last": rows[-ends:]} if len(rows) > 1 else {"last": rows}
        for name, part in parts.items():
            means = _mean_by_turn(part)
            if means:
                colour = f"@c{index % 8}"
                label = f"{name} {len(part)} steps" if len(part) > 1 else f"{name} step"
                traces.append(
                    {
                        "name": label if len(runs) == 1 else f"{run.name} · {label}",
                        "x": list(means),
                        "y": list(means.values()),
                        "mode": "lines+markers",
                        "line": {"color": colour, "width": 2, "dash": "dot" if name == "first" else "solid"},
                        "marker": {"color": colour, "size": 6},
                        "hovertemplate": "turn %{x}: %{y:.3f} nats<extra>%{fullData.name}</extra>",
                    }
                )
    made = make_chart(
        "teacher_kl_turn",
        "Distance by turn",
        "Where in an episode student and teacher part: nats per token, mean over the run's first and last steps. "
        "Turns count from 0; those from 10 on are one.",
        traces,
        "no teacher/kl_turn/…",
    )
    return made | {"axis": "none", "x_title": "turn", "y_title": "nats per token", "hover": "closest"}


def _mean_by_turn(rows: Sequence[MetricsRow]) -> dict[str, float]:
    """Turn's name → mean over the steps that have it, in order of turns."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.values.items():
            if _TURN.fullmatch(name):
                found.setdefault(name.rsplit("/", 1)[1], []).append(value)
    ordered = sorted(found, key=lambda turn: int(turn.rstrip("+")))
    return {turn: sum(found[turn]) / len(found[turn]) for turn in ordered}


def by_purpose(runs: Sequence[RunData]) -> Chart:
    """The distance on acts and on summaries of a compressed context."""
    return lines(
        runs,
        "teacher_kl_purpose",
        "Distance by purpose",
        "Tokens that act, and those that sum up a context that is compressed.",
        (Line("teacher/kl_purpose/act", "act"), Line("teacher/kl_purpose/summarise", "summarise")),
    )


def agreement(runs: Sequence[RunData]) -> Chart:
    """How often the student does what the teacher finds likeliest, and how much of it is scored."""
    return lines(
        runs,
        "teacher_top1",
        "Agreement",
        "Share of scored tokens that are the teacher's first choice, and of the agent's tokens without a score.",
        (Line("teacher/top1_agreement", "first choice"), Line("teacher/unscored_fraction", "unscored")),
        percent=True,
        bounds=[0, 1.05],
    )


def _training(runs: Sequence[RunData]) -> list[Chart]:
    return [
        lines(
            runs,
            "teacher_loss",
            "Divergence loss",
            "What is trained (train.divergence), mean per scored token.",
            (Line("loss/divergence", "loss"),),
        ),
        lines(
            runs,
            "teacher_clamped",
            "Clamped divergences",
            "Share of scored tokens whose divergence, or advantage, was cut at train.divergence.clamp.",
            (Line("teacher/clamped_fraction", "clamped"),),
            percent=True,
        ),
    ]


def _time(runs: Sequence[RunData]) -> list[Chart]:
    return [
        lines(
            runs,
            "teacher_time",
            "Teacher's time",
            "Share of a step in which a teacher works, and of the rollouts' time in which they wait for nothing but "
            "their scores.",
            (Line("teacher/busy_fraction", "busy"), Line("teacher/wait_fraction", "waited for")),
            percent=True,
        ),
        lines(
            runs,
            "teacher_speed",
            "Tokens scored per second",
            "Tokens that the teachers read for their scores, per second in which they work.",
            (Line("teacher/tokens_per_s", "tokens per second"),),
        )
        | {"y_format": ",.0f"},
        lines(
            runs,
            "teacher_requests",
            "Requests",
            "Segments that came from the cache, and those that could not be scored.",
            (Line("teacher/cache_hits", "from the cache"), Line("teacher/failures", "failed")),
        ),
    ]

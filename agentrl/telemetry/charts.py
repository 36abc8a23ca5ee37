"""The report's plots as plain data for charts.js: traces with an x for either axis, colours by name.

A chart is `{"id", "title", "caption", "y", "traces", "axis", …}`. A trace's `x` is `{"step": […], "minutes":
[…]}`; the page's switch chooses. Colours are names (`"@train"`) of the style sheet's variables, so that dark
and light have their own. A chart whose metrics no run has carries no traces but a `missing` note.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.telemetry.live_state import agent_share
from agentrl.telemetry.metrics import MetricsRow
from agentrl.telemetry.run_data import SPLITS, RunData, SolvePoint

Chart = dict[str, Any]
_DASHES = {"train": "dot", "fresh": "solid", "unseen": "dash"}
_PHASES = ("generate", "tool", "score", "train", "deliver")
_LINE_DASHES = ("solid", "dot", "dash", "dashdot")


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of a line plot: its public name and what the legend calls it."""

    metric: str
    label: str


def all_charts(runs: Sequence[RunData]) -> list[Chart]:
    """Every chart of the report, in reading order."""
    return [
        learning(runs),
        _lines(
            runs,
            "episodes",
            "Episodes",
            "Share of episodes that end with a submit, and malformed tool calls per episode.",
            (Line("agent/submit_rate", "submit rate"), Line("agent/bad_calls", "bad calls")),
        ),
        concurrency(runs),
        throughput(runs),
        phases(runs),
        agent_tokens(runs),
        _lines(
            runs,
            "staleness",
            "Staleness",
            "Policy version at the batch's first update minus the version that sampled the token.",
            (Line("staleness/mean", "mean"), Line("staleness/max", "max")),
        ),
        _lines(
            runs,
            "ess",
            "Effective sample size",
            "1 means every token counts alike; near 0, few tokens carry the update.",
            (Line("correction/ess", "ess"),),
            bounds=[0, 1.05],
        ),
        _lines(
            runs,
            "masked",
            "Tokens touched by correction",
            "Shares of agent tokens (or sequences) whose weight was clamped or set to zero.",
            (
                Line("correction/clamped_fraction", "clamped"),
                Line("correction/masked_token_fraction", "masked tokens"),
                Line("correction/masked_sequence_fraction", "masked sequences"),
            ),
            percent=True,
        ),
        _lines(
            runs,
            "kl",
            "Policy server against trainer",
            "kl = mean of log π_rollout − log π_train on agent tokens; k3_kl is its positive estimator.",
            (Line("correction/kl", "kl"), Line("correction/k3_kl", "k3_kl")),
        ),
        _lines(
            runs,
            "entropy",
            "Entropy",
            "Mean entropy of the policy on agent tokens, in nats.",
            (Line("entropy", "entropy"),),
        ),
        _lines(
            runs,
            "update",
            "Gradient norm",
            "Global norm before clipping, mean over the step's updates.",
            (Line("grad_norm", "gradient norm"),),
        ),
        _lines(
            runs,
            "idle",
            "Idle shares",
            "Share of wall time in which the trainer or the policy servers waited.",
            (Line("idle/trainer_fraction", "trainer"), Line("idle/inference_fraction", "inference")),
            percent=True,
        ),
    ]


def learning(runs: Sequence[RunData]) -> Chart:
    """Solve rates of the three splits with their 95 % intervals."""
    traces: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        for split in SPLITS:
            points = run.solve(split)
            if points:
                traces += _learning_traces(runs, index, split, points)
    return _chart(
        "learning",
        "Learning curve",
        "Solve rate by split with 95 % intervals: an evaluation's own; for training "
        "rollouts Wilson's, which takes them as independent and so is too narrow where groups agree.",
        traces,
        "no solve/train, solve/fresh or solve/unseen yet",
        percent=True,
        tall=True,
        bounds=[0, 1],
    )


def _learning_traces(
    runs: Sequence[RunData], index: int, split: str, points: Sequence[SolvePoint]
) -> list[dict[str, Any]]:
    single = len(runs) == 1
    colour = f"@{split}" if single else f"@c{index % 8}"
    name = split if single else f"{runs[index].name} · {split}"
    x = {"step": [p.step for p in points], "minutes": [p.minutes for p in points]}
    sparse = split != "train"
    line = {
        "name": name,
        "x": x,
        "y": [p.value for p in points],
        "mode": "lines+markers" if sparse else "lines",
        "line": {
            "color": colour,
            "width": 2.5 if sparse else 1.5,
            "dash": "solid" if single else _DASHES[split],
        },
        "marker": {"color": colour, "size": 7},
        "legendgroup": name,
        "text": [_interval_text(p) for p in points],
        "hovertemplate": "%{y:.1%} %{text}<extra>" + "%{fullData.name}</extra>",
    }
    known = [p for p in points if p.interval is not None]
    if not known or not (single or sparse):
        # Bands of several runs' noisy training curves would only cover each other.
        return [line]
    there_and_back = [*known, *reversed(known)]
    lows = [p.interval.low for p in reversed(known) if p.interval]
    band = {
        "x": {"step": [p.step for p in there_and_back], "minutes": [p.minutes for p in there_and_back]},
        "y": [p.interval.high for p in known if p.interval] + lows,
        "fill": "toself",
        "fillcolor": f"{colour}/{0.16 if sparse else 0.09}",
        "mode": "lines",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": name,
        "name": name,
    }
    return [band, line]


def _interval_text(point: SolvePoint) -> str:
    return "" if point.interval is None else f"({point.interval.low:.1%} to {point.interval.high:.1%})"


def concurrency(runs: Sequence[RunData]) -> Chart:
    """Rollouts in progress over time."""
    lines = (Line("concurrency/mean", "concurrency"),)
    return _lines(runs, "concurrency", "Concurrency over time", "Trajectories in progress, mean over each step.", lines)


def throughput(runs: Sequence[RunData]) -> Chart:
    """Concurrency against tokens per device and minute, one point per step."""
    traces = []
    for index, run in enumerate(runs):
        rows = [row for row, _ in run.series("concurrency/mean") if "throughput/tokens_per_device_minute" in row.values]
        if rows:
            traces.append(
                {
                    "name": run.name,
                    "x": [row.values["concurrency/mean"] for row in rows],
                    "y": [row.values["throughput/tokens_per_device_minute"] for row in rows],
                    "text": [f"step {row.step}" for row in rows],
                    "mode": "markers",
                    "marker": {"color": f"@c{index % 8}", "size": 8, "opacity": 0.75},
                    "hovertemplate": "%{text}: %{x:.1f} in progress, %{y:,.0f} tokens<extra></extra>",
                }
            )
    chart = _chart(
        "throughput",
        "Concurrency and throughput",
        "One point per step: trajectories in progress against tokens per device and minute.",
        traces,
        "no concurrency/mean together with throughput/tokens_per_device_minute",
    )
    return chart | {"axis": "none", "x_title": "trajectories in progress", "y_title": "tokens / device / min"}


def phases(runs: Sequence[RunData]) -> Chart:
    """Where a step's time goes: stacked by step for one run, means side by side for several."""
    traces = []
    for phase in _PHASES:
        found = [(run, run.series(f"time/{phase}_s")) for run in runs]
        if not any(series for _, series in found):
            continue
        trace: dict[str, Any] = {"type": "bar", "name": phase, "marker": {"color": f"@phase-{phase}"}}
        if len(runs) == 1:
            series = found[0][1]
            trace |= {"x": _x(runs[0], [row for row, _ in series]), "y": [value for _, value in series]}
        else:
            trace["x"] = [run.name for run, _ in found]
            trace["y"] = [sum(v for _, v in series) / len(series) if series else None for _, series in found]
        trace["hovertemplate"] = "%{y:.2f} s<extra>" + phase + "</extra>"
        traces.append(trace)
    caption = "Seconds of each phase per step" + ("." if len(runs) == 1 else ", mean over each run's steps.")
    chart = _chart("phases", "Where the time goes", caption, traces, "no time/…_s")
    return chart | {"stacked": True, "y_title": "seconds", **({} if len(runs) == 1 else {"axis": "none"})}


def agent_tokens(runs: Sequence[RunData]) -> Chart:
    """Share of recorded tokens that the agent sampled: only these are trained."""
    return _traced(
        runs,
        "agent_share",
        "Effective-token share",
        "Agent tokens over all recorded tokens. Only the agent's are trained; the rest is prompt and tool output.",
        (("agent share", lambda row: agent_share(row.values)),),
        "no tokens/agent and tokens/environment",
        percent=True,
    )


def _lines(
    runs: Sequence[RunData],
    chart_id: str,
    title: str,
    caption: str,
    lines: Sequence[Line],
    *,
    percent: bool = False,
    bounds: list[float] | None = None,
) -> Chart:
    getters = tuple((line.label, _getter(line.metric)) for line in lines)
    missing = "no " + ", ".join(line.metric for line in lines)
    return _traced(runs, chart_id, title, caption, getters, missing, percent=percent, bounds=bounds)


def _getter(metric: str) -> Callable[[MetricsRow], float | None]:
    return lambda row: row.values.get(metric)


def _traced(
    runs: Sequence[RunData],
    chart_id: str,
    title: str,
    caption: str,
    getters: Sequence[tuple[str, Callable[[MetricsRow], float | None]]],
    missing: str,
    *,
    percent: bool = False,
    bounds: list[float] | None = None,
) -> Chart:
    """One trace per run and getter: coloured by run, or by getter where there is one run."""
    traces = []
    for index, run in enumerate(runs):
        for number, (label, get) in enumerate(getters):
            points = [(row, value) for row in run.metrics if (value := get(row)) is not None]
            if points:
                single = len(runs) == 1
                colour = f"@c{(number if single else index) % 8}"
                name = label if single else run.name if len(getters) == 1 else f"{run.name} · {label}"
                dash = "solid" if single else _LINE_DASHES[number % 4]
                traces.append(
                    {
                        "name": name,
                        "x": _x(run, [row for row, _ in points]),
                        "y": [value for _, value in points],
                        "mode": "lines" if len(points) > 1 else "markers",
                        "line": {"color": colour, "width": 2, "dash": dash},
                        "marker": {"color": colour},
                    }
                )
    return _chart(chart_id, title, caption, traces, missing, percent=percent, bounds=bounds)


def _x(run: RunData, rows: Sequence[MetricsRow]) -> Mapping[str, list[Any]]:
    return {"step": [row.step for row in rows], "minutes": [run.minutes_at(row.time) for row in rows]}


def _chart(
    chart_id: str,
    title: str,
    caption: str,
    traces: list[dict[str, Any]],
    missing: str,
    *,
    percent: bool = False,
    tall: bool = False,
    bounds: list[float] | None = None,
) -> Chart:
    chart: Chart = {"id": chart_id, "title": title, "caption": caption, "axis": "switch", "traces": traces}
    chart |= {"percent": percent, "tall": tall, "bounds": bounds}
    if not traces:
        chart["missing"] = f"Not measured: {missing}."
    return chart

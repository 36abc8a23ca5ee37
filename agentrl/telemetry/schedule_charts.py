"""Plots that compare schedules: concurrency over time and against throughput, learning by cost, tokens that count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.telemetry.chart_parts import Chart, Line, interval_band, lines, make_chart, there_and_back
from agentrl.telemetry.run_data import RunData

MOST_POINTS = 600
"""Points of one trace over time: what a plot's pixels can show, however long the run was."""


def learning_by_device_hours(runs: Sequence[RunData]) -> Chart:
    """Solve rates against what they cost; of several runs the evaluation on fresh tasks, or training's without one."""
    traces = []
    for index, run in enumerate(runs):
        hours = run.device_hours
        evaluated = [split for split in ("fresh", "unseen") if run.solve(split)]
        splits = evaluated or ["train"]
        for split in splits if len(runs) == 1 else splits[:1]:
            points = [(hours[p.step], p) for p in run.solve(split) if p.step in hours]
            if not points:
                continue
            colour = f"@{split}" if len(runs) == 1 else f"@c{index % 8}"
            name = split if len(runs) == 1 else f"{run.name} · {split}"
            known = [(at, point) for at, point in points if point.interval is not None]
            if known and split != "train":
                band = interval_band([point for _, point in known], colour, 0.13, name)
                traces.append(band | {"x": there_and_back([at for at, _ in known])})
            traces.append(
                {
                    "name": name,
                    "x": [at for at, _ in points],
                    "y": [point.value for _, point in points],
                    "text": [f"step {point.step}" for _, point in points],
                    "mode": "lines+markers",
                    "line": {"color": colour, "width": 2.5 if split != "train" else 1.5},
                    "marker": {"color": colour, "size": 7 if split != "train" else 4},
                    "legendgroup": name,
                    "hovertemplate": "%{y:.1%} at %{x:.3f} device-hours, %{text}<extra>%{fullData.name}</extra>",
                }
            )
    made = make_chart(
        "learning_hours",
        "Learning curve by cost",
        "Solve rate against device-hours, with 95 % intervals: devices × time of the steps, without start-up and "
        "evaluations.",
        traces,
        "no time/step_s together with throughput/devices and a solve rate",
        percent=True,
        tall=True,
        bounds=[0, 1],
    )
    return made | {"axis": "none", "hover": "closest", "x_title": "device-hours", "x_from_zero": True}


def concurrency(runs: Sequence[RunData]) -> Chart:
    """Trajectories and requests in progress over time, from the run's looks at its load; by step without any."""
    if not any(run.load for run in runs):
        return lines(
            runs,
            "concurrency",
            "Concurrency over time",
            "Trajectories in their episode, mean over each step.",
            (Line("concurrency/mean", "concurrency"),),
        )
    traces = []
    for index, run in enumerate(runs):
        looks = [(minutes, data) for minutes, data in run.load if "active" in data]
        if not looks:
            continue
        if len(runs) > 1:
            traces.append(_over_time(run.name, looks, "active", f"@c{index % 8}"))
            continue
        traces.append(_over_time("active trajectories", looks, "active", "@c0"))
        if any("running" in data for _, data in looks):
            traces.append(_over_time("requests", looks, "running", "@c1"))
        if any("limit" in data for _, data in looks):
            limit = _over_time("limit", looks, "limit", "@c7")
            traces.append(limit | {"line": {"color": "@c7", "width": 1.5, "dash": "dot", "shape": "hv"}})
    shown = "trajectories in their episode, requests at the policy servers, and the limit of active trajectories"
    caption = f"Sampled about once a second: {shown if len(runs) == 1 else 'trajectories in their episode'}."
    made = make_chart("concurrency", "Concurrency over time", caption, traces, "no load events", tall=True)
    return made | {"axis": "none", "x_title": "minutes", "y_title": "at once", "x_from_zero": True}


def _over_time(name: str, looks: Sequence[tuple[float, Mapping[str, Any]]], key: str, colour: str) -> dict[str, Any]:
    """One figure of the looks; a list (one entry per server) is summed."""
    points = [(minutes, _number(data[key])) for minutes, data in looks if key in data]
    thin = thinned(points, most=MOST_POINTS)
    return {
        "name": name,
        "x": [round(minutes, 3) for minutes, _ in thin],
        "y": [round(value, 2) for _, value in thin],
        "mode": "lines",
        "line": {"color": colour, "width": 1.5},
        "hovertemplate": "%{y:.0f}<extra>" + name + "</extra>",
    }


def _number(value: Any) -> float:
    return float(sum(value) if isinstance(value, list) else value)


def thinned(points: Sequence[tuple[float, float]], *, most: int) -> list[tuple[float, float]]:
    """At most `most` points (x, y), x ascending: means over equal stretches of x; few enough are left as they are."""
    if len(points) <= most:
        return list(points)
    first, last = points[0][0], points[-1][0]
    width = (last - first) / most or 1.0
    bins: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        bins.setdefault(min(most - 1, int((x - first) / width)), []).append((x, y))
    return [(sum(x for x, _ in found) / len(found), sum(y for _, y in found) / len(found)) for found in bins.values()]


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
                    "hovertemplate": "%{text}: %{x:.1f} active, %{y:,.0f} tokens<extra>%{fullData.name}</extra>",
                }
            )
    made = make_chart(
        "throughput",
        "Concurrency and throughput",
        "One point per step: active trajectories (mean over the step) against tokens per device and minute.",
        traces,
        "no concurrency/mean together with throughput/tokens_per_device_minute",
    )
    return made | {
        "axis": "none",
        "hover": "closest",
        "y_format": ",.0f",
        "x_title": "active trajectories",
        "x_from_zero": True,
        "y_title": "tokens / device / min",
    }


def effective_tokens(runs: Sequence[RunData]) -> Chart:
    """How many of the agent's tokens count after correction, by step."""
    return lines(
        runs,
        "effective",
        "Effective-token share",
        "Trained agent tokens that count as if all weights were equal: Kish's effective sample size of the applied "
        "weights, masked tokens as 0, over all agent tokens of the batch.",
        (Line("tokens/effective_fraction", "effective share"),),
        percent=True,
        bounds=[0, 1.05],
    )

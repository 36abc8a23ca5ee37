"""The comparison as one HTML page that works offline: the tables, and what they are made of as plots."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from agentrl.run.bench_comparison import Comparison, Table, Value, figure, per_device_hour, tables
from agentrl.run.bench_figures import CONCURRENCY, CURVES, PHASES, TOKENS, RunFigures
from agentrl.run.bench_plan import BASELINE, SCHEDULES
from agentrl.telemetry.chart_parts import Chart, make_chart
from agentrl.telemetry.page import asset, self_contained
from agentrl.telemetry.report import chart_section, plotly_source
from agentrl.telemetry.writing import write_whole

_COLOURS = {name: f"@c{number}" for number, name in enumerate(SCHEDULES)}
_PHASE_COLOURS = {"setup": "@c7", "tail": "@c5"}
_DRAW = '"use strict"; agentrl.charts(agentrl.data("charts"), document.getElementById("axis"));'
_STYLE = (
    "<style>.figures{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}"
    ".figures th,.figures td{padding:7px 12px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}"
    ".figures th{font-size:12px;color:var(--ink-2);white-space:normal}"
    ".figures :is(th,td):first-child{text-align:left}</style>"
)


def write_page(comparison: Comparison, out: Path) -> None:
    """Write the page, whole or not at all. Raises `DiskFullError`."""
    charts = all_charts(comparison)
    sections = "\n".join(_table_html(table) for table in tables(comparison))
    body = f"""{_STYLE}<header class="top"><div class="wrap bar"><span class="brand">agentrl</span>
<span class="crumb">Schedules compared: {len(comparison.runs)} runs</span><span class="grow"></span>
<span id="axis"></span><button class="ghost" id="theme" title="dark or light">◐</button></div></header>
<main class="wrap">{sections}{chart_section("Plots", charts)}</main>"""
    scripts = [plotly_source(), asset("page.js"), asset("charts.js"), _DRAW]
    html = self_contained("agentrl · schedules", body, {"charts": charts}, scripts)
    write_whole(out, html)


def _table_html(table: Table) -> str:
    heads = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return (
        f'<section><h2>{escape(table.title)}</h2><p class="lead">{escape(table.note)}</p><div class="scroll">'
        f'<table class="figures"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def all_charts(comparison: Comparison) -> list[Chart]:
    """Every plot, in reading order."""
    train, affected, effective = CURVES
    return [
        _ratios(comparison),
        _scatter(comparison),
        _curves(comparison, "learning", "Learning curve", train, by_hours=True),
        _concurrency(comparison),
        _phases(comparison),
        _curves(comparison, "effective", "Effective share of trained tokens", effective, by_hours=False),
        _curves(comparison, "affected", "Tokens that correction affects", affected, by_hours=False),
    ]


def _ratios(comparison: Comparison) -> Chart:
    shown: tuple[tuple[str, Value], ...] = (
        ("tokens per device", figure(TOKENS)),
        ("requests per replica", figure(CONCURRENCY)),
        ("reward per device-hour", per_device_hour),
    )
    traces = []
    for number, (label, value) in enumerate(shown):
        found = {name: comparison.ratio(name, value) for name in comparison.schedules}
        known = {name: e for name, e in found.items() if e.value is not None}
        bounds = [(e.value or 0.0, e.low, e.high) for e in known.values()]
        up = [0.0 if high is None else high - value for value, _, high in bounds]
        down = [0.0 if low is None else value - low for value, low, _ in bounds]
        if known:
            trace: dict[str, Any] = {"type": "bar", "name": label, "marker": {"color": f"@c{number + 4}"}}
            trace |= {"x": list(known), "y": [value for value, _, _ in bounds]}
            trace["error_y"] = {"type": "data", "symmetric": False, "array": up, "arrayminus": down}
            traces.append(trace)
    caption = f"Ratios to {BASELINE}'s, paired by seed, with 95 % intervals."
    chart = make_chart("ratios", "Against the baseline", caption, traces, f"no finished run of {BASELINE}", tall=True)
    return chart | {"axis": "none", "y_title": f"÷ {BASELINE}'s"}


def _scatter(comparison: Comparison) -> Chart:
    traces = []
    for name in comparison.schedules:
        runs = [run for run in comparison.of(name) if TOKENS in run.figures and CONCURRENCY in run.figures]
        traces.append(
            {
                "name": name,
                "x": [run.figures[CONCURRENCY] for run in runs],
                "y": [run.figures[TOKENS] for run in runs],
                "text": [f"seed {run.seed}" for run in runs],
                "mode": "markers",
                "marker": {"color": _COLOURS[name], "size": 10, "opacity": 0.8},
                "hovertemplate": "%{text}: %{x:.1f} requests, %{y:,.0f} tokens<extra>%{fullData.name}</extra>",
            }
        )
    chart = make_chart("throughput", "Concurrency and throughput", "One point per run.", traces, "no finished run")
    titles = {"x_title": "requests in flight per replica", "y_title": "tokens / device / min"}
    return chart | {"axis": "none", "hover": "closest", "y_format": ",.0f"} | titles


def _curves(comparison: Comparison, chart_id: str, title: str, metric: str, *, by_hours: bool) -> Chart:
    traces = []
    for name in comparison.schedules:
        points = _means_by_step(comparison.of(name), metric)
        if points:
            x = [hours for _, hours, _ in points] if by_hours else [step for step, _, _ in points]
            line = {"color": _COLOURS[name], "width": 2}
            traces.append({"name": name, "x": x, "y": [y for _, _, y in points], "mode": "lines", "line": line})
    caption = f"{metric}, mean over seeds at each step."
    chart = make_chart(chart_id, title, caption, traces, f"no {metric}", percent=True)
    return chart | {"axis": "none", "x_title": "device-hours" if by_hours else "step"}


def _means_by_step(runs: Sequence[RunFigures], metric: str) -> list[tuple[float, float, float]]:
    """(step, device-hours, value), means over the runs that have the step."""
    by_step: dict[float, list[tuple[float, float]]] = {}
    for run in runs:
        for row in run.curve:
            if metric in row:
                by_step.setdefault(row["step"], []).append((row["device_hours"], row[metric]))
    return [
        (step, sum(hours for hours, _ in found) / len(found), sum(value for _, value in found) / len(found))
        for step, found in sorted(by_step.items())
    ]


def _concurrency(comparison: Comparison) -> Chart:
    """Of each schedule's first seed."""
    traces = []
    for name in comparison.schedules:
        run = comparison.of(name)[0]
        if run.load:
            line = {"color": _COLOURS[name], "width": 1.5}
            x, y = zip(*run.load, strict=True)
            label = f"{name}, seed {run.seed}"
            traces.append({"name": label, "x": list(x), "y": list(y), "mode": "lines", "line": line})
    caption = "Requests in flight per replica while training; evaluations are left out."
    chart = make_chart("concurrency", "Concurrency over time", caption, traces, "no load events")
    return chart | {"axis": "none", "x_title": "minutes", "hover": "closest"}


def _phases(comparison: Comparison) -> Chart:
    """Seconds per delivery: one bar per schedule and phase, side by side, as those of async overlap."""
    traces = []
    for phase in ("step", *PHASES):
        means = {name: [r.phases[phase] for r in comparison.of(name) if phase in r.phases] for name in SCHEDULES}
        known = {name: sum(values) / len(values) for name, values in means.items() if values}
        if known:
            colour = _PHASE_COLOURS.get(phase, "@ink-2" if phase == "step" else f"@phase-{phase}")
            bar = {"type": "bar", "name": phase, "marker": {"color": colour}}
            traces.append(bar | {"x": list(known), "y": list(known.values())})
    caption = "Mean seconds per delivery. In async, training and delivery lie within the rollouts' time."
    chart = make_chart("phases", "Where the time goes", caption, traces, "no time/…_s")
    return chart | {"axis": "none", "y_title": "seconds"}

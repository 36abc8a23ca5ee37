"""What the report's plots are made of: plain data for charts.js, with an x for either axis and colours by name.

A chart is `{"id", "title", "caption", "y", "traces", "axis", …}`. A trace's `x` is `{"step": […], "minutes":
[…]}`; the page's switch chooses. Where `axis` is `none`, `x` is a plain list and `x_title` says what it is. Colours
are names (`"@train"`) of the style sheet's variables, so that dark and light have their own. A chart whose metrics no
run has carries no traces but a `missing` note.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.telemetry.metrics import MetricsRow
from agentrl.telemetry.run_data import RunData, SolvePoint

Chart = dict[str, Any]
_LINE_DASHES = ("solid", "dot", "dash", "dashdot")


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of a line plot: its public name and what the legend calls it."""

    metric: str
    label: str


def lines(
    runs: Sequence[RunData],
    chart_id: str,
    title: str,
    caption: str,
    wanted: Sequence[Line],
    *,
    percent: bool = False,
    bounds: list[float] | None = None,
) -> Chart:
    """Metrics by step, one trace per run and metric."""
    getters = tuple((line.label, _getter(line.metric)) for line in wanted)
    missing = "no " + ", ".join(line.metric for line in wanted)
    return traced(runs, chart_id, title, caption, getters, missing, percent=percent, bounds=bounds)


def _getter(metric: str) -> Callable[[MetricsRow], float | None]:
    return lambda row: row.values.get(metric)


def traced(
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
                        "x": x_of(run, [row for row, _ in points]),
                        "y": [value for _, value in points],
                        "mode": "lines" if len(points) > 1 else "markers",
                        "line": {"color": colour, "width": 2, "dash": dash},
                        "marker": {"color": colour},
                    }
                )
    return make_chart(chart_id, title, caption, traces, missing, percent=percent, bounds=bounds)


def x_of(run: RunData, rows: Sequence[MetricsRow]) -> Mapping[str, list[Any]]:
    """The x of these steps on either axis."""
    return {"step": [row.step for row in rows], "minutes": [run.minutes_at(row.time) for row in rows]}


def interval_band(points: Sequence[SolvePoint], colour: str, alpha: float, group: str) -> dict[str, Any]:
    """The area between the bounds of solve rates; `x` is the caller's, `there_and_back`. Points without an interval
    must not be among them."""
    bounds = [point.interval for point in points if point.interval is not None]
    return {
        "y": [bound.high for bound in bounds] + [bound.low for bound in reversed(bounds)],
        "fill": "toself",
        "fillcolor": f"{colour}/{alpha}",
        "mode": "lines",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
        "legendgroup": group,
        "name": group,
    }


def there_and_back(values: Sequence[Any]) -> list[Any]:
    """The x of an area's upper edge, then of its lower one."""
    return [*values, *reversed(values)]


def make_chart(
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
    """A chart, or where there is no trace the note that says what was not measured."""
    made: Chart = {"id": chart_id, "title": title, "caption": caption, "axis": "switch", "traces": traces}
    made |= {"percent": percent, "tall": tall, "bounds": bounds}
    if not traces:
        made["missing"] = f"Not measured: {missing}."
    return made

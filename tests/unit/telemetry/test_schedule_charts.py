"""Plots that compare schedules: learning by cost, concurrency over time, throughput, tokens that count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.telemetry.report import write_report
from agentrl.telemetry.run_data import RunData, load_runs
from agentrl.telemetry.schedule_charts import (
    MOST_POINTS,
    concurrency,
    effective_tokens,
    learning_by_device_hours,
    thinned,
    throughput,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, fake: ModuleType) -> list[RunData]:
    """A `sync` run and an `async` one, of eight steps each, on two devices."""
    folder = tmp_path_factory.mktemp("runs")
    shapes = {name: fake.Shape(steps=8, groups=1, schedule=name) for name in ("sync", "async")}
    return load_runs([fake.make_run(folder / name, shape) for name, shape in shapes.items()])


def test_learning_is_drawn_against_devices_times_time_of_steps(runs: list[RunData], fake: ModuleType) -> None:
    """Steps of 9.5 s on two devices; the evaluation at step 4 cost what the steps before it did, at step 0 nothing."""
    hours = [2 * step * fake.STEP_S / 3600 for step in (0, 2, 4, 6, 8)]
    traces = learning_by_device_hours(runs)["traces"]
    drawn = [trace for trace in traces if "fill" not in trace]
    assert [trace["name"] for trace in drawn] == ["sync · fresh", "async · fresh"]
    for trace, band, run in zip(drawn, traces[::2], runs, strict=True):
        points = run.solve("fresh")
        assert trace["x"] == pytest.approx(hours)
        assert trace["y"] == [point.value for point in points]
        assert band["x"] == [*trace["x"], *reversed(trace["x"])]
        assert band["y"][: len(points)] == [point.interval.high for point in points if point.interval]
    alone = learning_by_device_hours(runs[:1])
    assert [trace["name"] for trace in alone["traces"][1::2]] == ["fresh", "unseen"]


def test_hours_are_not_guessed_where_devices_are_unknown(runs: list[RunData]) -> None:
    rows = [replace(row, values={"time/step_s": 5.0}) for row in runs[0].metrics]
    unknown = replace(runs[0], metrics=rows)
    assert unknown.device_hours == {}
    assert "missing" in learning_by_device_hours([unknown])


def test_an_evaluation_alone_costs_nothing(runs: list[RunData]) -> None:
    """Step 0 is written with the evaluation's figures alone."""
    first = replace(runs[0].metrics[0], step=0, values={"solve/fresh": 0.25})
    run = replace(runs[0], metrics=[first, *runs[0].metrics])
    assert run.device_hours[0] == 0.0
    assert run.device_hours[1] > 0
    assert learning_by_device_hours([run])["traces"][1]["x"][0] == 0.0


def test_concurrency_over_time_comes_from_the_looks(runs: list[RunData]) -> None:
    made = concurrency(runs[1:])
    names = {trace["name"]: trace for trace in made["traces"]}
    assert set(names) == {"active trajectories", "requests", "limit"}
    looks = [data for _, data in runs[1].load]
    assert names["active trajectories"]["y"] == [look["active"] for look in looks]
    assert names["requests"]["y"] == [sum(look["running"]) for look in looks]
    assert names["active trajectories"]["x"][0] == pytest.approx(20 / 60, abs=1e-3)
    assert [trace["name"] for trace in concurrency(runs)["traces"]] == ["sync", "async"]


def test_a_run_without_looks_shows_its_steps(runs: list[RunData]) -> None:
    older = replace(runs[0], events=[event for event in runs[0].events if event.kind != "load"])
    (trace,) = concurrency([older])["traces"]
    assert trace["y"] == [row.values["concurrency/mean"] for row in older.metrics]


def test_scatter_has_one_point_per_step_and_run(runs: list[RunData]) -> None:
    made = throughput(runs)
    assert [len(trace["x"]) for trace in made["traces"]] == [8, 8]
    assert made["traces"][0]["y"][3] == runs[0].metrics[3].values["throughput/tokens_per_device_minute"]


def test_effective_share_by_step(runs: list[RunData]) -> None:
    (trace,) = effective_tokens(runs[:1])["traces"]
    assert trace["y"] == [row.values["tokens/effective_fraction"] for row in runs[0].metrics]


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(-10, 10)), max_size=300).map(sorted), st.integers(1, 40))
def test_thinning_keeps_order_ends_and_bounds(points: list[tuple[float, float]], most: int) -> None:
    thin = thinned(points, most=most)
    assert len(thin) <= most
    assert [x for x, _ in thin] == sorted(x for x, _ in thin)
    if len(points) <= most:
        assert thin == points
    else:
        low, high = (f(y for _, y in points) for f in (min, max))
        assert all(low - 1e-6 <= y <= high + 1e-6 for _, y in thin)
        assert points[0][0] <= thin[0][0] + 1e-6
        assert thin[-1][0] <= points[-1][0] + 1e-6


def test_a_long_run_stays_readable(tmp_path: Path, fake: ModuleType) -> None:
    """300 steps and some ten thousand looks: the page stays small and no trace has more points than pixels."""
    run = tmp_path / "long"
    run.mkdir()
    (run / "config.toml").write_text("")
    with (run / "events.jsonl").open("w") as file:
        for i in range(30_000):
            look = {"active": i % 64, "running": [i % 9, 1], "limit": 64}
            file.write(json.dumps({"kind": "load", "time": 1e9 + i, "data": look}) + "\n")
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 301):
            values = {"time/step_s": 100.0, "throughput/devices": 2.0, "solve/train": 0.5}
            file.write(json.dumps({"step": step, "time": 1e9 + 100 * step, **values}) + "\n")
    data = load_runs([run])[0]
    assert all(len(trace["x"]) <= MOST_POINTS for trace in concurrency([data])["traces"])
    assert data.device_hours[300] == pytest.approx(300 * 100 * 2 / 3600)
    write_report([run], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 6_000_000

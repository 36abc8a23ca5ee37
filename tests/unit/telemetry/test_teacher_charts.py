"""The report's plots of distillation."""

from __future__ import annotations

import html
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentrl.telemetry.charts import chart_sections
from agentrl.telemetry.report import write_report
from agentrl.telemetry.run_data import RunData, load_runs


def runs_of(fake: ModuleType, tmp_path: Path, **teachers: tuple[str, ...]) -> list[RunData]:
    paths = [fake.make_run(tmp_path / n, fake.Shape(steps=12, groups=1, teachers=t)) for n, t in teachers.items()]
    return load_runs(paths)


def charts_of(runs: list[RunData]) -> dict[str, dict[str, Any]]:
    sections = dict(chart_sections(runs))
    return {chart["id"]: chart for chart in sections["Teacher"]}


def test_no_section_without_a_teacher(run_dir: Path) -> None:
    assert [title for title, _ in chart_sections(load_runs([run_dir]))] == [
        "Learning",
        "Speed",
        "Staleness and correction",
    ]


def test_every_measure_is_drawn(tmp_path: Path, fake: ModuleType) -> None:
    charts = charts_of(runs_of(fake, tmp_path, one=("big",)))
    assert [chart_id for chart_id, chart in charts.items() if "missing" in chart] == []
    assert "teacher_kl_each" not in charts
    assert {trace["name"]: trace["y"][-1] for trace in charts["teacher_kl"]["traces"]} == {
        "as sampled": pytest.approx(0.15),
        "as trained": pytest.approx(0.135),
    }
    assert [t["name"] for t in charts["teacher_time"]["traces"]] == ["busy", "waited for"]
    assert charts["teacher_top1"]["percent"]


def test_turns_are_in_order_and_of_the_runs_ends(tmp_path: Path, fake: ModuleType) -> None:
    chart = charts_of(runs_of(fake, tmp_path, one=("big",)))["teacher_kl_turn"]
    first, last = chart["traces"]
    assert (first["name"], last["name"]) == ("first 5 steps", "last 5 steps")
    assert first["x"] == last["x"] == ["0", "1", "2", "3", "10+"]
    assert first["y"][0] == pytest.approx(0.5 * (0.5 - 0.35 * 3 / 12))
    assert last["y"][-1] == pytest.approx(3 * (0.5 - 0.35 * 10 / 12))


def test_several_teachers_and_several_runs(tmp_path: Path, fake: ModuleType) -> None:
    charts = charts_of(runs_of(fake, tmp_path, one=("big", "small"), two=("big",), rl=()))
    each = [trace["name"] for trace in charts["teacher_kl_each"]["traces"]]
    assert each == ["one · big", "one · small"]
    assert [t["name"].split(" · ")[0] for t in charts["teacher_kl_turn"]["traces"]] == ["one", "one", "two", "two"]


def test_the_report_tells_the_teachers(tmp_path: Path, fake: ModuleType) -> None:
    run = fake.make_run(tmp_path / "run", fake.Shape(steps=2, groups=2, teachers=("big", "other")))
    write_report([run], tmp_path / "report.html")
    page = html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "<dt>teachers</dt><dd>big: models/big, other: models/other</dd>" in page
    assert "<dt>divergence</dt><dd>sampled</dd>" in page
    assert "<h2>Teacher</h2>" in page

"""The report as a file: self-contained, complete, and deaf to hostile text. Browsers look at it elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentrl.errors import DiskFullError, RunFolderError, UsageError
from agentrl.telemetry import report
from agentrl.telemetry.charts import chart_sections
from agentrl.telemetry.page import data_block
from agentrl.telemetry.report import write_report
from agentrl.telemetry.run_data import load_runs
from agentrl.telemetry.statistics import wilson

BLOCK = re.compile(r'<script type="application/json" id="(\w+)">(.*?)</script>', re.DOTALL)


def blocks(page: str) -> dict[str, Any]:
    return {name: json.loads(text) for name, text in BLOCK.findall(page)}


def written(tmp_path: Path, *runs: Path) -> str:
    out = tmp_path / "report.html"
    write_report(runs, out)
    assert list(tmp_path.iterdir()) == [out]
    return out.read_text(encoding="utf-8")


def without_scripts(page: str) -> str:
    return re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.DOTALL)


def test_one_file_and_no_address_outside(tmp_path: Path, run_dir: Path) -> None:
    page = written(tmp_path, run_dir)
    assert len(page) < 8_000_000
    markup = without_scripts(page)
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", markup)
    assert "url(" not in markup
    assert "default-src 'none'" in markup


def test_policy_names_exactly_our_scripts(tmp_path: Path, run_dir: Path) -> None:
    page = written(tmp_path, run_dir)
    named = set(re.findall(r"'sha256-([^']+)'", page.split("<title>")[0]))
    code = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(code) == 7
    assert {base64.b64encode(hashlib.sha256(c.encode()).digest()).decode() for c in code} == named


def test_header_tells_the_run(tmp_path: Path, run_dir: Path) -> None:
    markup = html.unescape(without_scripts(written(tmp_path, run_dir)))
    for fact in (
        "token-clamp-2",
        "ppo_clip, decoupled",
        "bubblewrap",
        "4 × 4",
        "6 of 6",
        "torch 2.13.0",
        "1 alarm",
        "<dt>schedule</dt><dd>sync</dd>",
        "<dt>devices</dt><dd>2</dd>",
    ):
        assert fact in markup
    curve = load_runs([run_dir])[0].solve("fresh")
    assert f"{curve[0].value:.1%}<span" in markup
    assert f"<b>{curve[-1].value:.1%}</b>" in markup
    last = curve[-1].interval
    assert last == wilson(curve[-1].value * 256, 256)
    assert f"95 %: {last.low:.1%} to {last.high:.1%}" in markup


def test_charts_carry_the_numbers(run_dir: Path) -> None:
    run = load_runs([run_dir])[0]
    charts = {chart["id"]: chart for _, section in chart_sections([run]) for chart in section}
    lines = {t["name"]: t for t in charts["learning"]["traces"] if t.get("fill") is None}
    assert set(lines) == {"train", "fresh", "unseen"}
    assert lines["train"]["x"]["step"] == [1, 2, 3, 4, 5, 6]
    assert lines["train"]["x"]["minutes"][0] == pytest.approx(29.5 / 60)
    assert lines["train"]["y"] == [row.values["solve/train"] for row in run.metrics]
    assert lines["fresh"]["x"]["step"][0] == 0
    share = charts["agent_share"]["traces"][0]["y"][0]
    first = run.metrics[0].values
    assert share == first["tokens/agent"] / (first["tokens/agent"] + first["tokens/environment"])
    assert [t["name"] for t in charts["phases"]["traces"]] == [
        "generate",
        "tool",
        "score",
        "train",
        "deliver",
        "whole step",
    ]
    assert "missing" not in charts["idle"]
    updates = {t["name"]: t["y"][0] for t in charts["updates"]["traces"]}
    assert updates == {"taken": 2.0, "off policy": 1.0, "skipped": 0.0}, "K24: counted and shown"
    assert [t["name"] for t in charts["staleness"]["traces"]] == ["mean", "max", "in flight", "in queue"]


def test_several_runs_are_overlaid(tmp_path: Path, run_dir: Path, hostile_dir: Path) -> None:
    data = blocks(written(tmp_path, run_dir, hostile_dir))
    assert data["runs"] == ["demo", "hostile"]
    assert {row[0] for row in data["table"]} == {0, 1}
    learning = next(chart for chart in data["charts"] if chart["id"] == "learning")
    assert {"demo · fresh", "hostile · fresh"} <= {trace["name"] for trace in learning["traces"]}
    assert {key.split("/")[0] for key in data["pages"]} == {"0", "1"}


def test_pages_hold_whole_groups_within_their_room(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = blocks(written(tmp_path, run_dir))["pages"]
    assert 60 <= len(pages) <= 64
    monkeypatch.setattr(report, "EMBEDDED_BYTES", 40_000)
    small = blocks(written(tmp_path, run_dir))["pages"]
    assert 0 < len(small) < 20
    assert sum(len(json.dumps(page)) for page in small.values()) <= 40_000


@pytest.mark.parametrize("metrics", [True, False])
def test_missing_parts_leave_a_note(tmp_path: Path, fake: ModuleType, metrics: bool) -> None:
    run = fake.make_run(tmp_path / "run", fake.Shape(steps=1, metrics=metrics))
    for path in (run / "tokenizer").iterdir():
        path.unlink()
    (tmp_path / "out").mkdir()
    page = written(tmp_path / "out", run)
    markup = html.unescape(without_scripts(page))
    assert ("Not measured: no idle/trainer_fraction" in markup) == (not metrics)
    assert ("Not measured: no solve/train" in markup) == (not metrics)
    assert next(iter(blocks(page)["pages"].values()))["has_text"] is False


def test_folder_with_a_configuration_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("steps = 3\n")
    (tmp_path / "out").mkdir()
    assert "0 of 3" in written(tmp_path / "out", tmp_path / "run")


def test_hostile_text_stays_text(tmp_path: Path, hostile_dir: Path, fake: ModuleType) -> None:
    """Markup in task ids, outputs, configuration, alarms and versions ends no script, opens no element."""
    page = written(tmp_path, hostile_dir)
    assert fake.ATTACK not in page
    assert "<img" not in without_scripts(page)
    assert html.escape("<img src=x onerror") in page
    data = blocks(page)
    assert data["table"][0][3].endswith(fake.ATTACK)
    assert any(page["patch"].endswith(fake.ATTACK) for page in data["pages"].values())


def test_data_block_round_trips_and_refuses_nan() -> None:
    value = {"a": "</script><!--&\u2028", "b": [1, None]}
    text = data_block("x", value)
    assert text.count("<") == 2
    assert blocks(text) == {"x": value}
    with pytest.raises(ValueError, match="JSON"):
        data_block("x", float("nan"))


def test_minutes_leave_out_the_time_between_runs(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    lines = [
        {"kind": "run.started", "time": 1000.0, "data": {}},
        {"kind": "run.finished", "time": 1120.0, "data": {"outcome": "interrupted"}},
        {"kind": "run.started", "time": 9000.0, "data": {"resumed": True}},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = load_runs([tmp_path])[0]
    assert run.minutes_at(1060.0) == 1.0
    assert run.minutes_at(9060.0) == 3.0


def test_bad_input_is_typed(tmp_path: Path, run_dir: Path) -> None:
    with pytest.raises(UsageError, match="no run folder"):
        write_report([], tmp_path / "r.html")
    with pytest.raises(RunFolderError, match="no run folder there"):
        write_report([tmp_path], tmp_path / "r.html")
    with pytest.raises(RunFolderError, match="twice"):
        write_report([run_dir, run_dir], tmp_path / "r.html")
    (tmp_path / "config.toml").write_text("steps = ")
    with pytest.raises(RunFolderError, match="not TOML"):
        write_report([tmp_path], tmp_path / "r.html")


def test_disk_full_is_typed(tmp_path: Path, run_dir: Path) -> None:
    (tmp_path / ".report.html.tmp").symlink_to("/dev/full")
    with pytest.raises(DiskFullError, match=r"report\.html"):
        write_report([run_dir], tmp_path / "report.html")


def test_names_tell_runs_of_one_folder_name_apart(tmp_path: Path) -> None:
    paths = [tmp_path / seed / "run" for seed in ("a", "b")]
    for path in paths:
        path.mkdir(parents=True)
        (path / "config.toml").write_text("")
    assert [run.name for run in load_runs(paths)] == ["a/run", "b/run"]

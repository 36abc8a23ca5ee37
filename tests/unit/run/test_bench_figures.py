"""Run folders with known figures: what one run gives, and the comparison of several, down to the last number."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from bench_runs import step, write_run

from agentrl.errors import RunFolderError
from agentrl.run.bench_comparison import Comparison, as_json, summary, tables
from agentrl.run.bench_figures import RunFigures, read_run
from agentrl.run.bench_page import all_charts, write_page
from agentrl.run.bench_plan import BenchRun, make_plan


def planned(work: Path, name: str) -> BenchRun:
    (run,) = (run for run in make_plan(work=work, seeds=5) if run.name == name)
    return run


def made(work: Path, name: str, *steps: dict[str, float], solve: tuple[float, float] = (0.3, 0.5)) -> RunFigures:
    run = planned(work, name)
    write_run(run, steps, solve=solve)
    return read_run(run.folder, schedule=run.schedule, seed=run.seed)


def test_figures_of_time_are_weighted_by_time(tmp_path: Path) -> None:
    found = made(
        tmp_path,
        "sync-2-seed1",
        step(
            10,
            tokens=1000,
            concurrency=4,
            kv__used_fraction_mean=0.1,
            time__tail_s=4,
            idle__outside_tail_fraction=0.2,
            updates=2,
        ),
        step(30, tokens=2000, concurrency=8, time__tail_s=12, idle__outside_tail_fraction=0.1, updates=1),
    )
    assert found.devices == 2, "two servers share their devices with two ranks"
    assert found.device_hours == pytest.approx(2 * 40 / 3600)
    assert found.updates == 2 + 1, "two a delivery, but one step had a single group to learn from"
    assert (found.deliveries, found.solve_start, found.solve_end) == (2, 0.3, 0.5)
    assert found.gain_per_100_updates == pytest.approx(100 * 0.2 / 3)
    assert found.gain_per_device_hour == pytest.approx(0.2 / (80 / 3600))
    assert found.figures["throughput/tokens_per_device_minute"] == pytest.approx(1750)
    assert found.figures["concurrency/per_replica_mean"] == pytest.approx(7)
    assert found.figures["kv/used_fraction_mean"] == pytest.approx(0.1), "over the steps that measured it"
    assert found.figures["idle/outside_tail_fraction"] == pytest.approx((0.2 * 6 + 0.1 * 18) / 24)
    assert "staleness/mean" not in found.figures


def test_tokens_per_device_minute_are_tokens_by_device_minutes(tmp_path: Path) -> None:
    """Each consumed trajectory's tokens once, over the whole time: a slow step weighs as long as it took."""
    tokens, seconds = [9000.0, 500.0], [20.0, 70.0]
    rows = [step(s, tokens=t / (2 * s / 60), concurrency=1) for t, s in zip(tokens, seconds, strict=True)]
    found = made(tmp_path, "async-1-seed0", *rows)
    assert found.devices == 2, "one server and one rank, a device each"
    assert found.figures["throughput/tokens_per_device_minute"] == pytest.approx(9500 / (2 * 90 / 60))
    assert found.device_hours * 60 == pytest.approx(2 * 90 / 60)


def test_figures_of_a_step_are_means_and_extremes(tmp_path: Path) -> None:
    found = made(
        tmp_path,
        "async-2-seed0",
        step(
            10, tokens=1, concurrency=1, staleness__mean=0.0, staleness__max=0, kv__preemptions=2, correction__ess=0.9
        ),
        step(90, tokens=1, concurrency=1, staleness__mean=1.0, staleness__max=1, kv__preemptions=3),
    )
    shown = {name: found.figures[name] for name in ("staleness/mean", "staleness/max", "kv/preemptions")}
    assert shown == {"staleness/mean": 0.5, "staleness/max": 1.0, "kv/preemptions": 5.0}
    assert found.figures["correction/ess"] == 0.9
    assert found.phases == {"step": 50.0, "train": 1.0}


def test_a_step_without_batch_trains_nothing(tmp_path: Path) -> None:
    idle = step(10, tokens=1, concurrency=1)
    del idle["time/train_s"], idle["updates"]
    found = made(tmp_path, "async-2-seed0", step(10, tokens=1, concurrency=1, updates=2), idle)
    assert found.updates == 2
    assert found.device_hours == pytest.approx(40 / 3600)
    with pytest.raises(RunFolderError, match="trained nothing"):
        made(tmp_path, "async-2-seed1", idle)


def test_the_curve_ends_at_the_runs_device_hours_and_the_load_leaves_evaluations_out(tmp_path: Path) -> None:
    first, second = (step(s, tokens=1, concurrency=1, solve__train=v) for s, v in ((10, 0.3), (20, 0.4)))
    found = made(tmp_path, "sync-1-seed0", first, second)
    assert [row["solve/train"] for row in found.curve] == [0.3, 0.4]
    assert [row["device_hours"] for row in found.curve] == pytest.approx([20 / 3600, 60 / 3600])
    assert len(found.load) == 30
    assert found.load[0] == (0.0, 10.0)
    assert found.load[10] == (pytest.approx(10 / 60), 20.0), "the second step follows the first at once"
    assert max(requests for _, requests in found.load) == 20.0


def test_an_unfinished_run_is_no_figure(tmp_path: Path) -> None:
    run = planned(tmp_path, "sync-1-seed0")
    write_run(run, [step(10, tokens=1, concurrency=1)], solve=(0.3, 0.5), evaluated=False)
    with pytest.raises(RunFolderError, match="lacks solve/fresh"):
        read_run(run.folder, schedule="sync-1", seed=0)
    bare = planned(tmp_path, "sync-1-seed1")
    write_run(bare, [{"time/step_s": 1.0}, {"solve/train": 1.0, "time/step_s": 1.0}], solve=(0.3, 0.5))
    with pytest.raises(RunFolderError, match="trained nothing"):
        read_run(bare.folder, schedule="sync-1", seed=1)


# --- several runs -------------------------------------------------------------------------------------------------


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    """sync-1 and async-2, three seeds: exactly 1.5 times the tokens, ratios of concurrency 2, 3 and 4.5, gains per
    device-hour 1.2 times as large on each seed; a lone run of sync-2."""
    runs = []
    for seed, scale in enumerate((1.0, 2.0, 0.5)):
        gain = 0.1 + 0.05 * seed
        base = step(36, tokens=1000 * scale, concurrency=10, solve__train=0.3)
        runs.append(made(tmp_path, f"sync-1-seed{seed}", base, base, solve=(0.3, 0.3 + gain)))
        fast = step(24, tokens=1500 * scale, concurrency=10 * (2.0, 3.0, 4.5)[seed], solve__train=0.4, updates=2)
        runs.append(made(tmp_path, f"async-2-seed{seed}", fast, fast, solve=(0.3, 0.3 + gain * 0.8)))
    lone = step(30, tokens=1240, concurrency=15)
    runs.append(made(tmp_path, "sync-2-seed0", lone, lone, solve=(0.3, 0.2)))
    return Comparison(runs)


def test_the_summary(comparison: Comparison) -> None:
    found = summary(comparison)
    assert found["async2_vs_sync1_tokens"] == 1.5
    assert found["async2_vs_sync1_tokens_interval"] == [1.5, 1.5]
    assert found["async2_vs_sync1_concurrency"] == pytest.approx(3.0, rel=1e-5), "geometric mean of 2, 3 and 4.5"
    half = 4.302653 * math.log(1.5) / math.sqrt(3)
    low, high = found["async2_vs_sync1_concurrency_interval"]
    assert (low, high) == pytest.approx((3 * math.exp(-half), 3 * math.exp(half)), rel=1e-4)
    assert found["async2_vs_sync1_reward_per_device_hour"] == pytest.approx(1.2, rel=1e-5)
    assert not [name for name in found if name.endswith("_note")]


def test_a_run_that_did_not_improve_is_said_so_and_is_valid_json(comparison: Comparison) -> None:
    found = json.loads(json.dumps(as_json(comparison), allow_nan=False))
    lone = found["schedules"]["sync-2"]["gain_per_device_hour_ratio"]
    assert (lone["value"], lone["low"], lone["high"], lone["method"]) == (pytest.approx(-1.2), None, None, "fieller")
    assert "1 of 1 seeds did not improve" in lone["note"]
    text = " ".join(table.note for table in tables(comparison))
    assert "sync-2: 1 of 1 seeds did not improve" in text
    assert len(found["runs"]) == 7
    assert found["runs"][0]["gain"] == 0.1
    assert found["schedules"]["async-2"]["seeds"] == [0, 1, 2]


def test_without_the_baseline_nothing_is_compared(comparison: Comparison) -> None:
    found = summary(Comparison([run for run in comparison.runs if run.schedule != "sync-1"]))
    assert found["async2_vs_sync1_tokens"] is None
    assert found["async2_vs_sync1_tokens_interval"] == [None, None]
    assert found["async2_vs_sync1_tokens_note"] == "no seed has both"
    assert summary(Comparison([]))["async2_vs_sync1_reward_per_device_hour"] is None
    assert [table.rows for table in tables(Comparison([]))] == [()] * 4


def test_seeds_that_only_one_of_them_has_are_left_out(comparison: Comparison) -> None:
    fewer = Comparison([run for run in comparison.runs if (run.schedule, run.seed) != ("async-2", 2)])
    assert summary(fewer)["async2_vs_sync1_concurrency"] == pytest.approx(math.sqrt(6), rel=1e-5)


def cell(comparison: Comparison, title: str, schedule: str, column: str, *, nth: int = 0) -> str:
    table = next(table for table in tables(comparison) if table.title == title)
    row = next(row for row in table.rows if row[0] == schedule)
    return [text for name, text in zip(table.columns, row, strict=True) if name == column][nth]


def test_the_tables(comparison: Comparison) -> None:
    assert [table.rows[0][0] for table in tables(comparison)] == ["sync-1"] * 4
    assert cell(comparison, "Throughput", "sync-1", "tokens / device / min") == "1,167"
    assert cell(comparison, "Throughput", "sync-1", "÷ sync-1's") == "1"
    assert cell(comparison, "Throughput", "async-2", "÷ sync-1's") == "1.50 [1.50, 1.50]"
    assert cell(comparison, "Throughput", "async-2", "÷ sync-1's", nth=1) == "3.00 [1.10, 8.21]"
    assert cell(comparison, "Throughput", "sync-2", "÷ sync-1's") == "1.24", "one seed: no interval"
    assert cell(comparison, "Reward per 100 updates", "async-2", "updates") == "4"
    assert cell(comparison, "Reward per 100 updates", "async-2", "÷ sync-1's") == "0.40 [0.40, 0.40]"
    assert cell(comparison, "Reward per device-hour", "async-2", "÷ sync-1's") == "1.20 [1.20, 1.20]"
    assert cell(comparison, "Reward per device-hour", "sync-1", "device-hours") == "0.040"
    assert cell(comparison, "Where the time goes", "async-2", "step") == "24.00"
    assert cell(comparison, "Where the time goes", "async-2", "deliver") == "–"


def test_the_page_works_offline(comparison: Comparison, tmp_path: Path) -> None:
    out = tmp_path / "new" / "page.html"
    write_page(comparison, out)
    html = out.read_text()
    assert "1.50 [1.50, 1.50]" in html
    assert "default-src 'none'" in html
    charts: list[dict[str, Any]] = all_charts(comparison)
    drawn = {chart["id"] for chart in charts if "missing" not in chart}
    assert drawn == {"ratios", "throughput", "learning", "concurrency", "phases"}
    ratios = next(chart for chart in charts if chart["id"] == "ratios")["traces"]
    assert ratios[0]["y"] == pytest.approx([1.0, 1.24, 1.5])
    for name in drawn:
        assert f'id="chart-{name}"' in html


def test_a_page_of_nothing_says_so(tmp_path: Path) -> None:
    write_page(Comparison([]), tmp_path / "page.html")
    assert "Not measured: no finished run" in (tmp_path / "page.html").read_text()

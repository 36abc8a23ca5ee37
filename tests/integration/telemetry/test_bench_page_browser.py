"""The page of `agentrl bench schedules` in a real browser: it is drawn without a network."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from bench_runs import step, write_run

from agentrl.run.bench_comparison import Comparison
from agentrl.run.bench_figures import read_run
from agentrl.run.bench_page import write_page
from agentrl.run.bench_plan import make_plan

pytestmark = pytest.mark.browser


def test_the_comparison_is_drawn(tmp_path: Path, dump_dom: Callable[[str], str]) -> None:
    runs = []
    for number, run in enumerate(make_plan(work=tmp_path, seeds=2)):
        more = {"solve__train": 0.4, "correction__affected_token_fraction": 0.01, "tokens__effective_fraction": 0.9}
        steps = [step(20, tokens=1000 + 100 * number, concurrency=10 + number, **more)] * 3
        write_run(run, steps, solve=(0.3, 0.4 + number / 100))
        runs.append(read_run(run.folder, schedule=run.schedule, seed=run.seed))
    write_page(Comparison(runs), tmp_path / "page.html")
    shown = dump_dom(f"file://{tmp_path}/page.html")
    for name in ("ratios", "throughput", "learning", "concurrency", "phases", "affected", "effective"):
        plot = re.search(
            rf'id="chart-{name}" class="[^"]*js-plotly-plot|class="[^"]*js-plotly-plot[^"]*" id="chart-{name}"', shown
        )
        assert plot is not None, name
    assert shown.count('class="errorbar"') >= 12, "three ratios of four schedules"

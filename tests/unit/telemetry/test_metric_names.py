"""`docs/metrics.md` names every figure that is written or shown: the names are a public interface."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import ModuleType

import pytest
from fake_teaching import fake_teacher_metrics

from agentrl.config import AlarmConfig
from agentrl.telemetry import alarms, charts, live_state, schedule_charts, teacher_charts
from agentrl.telemetry.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[3]
NAME = re.compile(r'"([a-z_]+/[a-z_\d]+|teacher/[a-z_]+/[a-z_]+)"')


def documented() -> set[str]:
    """Names of the first column, `a/{b,c}` spelled out."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    columns = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    found: set[str] = set()
    for written in itertools.chain.from_iterable(re.findall(r"`([^`]+)`", column) for column in columns):
        parts = [part.strip("{}").split(",") for part in re.findall(r"\{[^}]*\}|[^{}]+", written)]
        found.update("".join(choice) for choice in itertools.product(*parts))
    return found


def named_in(source: Path) -> set[str]:
    """The literals of a source that look like metric names: a known first part, a slash, a second part."""
    first_parts = {name.split("/")[0] for name in documented() if "/" in name}
    return {name for name in NAME.findall(source.read_text(encoding="utf-8")) if name.split("/")[0] in first_parts}


def test_the_page_spells_names_out() -> None:
    assert {"solve/fresh_n", "correction/ess", "time/tail_s", "entropy", "groups/too_few_valid"} <= documented()


@pytest.mark.parametrize("module", [charts, schedule_charts, teacher_charts, live_state, alarms])
def test_everything_shown_is_documented(module: ModuleType) -> None:
    assert module.__file__ is not None
    assert named_in(Path(module.__file__)) - documented() == set()


def test_every_alarm_is_documented() -> None:
    assert {rule[0] for rule in alarms._rules(AlarmConfig())} <= documented()


def test_everything_measured_is_documented() -> None:
    """The literal names in the code that measures."""
    rollout = ["rollout/metrics.py", "rollout/fairness.py", "rollout/teaching.py", "rollout/scoring.py"]
    sources = [*rollout, "run/load.py", "run/steps.py", "run/loop.py"]
    measured = {name for source in sources for name in named_in(ROOT / "agentrl" / source)}
    assert len(measured) > 30
    assert measured - documented() == set()


def test_the_fake_run_measures_what_a_real_one_does(run_dir: Path) -> None:
    names = {name for row in read_metrics(run_dir / "metrics.jsonl") for name in row.values}
    assert names - documented() == set()
    assert fake_teacher_metrics(0.5, ("teacher",)).keys() - documented() == set()
    assert "teacher/kl/<teacher>" in documented()

"""Tools that take longer than their work: the distribution, what decides a delay, and which options need which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from swe_rows import GOOD, write

from agentrl.errors import ConfigError
from agentrl.trajectory import Split
from agentrl.wire import Delaying
from agentrl_envs.swe_gym import SweGymEnvironment
from agentrl_envs.swe_gym.latency import ToolLatency

LATENCY = ToolLatency(median_s=0.5, p95_ratio=4.0, slow_fraction=0.25, slow_factor=8.0)


def draws(latency: ToolLatency, *, task: str = "t", count: int = 20_000) -> np.ndarray:
    return np.array([latency.delay_s(task, rollout=f"r{n // 10}", call=n % 10) for n in range(count)])


def test_half_wait_less_than_the_median_and_one_in_twenty_more_than_four_medians() -> None:
    found = draws(ToolLatency(median_s=0.5, p95_ratio=4.0, slow_fraction=0.0, slow_factor=8.0))
    assert np.median(found) == pytest.approx(0.5, rel=0.03)
    assert np.quantile(found, 0.95) == pytest.approx(2.0, rel=0.06)
    logs = np.log(found / 0.5)
    assert abs(logs.mean()) < 0.02, "lognormal: symmetric in its logarithm"
    assert logs.std() == pytest.approx(np.log(4.0) / 1.6449, rel=0.02)


def test_a_delay_is_a_function_of_task_rollout_and_call() -> None:
    first = LATENCY.delay_s("t", rollout="r", call=3)
    assert LATENCY.delay_s("t", rollout="r", call=3) == first
    others = [("u", "r", 3), ("t", "s", 3), ("t", "r", 4), ("t", "r\0", 3)]
    assert len({first, *(LATENCY.delay_s(task, rollout=r, call=c) for task, r, c in others)}) == 5


def test_a_quarter_of_the_tasks_wait_eight_times_as_long() -> None:
    tasks = [f"task-{n}" for n in range(4000)]
    assert np.mean([LATENCY.is_slow(task) for task in tasks]) == pytest.approx(0.25, abs=0.02)
    slow = next(task for task in tasks if LATENCY.is_slow(task))
    even = ToolLatency(median_s=0.5, p95_ratio=4.0, slow_fraction=0.0, slow_factor=8.0)
    assert draws(LATENCY, task=slow, count=50) == pytest.approx(8 * draws(even, task=slow, count=50))


@pytest.mark.parametrize("rows", [False, True], ids=["generated", "rows"])
def test_every_kind_of_data_set_delays(rows: bool, tmp_path: Path) -> None:
    data: dict[str, Any] = {"dataset": write(tmp_path / "rows.jsonl", GOOD), "fresh_fraction": 0.0} if rows else {}
    environment = SweGymEnvironment({**data, "tool_latency_median_s": 0.5})
    (task,) = environment.tasks(Split.TRAIN, start=0, count=1)
    assert isinstance(environment, Delaying)
    expected = ToolLatency(median_s=0.5, p95_ratio=4.0, slow_fraction=0.0, slow_factor=8.0)
    assert environment.tool_delay_s(task, rollout="r", call=1) == expected.delay_s(task.id, rollout="r", call=1) > 0
    assert SweGymEnvironment(data).tool_delay_s(task, rollout="r", call=1) == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tool_latency_p95_ratio": 3.0}, "tool_latency_p95_ratio: no effect without tool_latency_median_s"),
        ({"slow_fraction": 0.2}, "slow_fraction: no effect without tool_latency_median_s"),
        ({"tool_latency_median_s": 1.0, "slow_factor": 4.0}, "slow_factor: no effect without slow_fraction"),
        ({"tool_latency_median_s": 1.0, "tool_latency_p95_ratio": 1.0}, "greater than 1"),
        ({"tool_latency_median_s": -1.0}, "greater than or equal to 0"),
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SweGymEnvironment(options)

"""Solve rates: what counts, what does not, and that nothing counted is no rate of 0."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl.config import RunConfig
from agentrl.errors import InfrastructureError, PolicyDeadError
from agentrl.policy import ServerExit, ServerStats
from agentrl.rollout.groups import GroupResult
from agentrl.run import evaluate as evaluation
from agentrl.run import evaluate_command, services
from agentrl.run.evaluate import prediction, solve_rate
from agentrl.run.evaluate_command import _require_counted
from agentrl.telemetry.statistics import wilson
from agentrl.trajectory import Outcome, OutcomeKind, Segment, Span, SpanKind, Split, Trajectory

SEGMENT = Segment(
    token_ids=np.array([1, 2], np.int32),
    spans=(Span(SpanKind.PROMPT, 0, 2, 0),),
    logprobs=np.full(2, np.nan, np.float32),
    versions=np.full(2, -1, np.int32),
)


def rollout(group: str, member: int, reward: float | None) -> Trajectory:
    failed = reward is None
    kind = OutcomeKind.INFRASTRUCTURE if failed else OutcomeKind.SOLVED if reward else OutcomeKind.FAILED
    return Trajectory(
        trajectory_id=f"{group}-{member}",
        group_id=group,
        task_id=f"task-{group}",
        environment="toy",
        split=Split.FRESH,
        segments=() if failed else (SEGMENT,),
        outcome=Outcome(kind, "the machine died" if failed else ""),
        reward=reward,
        patch="a change",
    )


def group(name: str, *rewards: float | None) -> GroupResult:
    return GroupResult(name, f"task-{name}", 0, tuple(rollout(name, i, r) for i, r in enumerate(rewards)))


def test_one_sample_a_task_is_wilsons_interval() -> None:
    rate = solve_rate([group("a", 1.0), group("b", 0.0), group("c", 0.0), group("d", None)], Split.FRESH)
    assert (rate.n, rate.solve) == (3, pytest.approx(1 / 3))
    assert rate.interval == wilson(1, 3)
    assert set(rate.pass_at_k) == {1}


def test_samples_of_one_task_are_not_independent_trials() -> None:
    """One lost episode does not turn the interval over tasks into one over episodes."""
    groups = [group("a", 1.0, None), group("b", 0.0, 0.0), group("c", 1.0, 1.0)]
    rate = solve_rate(groups, Split.FRESH)
    assert rate.n == 5
    assert rate.interval != wilson(3, 5)
    assert set(rate.pass_at_k) == {1}


def test_nothing_counted_is_no_rate_of_zero() -> None:
    rate = solve_rate([group("a", None), group("b", None)], Split.FRESH)
    assert rate.n == 0
    assert math.isnan(rate.solve)


@pytest.mark.parametrize("summary", [{"n": 0, "tasks": 2}, {"errors": 2, "tasks": 2}])
def test_an_evaluation_that_machines_failed_exits_3(summary: dict[str, int], tmp_path: Path) -> None:
    class Folder:
        path = tmp_path

    with pytest.raises(InfrastructureError) as caught:
        _require_counted(summary, Folder())  # type: ignore[arg-type]
    assert caught.value.exit_code == 3
    _require_counted({"n": 1, "tasks": 2}, Folder())  # type: ignore[arg-type]


def test_a_prediction_is_a_line_of_the_official_harness() -> None:
    assert prediction(rollout("a", 0, 1.0), model="tiny") == {
        "instance_id": "task-a",
        "model_name_or_path": "tiny",
        "model_patch": "a change",
    }


def test_k19_a_server_that_dies_ends_an_evaluation_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although no request of the evaluation would ever come back; until then its load is told."""

    class Server:
        url, log_path = "http://policy", "logs/policy.log"

        async def wait_dead(self) -> ServerExit:
            await asyncio.sleep(0.8)
            return ServerExit(exit_code=-9, log_tail="last words")

    def in_flight() -> list[int]:
        return [0]

    async def stats() -> list[ServerStats]:
        return [ServerStats(3, 1, 0.5, 0, 0, 0, 0, 0)]

    async def label_version(_: int) -> None: ...

    async def hanging(*_: Any, **__: Any) -> None:
        await asyncio.sleep(60)

    @asynccontextmanager
    async def opened(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(
            router=SimpleNamespace(stats=stats, in_flight=in_flight, label_version=label_version),
            engine=SimpleNamespace(limit=4, active=4, waiting=0),
            controller=None,
            load=SimpleNamespace(add=lambda _: None),
            servers=(Server(),),
            process=None,
        )

    monkeypatch.setattr(services, "open_services", opened)
    monkeypatch.setattr(evaluation, "evaluate", hanging)
    monkeypatch.setattr(evaluate_command, "keep_tokenizer", lambda *_: None)
    told: list[str] = []
    recorder: Any = SimpleNamespace(tell=lambda kind, **_: told.append(kind))
    config, folder = RunConfig.model_validate({}), SimpleNamespace(path=tmp_path)
    wanted: Any = {"split": Split.FRESH, "tasks": 1, "samples": 1, "reference": False}
    with pytest.raises(PolicyDeadError, match="ended with exit code -9"):
        asyncio.run(asyncio.wait_for(evaluate_command._evaluation(config, folder, recorder, None, **wanted), 10))  # type: ignore[arg-type]
    assert "load" in told

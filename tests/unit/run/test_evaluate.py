"""Solve rates: what counts, what does not, and that nothing counted is no rate of 0."""

from __future__ import annotations

import math

import numpy as np
import pytest

from agentrl.errors import InfrastructureError
from agentrl.rollout.groups import GroupResult
from agentrl.run.command import _require_counted
from agentrl.run.evaluate import prediction, solve_rate
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
def test_an_evaluation_that_machines_failed_exits_3(summary: dict[str, int], tmp_path) -> None:
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

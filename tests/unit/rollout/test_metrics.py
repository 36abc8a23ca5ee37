"""Metrics by their public names (K33)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentrl.rollout.filters import FilterCounts, Verdict
from agentrl.rollout.groups import GroupResult
from agentrl.rollout.metrics import (
    concurrency_metrics,
    correction_metrics,
    filter_metrics,
    phase_seconds,
    rollout_metrics,
    staleness_metrics,
    throughput_metrics,
)
from agentrl.rollout.status import Usage
from agentrl.trajectory import OutcomeKind, Split, Trained, TurnTiming


def group(toys: Any, *members: dict[str, Any]) -> GroupResult:
    return GroupResult("g0", "task", 0, tuple(toys.trajectory(member=i, **m) for i, m in enumerate(members)))


def test_k33_reward_and_rates_count_each_valid_rollout_once(toys: Any) -> None:
    """Three segments and ten turns weigh as much as one; an infrastructure failure weighs nothing."""
    found = group(
        toys,
        {
            "reward": 1.0,
            "segments": [toys.segment(2)] * 3,
            "turns": (TurnTiming(),) * 10,
            "info": {"submitted": 1.0, "bad_calls": 2.0},
        },
        {"reward": 0.0, "turns": (TurnTiming(),) * 2, "kind": OutcomeKind.TRUNCATED_TURNS},
        {"reward": None, "info": {"attempts": 3.0, "submitted": 1.0}},
    )
    metrics = rollout_metrics([found], wall_s=10.0)
    assert metrics["reward/mean"] == 0.5
    assert metrics["solve/train"] == 0.5
    assert metrics["agent/submit_rate"] == 0.5
    assert metrics["agent/bad_calls"] == 1.0
    assert metrics["agent/turns"] == 6.0
    assert metrics["agent/truncated_fraction"] == 0.5
    assert metrics["rollout/infrastructure_failures"] == 1.0
    assert metrics["rollout/retries"] == 2.0


def test_tokens_add_up_and_count_sampled_ones(toys: Any) -> None:
    """2 prompt + n agent + 1 environment tokens per segment."""
    metrics = rollout_metrics([group(toys, {"segments": [toys.segment(3), toys.segment(1)]})], wall_s=10.0)
    assert (metrics["tokens/agent"], metrics["tokens/environment"]) == (4.0, 6.0)
    assert metrics["tokens/agent_fraction"] == 0.4


def test_solved_is_gradings_word_and_is_told_per_split(toys: Any) -> None:
    cut = {"kind": OutcomeKind.TRUNCATED_TIME, "reward": 1.0, "info": {"resolved": 1.0}}
    metrics = rollout_metrics(
        [group(toys, {**cut, "split": Split.FRESH}, {"reward": 0.0, "split": Split.FRESH})], wall_s=10.0
    )
    assert metrics["solve/fresh"] == 0.5
    assert "solve/train" not in metrics


def test_a_mean_over_nothing_is_left_out(toys: Any) -> None:
    metrics = rollout_metrics([group(toys, {"reward": None})], wall_s=10.0)
    assert "reward/mean" not in metrics
    assert "solve/train" not in metrics
    assert metrics["tokens/agent"] == 0.0
    assert staleness_metrics([group(toys, {"reward": None})], version=1) == {}


def test_staleness_is_weighted_by_token(toys: Any) -> None:
    found = group(toys, {"segments": [toys.segment(3, version=5)]}, {"segments": [toys.segment(1, version=2)]})
    assert staleness_metrics([found], version=5) == {"staleness/mean": 0.75, "staleness/max": 3.0}


def test_phase_seconds_share_out_the_wall(toys: Any) -> None:
    info = {"setup_s": 1.0, "episode_s": 5.0, "score_s": 2.0}
    t = toys.trajectory(info=info, turns=(TurnTiming(decode_s=2.0, tool_s=1.5), TurnTiming(tool_s=0.5)))
    seconds = phase_seconds([t, t], wall_s=4.0)
    assert seconds == {"time/tool_s": 1.0, "time/score_s": 1.0, "time/setup_s": 0.5, "time/generate_s": 1.5}
    assert sum(seconds.values()) == 4.0


def test_where_staleness_came_from_is_the_schedulers_word(toys: Any) -> None:
    """K16: the time in flight and in the queue counts as well, also in a step whose batch is empty."""
    assert staleness_metrics([], version=5, in_flight=0.5, in_queue=1.25) == {
        "staleness/in_flight": 0.5,
        "staleness/in_queue": 1.25,
    }
    found = staleness_metrics([group(toys, {"segments": [toys.segment(1, version=4)]})], version=5, in_flight=0.0)
    assert found == {"staleness/in_flight": 0.0, "staleness/mean": 1.0, "staleness/max": 1.0}


def test_concurrency_is_of_the_interval_and_per_server() -> None:
    usage = Usage(10.0, 3.5, 4)
    assert concurrency_metrics(usage) == {"concurrency/mean": 3.5, "concurrency/peak": 4.0}
    assert concurrency_metrics(usage, requests=(2.0, 1.0))["concurrency/per_replica_mean"] == 1.5


def test_throughput_is_per_device_over_the_whole_step(toys: Any) -> None:
    """5 tokens, 2 of them the agent's, in half a minute on two devices; the failed rollout counts nowhere."""
    metrics = throughput_metrics([group(toys, {}, {"reward": None})], seconds=30.0, devices=2)
    assert metrics == {
        "throughput/tokens_per_device_minute": pytest.approx(5.0),
        "throughput/agent_tokens_per_device_minute": pytest.approx(2.0),
        "throughput/environment_tokens_per_device_minute": pytest.approx(3.0),
        "throughput/trajectories_per_device_hour": pytest.approx(60.0),
        "throughput/devices": 2.0,
    }
    assert throughput_metrics([], seconds=0.0, devices=1) == {}


def trained(weights: list[float]) -> Trained:
    """The record of a segment of 2 prompt, `len(weights)` agent and 1 environment tokens; weight 0: taken out."""
    stream = np.array([0.0, 0.0, *weights, 0.0], np.float32)
    return Trained(1, np.where(stream > 0, 1.0, np.nan).astype(np.float32), stream, stream > 0)


def test_effective_tokens_are_kishs_over_all_agent_tokens(toys: Any) -> None:
    """Weights 2, 1, 1 and one token taken out: (2 + 1 + 1)² / (4 · (4 + 1 + 1)) of four tokens count in effect. A
    group without a record was not trained and counts nowhere."""
    one = group(toys, {"segments": [toys.segment(3), toys.segment(1)]})
    other = group(toys, {"segments": [toys.segment(9)]})
    records = {one.trajectories[0].trajectory_id: [trained([2.0, 0.0, 1.0]), trained([1.0])]}
    assert correction_metrics({}, [one], records) == {"tokens/effective_fraction": pytest.approx(16 / 24)}
    assert correction_metrics({}, [other], {other.trajectories[0].trajectory_id: None}) == {}
    assert correction_metrics({}, [other], {}) == {}


def test_k33_equal_weights_are_all_effective(toys: Any) -> None:
    one = group(toys, {"segments": [toys.segment(4)]})
    records = {one.trajectories[0].trajectory_id: [trained([0.5] * 4)]}
    assert correction_metrics({}, [one], records)["tokens/effective_fraction"] == pytest.approx(1.0)


def test_affected_tokens_are_clamped_or_masked() -> None:
    metrics = {"correction/clamped_fraction": 0.02, "correction/masked_token_fraction": 0.01}
    assert correction_metrics(metrics, [], {}) == {"correction/affected_token_fraction": pytest.approx(0.03)}
    assert correction_metrics({"correction/clamped_fraction": 0.02}, [], {}) == {}


def test_filter_counts_by_name() -> None:
    metrics = filter_metrics(FilterCounts.of([Verdict.ACCEPTED, Verdict.ZERO_VARIANCE, Verdict.FAILED]))
    assert metrics["groups/submitted"] == 3.0
    assert metrics["groups/zero_variance"] == metrics["groups/accepted"] == metrics["groups/failed"] == 1.0

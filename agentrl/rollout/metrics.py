"""From finished groups to the public metric names. Pure.

Rewards, solve rates and agent figures count each *valid* rollout once, however many turns or segments it has;
token metrics count tokens that were sampled. `tokens/environment` is every token that was read and not
sampled, prompts included, so that the two counts add up to all tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from agentrl.rollout.filters import FilterCounts
from agentrl.rollout.groups import GroupResult
from agentrl.rollout.status import Usage
from agentrl.trajectory import OutcomeKind, Trained, Trajectory

_HOUR_S, _MINUTE_S = 3600.0, 60.0


def rollout_metrics(groups: Sequence[GroupResult], *, wall_s: float) -> dict[str, float]:
    """Metrics of the groups that one step settled; `wall_s` seconds are shared out to the phases of their rollouts
    (`phase_seconds`). A mean over nothing is left out, never 0 or NaN."""
    every = [trajectory for group in groups for trajectory in group.trajectories]
    valid = [trajectory for group in groups for trajectory in group.valid]
    metrics = {
        "rollout/infrastructure_failures": float(len(every) - len(valid)),
        "rollout/retries": sum(t.info.get("attempts", 1.0) - 1.0 for t in every),
    }
    return metrics | _means(valid) | _tokens(valid) | _solve(valid) | phase_seconds(every, wall_s=wall_s)


def concurrency_metrics(usage: Usage, *, requests: Sequence[float] = ()) -> dict[str, float]:
    """Active trajectories over the interval of `usage`; `requests` in flight are each policy server's mean over it."""
    metrics = {"concurrency/mean": usage.concurrency_mean, "concurrency/peak": float(usage.concurrency_peak)}
    if requests:
        metrics["concurrency/per_replica_mean"] = float(np.mean(requests))
    return metrics


def staleness_metrics(
    groups: Sequence[GroupResult], *, version: int, in_flight: float | None = None, in_queue: float | None = None
) -> dict[str, float]:
    """Token-weighted mean and maximum of `version` minus the version of each sampled token of the batch.

    `in_flight` and `in_queue` say where the oldest tokens' staleness came from, in versions, means over the batch's
    groups (`Scheduler.staleness`): while the group was generated, and from then until it was trained.
    """
    streams = [s.versions[s.versions >= 0] for group in groups for t in group.valid for s in t.segments]
    versions = np.concatenate(streams) if streams else np.zeros(0, np.int32)
    causes = {"staleness/in_flight": in_flight, "staleness/in_queue": in_queue}
    metrics = {name: value for name, value in causes.items() if value is not None}
    if versions.size:
        behind = version - versions.astype(np.int64)
        metrics |= {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}
    return metrics


def filter_metrics(counts: FilterCounts) -> dict[str, float]:
    """How many groups of the step got which verdict."""
    return {
        "groups/submitted": float(counts.submitted),
        "groups/accepted": float(counts.accepted),
        "groups/zero_variance": float(counts.zero_variance),
        "groups/too_few_valid": float(counts.too_few_valid),
        "groups/stale": float(counts.stale),
        "groups/failed": float(counts.failed),
    }


def throughput_metrics(groups: Sequence[GroupResult], *, seconds: float, devices: int) -> dict[str, float]:
    """Tokens and rollouts per device over `seconds`, the whole step's: training and delivery included.

    `groups` are those that the step settled, so that each trajectory counts once, at the step that consumed it.
    """
    valid = [trajectory for group in groups for trajectory in group.valid]
    device_s = seconds * devices
    if device_s <= 0:
        return {}
    agent, every = sum(t.agent_tokens for t in valid), sum(t.tokens for t in valid)
    rates = {"tokens": every, "agent_tokens": agent, "environment_tokens": every - agent}
    return {
        **{f"throughput/{name}_per_device_minute": n * _MINUTE_S / device_s for name, n in rates.items()},
        "throughput/trajectories_per_device_hour": len(valid) * _HOUR_S / device_s,
        "throughput/devices": float(devices),
    }


def correction_metrics(
    metrics: Mapping[str, float], groups: Sequence[GroupResult], records: Mapping[str, Sequence[Trained] | None]
) -> dict[str, float]:
    """How much of what was trained counts: `tokens/effective_fraction` and `correction/affected_token_fraction`.

    The effective fraction is Kish's effective sample size of the applied weights over all agent tokens of the trained
    segments, those that correction took out with weight 0: (Σw)² / (N·Σw²). `records` is `trained_records`' answer,
    `metrics` the trainer's: a token is affected where its weight was clamped or it was masked.
    """
    weights = [
        record.weights[segment.agent_mask]
        for group in groups
        for t in group.valid
        for segment, record in zip(t.segments, records.get(t.trajectory_id) or (), strict=False)
    ]
    applied = np.concatenate(weights).astype(np.float64) if weights else np.zeros(0)
    found = {}
    if applied.any():
        found["tokens/effective_fraction"] = float(applied.sum() ** 2 / (applied.size * np.square(applied).sum()))
    names = ("correction/clamped_fraction", "correction/masked_token_fraction")
    if all(name in metrics for name in names):
        # A token that was clamped and then rejected counts twice; no preset does both to one token.
        found["correction/affected_token_fraction"] = min(1.0, sum(metrics[name] for name in names))
    return found


def phase_seconds(trajectories: Iterable[Trajectory], *, wall_s: float) -> dict[str, float]:
    """The wall seconds of a rollout phase, shared out by what the rollouts were busy with.

    Rollouts overlap, so their own seconds add up to more than the clock's; each phase gets the wall's share
    that it has of all busy seconds: generate (queue, prefill, decode), tool, score (collect and grade), setup
    (sandbox and work tree). The four add up to `wall_s`. Time in an episode that is neither the server's nor
    a tool's, the orchestrator's own, counts as generate; so does the wait for a server that delivers or trains.
    """
    found = list(trajectories)
    busy = {
        "tool": sum(turn.tool_s for t in found for turn in t.turns),
        "score": sum(t.info.get("score_s", 0.0) for t in found),
        "setup": sum(t.info.get("setup_s", 0.0) for t in found),
    }
    episode = sum(t.info.get("episode_s", 0.0) for t in found)
    busy["generate"] = max(0.0, episode - busy["tool"])
    total = sum(busy.values())
    if total <= 0:
        return {}
    return {f"time/{phase}_s": wall_s * seconds / total for phase, seconds in busy.items()}


def _means(valid: Sequence[Trajectory]) -> dict[str, float]:
    if not valid:
        return {}
    columns = {
        "reward/mean": [t.reward for t in valid if t.reward is not None],
        "agent/submit_rate": [t.info.get("submitted", 0.0) for t in valid],
        "agent/bad_calls": [t.info.get("bad_calls", 0.0) for t in valid],
        "agent/turns": [float(len(t.turns)) for t in valid],
        "agent/truncated_fraction": [float(t.outcome.truncated) for t in valid],
        "agent/segments": [float(len(t.segments)) for t in valid],
    }
    return {name: float(np.mean(values)) for name, values in columns.items() if values}


def _tokens(valid: Sequence[Trajectory]) -> dict[str, float]:
    agent, every = sum(t.agent_tokens for t in valid), sum(t.tokens for t in valid)
    share = {"tokens/agent_fraction": agent / every} if every else {}
    return {"tokens/agent": float(agent), "tokens/environment": float(every - agent), **share}


def _solve(valid: Sequence[Trajectory]) -> dict[str, float]:
    """Solve rate per split. A rollout cut by a limit may still have solved its task, so grading's word
    decides."""
    splits = sorted({t.split for t in valid})
    solved = {split: [float(is_solved(t)) for t in valid if t.split is split] for split in splits}
    return {f"solve/{split.value}": float(np.mean(values)) for split, values in solved.items()}


def is_solved(trajectory: Trajectory) -> bool:
    """True where grading found the task resolved."""
    resolved = trajectory.info.get("resolved")
    return trajectory.outcome.kind is OutcomeKind.SOLVED if resolved is None else bool(resolved)

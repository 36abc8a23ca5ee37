"""From finished groups to the public metric names. Pure.

Rewards, solve rates and agent figures count each *valid* rollout once, however many turns or segments it has;
token metrics count tokens that were sampled. `tokens/environment` is every token that was read and not
sampled, prompts included, so that the two counts add up to all tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from agentrl.rollout.filters import FilterCounts
from agentrl.rollout.groups import GroupResult
from agentrl.rollout.status import Usage
from agentrl.trajectory import OutcomeKind, Trajectory

_HOUR_S, _MINUTE_S = 3600.0, 60.0


def rollout_metrics(groups: Sequence[GroupResult], *, usage: Usage) -> dict[str, float]:
    """Metrics of the groups that one step generated. A mean over nothing is left out, never 0 or NaN."""
    every = [trajectory for group in groups for trajectory in group.trajectories]
    valid = [trajectory for group in groups for trajectory in group.valid]
    metrics = {
        "rollout/infrastructure_failures": float(len(every) - len(valid)),
        "rollout/retries": sum(t.info.get("attempts", 1.0) - 1.0 for t in every),
        "concurrency/mean": usage.concurrency_mean,
        "concurrency/peak": float(usage.concurrency_peak),
    }
    return metrics | _means(valid) | _tokens(valid) | _solve(valid) | phase_seconds(every, wall_s=usage.wall_s)


def staleness_metrics(groups: Sequence[GroupResult], *, version: int) -> dict[str, float]:
    """Token-weighted mean and maximum of `version` minus the version of each sampled token of the batch."""
    streams = [s.versions[s.versions >= 0] for group in groups for t in group.valid for s in t.segments]
    versions = np.concatenate(streams) if streams else np.zeros(0, np.int32)
    if not versions.size:
        return {}
    behind = version - versions.astype(np.int64)
    return {"staleness/mean": float(behind.mean()), "staleness/max": float(behind.max())}


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
    """All tokens and rollouts per device over `seconds`: the whole step's, training and delivery included."""
    valid = [trajectory for group in groups for trajectory in group.valid]
    device_s = seconds * devices
    if device_s <= 0:
        return {}
    return {
        "throughput/tokens_per_device_minute": sum(t.tokens for t in valid) * _MINUTE_S / device_s,
        "throughput/trajectories_per_device_hour": len(valid) * _HOUR_S / device_s,
    }


def phase_seconds(trajectories: Iterable[Trajectory], *, wall_s: float) -> dict[str, float]:
    """The wall seconds of a rollout phase, shared out by what the rollouts were busy with.

    Rollouts overlap, so their own seconds add up to more than the clock's; each phase gets the wall's share
    that it has of all busy seconds: generate (queue, prefill, decode), tool, score (collect and grade), setup
    (sandbox and work tree). The four add up to `wall_s`. Time in an episode that is neither the server's nor
    a tool's, the orchestrator's own, counts as generate.
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

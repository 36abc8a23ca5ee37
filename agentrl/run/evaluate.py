"""Solve rates: between training steps, and by `agentrl eval`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.config import RunConfig
from agentrl.rollout.cursor import TaskCursor
from agentrl.rollout.groups import GroupResult
from agentrl.rollout.metrics import is_solved
from agentrl.run.recorder import Recorder
from agentrl.run.services import Services
from agentrl.telemetry.statistics import Interval, pass_at_k_interval, wilson
from agentrl.trajectory import Split, Trajectory
from agentrl.wire import EventKind
from agentrl.wire.events import Phase

# Evaluation tasks are the same for every run, whatever its seed, so that runs can be compared.
EVAL_SEED = 0


@dataclass(frozen=True, slots=True)
class SolveRate:
    """`solve` is the mean over episodes, `interval` its 95 % interval; `n` episodes counted."""

    split: Split
    solve: float
    interval: Interval
    n: int
    pass_at_k: dict[int, Interval]


def solve_rate(groups: Sequence[GroupResult], split: Split) -> SolveRate:
    """Solve rate and pass@k of finished groups; infrastructure failures are left out (of nothing: NaN)."""
    per_task = [[is_solved(t) for t in group.valid] for group in groups if group.valid]
    n = sum(len(task) for task in per_task)
    solved = sum(sum(task) for task in per_task)
    samples = min((len(task) for task in per_task), default=0)
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= samples]
    counts = [(len(task), sum(task)) for task in per_task]
    # Samples of one task are not independent trials: with several, the interval is over tasks.
    several = any(len(task) > 1 for task in per_task)
    interval = pass_at_k_interval(counts, 1) if several else wilson(solved, n)
    return SolveRate(
        split=split,
        solve=solved / n if n else math.nan,
        interval=interval,
        n=n,
        pass_at_k={k: pass_at_k_interval(counts, k) for k in ks},
    )


async def evaluate(
    services: Services,
    recorder: Recorder,
    config: RunConfig,
    *,
    split: Split,
    tasks: int,
    samples: int,
    step: int,
) -> tuple[SolveRate, list[GroupResult]]:
    """Sample `samples` episodes of each of the split's first `tasks` tasks; rows are written, the rate is told."""
    cursor = TaskCursor(services.environment, split, seed=EVAL_SEED)
    requests = cursor.take(tasks, group_size=samples, prefix=f"eval{step}-")
    recorder.phase(Phase.EVALUATE, step=step, total=len(requests) * samples)
    episode = services.episode(temperature=config.eval.temperature, top_p=config.eval.top_p)
    groups = await services.engine.run_groups(requests, episode=episode, step=step)
    rate = solve_rate(groups, split)
    recorder.trajectories(f"step_{step:06d}-eval-{split.value}", [(t, None) for g in groups for t in g.trajectories])
    if rate.n == 0:
        return rate, groups
    recorder.tell(
        EventKind.EVAL_FINISHED,
        step=step,
        split=split.value,
        solve=rate.solve,
        n=rate.n,
        low=rate.interval.low,
        high=rate.interval.high,
    )
    return rate, groups


async def evaluate_splits(services: Services, recorder: Recorder, config: RunConfig, *, step: int) -> dict[str, float]:
    """Fresh and unseen tasks as configured; metrics by their public names."""
    metrics: dict[str, float] = {}
    for split, tasks in ((Split.FRESH, config.eval.fresh_tasks), (Split.UNSEEN, config.eval.unseen_tasks)):
        if tasks:
            rate, _ = await evaluate(
                services,
                recorder,
                config,
                split=split,
                tasks=tasks,
                samples=config.eval.samples_per_task,
                step=step,
            )
            if rate.n == 0:
                recorder.note(f"step {step}: no rollout on {split.value} tasks could be counted: machines failed all")
                continue
            metrics[f"solve/{split.value}"] = rate.solve
            metrics[f"solve/{split.value}_n"] = float(rate.n)
    return metrics


def prediction(trajectory: Trajectory, *, model: str) -> dict[str, str]:
    """A line of predictions.jsonl as the official SWE-bench harness reads it."""
    return {"instance_id": trajectory.task_id, "model_name_or_path": model, "model_patch": trajectory.patch}

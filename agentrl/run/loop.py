"""A training run, told top to bottom.

deliver the loaded weights (version n)
evaluate
repeat:
    generate    P groups of G rollouts with version n: agents in sandboxes against the policy server
    score       rewards → advantages; groups that teach nothing are set aside
    train       one batch, k optimizer steps, rollout correction in the loss
    deliver     the new weights as version n + 1; proved by a probe
    record      trajectories, metrics, alarms; now and then evaluate and checkpoint
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.errors import RunFailedError
from agentrl.rollout.batching import form_batch, trained_records
from agentrl.rollout.buffer import GroupBuffer
from agentrl.rollout.cursor import TaskCursor
from agentrl.rollout.filters import DrySpell, FilterCounts, Verdict
from agentrl.rollout.groups import GroupResult, ScoredGroup, score_groups
from agentrl.rollout.metrics import (
    filter_metrics,
    rollout_metrics,
    staleness_metrics,
    throughput_metrics,
)
from agentrl.rollout.schedule import SyncSchedule
from agentrl.rollout.scheduler import Scheduler
from agentrl.run.evaluate import evaluate_splits
from agentrl.run.folder import RunFolder
from agentrl.run.recorder import Recorder
from agentrl.run.resume import Start, fixed_settings
from agentrl.run.services import Services
from agentrl.run.state import RunState
from agentrl.trajectory import Split, Trained
from agentrl.wire import EventKind
from agentrl.wire.events import Phase

_SAVE_TIMEOUT_S = 600.0


@dataclass(slots=True)
class TrainingRun:
    """The moving parts of a run. `step` steps are done; the servers hold `version`."""

    config: RunConfig
    folder: RunFolder
    recorder: Recorder
    services: Services
    buffer: GroupBuffer
    cursor: TaskCursor
    scheduler: Scheduler
    dry: DrySpell
    step: int = 0
    resumed: bool = False
    minutes_before: float = 0.0
    scores: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def version(self) -> int:
        return self.scheduler.version

    @property
    def minutes(self) -> float:
        """Minutes of this run, earlier sittings included."""
        return self.minutes_before + (time.monotonic() - self.began) / 60


def prepare_run(
    config: RunConfig, folder: RunFolder, recorder: Recorder, services: Services, buffer: GroupBuffer, start: Start
) -> TrainingRun:
    """Take up where the checkpoint left off: rows consumed and metrics written after it are taken back."""
    state = start.state
    cursor = TaskCursor(services.environment, Split.TRAIN, seed=config.seed)
    if state.cursor:
        cursor.restore(state.cursor)
    through = state.step if start.checkpoint else -1  # without a checkpoint step 0 is done again as well
    recorder.take_back(after_step=through)
    buffer.take_back(after_step=through)
    schedule = SyncSchedule(config.rollout.groups, config.train.updates_per_step)
    dry = DrySpell(config.rollout.zero_variance_warn, config.rollout.zero_variance_stop, state.dry)
    return TrainingRun(
        config=config,
        folder=folder,
        recorder=recorder,
        services=services,
        buffer=buffer,
        cursor=cursor,
        scheduler=Scheduler(schedule, version=state.version),
        dry=dry,
        step=state.step,
        resumed=start.checkpoint is not None,
        minutes_before=state.minutes,
    )


async def train(run: TrainingRun) -> None:
    """Run to `config.steps`. Raises what ends the run; everything up to the last checkpoint can be resumed."""
    await _deliver(run, run.version, step=run.step)
    if not run.resumed:
        metrics = await evaluate_splits(run.services, run.recorder, run.config, step=0)
        run.scores = metrics
        run.recorder.step(0, metrics)
        await _checkpoint(run)
    while run.step < run.config.steps:
        await _step(run)


async def _step(run: TrainingRun) -> None:
    step, began = run.step + 1, time.monotonic()
    groups = await _generate(run, step)
    usage = run.services.engine.take_usage()
    metrics = rollout_metrics(groups, usage=usage) | run.services.load.take()

    run.recorder.phase(Phase.SCORE, step=step)
    scored = score_groups(groups, advantage=run.config.train.advantage.name)
    batch_groups = _settle(run, scored)
    counts = FilterCounts.of(group.verdict for group in scored)
    metrics |= filter_metrics(counts) | staleness_metrics([g.group for g in batch_groups], version=run.version)

    records: dict[str, list[Trained] | None] = {}
    if batch_groups:
        trained, records = await _train(run, step, batch_groups)
        metrics |= trained
        metrics |= await _deliver(run, run.version + 1, step=step)
    else:
        run.scheduler.next_round()
        run.recorder.note(f"step {step}: no group to learn from, nothing trained")

    seconds = time.monotonic() - began
    metrics |= throughput_metrics(groups, seconds=seconds, devices=run.services.devices)
    metrics |= run.services.sandbox_metrics()
    metrics |= _shares(metrics, seconds) | {"policy/version": float(run.version), "time/step_s": seconds}
    _record(run, step, groups, records)
    run.step = step
    last = step == run.config.steps
    if evaluated := last or _is_due(step, run.config.eval.every_steps):
        run.scores = await evaluate_splits(run.services, run.recorder, run.config, step=step)
        metrics |= run.scores
    run.recorder.step(step, metrics | {"time/minutes": run.minutes})
    if warning := run.dry.observe(counts):  # after the rows: who looks for the reason finds the rollouts
        run.recorder.note(warning)
    # Evaluated weights are always kept: a score must never stand at other weights than its own.
    if evaluated or _is_due(step, run.config.checkpoint.every_steps):
        await _checkpoint(run)


def _is_due(step: int, every_steps: int) -> bool:
    """True every `every_steps` steps; never where it is 0."""
    return every_steps > 0 and step % every_steps == 0


async def _generate(run: TrainingRun, step: int) -> list[GroupResult]:
    """The step's groups, in the order of the data. What an interrupted run had finished is taken as it is."""
    size = run.config.rollout.group_size
    kept = _kept(run)
    requests = run.cursor.take(run.scheduler.admissible(), group_size=size)
    for request in requests:
        run.scheduler.submit(request.group_id)
    missing = [request for request in requests if request.group_id not in kept]
    run.recorder.phase(Phase.GENERATE, step=step, total=len(missing) * size)
    # What is measured is the generation alone: the interval begins here, not where the last one was read.
    run.services.engine.take_usage()
    run.services.load.take()
    fresh = await run.services.engine.run_groups(
        missing,
        episode=run.services.episode(temperature=run.config.rollout.temperature),
        step=step,
        on_group=run.buffer.put,
    )
    kept |= {group.group_id: group for group in fresh}
    groups = [kept[request.group_id] for request in requests]
    if not any(group.valid for group in groups):
        run.recorder.trajectories(_rows_of(step), [(t, None) for group in groups for t in group.trajectories])
        causes = sorted({t.outcome.cause for group in groups for t in group.trajectories})
        raise RunFailedError(
            f"every rollout of step {step} failed: {'; '.join(causes[:3])}",
            where=f"step {step}, {len(groups)} groups",
            remedy="mend the cause (`agentrl doctor` looks at this machine), then go on with --resume",
        )
    return groups


def _kept(run: TrainingRun) -> dict[str, GroupResult]:
    """Waiting groups that are as if generated now: of this version, size and temperature. The others are dropped."""
    run.buffer.drop_other_versions(run.version)
    wanted = run.config.rollout
    waiting = {group.group_id: group for group in run.buffer.waiting()}
    unlike = {
        name
        for name, group in waiting.items()
        if len(group.trajectories) != wanted.group_size
        or any(t.temperature != wanted.temperature for t in group.trajectories)
    }
    run.buffer.drop(unlike)
    return {name: group for name, group in waiting.items() if name not in unlike}


def _settle(run: TrainingRun, scored: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Tell the scheduler how each group ended; the groups of the batch."""
    for group in scored:
        run.scheduler.finish(group.group.group_id, group.verdict, group.group.versions)
    taken = set(run.scheduler.batch()) if run.scheduler.ready() else set()
    return [group for group in scored if group.verdict is Verdict.ACCEPTED and group.group.group_id in taken]


async def _train(
    run: TrainingRun, step: int, groups: Sequence[ScoredGroup]
) -> tuple[dict[str, float], dict[str, list[Trained] | None]]:
    run.recorder.phase(Phase.TRAIN, step=step)
    assert run.services.trainer is not None
    batch = form_batch(
        groups,
        step=step,
        version=run.version,
        updates=run.scheduler.schedule.updates,
        temperature=run.config.rollout.temperature,
        max_staleness=run.scheduler.schedule.max_staleness,
    )
    result = await run.services.trainer.train(batch, timeout_s=run.config.train.step_timeout_s)
    return result.metrics, trained_records(batch, result, groups)


async def _deliver(run: TrainingRun, version: int, *, step: int) -> dict[str, float]:
    began = time.monotonic()
    run.recorder.phase(Phase.DELIVER, step=step)
    delivery = await run.services.deliver(version)
    if version != run.version:
        run.scheduler.delivered(version)
    run.recorder.tell(
        EventKind.DELIVERY_FINISHED,
        step=step,
        version=version,
        paused_s=delivery.paused_s,
        total_s=delivery.total_s,
        probe_max_abs=delivery.probe_max_abs,
    )
    return {"time/deliver_s": time.monotonic() - began, "deliver/probe_max_abs": delivery.probe_max_abs}


def _shares(metrics: dict[str, float], seconds: float) -> dict[str, float]:
    """What part of the step the trainer and the policy server stood still (nothing overlaps in `sync`)."""
    if seconds <= 0:
        return {}
    train = metrics.get("time/train_s", 0.0)
    inference = metrics.get("time/generate_s", 0.0)
    return {"idle/trainer_fraction": 1 - train / seconds, "idle/inference_fraction": 1 - inference / seconds}


def _rows_of(step: int) -> str:
    """The name of a step's trajectory file."""
    return f"step_{step:06d}-train"


def _record(
    run: TrainingRun, step: int, groups: Sequence[GroupResult], records: dict[str, list[Trained] | None]
) -> None:
    """Each group's rows, once, and the buffer's note that they are written."""
    rows = [(t, records.get(t.trajectory_id)) for group in groups for t in group.trajectories]
    run.recorder.trajectories(_rows_of(step), rows)
    run.buffer.settle([group.group_id for group in groups], step=step)


async def _checkpoint(run: TrainingRun) -> Path:
    run.recorder.phase(Phase.CHECKPOINT, step=run.step)
    assert run.services.trainer is not None
    state = RunState(
        step=run.step,
        version=run.version,
        cursor=run.cursor.state(),
        dry=run.dry.length,
        minutes=run.minutes,
        settings=fixed_settings(run.config),
    )
    score = run.scores.get("solve/fresh")
    run.scores = {}
    saved = await run.services.trainer.save(run.step, state.to_bytes(), score=score, timeout_s=_SAVE_TIMEOUT_S)
    run.buffer.prune(through_step=run.step)
    if saved.is_best:
        run.recorder.note(f"step {run.step} is the best so far (solve rate {score:.1%} on fresh tasks)")
    return Path(saved.path)

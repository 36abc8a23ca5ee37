"""A training run, told top to bottom; one loop for every schedule.

deliver the loaded weights (version n)
evaluate
beside the loop, for ever: admit groups as places fall free; agents in sandboxes against the policy servers; score
repeat:
    wait        until P groups are settled and the staleness bound lets them be trained (`Scheduler`)
    train       one batch, k optimizer steps, rollout correction in the loss; in `async` rollouts go on meanwhile
    deliver     the new weights as version n + 1 to every server; proved by a probe; what runs there goes on
    record      trajectories, metrics, alarms; now and then evaluate and checkpoint
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.config.distill import SELF
from agentrl.errors import RunFailedError
from agentrl.rollout.batching import form_batch, trained_records
from agentrl.rollout.buffer import GroupBuffer
from agentrl.rollout.cursor import TaskCursor
from agentrl.rollout.filters import DrySpell
from agentrl.rollout.groups import GroupResult
from agentrl.rollout.metrics import staleness_metrics
from agentrl.rollout.schedule import BoundedSchedule
from agentrl.rollout.scheduler import Scheduler
from agentrl.rollout.source import GroupCursor, GroupStream
from agentrl.run.evaluate import evaluate_splits
from agentrl.run.feed import GroupFeed, Settled
from agentrl.run.folder import RunFolder
from agentrl.run.kept import drop_all, drop_changed, sampled_alike
from agentrl.run.recorded import RecordedCursor, RecordedRun
from agentrl.run.recorded_stream import RecordedStream
from agentrl.run.recorder import Recorder
from agentrl.run.resume import Start, fixed_settings, teaching_digest
from agentrl.run.services import Services
from agentrl.run.state import RunState
from agentrl.run.steps import StepMeter
from agentrl.run.supervise import Doing, supervised
from agentrl.trajectory import Split, Trained
from agentrl.wire import EventKind
from agentrl.wire.events import Phase

_SAVE_TIMEOUT_S = 600.0


@dataclass(slots=True)
class TrainingRun:
    """The moving parts of a run. `step` steps are done; the servers hold `version`; `recorded`: another run whose
    rollouts are learned from, in place of new ones."""

    config: RunConfig
    folder: RunFolder
    recorder: Recorder
    services: Services
    buffer: GroupBuffer
    cursor: GroupCursor
    scheduler: Scheduler
    dry: DrySpell
    start: Start
    recorded: RecordedRun | None = None
    step: int = 0
    minutes_before: float = 0.0
    feed: GroupFeed | None = None
    training: bool = False
    scores: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    @property
    def version(self) -> int:
        return self.scheduler.version

    @property
    def minutes(self) -> float:
        """Minutes of this run, earlier sittings included."""
        return self.minutes_before + (time.monotonic() - self.began) / 60

    @contextmanager
    def trainer_at_work(self) -> Iterator[None]:
        """The block trains, or publishes and delivers what was trained: its devices are busy."""
        self.training = True
        self.services.load.mark(training=True)
        try:
            yield
        finally:
            self.training = False
            self.services.load.mark(training=False)

    def doing(self) -> Doing:
        """For those who watch."""
        counts = self.scheduler.counts()
        return Doing(in_flight=counts.running, queued=counts.queued, training=self.training)


def prepare_run(
    config: RunConfig,
    folder: RunFolder,
    recorder: Recorder,
    services: Services,
    buffer: GroupBuffer,
    start: Start,
    recorded: RecordedRun | None = None,
) -> TrainingRun:
    """Take up where the checkpoint left off: rows consumed and metrics written after it are taken back."""
    state = start.state
    cursor: GroupCursor = (
        TaskCursor(services.environment, Split.TRAIN, seed=config.seed)
        if recorded is None
        else RecordedCursor(recorded, services.environment)
    )
    if state.cursor:
        cursor.restore(state.cursor)
    through = state.step if start.checkpoint else -1  # without a checkpoint step 0 is done again as well
    recorder.take_back(after_step=through)
    buffer.take_back(after_step=through)
    wanted = config.rollout
    schedule = BoundedSchedule(
        groups=wanted.groups,
        updates=config.train.updates_per_step,
        max_staleness=wanted.staleness_bound,
        window=wanted.window,
        oversample=wanted.oversample,
        replace_filtered=wanted.replace_filtered,
        total=wanted.groups * (config.steps - state.step),
    )
    return TrainingRun(
        config=config,
        folder=folder,
        recorder=recorder,
        services=services,
        buffer=buffer,
        cursor=cursor,
        scheduler=Scheduler(schedule, version=state.version),
        dry=DrySpell(wanted.zero_variance_warn, wanted.zero_variance_stop, state.dry),
        start=start,
        recorded=recorded,
        step=state.step,
        minutes_before=state.minutes,
    )


async def train(run: TrainingRun) -> None:
    """Run to `config.steps`. Raises what ends the run; everything up to the last checkpoint can be resumed."""
    async with (
        supervised(run.services, run.recorder, run.doing) as tasks,
        _open_stream(run) as stream,
    ):
        feed = run.feed = GroupFeed(
            config=run.config,
            scheduler=run.scheduler,
            cursor=run.cursor,
            buffer=run.buffer,
            stream=stream,
            dry=run.dry,
            kept=await _kept(run),
            note=run.recorder.note,
        )
        feed.restore(run.start.state.in_flight)
        feed.look_ahead()  # the first groups' sandboxes are ready when the evaluation is over
        await _deliver(run, run.version, step=run.step)
        if run.start.checkpoint is None:
            run.scores = await evaluate_splits(run.services, run.recorder, run.config, step=0)
            run.recorder.step(0, run.scores)
            await _checkpoint(run)
        meter = StepMeter(run.services)
        feeding = tasks.create_task(feed.run(), name="feed")
        try:
            while run.step < run.config.steps:
                await _step(run, feed, meter)
        finally:
            feeding.cancel()  # before the stream closes, which takes no more groups


def _open_stream(run: TrainingRun) -> AbstractAsyncContextManager[GroupStream]:
    """New rollouts by the engine, or recorded ones, scored anew."""
    services, wanted = run.services, run.config.rollout
    if run.recorded is None:
        episode = services.episode(temperature=wanted.temperature)
        return services.engine.open(episode, step=run.step + 1, scorer=services.scorer)
    assert services.scorer is not None
    run.recorder.note(run.recorded.describe())
    return RecordedStream(
        run.recorded,
        services.scorer,
        emit=run.recorder.emit,
        step=run.step + 1,
        limit_s=wanted.group_timeout_s,
        concurrency=run.config.distill.concurrency,
    )


async def _kept(run: TrainingRun) -> dict[str, GroupResult]:
    """Groups that an interrupted run had finished, sampled and scored as configured. The others are dropped and
    generated again."""
    other_scores = run.start.state.teaching != teaching_digest(run.config)
    if run.recorded is not None or other_scores:  # recorded ones are read and scored again
        drop_all(run.buffer)
        return {}
    kept = sampled_alike(run.buffer, run.config.rollout, version=run.version)
    if run.services.scorer is None:
        return kept
    fixed = [teacher.name for teacher in run.config.distill.teachers if teacher.resolved_kind != SELF]
    return await drop_changed(run.buffer, kept, run.services.scorer, run.cursor, teachers=fixed, note=run.recorder.note)


async def _step(run: TrainingRun, feed: GroupFeed, meter: StepMeter) -> None:
    step = run.step + 1
    run.recorder.phase(Phase.GENERATE, step=step, total=run.config.rollout.groups * run.config.rollout.group_size)
    settled = await feed.batch()
    began = time.monotonic()
    _require_valid(run, step, settled)
    evaluating = step == run.config.steps or _is_due(step, run.config.eval.every_steps)
    feed.look_ahead()
    metrics = _staleness(run, settled)
    records: dict[str, list[Trained] | None] = {}
    if settled.trained:
        settled = await feed.drop(settled, run.scheduler.doomed())
        with run.trainer_at_work():
            trained, records = await _train(run, step, settled)
            metrics |= trained | await _deliver(run, run.version + 1, step=step)
    else:
        run.scheduler.next_round()
        settled = await feed.drop(settled, run.scheduler.doomed())  # after the last step: whatever is left
        run.recorder.note(f"step {step}: no group to learn from, nothing trained")
    feed.next_step(step + 1)
    feed.hold(evaluating and run.services.placement.colocated)
    feed.admit()
    apart_s = time.monotonic() - began
    metrics |= meter.read(settled, apart_s=apart_s, trainer=metrics, records=records)
    metrics["policy/version"] = float(run.version)
    _record(run, step, settled, records)
    run.step = step
    if evaluating:
        run.scores = await evaluate_splits(run.services, run.recorder, run.config, step=step)
        metrics |= run.scores
    run.recorder.step(step, metrics | {"time/minutes": run.minutes})
    if warning := run.dry.observe(settled.counts):  # after the rows: who looks for the reason finds the rollouts
        run.recorder.note(warning)
    # Evaluated weights are always kept: a score must never stand at other weights than its own.
    if evaluating or _is_due(step, run.config.checkpoint.every_steps):
        await _checkpoint(run)
    if not run.scheduler.counts().running:
        meter.restart()
    feed.hold(False)
    feed.admit()


def _is_due(step: int, every_steps: int) -> bool:
    """True every `every_steps` steps; never where it is 0."""
    return every_steps > 0 and step % every_steps == 0


def _require_valid(run: TrainingRun, step: int, settled: Settled) -> None:
    """Raise `RunFailedError` where machines failed every rollout of the step; their rows are written first."""
    groups = settled.groups
    if any(group.valid for group in groups):
        return
    run.recorder.trajectories(_rows_of(step), [(t, None) for group in groups for t in group.trajectories])
    causes = sorted({t.outcome.cause for group in groups for t in group.trajectories})
    raise RunFailedError(
        f"every rollout of step {step} failed: {'; '.join(causes[:3])}",
        where=f"step {step}, {len(groups)} groups",
        remedy="mend the cause (`agentrl doctor` looks at this machine), then go on with --resume",
    )


def _staleness(run: TrainingRun, settled: Settled) -> dict[str, float]:
    if not settled.trained or run.recorded is not None:  # versions of another run are no staleness
        return {}
    in_flight, in_queue = run.scheduler.staleness()
    trained = [scored.group for scored in settled.trained]
    return staleness_metrics(trained, version=run.version, in_flight=in_flight, in_queue=in_queue)


async def _train(
    run: TrainingRun, step: int, settled: Settled
) -> tuple[dict[str, float], dict[str, list[Trained] | None]]:
    run.recorder.phase(Phase.TRAIN, step=step)
    assert run.services.trainer is not None
    batch = form_batch(
        settled.trained,
        step=step,
        version=run.version,
        updates=run.scheduler.schedule.updates,
        temperature=run.config.rollout.temperature,
        max_staleness=None if run.recorded else run.scheduler.schedule.max_staleness,
        reward_weight=run.config.distill.reward_weight if run.config.distill.active else 1.0,
    )
    await run.services.give_devices_to_trainer()
    result = await run.services.trainer.train(batch, timeout_s=run.config.train.step_timeout_s)
    return result.metrics, trained_records(batch, result, settled.trained)


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


def _rows_of(step: int) -> str:
    """The name of a step's trajectory file."""
    return f"step_{step:06d}-train"


def _record(run: TrainingRun, step: int, settled: Settled, records: dict[str, list[Trained] | None]) -> None:
    """Each group's rows, once, and the buffer's note that they are written."""
    groups = settled.groups
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
        in_flight={} if run.feed is None else run.feed.state(),
        dry=run.dry.length,
        minutes=run.minutes,
        settings=fixed_settings(run.config),
        teaching=teaching_digest(run.config),
    )
    score = run.scores.get("solve/fresh")
    run.scores = {}
    saved = await run.services.trainer.save(run.step, state.to_bytes(), score=score, timeout_s=_SAVE_TIMEOUT_S)
    run.buffer.prune(through_step=run.step)
    if saved.is_best:
        run.recorder.note(f"step {run.step} is the best so far (solve rate {score:.1%} on fresh tasks)")
    return Path(saved.path)

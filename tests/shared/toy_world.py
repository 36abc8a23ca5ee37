"""A whole run without vLLM, torch or sandboxes: the real loop, engine, buffer, recorder and delivery around a toy.

Everything in it is deterministic from (seed, weights): tokens from the prompt, the weights that were *delivered* and
the rollout's name; rewards from the tokens; losses and new weights from the batch. So a run that resumes from a
crash must repeat the uninterrupted one to the last number, or something was lost, doubled or not delivered.

`World.tick` is called before and after every effect outside the loop; `crash_at` makes one of these the last.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from recorded_runs import TINY
from toy_parts import Crash, ToyEnvironment, ToyEpisode, ToyPolicy, ToyPool, ToyRouter, ToyTeacher, ToyTrainer

from agentrl.config import RunConfig
from agentrl.rollout.buffer import GroupBuffer
from agentrl.rollout.driver import Limits
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.scoring import Scorer
from agentrl.run import loop
from agentrl.run.folder import RunFolder, open_run_folder
from agentrl.run.load import LoadMeter
from agentrl.run.placement import Placement
from agentrl.run.recorded import RecordedRun
from agentrl.run.recorder import Recorder
from agentrl.run.resume import Start
from agentrl.run.services import Services
from agentrl.run.state import RunState
from agentrl.telemetry.metrics import read_events, read_metrics
from agentrl.trajectory import read_trajectories
from agentrl.wire import (
    EventKind,
)


@dataclass(slots=True)
class ToyServices(Services):
    """The real services, with the toy's agent."""

    submits: bool = True
    hang: bool = False

    def episode(self, *, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Any:
        return ToyEpisode(self.router.policy, temperature, self.submits, self.hang)  # type: ignore[attr-defined]


class AuditedScheduler(loop.Scheduler):
    """K17: the ledger balances after every event."""

    def _audited(self, name: str, *arguments: Any) -> Any:
        result = getattr(super(), name)(*arguments)
        counts = self.counts()
        assert counts.balanced, (name, counts)
        return result

    def submit(self, group_id: str) -> None:
        self._audited("submit", group_id)

    def finish(self, group_id: str, verdict: Any, span: Any = None) -> None:
        self._audited("finish", group_id, verdict, span)

    def batch(self) -> Any:
        return self._audited("batch")

    def drop(self, group_id: str) -> Any:
        return self._audited("drop", group_id)

    def restore(self, group_id: str, submit_version: int) -> None:
        self._audited("restore", group_id, submit_version)

    def delivered(self, version: int) -> None:
        self._audited("delivered", version)

    def next_round(self) -> None:
        self._audited("next_round")


class AuditedRecorder(Recorder):
    """Ticks around what reaches the disk."""

    tick: Callable[[str], None]

    def trajectories(self, name: str, items: Any) -> None:
        self.tick("rows")
        super().trajectories(name, items)
        self.tick("rows written")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.tick("metrics")
        super().step(step, metrics)
        self.tick("metrics written")


SETTINGS: dict[str, Any] = {
    "steps": 5,
    "rollout": {"groups": 3, "group_size": 3, "concurrency": 4, "zero_variance_warn": 2, "zero_variance_stop": 3},
    "train": {"updates_per_step": 1, "correction": "off"},
    "eval": {"every_steps": 2, "fresh_tasks": 2, "unseen_tasks": 0},
    "checkpoint": {"every_steps": 2},
}


def _recorded(config: RunConfig) -> RecordedRun | None:
    source = config.distill.from_run
    return None if source is None else RecordedRun.open(source, model=TINY, config=config)


@dataclass
class World:
    """One run folder and the sittings in it. After `crash_at` ticks of a sitting it crashes."""

    path: Path
    settings: Mapping[str, Any] = field(default_factory=lambda: SETTINGS)
    environment: ToyEnvironment = field(default_factory=ToyEnvironment)
    pool: ToyPool = field(default_factory=ToyPool)
    submits: bool = True
    hang: bool = False  # no rollout of the training ever ends
    process: Any = None
    teacher: ToyTeacher | None = None
    scorer: Scorer | None = None  # in place of the teacher alone
    servers: tuple[Any, ...] = ()
    crash_at: int | None = None
    on_tick: Callable[[str, int], None] | None = None
    ticks: list[str] = field(default_factory=list)

    @property
    def config(self) -> RunConfig:
        return RunConfig.model_validate({**self.settings, "run_dir": self.path})

    def tick(self, what: str) -> None:
        self.ticks.append(what)
        if self.on_tick is not None:
            self.on_tick(what, self.ticks.count(what))
        if self.crash_at is not None and len(self.ticks) >= self.crash_at:
            raise Crash(f"crash at tick {self.crash_at}: {what}")

    def start(self) -> tuple[Start, float]:
        """Where the next sitting begins, and with which weights."""
        found = sorted((self.path / "checkpoints").glob("step_*.json"))
        if not found:
            return Start(), 1.0
        saved = json.loads(found[-1].read_text())
        return Start(found[-1], RunState.from_bytes(saved["state"].encode())), saved["weights"]

    def sit(self, *, crash_at: int | None = None) -> loop.TrainingRun:
        """Start or resume the run and go on to its end, or to the crash (which is raised)."""
        self.crash_at, self.ticks = crash_at, []
        folder = open_run_folder(self.path, resume=(self.path / "config.toml").exists())
        folder.write_config("")
        try:
            return asyncio.run(self._sit(folder))
        finally:
            folder.close()

    async def _sit(self, folder: RunFolder) -> loop.TrainingRun:
        config = self.config
        start, weights = self.start()
        recorder = AuditedRecorder(folder, steps=config.steps, alarms=config.alarms, plain=True)
        recorder.tick = self.tick
        self.policy = ToyPolicy(self.tick)
        self.trainer = ToyTrainer(folder.path, self.tick, weights, version=-1)
        with recorder, GroupBuffer(folder.buffer) as buffer:
            engine = RolloutEngine(
                environment=self.environment,
                pool=self.pool,
                limits=Limits(lease_s=5, episode_s=5, grade_s=5, rollout_s=20, retries=1),
                concurrency=config.rollout.concurrency,
                ready_ahead=config.rollout.ready_ahead,
                emit=recorder.emit,
            )
            services = ToyServices(
                config=config,
                environment=self.environment,
                engine=engine,
                router=ToyRouter(self.policy),  # type: ignore[arg-type]
                controller=None,
                chat=None,  # type: ignore[arg-type]
                load=LoadMeter(),
                placement=Placement((None,), (None,), 2, colocated=config.rollout.schedule == "sync"),
                trainer=self.trainer,  # type: ignore[arg-type]
                process=self.process,
                servers=self.servers,
                submits=self.submits,
                hang=self.hang,
                scorer=self.scorer or (Scorer({"toy": self.teacher}, timeout_s=5) if self.teacher else None),
            )
            run = loop.prepare_run(config, folder, recorder, services, buffer, start, _recorded(config))
            await loop.train(run)
            self.waiting = [group.group_id for group in buffer.waiting()]
            return run

    # --- what a run leaves

    def metrics(self) -> dict[int, dict[str, float]]:
        """Metrics by step; steps are there once. Without what a clock or a crash (retries) decides."""
        rows = read_metrics(self.path / "metrics.jsonl")
        assert [row.step for row in rows] == sorted({row.step for row in rows})
        clocked = ("time/", "throughput/", "idle/", "concurrency/", "kv/", "fairness/")
        return {row.step: {k: v for k, v in row.values.items() if not k.startswith(clocked)} for row in rows}

    def rows(self) -> dict[str, list[tuple[Any, ...]]]:
        """What each trajectory file says, by its name."""
        found = {}
        for file in sorted((self.path / "trajectories").iterdir()):
            found[file.name] = [
                (
                    t.trajectory_id,
                    t.task_id,
                    t.reward,
                    [s.token_ids.tolist() for s in t.segments],
                    [s.versions.tolist() for s in t.segments],
                    trained and [(one.step, np.nan_to_num(one.advantages).tolist()) for one in trained],
                )
                for t, trained in read_trajectories([file])
            ]
        return found

    def last_state(self) -> dict[str, Any]:
        """The newest checkpoint, without its clock."""
        start, weights = self.start()
        state = json.loads(start.state.to_bytes())
        del state["minutes"]
        return {**state, "weights": weights}

    def events(self, kind: EventKind) -> list[dict[str, Any]]:
        return [event.data for event in read_events(self.path / "events.jsonl") if event.kind == kind]

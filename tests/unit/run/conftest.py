"""A whole run without vLLM, torch or sandboxes: the real loop, engine, buffer, recorder and delivery around a toy.

Everything in it is deterministic from (seed, weights): tokens from the prompt, the weights that were *delivered* and
the rollout's name; rewards from the tokens; losses and new weights from the batch. So a run that resumes from a
crash must repeat the uninterrupted one to the last number, or something was lost, doubled or not delivered.

`World.tick` is called before and after every effect outside the loop; `crash_at` makes one of these the last.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.config import RunConfig
from agentrl.rollout.buffer import GroupBuffer
from agentrl.rollout.driver import Limits
from agentrl.rollout.engine import RolloutEngine
from agentrl.run import loop
from agentrl.run.folder import RunFolder, open_run_folder
from agentrl.run.recorder import Recorder
from agentrl.run.resume import Start
from agentrl.run.services import LoadMeter, Services
from agentrl.run.state import RunState
from agentrl.telemetry.metrics import read_events, read_metrics
from agentrl.trajectory import FinishReason, Purpose, Segment, Span, SpanKind, Split, TurnTiming, read_trajectories
from agentrl.wire import (
    Batch,
    ChatMessage,
    EventKind,
    Generation,
    Grade,
    SamplingParams,
    Saved,
    StepResult,
    Task,
    TrainedSequence,
    WeightManifest,
)

VOCABULARY = 50
PROBE = np.array([1, 2, 3], np.int32)


class Crash(BaseException):
    """The process dies here: nothing handles it."""


def number(*parts: object) -> int:
    """A number that depends on nothing but the parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")


def probe(weights: float) -> np.ndarray:
    return np.array([-weights, -2 * weights], np.float32)


def read_weights(path: str) -> float:
    return float(Path(path).read_text())


@dataclass
class ToySandbox:
    id: str
    image: str
    workdir: str = "/testbed"
    patch: str = ""


@dataclass
class ToyPool:
    on_lease: Callable[[str], None] | None = None

    @asynccontextmanager
    async def lease(
        self, image: str, *, timeout_s: float, label: str = "", grading: bool = False
    ) -> AsyncIterator[ToySandbox]:
        if self.on_lease is not None:
            self.on_lease(label)
        yield ToySandbox(f"box {label}", image)

    async def close(self) -> None:
        return None


@dataclass
class ToyEnvironment:
    name: str = "toy"
    grade_unsubmitted: bool = False
    reward: Callable[[Task, str], float] = lambda _, patch: number(patch) % 4 / 3

    def tasks(self, split: Split, *, start: int, count: int, seed: int = 0) -> list[Task]:
        ids = [f"{split.value}-task-{seed}-{index}" for index in range(start, start + count)]
        return [Task(id=name, environment=self.name, split=split, data={}) for name in ids]

    def tool_names(self, task: Task) -> tuple[str, ...]:
        return ("submit",)

    def prompt(self, task: Task) -> list[ChatMessage]:
        return [ChatMessage(role="user", content=task.id)]

    def image(self, task: Task) -> str:
        return "toy/image"

    async def prepare(self, task: Task, sandbox: Any) -> None:
        return None

    async def collect(self, task: Task, sandbox: Any) -> str:
        return str(sandbox.patch)

    async def grade(self, task: Task, sandbox: Any, patch: str) -> Grade:
        reward = self.reward(task, patch)
        return Grade(reward=reward, resolved=reward == 1)

    def reference_patch(self, task: Task) -> str:
        return ""


@dataclass
class ToyPolicy:
    """Server and client in one (`PolicyClient`, and what `agentrl.policy.deliver` calls)."""

    tick: Callable[[str], None]
    weights: float = -1.0  # what a server loads at its start: none of the run's
    held: int = 0
    max_model_len: int = 1024
    asked: list[str] = field(default_factory=list)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float
    ) -> Generation:
        self.asked.append(f"generate {request_id} version {self.held}")
        self.tick("generate")
        await asyncio.sleep(0)
        key = (tuple(prompt_ids), self.weights, request_id)
        tokens = np.array([number(*key, i) % VOCABULARY for i in range(3)], np.int32)
        logprobs = -np.array([1 + number(*key, "logprob", i) % 7 for i in range(3)], np.float32) / 8
        return Generation(
            token_ids=tokens,
            logprobs=logprobs,
            versions=np.full(3, self.held, np.int32),
            finish_reason=FinishReason.STOP,
            prompt_tokens=len(prompt_ids),
        )

    async def control(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> None:
        self.asked.append(f"control {path}")
        if path == "/update_weights":
            self.tick("update")
        if path == "/update_weights" and body:
            self.weights = read_weights(body["update_info"]["path"])
        if path == "/finish_weight_update" and body:
            self.held = int(body["weight_version"])

    async def version(self, *, timeout_s: float) -> int:
        return self.held

    async def prompt_logprobs(self, token_ids: Sequence[int], *, timeout_s: float, request_id: str) -> np.ndarray:
        return probe(self.weights)


@dataclass
class ToyTrainer:
    """Weights are one number; a checkpoint is one JSON file, written whole."""

    folder: Path
    tick: Callable[[str], None]
    weights: float = 1.0
    version: int = 0
    batches: list[Batch] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    async def train(self, batch: Batch, *, timeout_s: float) -> StepResult:
        self.tick("train")
        assert batch.version == self.version, "the trainer's weights were not what the servers hold"
        terms = [
            float((s.advantages * s.behaviour_logprobs * s.token_ids)[s.pg_mask].sum(dtype=np.float64))
            for s in batch.sequences
        ]
        loss = sum(terms) / sum(int(s.pg_mask.sum()) for s in batch.sequences)
        self.batches.append(batch)
        self.losses.append(loss)
        self.weights = round(self.weights * 0.9 + loss * 0.01 + 0.05, 12)
        answer = StepResult(
            step=batch.step,
            updates=batch.updates,
            metrics={"loss": loss, "time/train_s": 0.0},
            sequences=tuple(
                TrainedSequence(
                    trajectory_id=s.trajectory_id,
                    segment=s.segment,
                    weights=s.pg_mask.astype(np.float32),
                    mask=s.pg_mask,
                )
                for s in batch.sequences
            ),
        )
        self.tick("trained")
        return answer

    async def publish(self, version: int, *, timeout_s: float) -> WeightManifest:
        self.tick("publish")
        self.version = version
        path = self.folder / "published"
        path.write_text(repr(self.weights))
        return WeightManifest(
            version=version,
            path=str(path),
            tensors=1,
            num_bytes=path.stat().st_size,
            probe_token_ids=PROBE,
            probe_logprobs=probe(self.weights),
        )

    async def save(self, step: int, state: bytes, *, score: float | None, timeout_s: float) -> Saved:
        self.tick("save")
        path = self.folder / "checkpoints" / f"step_{step:06d}.json"
        path.write_text(json.dumps({"weights": self.weights, "state": state.decode()}))
        self.tick("saved")
        return Saved(step=step, path=str(path), is_best=False)


@dataclass(frozen=True)
class ToyResult:
    segments: Sequence[Segment]
    turns: Sequence[TurnTiming]
    stop: str
    info: Mapping[str, float]

    @property
    def submitted(self) -> bool:
        return self.stop == "submitted"


@dataclass(frozen=True)
class ToyEpisode:
    """One turn a segment; member m of a group has 1 + m segments, so that rollouts differ in length."""

    policy: ToyPolicy
    temperature: float
    submits: bool = True

    async def __call__(self, task: Task, sandbox: Any, *, trajectory_id: str, on_turn: Any) -> ToyResult:
        segments = []
        for turn in range(1 + int(trajectory_id[-1])):
            prompt = [number(task.id) % VOCABULARY, turn]
            params = SamplingParams(max_tokens=3, temperature=self.temperature)
            found = await self.policy.generate(prompt, params, request_id=f"{trajectory_id}/{turn}", timeout_s=5)
            sandbox.patch += str(found.token_ids.tolist())
            nothing = np.full(2, np.nan, np.float32)
            segments.append(
                Segment(
                    np.concatenate([np.array(prompt, np.int32), found.token_ids]),
                    (Span(SpanKind.PROMPT, 0, 2, turn), Span(SpanKind.AGENT, 2, 5, turn, Purpose.ACT)),
                    np.concatenate([nothing, found.logprobs]),
                    np.concatenate([np.full(2, -1, np.int32), found.versions]),
                )
            )
        stop = "submitted" if self.submits else "tokens"
        info = {"submitted": float(self.submits), "bad_calls": 0.0}
        return ToyResult(segments, [TurnTiming()] * len(segments), stop, info)


@dataclass(slots=True)
class ToyServices(Services):
    """The real services, with the toy's agent."""

    submits: bool = True

    def episode(self, *, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Any:
        return ToyEpisode(self.client, temperature, self.submits)  # type: ignore[arg-type]


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

    def batch(self) -> tuple[str, ...]:
        return self._audited("batch")

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


@dataclass
class World:
    """One run folder and the sittings in it. After `crash_at` ticks of a sitting it crashes."""

    path: Path
    settings: Mapping[str, Any] = field(default_factory=lambda: SETTINGS)
    environment: ToyEnvironment = field(default_factory=ToyEnvironment)
    pool: ToyPool = field(default_factory=ToyPool)
    submits: bool = True
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
                emit=recorder.emit,
            )
            services = ToyServices(
                config=config,
                environment=self.environment,
                engine=engine,
                client=self.policy,  # type: ignore[arg-type]
                chat=None,  # type: ignore[arg-type]
                load=LoadMeter(),
                devices=2,
                trainer=self.trainer,  # type: ignore[arg-type]
                submits=self.submits,
            )
            run = loop.prepare_run(config, folder, recorder, services, buffer, start)
            await loop.train(run)
            self.waiting = [group.group_id for group in buffer.waiting()]
            return run

    # --- what a run leaves

    def metrics(self) -> dict[int, dict[str, float]]:
        """Metrics by step; steps are there once. Without what a clock or a crash (retries) decides."""
        rows = read_metrics(self.path / "metrics.jsonl")
        assert [row.step for row in rows] == sorted({row.step for row in rows})
        clocked = ("time/", "throughput/", "idle/", "concurrency/")
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


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Worlds, each in a folder of its own, with schedulers that are audited."""
    monkeypatch.setattr(loop, "Scheduler", AuditedScheduler)
    count = iter(range(10_000))

    def make(**fields: Any) -> World:
        return World(tmp_path / f"run{next(count)}", **fields)

    return make


@pytest.fixture(scope="session")
def toy() -> Any:
    """The module's names, as tests cannot import a conftest."""

    class Names:
        crash = Crash
        settings = SETTINGS
        Environment = ToyEnvironment
        number = staticmethod(number)
        Pool = ToyPool
        Trainer = ToyTrainer

    return Names

"""What a run is made of, played: sandboxes, an environment, a policy, a trainer and an agent. See `toy_world`."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.policy import ServerStats, deliver
from agentrl.trajectory import FinishReason, Purpose, Segment, Span, SpanKind, Split, TeacherScores, TurnTiming
from agentrl.wire import (
    Batch,
    ChatMessage,
    Delivery,
    Generation,
    Grade,
    SamplingParams,
    Saved,
    ScoreRequest,
    StepResult,
    Task,
    TrainedSequence,
    TrainSequence,
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
class ToyRouter:
    """The one server's router, by the real delivery."""

    policy: ToyPolicy

    async def deliver(self, manifest: WeightManifest, *, tolerance: float, timeout_s: float) -> Delivery:
        return await deliver(self.policy, manifest, tolerance=tolerance, timeout_s=timeout_s)  # type: ignore[arg-type]

    async def sleep(self, *, timeout_s: float) -> None:
        return None

    async def wake(self, *, timeout_s: float) -> None:
        return None

    async def stats(self) -> list[ServerStats]:
        return [ServerStats(0, 0, 0.0, 0, 0, 0, 0, 0)]

    def in_flight(self) -> list[int]:
        return [0]

    def take_in_flight(self) -> list[float]:
        return [0.0]


def _trained(sequence: TrainSequence) -> np.ndarray:
    weights = sequence.teacher_weights
    return sequence.pg_mask if weights is None else sequence.pg_mask | (weights > 0)


@dataclass
class ToyTeacher:
    """Scores that depend on tokens and position alone; `before` runs ahead of each and may raise or wait."""

    name: str = "toy"
    before: Callable[[ScoreRequest], Awaitable[None]] | None = None
    asked: list[str] = field(default_factory=list)

    async def probe(self, token_ids: Sequence[int], *, timeout_s: float) -> list[str]:
        return []

    async def score(self, request: ScoreRequest, *, timeout_s: float) -> TeacherScores:
        self.asked.append(f"{request.trajectory_id}/{request.index}")
        if self.before is not None:
            await self.before(request)
        ids = request.segment.token_ids.tolist()
        logprobs = [-(1 + number(ids[: t + 1], "teacher") % 9) / 8 for t in range(len(ids))]
        return TeacherScores(self.name, np.where(request.mask, np.array(logprobs, np.float32), np.float32(np.nan)))


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
        taught = [s for s in batch.sequences if s.teacher_weights is not None]
        gaps = [s.teacher_weights * (s.teacher_logprobs - s.behaviour_logprobs) * s.token_ids for s in taught]
        loss = sum(terms) / max(1, sum(int(s.pg_mask.sum()) for s in batch.sequences))
        loss += sum(float(gap.sum(dtype=np.float64)) for gap in gaps) / max(1, sum(map(len, gaps)))
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
                    weights=_trained(s).astype(np.float32),
                    mask=_trained(s),
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
    hang: bool = False

    async def __call__(
        self, task: Task, sandbox: Any, *, trajectory_id: str, on_turn: Any, on_sealed: Any
    ) -> ToyResult:
        if self.hang and task.split is Split.TRAIN:
            await asyncio.sleep(3600)
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
            on_sealed(turn, segments[-1])
        stop = "submitted" if self.submits else "tokens"
        info = {"submitted": float(self.submits), "bad_calls": 0.0}
        return ToyResult(segments, [TurnTiming()] * len(segments), stop, info)

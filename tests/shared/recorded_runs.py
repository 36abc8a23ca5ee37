"""Run folders with recorded rollouts, and a teacher that says what a test wants."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.policy import models
from agentrl.trajectory import (
    Outcome,
    OutcomeKind,
    Purpose,
    Segment,
    Source,
    Span,
    SpanKind,
    Split,
    TeacherScores,
    Trajectory,
    TurnTiming,
)
from agentrl.trajectory.parquet import write_rows
from agentrl.wire import ScoreRequest

TINY = Path(models.__file__).parent / "tiny"


def recorded_segment(agent: int = 3, *, prompt: int = 2, version: int = 7, source: Source = Source.SAMPLED) -> Segment:
    """`prompt` tokens read, `agent` tokens sampled, one read; token ids count from 10."""
    total = prompt + agent + 1
    spans = [Span(SpanKind.PROMPT, 0, prompt, 0)] if prompt else []
    spans += [Span(SpanKind.AGENT, prompt, prompt + agent, 0, Purpose.ACT)] if agent else []
    spans.append(Span(SpanKind.ENVIRONMENT, prompt + agent, total, 0))
    logprobs, versions = np.full(total, np.nan, np.float32), np.full(total, -1, np.int32)
    if source is Source.SAMPLED:
        logprobs[prompt : prompt + agent] = -np.arange(1, agent + 1) / 8
        versions[prompt : prompt + agent] = version
    return Segment(np.arange(total, dtype=np.int32) + 10, tuple(spans), logprobs, versions, source)


def recorded_rollout(
    group: int, member: int, *, segments: Sequence[Segment] | None = None, reward: float | None = 1.0, **fields: Any
) -> Trajectory:
    """One rollout of group `group`; `reward` None: machines failed it."""
    failed = Outcome(OutcomeKind.INFRASTRUCTURE, "sandbox gone")
    found = (recorded_segment(),) if segments is None else tuple(segments)
    return Trajectory(
        **{
            "trajectory_id": f"train-{group:06d}-{member}",
            "group_id": f"train-{group:06d}",
            "task_id": f"train-task-0-{group}",
            "environment": "toy",
            "split": Split.TRAIN,
            "segments": found,
            "outcome": failed if reward is None else Outcome(OutcomeKind.SOLVED if reward == 1 else OutcomeKind.FAILED),
            "reward": reward,
            "turns": (TurnTiming(decode_s=3.0, tool_s=2.0),),
            "started_at": 100.0,
            "ended_at": 130.0,
            "info": {"submitted": 1.0, "episode_s": 30.0, "score_s": 4.0, "attempts": 2.0},
            **fields,
        }
    )


def write_recorded_run(folder: Path, steps: Sequence[Sequence[Trajectory]]) -> Path:
    """A run folder as `agentrl train` leaves it, with the tiny policy's tokenizer; one file per step, from step 1."""
    (folder / "trajectories").mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    (folder / "config.toml").write_text("")
    shutil.copyfile(TINY / "tokenizer.json", folder / "tokenizer" / "tokenizer.json")
    for step, rollouts in enumerate(steps, 1):
        path = folder / "trajectories" / f"step_{step:06d}-train.parquet"
        write_rows(path, [(rollout, None) for rollout in rollouts], run=folder.name)
    return folder


@dataclass
class SayingTeacher:
    """Scores every wanted token −1; `on_score` may raise, or wait, before."""

    name: str = "teacher"
    on_score: Callable[[ScoreRequest], Any] | None = None
    asked: list[ScoreRequest] = field(default_factory=list)
    cancelled: int = 0

    async def probe(self, token_ids: Sequence[int], *, timeout_s: float) -> list[str]:
        return []

    async def score(self, request: ScoreRequest, *, timeout_s: float) -> TeacherScores:
        self.asked.append(request)
        try:
            waiting = None if self.on_score is None else self.on_score(request)
            if waiting is not None:
                await waiting
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return TeacherScores(self.name, np.where(request.mask, np.float32(-1), np.float32(np.nan)))

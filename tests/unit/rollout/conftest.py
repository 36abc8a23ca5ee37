"""Trajectories by hand, and a small world (environment, pool, agent) without sandbox or server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from agentrl.rollout.driver import Limits
from agentrl.rollout.groups import GroupRequest, GroupResult
from agentrl.trajectory import (
    Outcome,
    OutcomeKind,
    Purpose,
    Segment,
    Source,
    Span,
    SpanKind,
    Split,
    Trajectory,
    TurnTiming,
)
from agentrl.wire import ChatMessage, Grade, Task


def make_segment(agent: int = 2, *, version: int = 0, prompt: int = 2, source: Source = Source.SAMPLED) -> Segment:
    """`prompt` tokens read, `agent` tokens sampled, one token read."""
    total = prompt + agent + 1
    spans = [Span(SpanKind.PROMPT, 0, prompt, 0)] if prompt else []
    if agent:
        spans.append(Span(SpanKind.AGENT, prompt, prompt + agent, 0, Purpose.ACT))
    spans.append(Span(SpanKind.ENVIRONMENT, prompt + agent, total, 0))
    logprobs, versions = np.full(total, np.nan), np.full(total, -1)
    if source is Source.SAMPLED:
        logprobs[prompt : prompt + agent] = -np.arange(1, agent + 1) / 8
        versions[prompt : prompt + agent] = version
    return Segment(np.arange(total) + 10, tuple(spans), logprobs, versions, source)


def make_trajectory(
    group_id: str = "g0",
    member: int = 0,
    *,
    reward: float | None = 1.0,
    segments: Sequence[Segment] | None = None,
    source: Source = Source.SAMPLED,
    kind: OutcomeKind | None = None,
    **fields: Any,
) -> Trajectory:
    """A finished rollout; `reward=None` is an infrastructure failure."""
    if reward is None:
        outcome = Outcome(OutcomeKind.INFRASTRUCTURE, "sandbox gone")
    else:
        outcome = Outcome(kind or (OutcomeKind.SOLVED if reward == 1 else OutcomeKind.FAILED))
    found = segments if segments is not None else (() if reward is None else (make_segment(source=source),))
    return Trajectory(
        trajectory_id=f"{group_id}-{member}",
        group_id=group_id,
        task_id=f"task-{group_id}",
        environment="toy",
        split=fields.pop("split", Split.TRAIN),
        segments=tuple(found),
        outcome=outcome,
        reward=reward,
        source=source,
        **fields,
    )


def make_group(
    group_id: str = "g0", rewards: Sequence[float | None] = (1.0, 0.0), *, index: int = 0, version: int = 0
) -> GroupResult:
    """A finished group with these rewards, one segment each."""
    return GroupResult(
        group_id,
        f"task-{group_id}",
        index,
        tuple(
            make_trajectory(group_id, i, reward=r, segments=None if r is None else (make_segment(version=version),))
            for i, r in enumerate(rewards)
        ),
    )


# --- a world without sandbox or server ------------------------------------------------------------


@dataclass
class ToySandbox:
    id: str
    image: str
    workdir: str = "/testbed"


class ToyPool:
    """Hands out sandboxes `s1`, `s2`, … and counts those out. `on_lease` may raise or wait."""

    def __init__(self, on_lease: Callable[[str], Any] | None = None) -> None:
        self.leases: list[tuple[str, str]] = []
        self.out = 0
        self.out_max = 0
        self.on_lease = on_lease

    @asynccontextmanager
    async def lease(
        self, image: str, *, timeout_s: float, label: str = "", grading: bool = False
    ) -> AsyncIterator[ToySandbox]:
        sandbox = ToySandbox(f"s{len(self.leases) + 1}", image)
        self.leases.append((sandbox.id, label))
        if self.on_lease is not None:
            await self.on_lease(label)
        self.out += 1
        self.out_max = max(self.out_max, self.out)
        try:
            yield sandbox
        finally:
            self.out -= 1

    async def close(self) -> None:
        return None


@dataclass
class ToyEnvironment:
    """Rewards a patch that is `good`; steps named in `hooks` are run first and may raise or wait."""

    name: str = "toy"
    grade_unsubmitted: bool = False
    size: int = 10_000
    hooks: dict[str, Callable[[Task], Any]] = field(default_factory=dict)
    sandboxes: list[tuple[str, str]] = field(default_factory=list)

    def tasks(self, split: Split, *, start: int, count: int, seed: int = 0) -> list[Task]:
        stop = start + count if split is Split.TRAIN else min(start + count, self.size)
        if self.size == 0:
            return []
        return [
            Task(id=f"{split.value}-{seed}-{i % self.size}", environment=self.name, split=split, data={})
            for i in range(start, stop)
        ]

    def tool_names(self, task: Task) -> tuple[str, ...]:
        return ("submit",)

    def prompt(self, task: Task) -> list[ChatMessage]:
        return [ChatMessage(role="user", content="fix it")]

    def image(self, task: Task) -> str:
        return "toy/image"

    async def _hook(self, step: str, task: Task, sandbox: ToySandbox) -> None:
        self.sandboxes.append((step, sandbox.id))
        if step in self.hooks:
            await self.hooks[step](task)

    async def prepare(self, task: Task, sandbox: Any) -> None:
        await self._hook("prepare", task, sandbox)

    async def collect(self, task: Task, sandbox: Any) -> str:
        await self._hook("collect", task, sandbox)
        return "good"

    async def grade(self, task: Task, sandbox: Any, patch: str) -> Grade:
        await self._hook("grade", task, sandbox)
        return Grade(reward=float(patch == "good"), resolved=patch == "good")

    def reference_patch(self, task: Task) -> str:
        return "good"


@dataclass
class ToyResult:
    segments: Sequence[Segment]
    turns: Sequence[TurnTiming]
    stop: str
    info: Mapping[str, float]

    @property
    def submitted(self) -> bool:
        return self.stop == "submitted"


@dataclass
class ToyEpisode:
    """An agent that takes one turn and ends as `stop`; `hook` is run in the middle and may raise or wait."""

    stop: str = "submitted"
    hook: Callable[[str], Any] | None = None
    temperature: float = 1.0
    version: int = 0

    async def __call__(
        self, task: Task, sandbox: Any, *, trajectory_id: str, on_turn: Any, on_sealed: Any
    ) -> ToyResult:
        on_turn(0, "sampling")
        if self.hook is not None:
            await self.hook(trajectory_id)
        await asyncio.sleep(0)
        info = {"submitted": float(self.stop == "submitted"), "bad_calls": 0.0}
        turn = TurnTiming(decode_s=0.5, tool_s=0.25)
        segment = make_segment(version=self.version)
        on_sealed(0, segment)
        return ToyResult((segment,), (turn,), self.stop, info)


def make_request(group_id: str = "g0", size: int = 1, index: int = 0) -> GroupRequest:
    """A group of a toy task."""
    task = Task(id=f"task-{group_id}", environment="toy", split=Split.TRAIN, data={})
    return GroupRequest(group_id, task, index, size)


def make_limits(**changes: float) -> Limits:
    """Generous limits with two retries."""
    values: dict[str, Any] = {
        "lease_s": 5.0,
        "episode_s": 5.0,
        "grade_s": 5.0,
        "rollout_s": 20.0,
        "retries": 2,
    }
    return Limits(**{**values, **changes})


class Toys:
    """The above in one place, as tests cannot import a conftest."""

    segment = staticmethod(make_segment)
    trajectory = staticmethod(make_trajectory)
    group = staticmethod(make_group)
    request = staticmethod(make_request)
    limits = staticmethod(make_limits)
    Pool = ToyPool
    Environment = ToyEnvironment
    Episode = ToyEpisode


@pytest.fixture(scope="session")
def toys() -> type[Toys]:
    return Toys

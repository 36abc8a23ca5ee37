"""What stands still is named, failed and replaced; where all does, the run ends with the reason (K19)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentrl.errors import RunFailedError
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.groups import GroupResult
from agentrl.trajectory import OutcomeKind
from agentrl.wire import Event, EventKind


def run(
    toys: Any,
    hook: Callable[[str], Any],
    *,
    size: int = 1,
    retries: int = 2,
    environment: Any = None,
    **engine: Any,
) -> tuple[GroupResult, list[str]]:
    """One group whose episodes run `hook`, and the notes that were made of it."""
    events: list[Event] = []

    async def scenario() -> GroupResult:
        made = RolloutEngine(
            environment=environment or toys.Environment(),
            pool=toys.Pool(),
            limits=toys.limits(retries=retries),
            concurrency=4,
            emit=events.append,
            look_every_s=0.02,
            **engine,
        )
        async with asyncio.timeout(20):
            (group,) = await made.run_groups([toys.request(size=size)], episode=toys.Episode(hook=hook))
        return group

    group = asyncio.run(scenario())
    return group, [event.data["text"] for event in events if event.kind == EventKind.NOTE]


def test_k19_a_stuck_rollout_is_named_and_tried_again(toys: Any) -> None:
    """With rollout, phase, turn and sandbox; the others of its group never notice."""
    tries: list[str] = []

    async def hook(name: str) -> None:
        tries.append(name)
        if tries.count("g0-1") == 1 and name == "g0-1":
            await asyncio.Event().wait()

    group, notes = run(toys, hook, size=2, stuck_timeout_s=0.3)
    assert [t.outcome.kind for t in group.trajectories] == [OutcomeKind.SOLVED] * 2
    assert [t.info["attempts"] for t in group.trajectories] == [1, 2]
    named, again = notes
    place = "rollout g0-1, phase episode, turn 0 sampling, sandbox s2, attempt 1"
    assert re.fullmatch(rf"no progress for \d s: {place}", named)
    assert again.startswith("rollout g0-1 is tried again in a fresh sandbox: DeadlineError: no progress for")
    (event,) = group.trajectories[1].events
    assert place in event["cause"]


def test_k19_a_rollout_that_stays_stuck_is_recorded_with_its_place(toys: Any) -> None:
    async def hook(_: str) -> None:
        await asyncio.Event().wait()

    group, _ = run(toys, hook, retries=1, stuck_timeout_s=0.1)
    (lost,) = group.trajectories
    assert (lost.outcome.kind, lost.reward, lost.info["attempts"]) == (OutcomeKind.INFRASTRUCTURE, None, 2)
    assert "s (rollout g0-0, phase episode, turn 0 sampling, sandbox s2, attempt 2)" in lost.outcome.cause


def test_a_stuck_grading_is_repeated_alone(toys: Any) -> None:
    gradings: list[str] = []

    async def grade(task: Any) -> None:
        gradings.append(task.id)
        if len(gradings) == 1:
            await asyncio.Event().wait()

    async def hook(_: str) -> None:
        return None

    environment = toys.Environment(hooks={"grade": grade})
    group, notes = run(toys, hook, environment=environment, stuck_timeout_s=0.3)
    assert group.rewards == (1.0,)
    assert [step for step, _ in environment.sandboxes] == ["prepare", "collect", "grade", "grade"]
    assert "phase grade, sandbox s2" in notes[0]


def test_a_rollout_that_goes_on_turn_by_turn_is_not_stuck(toys: Any) -> None:
    """K23: what counts is the time in one turn, not how long the healthy whole takes."""

    class Long:
        temperature = 1.0

        async def __call__(self, task: Any, sandbox: Any, *, trajectory_id: str, on_turn: Any, on_sealed: Any) -> Any:
            for turn in range(8):
                on_turn(turn, "sampling")
                await asyncio.sleep(0.1)
            return await toys.Episode()(
                task, sandbox, trajectory_id=trajectory_id, on_turn=on_turn, on_sealed=on_sealed
            )

    async def scenario() -> GroupResult:
        made = RolloutEngine(
            environment=toys.Environment(),
            pool=toys.Pool(),
            limits=toys.limits(retries=0),
            concurrency=1,
            emit=lambda event: None,
            look_every_s=0.02,
            stuck_timeout_s=0.5,
            stall_timeout_s=0.6,
        )
        # The second rollout waits for the slot longer than the limit: a wait is nobody's standstill.
        return (await made.run_groups([toys.request(size=2)], episode=Long()))[0]

    group = asyncio.run(scenario())
    assert [t.outcome.kind for t in group.trajectories] == [OutcomeKind.SOLVED] * 2


def test_k19_where_nothing_moves_at_all_the_run_ends_and_names_the_oldest(toys: Any) -> None:
    async def hook(_: str) -> None:
        await asyncio.Event().wait()

    with pytest.raises(RunFailedError, match="no rollout has made progress for") as stalled:
        run(toys, hook, size=2, stuck_timeout_s=60, stall_timeout_s=0.3)
    assert "2 rollouts in progress" in stalled.value.where
    assert "rollout g0-0, phase episode, turn 0 sampling, sandbox s1, attempt 1" in stalled.value.where
    assert "--resume" in stalled.value.remedy


def test_who_waits_for_a_sandbox_that_never_comes_ends_the_run_as_well(toys: Any) -> None:
    """K19: not stuck by itself, yet nothing moves."""

    async def never(_: str) -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        made = RolloutEngine(
            environment=toys.Environment(),
            pool=toys.Pool(on_lease=never),
            limits=toys.limits(),
            concurrency=1,
            emit=lambda event: None,
            look_every_s=0.02,
            stuck_timeout_s=0.05,
            stall_timeout_s=0.3,
        )
        await made.run_groups([toys.request()], episode=toys.Episode())

    with pytest.raises(RunFailedError) as stalled:
        asyncio.run(scenario())
    assert "rollout g0-0, phase lease, attempt 1" in stalled.value.where


def test_groups_that_are_only_set_up_ahead_are_no_stall(toys: Any) -> None:
    """Between a batch and its delivery nothing is admitted, for as long as training takes."""

    async def scenario() -> None:
        made = RolloutEngine(
            environment=toys.Environment(),
            pool=toys.Pool(),
            limits=toys.limits(),
            concurrency=1,
            emit=lambda event: None,
            look_every_s=0.01,
            stuck_timeout_s=0.05,
            stall_timeout_s=0.3,
        )
        async with made.open(toys.Episode()) as stream:
            stream.prepare([toys.request()])
            await asyncio.sleep(0.6)
            stream.start(toys.request())
            (trajectory,) = (await stream.next(5)).trajectories
        assert (trajectory.reward, trajectory.info["attempts"]) == (1.0, 1)

    asyncio.run(scenario())


class SmallPool:
    """So many sandboxes in all, handed out first come first served."""

    def __init__(self, size: int) -> None:
        self._free = asyncio.Semaphore(size)
        self.out = self.count = 0

    @asynccontextmanager
    async def lease(
        self, image: str, *, timeout_s: float, label: str = "", grading: bool = False
    ) -> AsyncIterator[Any]:
        async with asyncio.timeout(timeout_s):
            await self._free.acquire()
        self.out += 1
        self.count += 1
        try:
            yield type("Sandbox", (), {"id": f"s{self.count}", "image": image})()
        finally:
            self.out -= 1
            self._free.release()


def test_grading_gets_the_sandbox_that_the_next_batch_holds_ready(toys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool smaller than `concurrency`: else the batch would wait for its last grade, the grade for a sandbox, and
    the sandbox for the next batch's admission."""
    monkeypatch.setattr("agentrl.rollout.stream._SANDBOX_PATIENCE_S", 0.1)

    async def scenario() -> None:
        pool, events = SmallPool(1), list[Event]()
        made = RolloutEngine(
            environment=toys.Environment(hooks={"grade": slow}),
            pool=pool,  # type: ignore[arg-type]
            limits=toys.limits(lease_s=30, rollout_s=60),
            concurrency=4,
            emit=events.append,
            look_every_s=0.02,
        )
        async with asyncio.timeout(20), made.open(toys.Episode(hook=slow)) as stream:
            stream.start(toys.request("g0"))
            await asyncio.sleep(0.02)
            ahead = [toys.request("g1", size=2), toys.request("g2")]
            stream.prepare(ahead)
            assert (await stream.next(10)).rewards == (1.0,)
            stream.start(*ahead)
            groups = [await stream.next(10) for _ in ahead]
        assert sorted(group.group_id for group in groups) == ["g1", "g2"]
        assert [group.rewards for group in groups] in ([(1.0, 1.0), (1.0,)], [(1.0,), (1.0, 1.0)])
        assert [event for event in events if event.kind == EventKind.NOTE] == []
        assert pool.out == 0

    async def slow(_: Any) -> None:
        await asyncio.sleep(0.1)

    asyncio.run(scenario())

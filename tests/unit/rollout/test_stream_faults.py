"""Faults of what runs in a stream (K20), and waits that end with a name (K19)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from stream_world import World

from agentrl.errors import DeadlineError, NoSandboxBackendError, PolicyDeadError, SandboxDeadError
from agentrl.rollout.stream import RolloutStream
from agentrl.trajectory import OutcomeKind


def test_k20_one_rollouts_failure_is_its_own(toys: Any) -> None:
    world = World(toys, limits=toys.limits(retries=0))
    world.errors["g0-1"] = SandboxDeadError("gone")

    async def body(stream: RolloutStream) -> None:
        stream.start(toys.request("g0", size=3))
        group = await stream.next(5)
        kinds = [t.outcome.kind for t in group.trajectories]
        assert kinds == [OutcomeKind.SOLVED, OutcomeKind.INFRASTRUCTURE, OutcomeKind.SOLVED]

    world.run(body)


@pytest.mark.parametrize("error", [ZeroDivisionError("bug"), PolicyDeadError("the server ended")])
def test_k20_the_next_that_waits_raises_a_fault_at_once(toys: Any, error: Exception) -> None:
    world = World(toys)
    world.hold("g0-0")
    world.errors["g1-0"] = error
    began = time.monotonic()

    async def body(stream: RolloutStream) -> None:
        stream.start(toys.request("g0"), toys.request("g1"))
        await stream.next(60)

    with pytest.raises(type(error), match=str(error)):
        world.run(body)
    assert time.monotonic() - began < 5


def test_k20_a_fault_while_setting_up_ahead_surfaces_too(toys: Any) -> None:
    async def none_here(_: str) -> None:
        raise NoSandboxBackendError("neither")

    world = World(toys)
    world.pool.on_lease = none_here

    async def body(stream: RolloutStream) -> None:
        stream.prepare([toys.request("g0")])
        await stream.next(60)

    with pytest.raises(NoSandboxBackendError):
        world.run(body)


def test_k20_a_fault_that_nobody_has_asked_for_is_raised_at_the_end(toys: Any) -> None:
    world = World(toys)
    world.errors["g0-0"] = ZeroDivisionError("bug")

    async def body(stream: RolloutStream) -> None:
        stream.start(toys.request("g0"))
        await asyncio.sleep(0.05)

    with pytest.raises(ZeroDivisionError, match="bug"):
        world.run(body)


def test_a_fault_that_was_raised_once_is_left_to_who_handles_it(toys: Any) -> None:
    world = World(toys)
    world.errors["g0-0"] = PolicyDeadError("gone")

    async def body(stream: RolloutStream) -> None:
        stream.start(toys.request("g0"))
        with pytest.raises(PolicyDeadError):
            await stream.next(5)

    world.run(body)


def test_k20_a_rollout_that_cancels_itself_does_not_leave_its_group_waiting(toys: Any) -> None:
    world = World(toys)
    world.errors["g0-0"] = asyncio.CancelledError()  # type: ignore[assignment]

    async def body(stream: RolloutStream) -> None:
        stream.start(toys.request("g0"))
        await stream.next(60)

    with pytest.raises(RuntimeError, match="g0-0 was cancelled by something within it"):
        world.run(body)


def test_k19_a_wait_that_is_over_names_who_is_waited_for(toys: Any) -> None:
    world = World(toys)
    world.hold("g0-1")

    async def body(stream: RolloutStream) -> None:
        with pytest.raises(DeadlineError) as nothing:
            await stream.next(0.01)
        assert nothing.value.where == "no group is running"
        stream.start(toys.request("g0", size=2))
        with pytest.raises(DeadlineError, match="no group finished within") as late:
            await stream.next(0.3)
        assert "rollout g0-1, phase episode, turn 0 sampling, sandbox s2, attempt 1" in late.value.where
        world.held["g0-1"].set()
        assert (await stream.next(5)).group_id == "g0", "a wait that is over loses nothing"

    world.run(body)

"""Groups admitted and taken one by one: set-up ahead, order, faults, drops (K17, K20, K22)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from stream_world import World, until

from agentrl.errors import DeadlineError, SandboxDeadError, SandboxStartError
from agentrl.rollout.stream import RolloutStream
from agentrl.trajectory import OutcomeKind
from agentrl.wire import EventKind


def test_groups_are_taken_as_they_finish_and_more_may_start_meanwhile(toys: Any) -> None:
    world = World(toys)
    world.hold("g0-0")

    async def body(stream: RolloutStream) -> None:
        first, second, third = (toys.request(f"g{i}", size=2, index=i) for i in range(3))
        stream.start(first)
        stream.start(second)
        assert stream.running == ("g0", "g1")
        group = await stream.next(5)
        assert (group.group_id, group.index, [t.trajectory_id for t in group.trajectories]) == (
            "g1",
            1,
            ["g1-0", "g1-1"],
        )
        stream.start(third)
        assert (await stream.next(5)).group_id == "g2"
        world.held["g0-0"].set()
        assert (await stream.next(5)).group_id == "g0"
        assert (stream.running, stream.prepared) == ((), ())

    world.run(body)


def test_what_has_finished_is_running_until_it_is_taken(toys: Any) -> None:
    """Who takes groups while there are running ones takes them all."""
    world = World(toys)

    async def body(stream: RolloutStream) -> None:
        stream.start(toys.request("g0"), toys.request("g1"))
        await until(lambda: stream.done == 2)
        assert stream.running == ("g0", "g1")
        taken = []
        while stream.running:
            taken.append((await stream.next(5)).group_id)
        assert taken == ["g0", "g1"]

    world.run(body)


def test_set_up_ahead_holds_a_sandbox_and_no_slot(toys: Any) -> None:
    """Prepared rollouts ask the policy for nothing; at most concurrency + ready_ahead hold a sandbox."""
    world = World(toys, concurrency=2, ready_ahead=1)

    async def body(stream: RolloutStream) -> None:
        requests = [toys.request(f"g{i}", size=2) for i in range(3)]
        stream.prepare(requests)
        stream.prepare(requests)
        await until(lambda: len(world.environment.sandboxes) == 3)
        await asyncio.sleep(0.02)
        assert (world.pool.out, len(world.environment.sandboxes)) == (3, 3)
        assert (world.began, world.engine.active, world.engine.waiting) == ([], 0, 0)
        assert (stream.prepared, stream.running) == (("g0", "g1", "g2"), ())
        stream.start(requests[0])
        assert world.engine.waiting == 2
        assert (await stream.next(5)).group_id == "g0"
        assert world.began == ["g0-0", "g0-1"]
        prepared = [sandbox for step, sandbox in world.environment.sandboxes if step == "prepare"]
        assert prepared[:2] == ["s1", "s2"], "they used what was set up for them"

    world.run(body)


def test_an_unprepared_group_overtakes_those_set_up_ahead(toys: Any) -> None:
    """An evaluation between a batch and its delivery must not wait for the next batch's sandboxes."""
    world = World(toys, concurrency=2)

    async def body(stream: RolloutStream) -> None:
        ahead = [toys.request(f"g{i}", size=2) for i in range(2)]
        stream.prepare(ahead)
        await until(lambda: world.pool.out == 2)
        groups = await world.engine.run_groups([toys.request("e0", size=2)], episode=toys.Episode())
        assert [t.outcome.kind for t in groups[0].trajectories] == [OutcomeKind.SOLVED] * 2
        await until(lambda: world.pool.out == 2)
        stream.start(*ahead)
        for _ in ahead:
            group = await stream.next(5)
            assert [t.info["attempts"] for t in group.trajectories] == [1, 1], "giving way is no failure"

    world.run(body)


def test_the_limit_of_active_rollouts_moves(toys: Any) -> None:
    world = World(toys, concurrency=3)
    world.hold(*[f"g{i}-0" for i in range(5)])

    async def body(stream: RolloutStream) -> None:
        engine = world.engine
        engine.limit = 1
        stream.start(*[toys.request(f"g{i}") for i in range(5)])
        await until(lambda: engine.active == 1)
        await asyncio.sleep(0.02)
        assert (engine.active, engine.waiting, engine.limit) == (1, 4, 1)
        engine.limit = 3
        await until(lambda: engine.active == 3)
        engine.limit = 2
        assert (engine.active, engine.waiting) == (3, 2), "lowering cancels none"
        for number in range(5):
            world.held[f"g{number}-0"].set()
            assert (await stream.next(5)).group_id == f"g{number}"
        assert world.began == [f"g{i}-0" for i in range(5)]

    world.run(body)


def test_a_rollout_that_is_tried_again_sets_up_without_a_slot_and_keeps_its_place(toys: Any) -> None:
    """With one slot, another one's episode runs while the failed one gets its fresh sandbox."""
    world = World(toys, concurrency=1, ready_ahead=2)
    world.errors["g0-0"] = SandboxDeadError("gone")
    setting_up, go_on = asyncio.Event(), asyncio.Event()
    calls: list[str] = []

    async def prepare(task: Any) -> None:
        calls.append(task.id)
        if calls[-1] == "task-g0" and len(calls) > 1:
            setting_up.set()
            await go_on.wait()

    world.environment.hooks["prepare"] = prepare

    async def body(stream: RolloutStream) -> None:
        world.hold("g1-0")
        stream.start(*[toys.request(f"g{i}") for i in range(3)])
        await asyncio.wait_for(setting_up.wait(), 5)
        await until(lambda: world.began == ["g0-0", "g1-0"])
        go_on.set()
        await asyncio.sleep(0.02)
        world.held["g1-0"].set()
        assert [(await stream.next(5)).group_id for _ in range(3)] == ["g1", "g0", "g2"]
        assert world.began == ["g0-0", "g1-0", "g0-0", "g2-0"], "g0 was before g2 and still is"

    world.run(body)


def test_who_finds_no_sandbox_ahead_of_admission_has_not_failed(toys: Any) -> None:
    """Those set up ahead may hold every sandbox for as long as training takes."""
    world = World(toys, limits=toys.limits(lease_s=0.1, retries=0))
    leases = 0

    async def none_free(_: str) -> None:
        nonlocal leases
        leases += 1
        if leases < 3:
            await asyncio.sleep(0.05)
            raise DeadlineError("no sandbox was free")

    world.pool.on_lease = none_free

    async def body(stream: RolloutStream) -> None:
        stream.prepare([toys.request("g0")])
        await until(lambda: leases == 3)
        stream.start(toys.request("g0"))
        (trajectory,) = (await stream.next(5)).trajectories
        assert (trajectory.outcome.kind, trajectory.info["attempts"]) == (OutcomeKind.SOLVED, 1)

    world.run(body)


def test_a_group_whose_set_up_failed_for_good_is_handed_on_once_it_is_started(toys: Any) -> None:
    async def no_start(_: str) -> None:
        raise SandboxStartError("no room")

    world = World(toys, limits=toys.limits(retries=0))
    world.pool.on_lease = no_start

    async def body(stream: RolloutStream) -> None:
        stream.prepare([toys.request("g0", size=2)])
        await until(lambda: stream.done == 2)
        assert stream.running == ()
        stream.start(toys.request("g0", size=2))
        group = await stream.next(5)
        assert [t.outcome.kind for t in group.trajectories] == [OutcomeKind.INFRASTRUCTURE] * 2

    world.run(body)


# --- drops (K22) ---------------------------------------------------------------------------------------------------


def test_a_dropped_group_is_gone_from_wherever_it_was(toys: Any) -> None:
    """Set up ahead, waiting for a slot, active, finished: none is taken, and its sandboxes are back on return."""
    world = World(toys, concurrency=1, ready_ahead=3)
    world.hold("active-0")

    async def body(stream: RolloutStream) -> None:
        stream.start(toys.request("finished"))
        await until(lambda: stream.done == 1)
        stream.start(toys.request("active"), toys.request("waiting"))
        stream.prepare([toys.request("ahead")])
        await until(lambda: world.engine.active == 1 and world.pool.out == 3)
        dropped = await stream.drop(["finished", "active", "waiting", "ahead", "stranger"])
        assert dropped == ("finished", "active", "waiting", "ahead")
        assert (world.pool.out, world.engine.active, world.engine.waiting) == (0, 0, 0)
        assert (stream.running, stream.prepared) == ((), ())
        stream.start(toys.request("after"))
        assert (await stream.next(5)).group_id == "after"

    world.run(body)


def test_a_group_that_is_dropped_before_it_began_leaves_no_count_behind(toys: Any) -> None:
    """K17: a task that is cancelled before its first step runs none of its own clean-up."""
    world = World(toys)

    async def body(stream: RolloutStream) -> None:
        stream.start(toys.request("g0", size=3))
        await stream.drop(["g0"])
        assert (world.engine.waiting, world.engine.active, world.began) == (0, 0, [])

    world.run(body)


def test_k22_drop_returns_when_the_requests_are_closed(toys: Any) -> None:
    """Closing may take time (the policy room holds it back while a server is paused): nothing is left in flight."""
    world = World(toys)
    open_requests: set[str] = set()
    closing: list[str] = []
    resumed = asyncio.Event()

    async def request(name: str) -> None:
        open_requests.add(name)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            closing.append(name)
            await resumed.wait()
            open_requests.discard(name)
            raise

    world.episode = request  # type: ignore[method-assign]

    async def body(stream: RolloutStream) -> None:
        stream.start(toys.request("g0", size=2), toys.request("g1"))
        await until(lambda: len(open_requests) == 3)
        dropping = asyncio.create_task(stream.drop(["g0"]))
        await until(lambda: len(closing) == 2)
        await asyncio.sleep(0.02)
        assert not dropping.done(), "the server is paused: nothing may be closed"
        resumed.set()
        assert await dropping == ("g0",)
        assert (open_requests, stream.running) == ({"g1-0"}, ("g1",))

    world.run(body)


def test_k19_a_drop_that_never_ends_says_whose(toys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.rollout.stream._CLOSE_S", 0.05)
    world = World(toys)
    release = asyncio.Event()

    async def stubborn(name: str) -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    world.episode = stubborn  # type: ignore[method-assign]

    async def body(stream: RolloutStream) -> None:
        stream.start(toys.request("g0"))
        await until(lambda: world.engine.active == 1)
        with pytest.raises(DeadlineError, match="1 cancelled rollouts did not end") as late:
            await stream.drop(["g0"])
        assert late.value.where == "g0-0"
        release.set()

    world.run(body)


# --- what is told --------------------------------------------------------------------------------------------------


def test_events_carry_the_step_in_progress(toys: Any) -> None:
    world = World(toys)

    async def body(stream: RolloutStream) -> None:
        stream.start(toys.request("g0", size=2))
        await stream.next(5)
        stream.step = 8
        stream.start(toys.request("g1"))
        await stream.next(5)

    world.run(body, step=7)
    told = [event.data for event in world.events if event.kind == EventKind.ROLLOUT_FINISHED]
    assert [(data["step"], data["done"], data["total"]) for data in told] == [(7, 1, None), (7, 2, None), (8, 1, None)]


def test_a_trajectory_begins_with_its_episode(toys: Any) -> None:
    """Waiting set up for admission is not the rollout's own time, nor is it its deadline's."""
    world = World(toys, limits=toys.limits(rollout_s=0.3))

    async def body(stream: RolloutStream) -> None:
        request = toys.request("g0")
        stream.prepare([request])
        await asyncio.sleep(0.5)
        admitted = time.time()
        stream.start(request)
        (trajectory,) = (await stream.next(5)).trajectories
        assert trajectory.outcome.kind is OutcomeKind.SOLVED
        assert admitted <= trajectory.started_at <= trajectory.ended_at
        assert trajectory.info["wait_s"] > 0.4 > trajectory.info["setup_s"]

    world.run(body)

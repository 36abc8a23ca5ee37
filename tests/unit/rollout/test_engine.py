"""Groups of rollouts: supervision, order, concurrency, cancellation, watchdog (K19, K20, K34)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agentrl.errors import PolicyDeadError, SandboxDeadError
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.status import WAITS, ConcurrencyMeter, Pulse, RolloutPhase, RolloutStatus, Watchdog
from agentrl.trajectory import OutcomeKind
from agentrl.wire import Event, EventKind


class World:
    """An engine in the toy world and the events it emitted."""

    def __init__(self, toys: Any, *, concurrency: int = 4, emit: Any = None, **engine: Any) -> None:
        self.toys = toys
        self.events: list[Event] = []
        self.pool = toys.Pool()
        self.settings = {
            "environment": toys.Environment(),
            "pool": self.pool,
            "limits": toys.limits(),
            "concurrency": concurrency,
            "emit": emit or self.events.append,
            **engine,
        }

    def run(self, requests: list[Any], episode: Any = None, **arguments: Any) -> list[Any]:
        async def scenario() -> list[Any]:
            engine = self.engine = RolloutEngine(**self.settings)
            return await engine.run_groups(requests, episode=episode or self.toys.Episode(), **arguments)

        return asyncio.run(scenario())

    def notes(self) -> list[str]:
        return [event.data["text"] for event in self.events if event.kind == EventKind.NOTE]


def test_the_pool_is_told_the_images_of_all_groups_at_once(toys: Any) -> None:
    """In their order, each once."""
    told: list[list[str]] = []
    world = World(toys)
    world.pool.prefetch = told.append

    images = {"task-g0": "x/second", "task-g1": "x/first", "task-g2": "x/second"}
    world.settings["environment"].image = lambda task: images[task.id]
    world.settings["concurrency"] = 1
    requests = [toys.request(f"g{number}", size=1) for number in range(3)]
    world.run(requests)
    assert told == [["x/second", "x/first"]]


def test_groups_come_back_in_order_whatever_finishes_first(toys: Any) -> None:
    """K34: members and groups are joined by name."""

    async def last_first(name: str) -> None:
        if name[1] != "2":
            await gone[int(name[1]) + 1].wait()

    def on_group(group: Any) -> None:
        finished.append(group.group_id)
        gone[int(group.group_id[1])].set()

    gone = [asyncio.Event() for _ in range(3)]
    finished: list[str] = []
    world = World(toys, concurrency=8)
    groups = world.run(
        [toys.request(f"g{i}", size=2, index=i) for i in range(3)],
        toys.Episode(hook=last_first),
        on_group=on_group,
        step=5,
    )
    assert [group.group_id for group in groups] == ["g0", "g1", "g2"]
    assert finished == ["g2", "g1", "g0"]
    assert [[t.trajectory_id for t in group.trajectories] for group in groups][1] == ["g1-0", "g1-1"]
    done = [event.data for event in world.events if event.kind == EventKind.ROLLOUT_FINISHED]
    assert [data["done"] for data in done] == [1, 2, 3, 4, 5, 6]
    assert done[0] == {
        "step": 5,
        "done": 1,
        "total": 6,
        "task": "task-g2",
        "outcome": "solved",
        "reward": 1.0,
    }


def test_slots_bound_concurrency_and_are_given_in_order(toys: Any) -> None:
    started: list[str] = []

    async def hook(name: str) -> None:
        started.append(name)
        await asyncio.sleep(0.005)

    world = World(toys, concurrency=3)
    world.run([toys.request(f"g{i}", size=4) for i in range(3)], toys.Episode(hook=hook))
    assert started == [f"g{i}-{m}" for i in range(3) for m in range(4)]
    assert world.pool.out_max == 3
    assert world.engine.active == 0


def test_k20_one_rollouts_failure_is_its_own(toys: Any) -> None:
    async def hook(name: str) -> None:
        if name == "g0-1":
            raise SandboxDeadError("gone")

    (group,) = World(toys).run([toys.request(size=3)], toys.Episode(hook=hook))
    kinds = [t.outcome.kind for t in group.trajectories]
    assert kinds == [OutcomeKind.SOLVED, OutcomeKind.INFRASTRUCTURE, OutcomeKind.SOLVED]
    assert len(group.valid) == 2


@pytest.mark.parametrize("error", [ZeroDivisionError("bug"), PolicyDeadError("the server ended")])
def test_k20_a_fault_reaches_the_foreground_at_once_and_all_sandboxes_come_back(toys: Any, error: Exception) -> None:
    async def hook(name: str) -> None:
        if name == "g1-0":
            raise error
        await asyncio.sleep(30)

    world = World(toys, concurrency=8)
    began = time.monotonic()
    with pytest.raises(type(error), match=str(error)):
        world.run([toys.request(f"g{i}", size=2) for i in range(2)], toys.Episode(hook=hook))
    assert time.monotonic() - began < 5
    assert (world.pool.out, world.engine.active) == (0, 0)


def test_k20_an_error_of_the_event_sink_is_not_swallowed(toys: Any) -> None:
    def emit(_: Event) -> None:
        raise OSError("sink is gone")

    with pytest.raises(OSError, match="sink is gone"):
        World(toys, emit=emit).run([toys.request()])


def test_ctrl_c_gives_every_sandbox_back(toys: Any) -> None:
    async def forever(_: str) -> None:
        if world.pool.out == 4:
            all_out.set()
        await asyncio.Event().wait()

    async def scenario() -> None:
        engine = RolloutEngine(**world.settings)
        requests = [toys.request(f"g{i}", size=2) for i in range(4)]
        task = asyncio.create_task(engine.run_groups(requests, episode=toys.Episode(hook=forever)))
        await asyncio.wait_for(all_out.wait(), 5)
        assert engine.active == 4
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (world.pool.out, engine.active) == (0, 0)
        assert len(asyncio.all_tasks()) == 1

    world, all_out = World(toys), asyncio.Event()
    asyncio.run(scenario())


def test_a_rollout_is_stuck_by_itself_and_anew_with_every_turn() -> None:
    """K19: a wait for a sandbox, for admission or for a slot is not its own standstill."""
    status = RolloutStatus("g0-0", "t", since=0.0)
    watchdog = Watchdog(stuck_s=10, stall_s=30)
    for wait in WAITS:
        status.enter(wait, now=0)
        assert not watchdog.is_stuck(status, now=99)
    status.enter(RolloutPhase.EPISODE, now=100, sandbox_id="s1")
    assert not watchdog.is_stuck(status, now=109)
    assert watchdog.is_stuck(status, now=110)
    status.enter_turn(3, "acting", now=110)
    assert not watchdog.is_stuck(status, now=119)
    assert watchdog.is_stuck(status, now=120)


def test_any_rollouts_progress_is_felt_by_all() -> None:
    pulse, watchdog = Pulse(0.0), Watchdog(stuck_s=10, stall_s=30)
    first, second = (RolloutStatus(name, "t", 0.0, pulse) for name in ("g0-0", "g0-1"))
    first.enter(RolloutPhase.EPISODE, now=5)
    assert not watchdog.is_stalled(pulse, now=34)
    assert watchdog.is_stalled(pulse, now=35)
    second.enter_turn(1, "acting", now=35)
    assert not watchdog.is_stalled(pulse, now=64)


def test_phases_are_booked_over_attempts() -> None:
    status = RolloutStatus("g0-0", "t", since=0.0)
    for phase, now in ((RolloutPhase.PREPARE, 1), (RolloutPhase.EPISODE, 3), (RolloutPhase.QUEUED, 10)):
        status.enter(phase, now=now)
    status.enter_turn(1, "sampling", now=11)
    status.enter(RolloutPhase.EPISODE, now=14)
    assert status.spent(RolloutPhase.QUEUED) == 1 + 4
    assert status.spent(RolloutPhase.QUEUED, RolloutPhase.PREPARE) == 7
    assert status.spent(RolloutPhase.EPISODE) == 7


def test_concurrency_is_weighted_by_time() -> None:
    meter = ConcurrencyMeter(now=0.0)
    meter.change(+1, now=0.0)
    meter.change(+1, now=1.0)
    meter.change(-1, now=4.0)
    usage = meter.read(now=10.0)
    assert usage.concurrency_mean == pytest.approx((1 * 1 + 2 * 3 + 1 * 6) / 10)
    assert (usage.wall_s, usage.concurrency_peak) == (10.0, 2)
    assert meter.read(now=12.0).concurrency_mean == 1.0


def test_usage_of_a_run(toys: Any) -> None:
    async def hook(_: str) -> None:
        await asyncio.sleep(0.2)

    world = World(toys, concurrency=2)
    world.run([toys.request(size=4)], toys.Episode(hook=hook))
    usage = world.engine.take_usage()
    assert usage.concurrency_peak == 2
    assert 1.2 < usage.concurrency_mean <= 2.0

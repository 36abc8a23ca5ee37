"""The pool's promises, held against a backend of in-process fakes: bounds, freshness, deadlines, and no leak
ever."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_fakes import IMAGE, FakeBackend, drive, quicken, until

from agentrl.errors import (
    AgentRLError,
    DeadlineError,
    SandboxDeadError,
    SandboxError,
    SandboxStartError,
)
from agentrl.sandbox.pool import Pool, starts_wanted
from agentrl.sandbox.session import Session


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@given(*(st.integers(0, 20),) * 5)
def test_starts_wanted_keeps_its_bounds(waiting: int, reserve: int, supply: int, room: int, starters_free: int) -> None:
    count = starts_wanted(waiting=waiting, reserve=reserve, supply=supply, room=room, starters_free=starters_free)
    assert 0 <= count <= min(room, starters_free)
    if count < min(room, starters_free):
        assert supply + count >= waiting + reserve


def test_k44_a_sandbox_that_has_graded_never_serves_an_agent() -> None:
    async def body(pool: Pool, backend: FakeBackend) -> None:
        graders, agents = set(), set()
        for _ in range(6):
            async with pool.lease(IMAGE, timeout_s=5, grading=True) as box:
                graders.add(box.id)
            async with pool.lease(IMAGE, timeout_s=5) as box:
                agents.add(box.id)
        assert len(graders) == 1
        assert not graders & agents

    drive(body)


def test_k44_graders_give_way_to_agents_and_agents_to_gradings_that_wait() -> None:
    """Neither kind can starve the other in a full pool."""

    async def body(pool: Pool, backend: FakeBackend) -> None:
        async def hold(grading: bool) -> str:
            async with pool.lease(IMAGE, timeout_s=5, grading=grading) as box:
                await asyncio.sleep(0.005)
                return box.id

        graded = set(await asyncio.gather(*(hold(True) for _ in range(6))))
        agents = set(await asyncio.gather(*(hold(False) for _ in range(6))))
        assert not graded & agents
        await asyncio.gather(*(hold(bool(n % 2)) for n in range(20)))
        assert backend.most_alive <= 2

    drive(body, size=2)


def test_a_lease_is_fresh_and_the_sandbox_is_used_again() -> None:
    async def body(pool: Pool, backend: FakeBackend) -> None:
        seen = []
        for _ in range(6):
            async with pool.lease(IMAGE, timeout_s=5) as box:
                assert (await box.run("ls", timeout_s=1)).output == ""
                await box.write_files({"left": b"x"})
                seen.append(box.id)
        assert len(seen) > len(set(seen))
        assert pool.stats().leases == 6
        assert pool.stats().failures == 0
        assert pool.stats().starts == backend.started

    drive(body)


def test_a_warm_lease_waits_for_no_start() -> None:
    async def body(pool: Pool, backend: FakeBackend) -> None:
        await until(lambda: pool.stats().idle == 2)
        took = []
        for _ in range(50):
            await until(lambda: pool.stats().idle > 0)
            began = time.perf_counter()
            async with pool.lease(IMAGE, timeout_s=5):
                took.append(time.perf_counter() - began)
        assert sorted(took)[25] < 0.1

    drive(body, backend=FakeBackend(start_s=0.3), reuse=100)


def test_reuse_ends_after_its_number_of_leases() -> None:
    async def body(pool: Pool, backend: FakeBackend) -> None:
        ids = []
        for _ in range(6):
            async with pool.lease(IMAGE, timeout_s=5) as box:
                ids.append(box.id)
        assert len(ids) == 6
        assert all(ids.count(name) <= 2 for name in ids)
        assert any(ids.count(name) == 2 for name in ids)

    drive(body, reuse=2, size=1, starters=1)


def test_size_and_starters_are_bounds() -> None:
    async def user(pool: Pool) -> None:
        async with pool.lease(IMAGE, timeout_s=10):
            await asyncio.sleep(0.002)

    async def body(pool: Pool, backend: FakeBackend) -> None:
        await asyncio.gather(*(user(pool) for _ in range(40)))

    backend = drive(body, backend=FakeBackend(start_s=0.003), size=5, starters=2)
    assert backend.most_alive <= 5
    assert backend.most_starting <= 2
    assert backend.started >= 3


def test_a_lease_that_waits_too_long_names_its_holder() -> None:
    async def body(pool: Pool, backend: FakeBackend) -> None:
        async with pool.lease(IMAGE, timeout_s=5):
            with pytest.raises(DeadlineError, match="1 leased") as caught:
                async with pool.lease(IMAGE, timeout_s=0.05, label="rollout 17"):
                    pass
            assert "rollout 17" in caught.value.where
        async with pool.lease(IMAGE, timeout_s=5):
            pass

    drive(body, size=1, starters=1)


@pytest.mark.parametrize("how", ["sandbox error", "dead", "out of memory", "reset fails"])
def test_what_went_wrong_is_not_used_again(how: str) -> None:
    """K42."""

    async def body(pool: Pool, backend: FakeBackend) -> None:
        backend.reset_fails = how == "reset fails"
        with suppress(SandboxError):
            async with pool.lease(IMAGE, timeout_s=5) as box:
                first = box.id
                machine = next(m for m in backend.alive if m.id == first)
                if how == "sandbox error":
                    raise SandboxError("refused")
                if how == "dead":
                    await box.run("exit", timeout_s=1)
                if how == "out of memory":
                    machine.ooms = 1
                    assert (await box.run("hog", timeout_s=1)).out_of_memory
        await until(lambda: machine not in backend.alive)
        backend.reset_fails = False
        async with pool.lease(IMAGE, timeout_s=5) as box:
            assert box.id != first
        assert pool.stats().failures == 1

    drive(body, size=1, starters=1)


def test_an_idle_sandbox_found_dead_is_replaced() -> None:
    async def body(pool: Pool, backend: FakeBackend) -> None:
        await until(lambda: pool.stats().idle == 1)
        machine = next(iter(backend.alive))
        machine.kill()
        await asyncio.sleep(0.01)
        async with pool.lease(IMAGE, timeout_s=5) as box:
            assert box.id != machine.id
        assert pool.stats().failures == 1

    drive(body, size=1, starters=1)


def test_an_error_of_the_holder_is_not_the_sandboxes() -> None:
    async def body(pool: Pool, backend: FakeBackend) -> None:
        with pytest.raises(ValueError, match="mine"):
            async with pool.lease(IMAGE, timeout_s=5):
                raise ValueError("mine")
        await until(lambda: pool.stats().idle == 1)
        assert backend.started == 1
        assert pool.stats().failures == 0

    drive(body, size=1, starters=1)


def test_places_for_many_who_wait_are_made_at_once() -> None:
    """Not one after the other: an end may take a second on a loaded daemon."""

    async def body(pool: Pool, backend: FakeBackend) -> None:
        await until(lambda: pool.stats().idle == 4)
        began, all_there = time.monotonic(), asyncio.Barrier(4)

        async def other() -> None:
            async with pool.lease("other", timeout_s=5):
                await all_there.wait()

        await asyncio.gather(*(other() for _ in range(4)))
        assert time.monotonic() - began < 0.9

    backend = FakeBackend()
    backend.close_s = 0.3
    assert drive(body, backend=backend, size=4, starters=4).most_alive <= 4


def test_an_operation_left_in_progress_ends_with_its_lease() -> None:
    """The next lease would wait for it, and its answer."""

    async def body(pool: Pool, backend: FakeBackend) -> None:
        async with pool.lease(IMAGE, timeout_s=5) as box:
            left = asyncio.create_task(box.run("sleep", timeout_s=60))
            await asyncio.sleep(0.01)
            first = box.id
        async with pool.lease(IMAGE, timeout_s=2) as box:
            assert box.id != first
            assert (await box.run("ls", timeout_s=1)).output == ""
        with pytest.raises(SandboxDeadError):
            await left

    drive(body, size=1, starters=1)


def test_a_reset_that_fails_in_an_unforeseen_way_costs_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(session: Session, *, timeout_s: float) -> None:
        raise ZeroDivisionError("a fault of the program")

    monkeypatch.setattr(Session, "reset", broken)

    async def body(pool: Pool, backend: FakeBackend) -> None:
        for _ in range(3):
            async with pool.lease(IMAGE, timeout_s=2):
                pass
        assert pool.stats().failures >= 2

    drive(body, size=1, starters=1)


def test_a_reset_has_as_long_as_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either may have a whole work tree to copy."""
    given: list[float] = []

    async def reset(session: Session, *, timeout_s: float) -> None:
        given.append(timeout_s)

    monkeypatch.setattr(Session, "reset", reset)

    async def body(pool: Pool, backend: FakeBackend) -> None:
        async with pool.lease(IMAGE, timeout_s=2):
            pass
        await until(lambda: bool(given))

    drive(body, start_timeout_s=70.0)
    drive(body, start_timeout_s=5.0)
    assert given == [70.0, 20.0]


def test_close_ends_leases_starts_and_waits() -> None:
    async def body(pool: Pool, backend: FakeBackend) -> None:
        entered = asyncio.Event()

        async def hold() -> None:
            async with pool.lease(IMAGE, timeout_s=5) as box:
                entered.set()
                while True:
                    await box.run("ls", timeout_s=1)
                    await asyncio.sleep(0.001)

        async def wait() -> None:
            async with pool.lease(IMAGE, timeout_s=30):
                pass

        holder, waiter = asyncio.create_task(hold()), asyncio.create_task(wait())
        await entered.wait()
        backend.start_s = 60.0
        await pool.close()
        with pytest.raises(SandboxDeadError):
            await holder
        with pytest.raises(SandboxError, match="pool was closed"):
            await waiter
        with pytest.raises(SandboxError, match="pool is closed"):
            await wait()

    drive(body, size=1, starters=1)


def test_close_while_the_first_are_starting() -> None:
    async def body(pool: Pool, backend: FakeBackend) -> None:
        await asyncio.sleep(0.01)
        assert backend.starting == 2

    drive(body, backend=FakeBackend(start_s=60.0))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(1, 4), reuse=st.integers(1, 5))
def test_whatever_happens_nothing_leaks_and_every_lease_is_fresh(seed: int, size: int, reuse: int) -> None:
    """Random users: cancelled in every place, dying sandboxes, failing starts and resets, two images."""
    dice = random.Random(seed)

    async def user(pool: Pool) -> None:
        with suppress(AgentRLError):
            async with pool.lease(dice.choice([IMAGE, "other"]), timeout_s=dice.choice([0.001, 0.01, 1.0])) as box:
                assert (await box.run("ls", timeout_s=1)).output == ""
                await box.write_files({"left": b""})
                if dice.random() < 0.2:
                    await box.run("exit", timeout_s=1)
                await asyncio.sleep(dice.random() * 0.003)

    async def body(pool: Pool, backend: FakeBackend) -> None:
        users = []
        for _ in range(30):
            if dice.random() < 0.1:
                backend.faults.append(SandboxStartError("busy"))
            backend.reset_fails = dice.random() < 0.1
            backend.reset_s = dice.random() * 0.002
            users.append(asyncio.create_task(user(pool)))
            await asyncio.sleep(dice.random() * 0.002)
            if dice.random() < 0.4:
                dice.choice(users).cancel()
        results = await asyncio.gather(*users, return_exceptions=True)
        assert [r for r in results if isinstance(r, Exception)] == []

    backend = drive(body, backend=FakeBackend(start_s=0.001), size=size, starters=2, reuse=reuse)
    assert backend.most_alive <= size
    assert backend.most_starting <= 2

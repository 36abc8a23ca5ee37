"""The pool's promises, held against a backend of in-process fakes: bounds, freshness, deadlines, and no leak
ever."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import SandboxConfig
from agentrl.errors import (
    AgentRLError,
    DaemonUnreachableError,
    DeadlineError,
    ImageMissingError,
    SandboxDeadError,
    SandboxError,
    SandboxStartError,
)
from agentrl.sandbox import pool as pool_module
from agentrl.sandbox.backend import BackendName
from agentrl.sandbox.channel import Channel
from agentrl.sandbox.pool import Pool, starts_wanted

IMAGE = "agentrl/base"


class FakeMachine:
    """A server that keeps `files`, answers, and can be told to die or to fail its reset."""

    def __init__(self, backend: FakeBackend, number: int, image: str, channel: Channel) -> None:
        self.id = f"fake-{number}"
        self.image = image
        self.channel = channel
        self.files: set[str] = set()
        self.server: asyncio.Task[None] | None = None
        self.ooms = 0
        self._backend = backend

    def kill(self) -> None:
        if self.server is not None:
            self.server.cancel()

    def oom_kills(self) -> int | None:
        return self.ooms

    async def cause_of_death(self) -> SandboxError:
        return SandboxDeadError("it died")

    async def close(self) -> None:
        self.kill()
        await asyncio.sleep(0)
        self.channel.close()
        self._backend.alive.discard(self)

    async def serve(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            writer.write(b'{"ready": true, "protocol": 1}\n')
            while line := await reader.readline():
                question = json.loads(line)
                if question["op"] == "reset":
                    if self._backend.reset_fails:
                        break
                    await asyncio.sleep(self._backend.reset_s)
                    self.files.clear()
                elif question["op"] == "write":
                    self.files |= question["files"].keys()
                elif question["op"] == "run" and question["command"] == "exit":
                    break
                fields = {
                    "exit_code": 0,
                    "output": " ".join(sorted(self.files)),
                    "output_bytes": 0,
                    "timed_out": False,
                    "out_of_memory": False,
                    "duration_s": 0.0,
                }
                writer.write(json.dumps({"id": question["id"], "ok": True, **fields}).encode() + b"\n")
        finally:
            writer.close()


class FakeBackend:
    """Starts fakes, counting what lives, and failing as told: `faults` are raised by the next starts in
    turn."""

    name: BackendName = "bubblewrap"

    def __init__(self, *, start_s: float = 0.0) -> None:
        self.start_s = start_s
        self.reset_s = 0.0
        self.reset_fails = False
        self.faults: list[Exception] = []
        self.always: Exception | None = None
        self.alive: set[FakeMachine] = set()
        self.started = self.starting = self.most_starting = self.most_alive = 0
        self.closed = False

    async def prepare(self, image: str) -> None:
        """Nothing to prepare."""

    async def start(self, image: str, *, timeout_s: float) -> FakeMachine:
        self.starting += 1
        self.most_starting = max(self.most_starting, self.starting)
        try:
            await asyncio.sleep(self.start_s)
            fault = self.faults.pop(0) if self.faults else self.always
            if fault is not None:
                raise fault
            ours, theirs = socket.socketpair()
            self.started += 1
            machine = FakeMachine(self, self.started, image, await Channel.over(ours))
            machine.server = asyncio.create_task(machine.serve(theirs))
            self.alive.add(machine)
            self.most_alive = max(self.most_alive, len(self.alive))
            return machine
        finally:
            self.starting -= 1

    async def close(self) -> None:
        self.closed = True


def drive(
    body: Callable[[Pool, FakeBackend], Awaitable[None]], *, backend: FakeBackend | None = None, **config: int
) -> FakeBackend:
    """Run `body` in a pool, close it, and check that nothing lives on."""
    backend = backend or FakeBackend()

    async def main() -> None:
        async with asyncio.timeout(20):
            pool = Pool(SandboxConfig(**{"size": 4, "starters": 2, "reuse": 64, **config}), backend)
            try:
                await body(pool, backend)
            finally:
                await pool.close()
            assert pool.stats().alive == 0
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for _ in range(5):
            await asyncio.sleep(0)
        assert not {task for task in others if not task.done()}

    asyncio.run(main())
    assert backend.alive == set()
    assert backend.starting == 0
    assert backend.closed
    return backend


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "BACKOFF_S", 0.001)
    monkeypatch.setattr(pool_module, "COOLDOWN_S", 0.02)


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        await asyncio.sleep(0.001)


@given(*(st.integers(0, 20),) * 5)
def test_starts_wanted_keeps_its_bounds(waiting: int, reserve: int, supply: int, room: int, starters_free: int) -> None:
    count = starts_wanted(waiting=waiting, reserve=reserve, supply=supply, room=room, starters_free=starters_free)
    assert 0 <= count <= min(room, starters_free)
    if count < min(room, starters_free):
        assert supply + count >= waiting + reserve


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


def test_a_start_that_fails_is_tried_again() -> None:
    """K43."""

    async def body(pool: Pool, backend: FakeBackend) -> None:
        async with pool.lease(IMAGE, timeout_s=5):
            pass
        assert pool.stats().failures == 2

    backend = FakeBackend()
    backend.faults = [SandboxStartError("busy"), RuntimeError("unforeseen")]
    drive(body, backend=backend, size=1, starters=1)


@pytest.mark.parametrize(
    ("fault", "kind", "tries"),
    [
        (SandboxStartError("no room"), SandboxStartError, pool_module.START_ATTEMPTS),
        (
            DaemonUnreachableError("gone", remedy="start it"),
            DaemonUnreachableError,
            pool_module.START_ATTEMPTS,
        ),
        (ImageMissingError("no image"), ImageMissingError, 1),
        (RuntimeError("unforeseen"), SandboxStartError, pool_module.START_ATTEMPTS),
    ],
)
def test_when_no_start_succeeds_those_who_wait_fail_with_the_reason(
    fault: Exception, kind: type[AgentRLError], tries: int
) -> None:
    async def wait(pool: Pool) -> None:
        async with pool.lease(IMAGE, timeout_s=30):
            pass

    async def body(pool: Pool, backend: FakeBackend) -> None:
        began = time.monotonic()
        results = await asyncio.gather(*(wait(pool) for _ in range(8)), return_exceptions=True)
        assert time.monotonic() - began < 5
        assert [type(result) for result in results] == [kind] * 8
        assert str(fault).splitlines()[0] in str(results[0])
        backend.always = None
        async with pool.lease(IMAGE, timeout_s=5):
            pass  # a pool that failed once recovers

    backend = FakeBackend()
    backend.always = fault
    drive(body, backend=backend, starters=1)


def test_another_image_takes_the_place_of_an_idle_one() -> None:
    async def body(pool: Pool, backend: FakeBackend) -> None:
        await until(lambda: pool.stats().idle == 2)
        async with pool.lease("other", timeout_s=5) as box:
            assert box.image == "other"
        async with pool.lease(IMAGE, timeout_s=5) as box:
            assert box.image == IMAGE

    assert drive(body, size=2, starters=2).most_alive <= 2


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

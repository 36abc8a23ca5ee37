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
from agentrl.sandbox import pool_starts as starts_module
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
        self.attempts = self.preparing = self.most_preparing = 0
        self.prepared: list[str] = []
        self.prepare_s: dict[str, float] = {}
        self.missing: set[str] = set()
        self.room: int | None = None

    async def prepare(self, image: str) -> None:
        self.prepared.append(image)
        self.preparing += 1
        self.most_preparing = max(self.most_preparing, self.preparing)
        try:
            await asyncio.sleep(self.prepare_s.get(image, 0.0))
        finally:
            self.preparing -= 1
        if image in self.missing:
            raise ImageMissingError(f"no {image}")

    async def start(self, image: str, *, timeout_s: float) -> FakeMachine:
        self.attempts += 1
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

    def free_room(self) -> int | None:
        return self.room

    async def close(self) -> None:
        self.closed = True


def drive(
    body: Callable[[Pool, FakeBackend], Awaitable[None]], *, backend: FakeBackend | None = None, **config: float
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
    monkeypatch.setattr(starts_module, "BACKOFF_S", 0.001)
    monkeypatch.setattr(starts_module, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(starts_module, "COOLDOWN_S", 0.02)
    monkeypatch.setattr(pool_module, "LOOK_AGAIN_S", 0.02)


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
    ("fault", "kind"),
    [
        (SandboxStartError("no room"), SandboxStartError),
        (DaemonUnreachableError("gone", remedy="start it"), DaemonUnreachableError),
        (ImageMissingError("no image"), ImageMissingError),
        (RuntimeError("unforeseen"), SandboxStartError),
    ],
)
def test_when_no_start_succeeds_those_who_wait_fail_with_the_reason(fault: Exception, kind: type[AgentRLError]) -> None:
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
    drive(body, backend=backend, starters=1, daemon_patience_s=0.02)


def test_k43_a_daemon_that_is_away_fails_nobody_who_can_wait() -> None:
    """Far more silent tries than a failing start gets; counted as one failure."""

    async def body(pool: Pool, backend: FakeBackend) -> None:
        async def use() -> None:
            async with pool.lease(IMAGE, timeout_s=10):
                pass

        users = [asyncio.create_task(use()) for _ in range(6)]
        await until(lambda: backend.attempts > 3 * starts_module.START_ATTEMPTS)
        assert not any(user.done() for user in users)
        backend.always = None
        await asyncio.gather(*users)
        assert pool.stats().failures == 1

    backend = FakeBackend()
    backend.always = DaemonUnreachableError("gone")
    drive(body, backend=backend, starters=1)


def test_an_image_that_is_slow_to_come_holds_up_no_other() -> None:
    async def body(pool: Pool, backend: FakeBackend) -> None:
        backend.prepare_s["slow"] = 60.0
        slow = asyncio.create_task(pool.lease("slow", timeout_s=30).__aenter__())
        await until(lambda: "slow" in backend.prepared)
        for _ in range(3):
            async with pool.lease(IMAGE, timeout_s=2):
                pass
        slow.cancel()

    drive(body, size=1, starters=1, reuse=1)


def test_prefetch_has_images_ahead_and_never_fails() -> None:
    async def body(pool: Pool, backend: FakeBackend) -> None:
        backend.missing = {"none"}
        await until(lambda: pool.stats().idle > 0)
        pool.prefetch(["first", "none", "second", IMAGE])
        pool.prefetch(["second", "third"])
        await until(lambda: "third" in backend.prepared)
        assert backend.prepared == [IMAGE, "first", "none", "second", "third"]
        assert backend.most_preparing == 1
        async with pool.lease("second", timeout_s=5):
            pass
        assert backend.prepared.count("second") == 1
        with pytest.raises(ImageMissingError):
            async with pool.lease("none", timeout_s=5):
                pass

    drive(body)


def test_a_backend_without_room_is_not_asked_and_asked_again() -> None:
    async def body(pool: Pool, backend: FakeBackend) -> None:
        await asyncio.sleep(0.02)
        assert backend.attempts == 0
        user = asyncio.create_task(pool.lease(IMAGE, timeout_s=10).__aenter__())
        await asyncio.sleep(0.02)
        assert backend.attempts == 0
        backend.room = 1
        await user

    backend = FakeBackend()
    backend.room = 0
    drive(body, backend=backend)


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

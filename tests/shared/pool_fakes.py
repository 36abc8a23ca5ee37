"""In-process fakes that a sandbox pool is held against, and a pool of them for one test."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from agentrl.config import SandboxConfig
from agentrl.errors import (
    ImageMissingError,
    SandboxDeadError,
    SandboxError,
)
from agentrl.sandbox import pool as pool_module
from agentrl.sandbox import pool_starts as starts_module
from agentrl.sandbox.backend import BackendName
from agentrl.sandbox.channel import Channel
from agentrl.sandbox.pool import Pool

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
        await asyncio.sleep(self._backend.close_s)
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
                elif question["op"] == "run" and question["command"] == "sleep":
                    await asyncio.sleep(60)
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
        self.close_s = 0.0
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


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pool's pauses short."""
    monkeypatch.setattr(starts_module, "BACKOFF_S", 0.001)
    monkeypatch.setattr(starts_module, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(starts_module, "COOLDOWN_S", 0.02)
    monkeypatch.setattr(pool_module, "LOOK_AGAIN_S", 0.02)


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for it; fails where it does not come true in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        await asyncio.sleep(0.001)

"""agentrl's pool under load: what `benchmarks/sandbox.py` measures of ours."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Literal

from sandbox_containers import cpu_files, read_cpu_s
from sandbox_load import COMMANDS_PER_EPISODE, STARTERS, TIMEOUT_S, Load, in_turn
from sandbox_report import OURS_BUBBLEWRAP, OURS_DOCKER

from agentrl.config import SandboxConfig
from agentrl.sandbox import open_pool
from agentrl.sandbox.docker_client import LABEL_RUN
from agentrl.sandbox.pool import Pool
from agentrl.wire import Sandbox


class Ours:
    """agentrl's pool on one of its backends."""

    share = 1.0

    def __init__(self, backend: Literal["docker", "bubblewrap"], size: int, run_id: str) -> None:
        self.name = OURS_DOCKER if backend == "docker" else OURS_BUBBLEWRAP
        self._config = SandboxConfig(backend=backend, size=size, starters=STARTERS)
        self._run_id = run_id
        self._stack = AsyncExitStack()
        self._leases = AsyncExitStack()
        self._pool: Pool | None = None
        self._boxes: list[Sandbox] = []
        self._cpu_files: list[Path] | None = None

    async def open(self) -> float:
        """Open the pool and lease all its sandboxes; seconds from the first start until all were ready."""
        pool = await self._stack.enter_async_context(open_pool(self._config, run_id=self._run_id))
        self._pool = pool
        began = time.perf_counter()
        await asyncio.gather(*(self._lease(pool) for _ in range(self._config.size)))
        took = time.perf_counter() - began
        if self.name == OURS_DOCKER:
            self._cpu_files = await asyncio.to_thread(cpu_files, f"{LABEL_RUN}={self._run_id}")
        return took

    async def _lease(self, pool: Pool) -> None:
        box = await self._leases.enter_async_context(pool.lease(self._config.image, timeout_s=TIMEOUT_S))
        self._boxes.append(box)

    async def prepare(self, command: str) -> None:
        """Run `command` once in every sandbox."""
        await asyncio.gather(*(_run(box, command) for box in self._boxes))

    async def load(self, command: str, *, count: int, seconds: float) -> Load:
        latencies: list[float] = []
        boxes = self._boxes[:count]
        await asyncio.gather(*(_run(box, command) for box in boxes))

        def worker(box: Sandbox) -> Callable[[float], Any]:
            async def loop(end: float) -> None:
                last = time.perf_counter()
                while last < end:
                    await _run(box, command)
                    now = time.perf_counter()
                    latencies.append(now - last)
                    last = now

            return loop

        done = await in_turn([worker(box) for box in boxes], seconds)
        done.latencies_s = latencies
        return done

    async def turnover(self, command: str, *, count: int, seconds: float) -> Load:
        """Episodes of lease, ten commands, release; `count` at once."""
        pool = self._pool
        if pool is None:
            raise RuntimeError("the pool is not open")
        episodes: list[float] = []
        leases: list[float] = []

        async def loop(end: float) -> None:
            while (began := time.perf_counter()) < end:
                async with pool.lease(self._config.image, timeout_s=TIMEOUT_S) as box:
                    leases.append(time.perf_counter() - began)
                    for _ in range(COMMANDS_PER_EPISODE):
                        await _run(box, command)
                episodes.append(time.perf_counter() - began)

        done = await in_turn([loop] * count, seconds)
        done.latencies_s, done.leases_s = episodes, leases
        return done

    async def inside_cpu_s(self) -> float | None:
        if self.name == OURS_DOCKER:
            return read_cpu_s(self._cpu_files)
        if not self._boxes:
            return None
        # The server waits for every process inside, so its own figures hold theirs.
        said = await asyncio.gather(*(box.run("cat /proc/1/stat", timeout_s=TIMEOUT_S) for box in self._boxes))
        ticks = sum(sum(map(int, each.output.rpartition(")")[2].split()[11:15])) for each in said)
        return ticks / os.sysconf("SC_CLK_TCK")

    async def end_leases(self) -> None:
        """Give back what `open` leased, and wait until all have been wiped."""
        self._boxes.clear()
        await self._leases.aclose()
        async with asyncio.timeout(TIMEOUT_S):
            while self._pool is not None and self._pool.stats().idle < self._config.size:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.05)

    async def close(self) -> None:
        await self._leases.aclose()
        await self._stack.aclose()


async def _run(box: Sandbox, command: str) -> None:
    result = await box.run(command, timeout_s=TIMEOUT_S)
    if result.exit_code != 0:
        raise RuntimeError(f"{box.id}: exit code {result.exit_code}: {result.output[:200]}")

"""Real sandboxes for tests: one pool per kind of house and test file, in an event loop that stays open between
tests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import TypeVar

import pytest

from agentrl.config import SandboxConfig
from agentrl.sandbox import Pool, open_pool
from agentrl.sandbox.backend import bubblewrap_fault, docker_fault
from agentrl.sandbox.docker_client import is_local
from agentrl.wire.protocols import Sandbox

T = TypeVar("T")
BACKENDS = [
    pytest.param("bubblewrap", marks=pytest.mark.bubblewrap),
    pytest.param("docker", marks=pytest.mark.docker),
]
# Docker's sandboxes are spoken to over a socket or over stdin and stdout: everything holds for both.
HOUSES = [*BACKENDS, pytest.param("docker-stdio", marks=pytest.mark.docker)]
_FAULTS: dict[str, str | None] = {}


class House:
    """A pool and the loop it lives in."""

    def __init__(self, config: SandboxConfig, runner: asyncio.Runner, pool: Pool) -> None:
        self.config = config
        self.runner = runner
        self.pool = pool

    def lease(self, body: Callable[[Sandbox], Awaitable[T]], *, timeout_s: float = 120.0) -> T:
        """Run `body` with a leased sandbox."""

        async def main() -> T:
            async with (
                asyncio.timeout(timeout_s),
                self.pool.lease(self.config.image, timeout_s=60) as sandbox,
            ):
                return await body(sandbox)

        return self.runner.run(main())


def require_backend(name: str) -> None:
    """Skip, with the reason, where the backend cannot be used."""
    if name not in _FAULTS:
        _FAULTS[name] = docker_fault() if name == "docker" else bubblewrap_fault()
    if _FAULTS[name]:
        pytest.skip(str(_FAULTS[name]))


@pytest.fixture(scope="module", params=BACKENDS)
def backend_name(request: pytest.FixtureRequest) -> str:
    """Each backend that can be used here."""
    require_backend(request.param)
    return str(request.param)


@pytest.fixture(scope="module", params=HOUSES)
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    """A small pool of narrow sandboxes."""
    backend, _, channel = str(request.param).partition("-")
    require_backend(backend)
    config = SandboxConfig(backend=backend, size=2, starters=1, memory_mb=256, pids=64, disk_mb=32, start_timeout_s=60)
    if backend == "docker":
        config = config.model_copy(update={"channel": channel or ("socket" if is_local("") else "auto")})
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        pool = runner.run(stack.enter_async_context(open_pool(config, run_id="contract")))
        try:
            yield House(config, runner, pool)
        finally:
            runner.run(stack.aclose())

"""Work with a small pool of real bubblewrap sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from agentrl.config import SandboxConfig
from agentrl.errors import NoSandboxBackendError
from agentrl.sandbox import open_pool
from agentrl.wire import SandboxPool

T = TypeVar("T")


def with_pool(work: Callable[[SandboxPool], Awaitable[T]], *, size: int = 4) -> T:
    """The result of `work(pool)`. Skips the test, with the reason, where there is no bubblewrap."""

    async def main() -> T:
        config = SandboxConfig(backend="bubblewrap", size=size, starters=2)
        async with open_pool(config, run_id="test-envs") as pool:
            return await work(pool)

    try:
        return asyncio.run(main())
    except NoSandboxBackendError as error:
        pytest.skip(f"no bubblewrap here: {error.what}")

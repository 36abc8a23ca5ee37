"""Deadlines with names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from agentrl.errors import AgentRLError


@asynccontextmanager
async def deadline(seconds: float, late: Callable[[], AgentRLError]) -> AsyncIterator[None]:
    """Cancel the block after `seconds` and raise `late()`.

    A `TimeoutError` of the block's own passes through: it is somebody else's.
    """
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield
    except TimeoutError:
        if scope.expired():
            raise late() from None
        raise


def being_cancelled() -> bool:
    """True where the current task was asked to end and has not done so."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

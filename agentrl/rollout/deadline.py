"""Deadlines with names, and blocks that another task may end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from agentrl.errors import AgentRLError


class Deadline:
    """A running deadline. It stands still while the block waits for its turn (`paused`)."""

    def __init__(self, scope: asyncio.Timeout) -> None:
        self._scope = scope

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Seconds spent in the block do not count."""
        end, loop = self._scope.when(), asyncio.get_running_loop()
        if end is None or self._scope.expired():
            yield
            return
        left = end - loop.time()
        self._scope.reschedule(None)
        try:
            yield
        finally:
            self._scope.reschedule(loop.time() + left)


@asynccontextmanager
async def deadline(seconds: float, late: Callable[[], AgentRLError]) -> AsyncIterator[Deadline]:
    """Cancel the block after `seconds` and raise `late()`.

    A `TimeoutError` of the block's own passes through: it is somebody else's.
    """
    scope = asyncio.timeout(seconds)
    try:
        async with scope:
            yield Deadline(scope)
    except TimeoutError:
        if scope.expired():
            raise late() from None
        raise


class Interruptible:
    """A block that another task may end with an error of its choice; may be entered again afterwards."""

    def __init__(self) -> None:
        self._scope: asyncio.Timeout | None = None
        self._error: Exception | None = None

    def interrupt(self, error: Exception) -> bool:
        """Cancel the block, which then raises `error`. False where nobody is in it, or it is ending already."""
        if self._scope is None or self._error is not None:
            return False
        self._error = error
        self._scope.reschedule(asyncio.get_running_loop().time())
        return True

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """The block. What it raises by itself while it is being ended passes through."""
        self._error = None
        self._scope = scope = asyncio.timeout(None)
        try:
            async with scope:
                yield
        except TimeoutError:
            if self._error is not None and scope.expired():
                raise self._error from None
            raise
        finally:
            self._scope = None


def being_cancelled() -> bool:
    """True where the current task was asked to end and has not done so."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

"""One policy server's requests: counted over time, and kept in step with weight deliveries.

    flowing ──hold()──▶ held ──let_send()──▶ settling ──release()──▶ flowing

| state | a new request | closing a request (cancelled, or its deadline reached) |
|---|---|---|
| flowing | is sent | at once |
| held | waits, unsent | waits |
| settling | is sent | waits |

Closing makes the server abort the request, which ends engines that stand still or have just been resumed: so `hold`
waits for closings under way, and later ones wait for `release`. A request is written only when it is sent: one that
waited speaks of the new weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from agentrl.errors import DeadlineError

Clock = Callable[[], float]
_CLOSE_TIMEOUT_S = 5.0


class InFlight:
    """How many requests are in flight now, and their time-weighted mean since the last `take`."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._count = 0
        self._area = 0.0  # request-seconds since `_since`
        self._since = self._at = clock()

    @property
    def now(self) -> int:
        """Requests sent and not answered."""
        return self._count

    def add(self, change: int) -> None:
        """One more (1) or one less (-1)."""
        self._advance()
        self._count += change

    def take(self) -> float:
        """The mean since the last call (the present number where no time has passed)."""
        self._advance()
        elapsed = self._at - self._since
        mean = self._area / elapsed if elapsed > 0 else float(self._count)
        self._area, self._since = 0.0, self._at
        return mean

    def _advance(self) -> None:
        now = self._clock()
        self._area += self._count * (now - self._at)
        self._at = now


class Traffic:
    """See the module. One per server; `run` is the way of every sampling request."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.in_flight = InFlight(clock)
        self.closed = 0
        """Requests closed unanswered so far."""
        self._may_send = asyncio.Event()
        self._may_close = asyncio.Event()
        self._none_closing = asyncio.Event()
        self._closing = 0
        self._none_closing.set()
        self.release()

    async def run(self, send: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
        """Send a request as soon as the state allows, and wait for its answer. Cancelling closes it, in step with
        deliveries: a delivery's own deadlines bound how long that waits."""
        await self._may_send.wait()
        task = asyncio.create_task(send())
        self.in_flight.add(1)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                await self._close(task)
            raise
        finally:
            self.in_flight.add(-1)

    async def _close(self, task: asyncio.Task[bytes]) -> None:
        """Wait until the request may be closed, then close it. A second cancellation closes it at once."""
        try:
            await self._may_close.wait()
        finally:
            self._closing += 1
            self.closed += 1
            self._none_closing.clear()
            task.cancel()
            try:
                await asyncio.wait({task}, timeout=_CLOSE_TIMEOUT_S)
            finally:
                self._closing -= 1
                if not self._closing:
                    self._none_closing.set()

    async def hold(self, *, timeout_s: float) -> None:
        """Hold new requests and new closings back; return when no closing is under way. Raises `DeadlineError`.

        Whoever holds must `release`, whatever this ends with.
        """
        self._may_send.clear()
        self._may_close.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._none_closing.wait()
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._closing} requests to a policy server were still being closed after {timeout_s:g} s",
                where="before a weight delivery",
                remedy="read the server's log; raise policy.delivery_timeout_s",
            ) from error

    def let_send(self) -> None:
        """The server takes requests again, under the new weights."""
        self._may_send.set()

    def release(self) -> None:
        """Everything flows."""
        self._may_send.set()
        self._may_close.set()

"""How a pool's sandboxes come up: the image first, then the start, each tried again for as long as it makes sense.

An image is had before a starter is taken for it, so that a slow pull holds up no other image. A start that fails is
tried again a few times with growing pauses; one that fails because the daemon does not answer, for as long as
`daemon_patience_s` says. What no waiting mends (no such image, one that can be no sandbox, a recipe that cannot be
read, a program that is lacking, no backend) fails at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from agentrl.config import SandboxConfig
from agentrl.errors import (
    AgentRLError,
    DaemonUnreachableError,
    ImageMissingError,
    ImageUnfitError,
    MissingRequirementError,
    NoSandboxBackendError,
    SandboxStartError,
    UsageError,
)
from agentrl.sandbox.backend import Backend
from agentrl.sandbox.session import Session

log = logging.getLogger("agentrl.sandbox")

START_ATTEMPTS = 4
BACKOFF_S = 0.25
LONGEST_PAUSE_S = 2.0
COOLDOWN_S = 2.0

_FINAL = (ImageMissingError, ImageUnfitError, MissingRequirementError, NoSandboxBackendError, UsageError)
"""What no further try would mend."""

T = TypeVar("T")


class Taker(Protocol):
    """The pool, as its starts see it."""

    def take_started(self, session: Session) -> None:
        """It is ready for a lease."""
        ...

    def take_broken(self, session: Session) -> None:
        """It never became ready and is to be closed."""
        ...

    def take_fault(self, image: str, error: AgentRLError) -> None:
        """No sandbox of `image` could be had."""
        ...

    def take_change(self) -> None:
        """Look again at what is missing."""
        ...


class Starts:
    """The starts in progress of one pool, and their figures."""

    def __init__(self, config: SandboxConfig, backend: Backend, taker: Taker) -> None:
        self.starting: Counter[str] = Counter()
        self.count = self.failures = 0
        self.seconds = 0.0
        self._config = config
        self._backend = backend
        self._taker = taker
        self._ready: set[str] = set()
        self._getting: dict[str, asyncio.Task[None]] = {}
        self._fetching: asyncio.Task[None] | None = None
        self._to_fetch: dict[str, None] = {}
        self._not_before: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pending(self) -> list[asyncio.Task[None]]:
        """What is in progress."""
        return list(self._tasks)

    def may_start(self, image: str) -> bool:
        """Whether a start of `image` makes sense now. Where its image is not known to be there, it is had first."""
        if self._not_before.get(image, 0.0) > time.monotonic():
            return False  # it has failed just now; `_fail` has set a timer
        if image not in self._ready and image not in self._getting:
            self._getting[image] = self._spawn(self._get(image))
        return image in self._ready

    def start(self, image: str) -> None:
        """Start one sandbox in the background."""
        self.starting[image] += 1
        self._spawn(self._start_series(image))

    def prefetch(self, images: Sequence[str]) -> None:
        """Have the images in the background, one after the other. What cannot be had is told to whoever leases it."""
        self._to_fetch.update(dict.fromkeys(image for image in images if image not in self._ready))
        if self._to_fetch and (self._fetching is None or self._fetching.done()):
            self._fetching = self._spawn(self._fetch())

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _fetch(self) -> None:
        while self._to_fetch:
            image = next(iter(self._to_fetch))
            try:
                if image not in self._ready:
                    await self._backend.prepare(image)
                    self._ready.add(image)
            except AgentRLError as error:
                log.info("image %s could not be had ahead: %s", image, error.what)
            except Exception:
                log.exception("image %s could not be had ahead, in an unforeseen way", image)
            del self._to_fetch[image]

    async def _get(self, image: str) -> None:
        try:
            await self._persist(image, lambda: self._backend.prepare(image))
        except AgentRLError as error:
            self._fail(image, error)
        else:
            self._ready.add(image)
        finally:
            del self._getting[image]
        self._taker.take_change()

    async def _start_series(self, image: str) -> None:
        """Start one sandbox, whatever number of tries that takes."""
        error: AgentRLError | None = None
        session: Session | None = None
        try:
            session = await self._persist(image, lambda: self._start_once(image))
        except AgentRLError as fault:
            error = fault
        finally:
            self.starting[image] -= 1
        if session is not None:
            self._taker.take_started(session)
        elif error is not None:
            self._fail(image, error)
        self._taker.take_change()

    async def _persist(self, image: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of the first attempt that succeeds. Raises the last one's error, as ours."""
        tries = silences = 0
        away_since: float | None = None
        while True:
            try:
                return await attempt()
            except _FINAL:
                raise
            except DaemonUnreachableError as fault:
                error: AgentRLError = fault
                if away_since is None:
                    away_since, silences = time.monotonic(), 0
                    self.failures += 1
                silences += 1
                if time.monotonic() - away_since >= self._config.daemon_patience_s:
                    raise
            except Exception as fault:
                error = fault if isinstance(fault, AgentRLError) else self._unforeseen(fault, image)
                away_since = None
                tries += 1
                self.failures += 1
                log.warning("start %d of %d failed: %s", tries, START_ATTEMPTS, error.what)
                if tries >= START_ATTEMPTS:
                    raise error from fault
            pause_s = BACKOFF_S * 2 ** ((tries if away_since is None else silences) - 1)
            await asyncio.sleep(min(pause_s, LONGEST_PAUSE_S))

    @staticmethod
    def _unforeseen(fault: Exception, image: str) -> SandboxStartError:
        log.error("a sandbox start failed in an unforeseen way", exc_info=fault)
        return SandboxStartError(f"{type(fault).__name__}: {fault}", where=f"image {image}")

    async def _start_once(self, image: str) -> Session:
        began = time.monotonic()
        machine = await self._backend.start(image, timeout_s=self._config.start_timeout_s)
        session = Session(machine)
        try:
            await session.wait_ready(timeout_s=self._config.start_timeout_s)
        except BaseException:
            self._taker.take_broken(session)
            raise
        self.count += 1
        self.seconds += time.monotonic() - began
        return session

    def _fail(self, image: str, error: AgentRLError) -> None:
        """No attempt succeeded: a pause, then whoever still waits for the image may have another try."""
        self._not_before[image] = time.monotonic() + COOLDOWN_S
        asyncio.get_running_loop().call_later(COOLDOWN_S + 0.01, self._taker.take_change)
        self._taker.take_fault(image, error)


def for_waiter(error: AgentRLError, image: str) -> AgentRLError:
    """A new error for each who waits (an exception object carries one traceback)."""
    if isinstance(error, (DaemonUnreachableError, *_FINAL)):
        return type(error)(error.what, where=error.where, remedy=error.remedy)
    return SandboxStartError(
        f"no sandbox of {image} could be started in {START_ATTEMPTS} tries: {error.what}",
        where=error.where,
        remedy=error.remedy,
    )

"""The line to one Docker daemon: its clients, and whether it answers.

A daemon that gives no answer is *away*. It is asked every second until it answers; then `clear_up` runs, and only
when that has succeeded it counts as back, which `on_return` is told.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from agentrl.config import SandboxConfig
from agentrl.errors import DaemonUnreachableError
from agentrl.sandbox.docker_client import DAEMON_ERRORS, connect, gave_no_answer, named, unreachable
from agentrl.sandbox.docker_disk import UseRecords
from agentrl.sandbox.docker_images import ImageStore
from agentrl.sandbox.limits import Limits

log = logging.getLogger("agentrl.sandbox")

ASK_AGAIN_S = 1.0
_QUESTION_TIMEOUT_S = 5.0
_IMAGE_TIMEOUT_S = 120.0  # between two signs of life while an image is pulled or imported

T = TypeVar("T")


class Clients:
    """The daemon's clients (patient for starts, quick for questions, and for images) and what it is known by."""

    def __init__(self, address: str, config: SandboxConfig) -> None:
        """Blocking. Raises `DaemonUnreachableError`."""
        self.questions = connect(_QUESTION_TIMEOUT_S, address)  # first: a daemon that hangs is found out soon
        self.starts = connect(config.start_timeout_s, address)
        self.images = connect(_IMAGE_TIMEOUT_S, address)
        try:
            self.records = UseRecords(str(self.questions.info().get("ID") or named(address)))
        except DAEMON_ERRORS as error:
            raise unreachable(error, address) from error
        self.store = ImageStore(
            self.images, address, limits=Limits.of(config), pull=config.pull, recipes=config.recipes
        )

    def close(self) -> None:
        for client in (self.starts, self.questions, self.images):
            client.close()


class Daemon:
    """One daemon. Used in one event loop, made anywhere; nothing is asked when it is made."""

    def __init__(
        self, address: str, config: SandboxConfig, *, clear_up: Callable[[], None], on_return: Callable[[], None]
    ) -> None:
        """`clear_up` runs in one of the workers' threads, and when it raises the daemon is asked again; `on_return` in
        the event loop."""
        self.address = address
        self.away: DaemonUnreachableError | None = None
        self._config = config
        self._clear_up, self._on_return = clear_up, on_return
        self._clients: Clients | None = None
        self._connecting = threading.Lock()
        self._watch: asyncio.Task[None] | None = None

    def clients(self) -> Clients:
        """The clients, made at the first need. Blocking; raises `DaemonUnreachableError`."""
        with self._connecting:
            if self._clients is None:
                self._clients = Clients(self.address, self._config)
            return self._clients

    async def ask(self, workers: ThreadPoolExecutor, job: Callable[[], T]) -> T:
        """Run `job` in a thread. No answer makes the daemon away and raises `DaemonUnreachableError`."""
        try:
            return await asyncio.get_running_loop().run_in_executor(workers, job)
        except Exception as error:
            if (fault := self.no_answer(error, workers)) is not None:
                raise fault from error
            raise

    def no_answer(self, error: Exception, workers: ThreadPoolExecutor) -> DaemonUnreachableError | None:
        """Where `error` says that the daemon is away: note it, and give the typed error."""
        if isinstance(error, DaemonUnreachableError):
            fault = error
        elif gave_no_answer(error):
            fault = unreachable(error, self.address)
        else:
            return None
        if self.away is None:
            log.warning("nothing is started on %s for now: %s", named(self.address), fault.what)
        self.away = fault
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._wait_for_return(workers))
        return fault

    async def _wait_for_return(self, workers: ThreadPoolExecutor) -> None:
        def look() -> None:
            self.clients().questions.ping()
            self._clear_up()

        while True:
            await asyncio.sleep(ASK_AGAIN_S)
            try:
                await asyncio.get_running_loop().run_in_executor(workers, look)
            except (*DAEMON_ERRORS, DaemonUnreachableError):
                continue
            except Exception:
                log.exception("%s cannot be asked whether it is back", named(self.address))
                continue
            log.warning("%s answers again", named(self.address))
            self.away = None
            self._on_return()
            return

    async def stop(self) -> None:
        """Ask no more, and give up pulls and what else images wait for."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._clients is not None:
            self._clients.store.stop()

    def close(self) -> None:
        """Close the clients. Blocking."""
        if self._clients is not None:
            self._clients.close()

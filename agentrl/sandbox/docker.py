"""Sandboxes by Docker: hardened containers whose PID 1 is the server, on one daemon or on several.

A start goes to the daemon with the most free room among those that answer, have had no failing start of late and, for
an image that must be pulled, have it. A daemon that gives no answer is left out until it answers again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from agentrl.config import SandboxConfig
from agentrl.errors import DaemonUnreachableError, ImageMissingError, SandboxStartError
from agentrl.sandbox.backend import BackendName
from agentrl.sandbox.docker_client import named
from agentrl.sandbox.docker_container import DockerMachine
from agentrl.sandbox.docker_host import DockerHost
from agentrl.sandbox.docker_images import is_own

log = logging.getLogger("agentrl.sandbox")

_CLOSE_TIMEOUT_S = 30.0
_MISSING_FOR_S = 60.0
_ROOM_CHECK_S = 0.05


T = TypeVar("T")


class DockerBackend:
    """Starts containers (`Backend`). Use one per pool, inside its event loop."""

    name: BackendName = "docker"

    def __init__(self, config: SandboxConfig, *, run_id: str) -> None:
        addresses = config.hosts or ("",)
        room = config.host_size or math.ceil(config.size / len(addresses))
        pool_id = secrets.token_hex(8)
        self.hosts = tuple(
            DockerHost(address, config, run_id=run_id, pool_id=pool_id, room=room) for address in addresses
        )
        self._missing: dict[tuple[str, str], float] = {}  # (address, image): until when it is not asked for there
        self._own: set[str] = set()
        self._returns: set[asyncio.Task[None]] = set()
        for host in self.hosts:
            host.on_return(functools.partial(self._came_back, host))

    def free_room(self) -> int | None:
        """As `Backend.free_room`; None where no daemon answers, so that starts say so."""
        answering = [host for host in self.hosts if host.away is None]
        return sum(host.free for host in answering) if answering else None

    async def prepare(self, image: str) -> None:
        """As `Backend.prepare`. What is built here is had on every daemon that answers, anything else on one: where
        the others need it, they have it by then or pull it themselves."""
        if is_own(image):
            self._own.add(image)
            done = await asyncio.gather(
                *(host.prepare(image) for host in self.hosts if host.away is None), return_exceptions=True
            )
            faults = [result for result in done if isinstance(result, BaseException)]
            if done and len(faults) < len(done):
                return  # the others say why when a start gets there
            raise faults[0] if faults else self._all_away()
        if not any(host.has(image) and host.away is None for host in self.hosts):
            await self._on_some_host(image, lambda host: host.prepare(image), full_too=True)

    async def start(self, image: str, *, timeout_s: float) -> DockerMachine:
        """As `Backend.start`."""
        end = time.monotonic() + timeout_s
        while self.free_room() == 0:
            if time.monotonic() > end:
                raise SandboxStartError(
                    f"no Docker daemon that answers had room within {timeout_s:g} s",
                    where=", ".join(named(host.address) for host in self.hosts),
                    remedy="raise sandbox.host-size, lower sandbox.size, or start the daemons that are away",
                )
            await asyncio.sleep(_ROOM_CHECK_S)
        return await self._on_some_host(image, lambda host: host.start(image, timeout_s=timeout_s))

    async def _on_some_host(
        self, image: str, work: Callable[[DockerHost], Awaitable[T]], *, full_too: bool = False
    ) -> T:
        """Do `work` on the best host; where one turns out to be away, or to lack the image, on the next."""
        error: DaemonUnreachableError | ImageMissingError | None = None
        for host in self._ranked(image, full_too=full_too):
            try:
                return await work(host)
            except DaemonUnreachableError as fault:
                error = error or fault
            except ImageMissingError as fault:
                self._missing[host.address, image] = time.monotonic() + _MISSING_FOR_S
                error = fault
        if isinstance(error, ImageMissingError) and any(host.has(image) for host in self.hosts):
            raise SandboxStartError(
                f"the Docker daemons that have {image} have no room",
                where=error.where,
                remedy="load or pull it on every daemon of sandbox.hosts",
            ) from error
        raise error if error is not None else self._all_away()

    def _ranked(self, image: str, *, full_too: bool) -> list[DockerHost]:
        """The daemons that answer and have room, the best first; those known to lack the image only if all do."""
        answering = [host for host in self.hosts if host.away is None and (host.free > 0 or full_too)]
        now = time.monotonic()
        having = [host for host in answering if self._missing.get((host.address, image), 0.0) < now]
        return sorted(having or answering, key=lambda host: (host.failures, not host.has(image), -host.free))

    def _all_away(self) -> DaemonUnreachableError:
        """A new error for each who asks (an exception object carries one traceback)."""
        fault = next((host.away for host in self.hosts if host.away is not None), None)
        if fault is None:
            return DaemonUnreachableError("no Docker daemon has room", where="sandbox.hosts")
        return DaemonUnreachableError(fault.what, where=fault.where, remedy=fault.remedy)

    def _came_back(self, host: DockerHost) -> None:
        """Have the images built here on it again, so that it is as good a place as the others."""

        async def catch_up() -> None:
            done = await asyncio.gather(*(host.prepare(image) for image in self._own), return_exceptions=True)
            for result in done:
                if isinstance(result, Exception):
                    log.warning("%s lacks an image: %s", named(host.address), result)

        task = asyncio.create_task(catch_up())
        self._returns.add(task)
        task.add_done_callback(self._returns.discard)

    async def close(self) -> None:
        """As `Backend.close`."""
        for task in self._returns:
            task.cancel()
        await asyncio.gather(*(host.close(_CLOSE_TIMEOUT_S) for host in self.hosts))

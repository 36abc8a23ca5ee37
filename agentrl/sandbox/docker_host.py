"""One Docker daemon: its images, its containers, and whether it answers.

The SDK (blocking) runs in three bounded pools of threads: starts, removals and short questions, images. The bytes of
the conversations go through asyncio, past the daemon where a Unix socket reaches the container, else over its
attached stdin and stdout; never by `docker exec`, which costs a round of the daemon per command and cannot end what
it started.

Nothing is started on a daemon that is away. When it is back, whatever of ours it has that nobody holds (removals it
missed, starts whose answer was lost) is removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import docker
import docker.errors

from agentrl.config import SandboxConfig
from agentrl.errors import DaemonUnreachableError, SandboxStartError
from agentrl.sandbox.docker_channel import ChannelRefusedError, Door
from agentrl.sandbox.docker_client import (
    DAEMON_ERRORS,
    LABEL_IMAGE,
    LABEL_POOL,
    LABEL_RUN,
    is_local,
    named,
    owner_labels,
    remove_container,
)
from agentrl.sandbox.docker_container import (
    DockerMachine,
    EndedEarlyError,
    Link,
    Plan,
    attach,
    create,
    early_end,
    link_socket,
    link_stdio,
)
from agentrl.sandbox.docker_daemon import Clients, Daemon
from agentrl.sandbox.docker_disk import make_room, used_fraction
from agentrl.sandbox.docker_images import Prepared
from agentrl.sandbox.limits import Limits
from agentrl.sandbox.owner import Owner

log = logging.getLogger("agentrl.sandbox")

_REMOVERS = 4
_IMAGE_WORKERS = 2
_SLACK_S = 0.2


class DockerHost:
    """One daemon. Its methods run in one event loop; made anywhere."""

    def __init__(self, address: str, config: SandboxConfig, *, run_id: str, pool_id: str, room: int) -> None:
        """`room`: the most sandboxes it holds. Nothing is asked of the daemon yet."""
        self.address = address
        self.room = room
        self.failures = 0  # starts in a row that failed
        self._config = config
        self._limits = Limits.of(config)
        self._labels = {LABEL_RUN: run_id, LABEL_POOL: pool_id}
        self._run_id, self._pool_id = run_id, pool_id
        self._owner = Owner.current()
        self._daemon = Daemon(
            address,
            config,
            clear_up=lambda: self._sweep(frozenset(self._names)),
            on_return=self._returned,
        )
        local = is_local(address) or config.channel == "socket"
        self._socket_works: bool | None = None if local else False
        self._prepared: dict[str, Prepared] = {}
        self._preparing: dict[str, asyncio.Task[Prepared]] = {}
        self._names: set[str] = set()  # containers that are being started, or live
        self._on_return: Callable[[], None] = lambda: None
        prefix = "agentrl-docker"
        self._starters = ThreadPoolExecutor(config.starters, thread_name_prefix=f"{prefix}-start")
        self._removers = ThreadPoolExecutor(_REMOVERS, thread_name_prefix=f"{prefix}-remove")
        self._image_workers = ThreadPoolExecutor(_IMAGE_WORKERS, thread_name_prefix=f"{prefix}-image")

    @property
    def away(self) -> DaemonUnreachableError | None:
        """Why nothing can be started there now; None while the daemon answers."""
        return self._daemon.away

    @property
    def free(self) -> int:
        """How many more sandboxes it can hold now."""
        return 0 if self.away is not None else max(0, self.room - len(self._names))

    def has(self, image: str) -> bool:
        """Whether `image` is known to be ready there."""
        return image in self._prepared

    def on_return(self, call: Callable[[], None]) -> None:
        """Call this whenever the daemon answers again."""
        self._on_return = call

    def _returned(self) -> None:
        self._prepared.clear()  # it may have come back without some of its images
        self._on_return()

    # --- images ---------------------------------------------------------------------------------------------

    async def prepare(self, image: str) -> Prepared:
        """Have the image there, with what its containers need. Whoever asks for it meanwhile waits for the same work,
        which goes on if they are cancelled. Raises as `ImageStore.prepare`."""
        if image in self._prepared:
            return self._prepared[image]
        task = self._preparing.get(image)
        if task is None:
            task = asyncio.create_task(self._prepare(image))
            self._preparing[image] = task
            task.add_done_callback(lambda done: self._preparing.pop(image, None))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, even if nobody waits
        return await asyncio.shield(task)

    async def _prepare(self, image: str) -> Prepared:
        def job() -> Prepared:
            clients = self._daemon.clients()
            if clients.store.find(image) is None:
                self._make_room(clients)
            pulled = []

            def note(image_id: str) -> None:
                pulled.append(image_id)
                clients.records.note(image_id, pulled_as=image)

            prepared = clients.store.prepare(image, on_pulled=note)
            clients.records.note(prepared.image_id)
            if pulled:
                self._make_room(clients)
            return prepared

        prepared = await self._daemon.ask(self._image_workers, job)
        self._prepared[image] = prepared
        return prepared

    def _make_room(self, clients: Clients) -> None:
        """Keep the daemon's disk below the watermark. Blocking; what the daemon refuses here fails no start."""
        local = is_local(self.address) and self._socket_works is not False
        try:
            make_room(
                clients.images,
                clients.records,
                used=lambda: used_fraction(clients.images, local=local),
                watermark=self._config.disk_watermark,
            )
        except docker.errors.APIError as error:
            log.warning("no room can be made on %s: %s", named(self.address), str(error)[:200])

    # --- starts ---------------------------------------------------------------------------------------------

    async def start(self, image: str, *, timeout_s: float) -> DockerMachine:
        """As `Backend.start`, on this daemon."""
        name = f"agentrl-{self._run_id}-{secrets.token_hex(4)}"
        self._names.add(name)  # its room is taken from here on
        try:
            prepared = await self.prepare(image)
            async with asyncio.timeout(timeout_s):
                container, link = await self._start(name, image, prepared, timeout_s)
        except BaseException as error:
            self._discard(name)
            if isinstance(error, SandboxStartError | TimeoutError):
                self.failures += 1
                self._doubt(image)
            if isinstance(error, TimeoutError):
                raise SandboxStartError(
                    f"the container did not start within {timeout_s:g} s",
                    where=f"sandbox {name}",
                    remedy="lower sandbox.starters, or raise sandbox.start-timeout-s",
                ) from None
            raise
        self.failures = 0
        return DockerMachine(image=image, container=container, name=name, link=link, host=self)

    def _doubt(self, image: str) -> None:
        """A start failed. Volumes that were removed meanwhile would come back empty, so a foreign image is looked at
        anew, which takes a second where all is there."""
        prepared = self._prepared.get(image)
        if prepared is not None and prepared.equipment.volumes:
            del self._prepared[image]

    async def _start(self, name: str, image: str, prepared: Prepared, timeout_s: float) -> tuple[str, Link]:
        """Over the socket where it works or has not been tried yet, else over stdin and stdout."""
        began = time.monotonic()
        labels = {**owner_labels(self._owner), **self._labels, LABEL_IMAGE: image}
        plan = Plan(name, prepared, self._limits, labels, self._open_door(name))
        try:
            container, attached = await self._launch(plan, image)
            if plan.door is None:
                return container, await link_stdio(attached)
            left_s = max(0.1, began + timeout_s - time.monotonic() - _SLACK_S)  # so that it is the one to say why
            try:
                link = await link_socket(attached, plan.door, timeout_s=left_s)
            except EndedEarlyError as error:
                raise early_end(await self.state(container), str(error), name) from error
            self._socket_works = True
            return container, link
        except ChannelRefusedError as error:
            self._refused(error, name)
            await asyncio.get_running_loop().run_in_executor(self._removers, self._remove, name)
            return await self._start(name, image, prepared, timeout_s)
        finally:
            if plan.door is not None:
                plan.door.close()

    def _open_door(self, name: str) -> Door | None:
        """Where the server is to come; None: it is spoken to over its stdin and stdout."""
        if self._config.channel == "stdio" or self._socket_works is False:
            return None
        try:
            return Door(self._owner)
        except OSError as error:
            self._refused(error, name)
            return None

    def _refused(self, error: Exception, name: str) -> None:
        """The socket cannot be used: never again, or not at all where nothing else will do."""
        if self._config.channel == "socket":
            raise SandboxStartError(
                f"a Unix socket of this machine cannot be reached from a container: {error}",
                where=f"sandbox {name} at {named(self.address)}",
                remedy="sandbox.channel=stdio, or auto",
            ) from error
        if self._socket_works is None:
            log.info("%s: sandboxes are spoken to over stdin and stdout (%s)", named(self.address), error)
        self._socket_works = False

    async def _launch(self, plan: Plan, image: str) -> tuple[str, socket.socket]:
        abandoned = threading.Event()
        future = asyncio.get_running_loop().run_in_executor(
            self._starters, functools.partial(self._launch_blocking, plan, abandoned)
        )
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            # Nobody will take what the start makes: it is thrown away, whether it has ended or not.
            abandoned.set()
            future.add_done_callback(lambda done: self._abandon(plan.name, done))
            raise
        except docker.errors.ImageNotFound as error:
            self._prepared.pop(image, None)  # evicted, or removed by hand: the next try has it again
            raise SandboxStartError(
                f"image {plan.image.tag} was removed from the daemon",
                where=f"sandbox {plan.name}",
                remedy="it is had again",
            ) from error
        except docker.errors.APIError as error:
            said = str(error.explanation or error)[:300]
            if plan.door is not None and "bind source path does not exist" in said:
                raise ChannelRefusedError(said) from error
            raise SandboxStartError(
                f"the daemon refused the container: {said}",
                where=f"sandbox {plan.name} at {named(self.address)}",
                remedy="see the daemon's log; lower sandbox.size or sandbox.starters on a loaded machine",
            ) from error
        except Exception as error:
            if (fault := self._daemon.no_answer(error, self._removers)) is not None:
                raise fault from error
            raise

    def _launch_blocking(self, plan: Plan, abandoned: threading.Event) -> tuple[str, socket.socket]:
        """Create, attach, start (in this order: nothing the server says is missed), in a starter's thread."""
        clients = self._daemon.clients()
        client = clients.starts
        clients.records.note(plan.image.image_id)
        container = create(client, plan)
        attached = attach(client, container, address=self.address, stdio=plan.door is None)
        try:
            client.api.start(container)
            if abandoned.is_set():
                raise SandboxStartError("nobody waits for it any more", where=f"sandbox {plan.name}")
        except BaseException:
            attached.close()
            raise
        return container, attached

    def _abandon(self, name: str, done: asyncio.Future[tuple[str, socket.socket]]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result()[1].close()
        self._discard(name)

    # --- ends -----------------------------------------------------------------------------------------------

    def _discard(self, name: str) -> None:
        """Remove it in the background. Also where it may not exist: the daemon knows."""
        with contextlib.suppress(RuntimeError):  # after `close`, which removes everything itself
            self._removers.submit(self._remove, name)
        self._names.discard(name)

    async def state(self, container: str) -> dict[str, Any]:
        """The container's `State`; empty where it is gone. Raises `DaemonUnreachableError`."""

        def job() -> dict[str, Any]:
            try:
                return dict(self._daemon.clients().questions.api.inspect_container(container)["State"])
            except docker.errors.NotFound:
                return {}

        return await self._daemon.ask(self._removers, job)

    async def remove(self, name: str) -> None:
        """Remove the container. Where the daemon is away it is removed when that is back, or by the reaper."""
        try:
            fault = await asyncio.get_running_loop().run_in_executor(self._removers, self._remove, name)
        except RuntimeError:  # after `close`, which removed everything itself
            return
        finally:
            self._names.discard(name)
        if fault is not None:
            self._daemon.no_answer(fault, self._removers)

    def _remove(self, name: str) -> Exception | None:
        """Blocking; the error that left it there."""
        if (fault := self.away) is not None:
            return fault  # not to wait for it once for each: all are removed when it is back
        try:
            remove_container(self._daemon.clients().starts, name)
        except (*DAEMON_ERRORS, DaemonUnreachableError) as error:
            log.warning("container %s is left for later: %s", name, str(error)[:200])
            return error
        return None

    def _sweep(self, held: frozenset[str]) -> None:
        """Remove this pool's containers whose names are not in `held`. Blocking."""
        client = self._daemon.clients().starts
        for found in client.api.containers(all=True, filters={"label": f"{LABEL_POOL}={self._pool_id}"}):
            if not held.intersection(name.removeprefix("/") for name in found.get("Names") or ()):
                remove_container(client, found["Id"])

    async def close(self, timeout_s: float) -> None:
        """Remove whatever this pool still has there."""
        await self._daemon.stop()
        for task in self._preparing.values():
            task.cancel()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.to_thread(self._close)
        except TimeoutError:
            log.warning("containers of pool %s are left to the reaper: the daemon is too slow", self._pool_id)

    def _close(self) -> None:
        self._starters.shutdown(wait=True, cancel_futures=True)
        self._image_workers.shutdown(wait=False, cancel_futures=True)
        self._removers.shutdown(wait=True, cancel_futures=True)  # what waits there is swept below
        try:
            self._sweep(frozenset())
        except (*DAEMON_ERRORS, DaemonUnreachableError) as error:
            log.warning("containers of pool %s are left to the reaper: %s", self._pool_id, str(error)[:200])
        self._daemon.close()

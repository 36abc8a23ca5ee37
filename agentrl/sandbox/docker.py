"""Sandboxes by Docker: hardened containers whose PID 1 is the server, spoken to over the container's own
attached stdin and stdout (never `docker exec`, which costs a round of the daemon per command and cannot end
what it started).

The SDK (blocking, threads) creates, starts, inspects and removes; the bytes of the conversation go through
asyncio. Containers carry labels that say whose they are (`owner`, `host`), of which run, and their last day
(`deadline`): see `agentrl.sandbox.reaper`. Works with API 1.41 (Docker 20.10) and later.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import docker
import docker.errors
import docker.types
import requests

from agentrl.config import SandboxConfig
from agentrl.errors import (
    DaemonUnreachableError,
    ImageMissingError,
    SandboxDeadError,
    SandboxError,
    SandboxOutOfMemoryError,
    SandboxStartError,
)
from agentrl.sandbox.backend import BackendName
from agentrl.sandbox.channel import Channel, docker_chunks
from agentrl.sandbox.images import ensure_docker_image
from agentrl.sandbox.limits import ENVIRONMENT, MAX_AGE_S, SANDBOX_UID, SERVER_COMMAND, WORKDIR, Limits
from agentrl.sandbox.owner import Owner

log = logging.getLogger("agentrl.sandbox")

LABEL_OWNER = "agentrl.owner"
LABEL_HOST = "agentrl.host"
LABEL_RUN = "agentrl.run"
LABEL_POOL = "agentrl.pool"
LABEL_DEADLINE = "agentrl.deadline"

_REMOVERS = 4
_CLOSE_TIMEOUT_S = 30.0
_INSPECT_TIMEOUT_S = 5.0
_HTTP_NOT_FOUND, _HTTP_CONFLICT = 404, 409

T = TypeVar("T")


def connect(timeout_s: float) -> docker.DockerClient:
    """A client of the daemon that the environment names. Raises `DaemonUnreachableError`."""
    try:
        return docker.from_env(timeout=timeout_s, max_pool_size=64)
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        raise _unreachable(error) from error


def _unreachable(error: Exception) -> DaemonUnreachableError:
    return DaemonUnreachableError(
        f"the Docker daemon does not answer ({str(error)[:200]})",
        where=os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"),
        remedy="start dockerd (scripts/start_docker.sh); after a kill -9 remove its stale pid files first",
    )


def remove_container(client: docker.DockerClient, container: str) -> bool:
    """Remove it with its volumes, running or not; False where it was gone (or going) already."""
    try:
        client.api.remove_container(container, force=True, v=True)
    except docker.errors.APIError as error:
        if error.status_code in (_HTTP_NOT_FOUND, _HTTP_CONFLICT):
            return False
        raise
    return True


class DockerMachine:
    """A started container (`Machine`)."""

    def __init__(self, *, id: str, image: str, container: str, channel: Channel, backend: DockerBackend) -> None:
        self.id = id
        self.image = image
        self.channel = channel
        self.container = container
        self._backend = backend
        self._removal: asyncio.Task[None] | None = None

    def kill(self) -> None:
        """End of file on stdin ends a healthy server; the removal behind it ends any."""
        self.channel.close()
        if self._removal is None:
            self._removal = asyncio.create_task(self._backend.remove(self.container))

    def oom_kills(self) -> int | None:
        return None  # the server reads the container's own counter, which the host may not see (a remote daemon)

    async def cause_of_death(self) -> SandboxError:
        where = f"sandbox {self.id}"
        try:
            state = await self._backend.state(self.container)
        except DaemonUnreachableError as error:
            return error
        if state.get("OOMKilled"):
            return SandboxOutOfMemoryError(
                "the whole sandbox ran out of memory", where=where, remedy="raise sandbox.memory-mb"
            )
        said = str(self.channel.stderr)
        what = f"its container is {state.get('Status', 'gone')}, exit code {state.get('ExitCode', 'unknown')}"
        return SandboxDeadError(
            what + (f" ({said[-300:]})" if said else ""), where=where, remedy="lease another sandbox"
        )

    async def close(self) -> None:
        self.kill()
        if self._removal is not None:
            await asyncio.shield(self._removal)


class DockerBackend:
    """Starts containers (`Backend`). Open one per pool, inside its event loop."""

    name: BackendName = "docker"

    def __init__(self, config: SandboxConfig, *, run_id: str) -> None:
        self._limits = Limits.of(config)
        self._run_id = run_id
        self._owner = Owner.current()
        self._pool_id = secrets.token_hex(8)
        self._tags: dict[str, str] = {}
        self._client = connect(config.start_timeout_s)
        self._inspector = connect(_INSPECT_TIMEOUT_S)
        self._starters = ThreadPoolExecutor(config.starters, thread_name_prefix="agentrl-docker-start")
        self._removers = ThreadPoolExecutor(_REMOVERS, thread_name_prefix="agentrl-docker-remove")

    async def prepare(self, image: str) -> None:
        if image not in self._tags:
            self._tags[image] = await asyncio.to_thread(ensure_docker_image, self._client, image)

    async def start(self, image: str, *, timeout_s: float) -> DockerMachine:
        await self.prepare(image)
        name = f"agentrl-{self._run_id}-{secrets.token_hex(4)}"
        abandoned = threading.Event()
        job = functools.partial(self._launch, name, self._tags[image], abandoned)
        future = asyncio.get_running_loop().run_in_executor(self._starters, job)
        try:
            async with asyncio.timeout(timeout_s):
                container, sock = await asyncio.shield(future)
        except TimeoutError:
            self._abandon(future, abandoned)
            raise SandboxStartError(
                f"the container did not start within {timeout_s:g} s",
                where=f"sandbox {name}",
                remedy="lower sandbox.starters, or raise sandbox.start-timeout-s",
            ) from None
        except asyncio.CancelledError:
            self._abandon(future, abandoned)
            raise
        try:
            channel = await Channel.over(sock, docker_chunks)
        except BaseException:
            self._abandon(future, abandoned)
            raise
        return DockerMachine(
            id=f"docker:{container[:12]}", image=image, container=container, channel=channel, backend=self
        )

    def _abandon(self, future: asyncio.Future[tuple[str, socket.socket]], abandoned: threading.Event) -> None:
        """Nobody will take what the start makes: it is thrown away, whether it has ended or not."""

        def discard(done: asyncio.Future[tuple[str, socket.socket]]) -> None:
            if not done.cancelled() and done.exception() is None:
                container, sock = done.result()
                sock.close()
                self._removers.submit(self._remove, container)

        abandoned.set()
        future.add_done_callback(discard)

    def _launch(self, name: str, tag: str, abandoned: threading.Event) -> tuple[str, socket.socket]:
        """Create, attach, start (in this order: nothing the server says is missed). Blocking, in a starter's
        thread. Whatever goes wrong, and when `abandoned` is set meanwhile, the container is removed."""
        container: str | None = None
        sock: socket.socket | None = None
        try:
            container = self._create(name, tag)
            sock = self._attach(container)
            self._client.api.start(container)
            if abandoned.is_set():
                raise SandboxStartError("nobody waits for it any more", where=f"sandbox {name}")
        except BaseException as error:
            if sock is not None:
                sock.close()
            if container is not None:
                self._removers.submit(self._remove, container)
            raise _start_fault(error, name, tag) from error
        return container, sock

    def _create(self, name: str, tag: str) -> str:
        limits = self._limits
        api = self._client.api
        tmpfs = f"rw,exec,nosuid,nodev,size={limits.disk_bytes},uid={SANDBOX_UID},gid={SANDBOX_UID}"
        host_config = api.create_host_config(
            read_only=True,
            tmpfs={WORKDIR: f"{tmpfs},mode=0755", "/tmp": f"{tmpfs},mode=1777"},
            shm_size=limits.shm_bytes,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            mem_limit=limits.memory_bytes,
            memswap_limit=limits.memory_bytes,  # memory and swap together: no swap
            pids_limit=limits.pids,
            nano_cpus=round(limits.cpus * 1e9),
            network_mode="none",
            init=False,
            ipc_mode="private",
            log_config=docker.types.LogConfig(type="none"),
            ulimits=[docker.types.Ulimit(name="core", soft=0, hard=0)],
            # Of System V and POSIX inter-process memory nothing outlives the processes that a reset kills.
            sysctls={"kernel.shm_rmid_forced": "1", "fs.mqueue.queues_max": "0"},
        )
        created = api.create_container(
            tag,
            list(SERVER_COMMAND),
            name=name,
            hostname="sandbox",
            user=f"{SANDBOX_UID}:{SANDBOX_UID}",
            working_dir=WORKDIR,
            environment=dict(ENVIRONMENT),
            stdin_open=True,
            tty=False,
            entrypoint="",
            host_config=host_config,
            labels={
                LABEL_OWNER: str(self._owner),
                LABEL_HOST: self._owner.host,
                LABEL_RUN: self._run_id,
                LABEL_POOL: self._pool_id,
                LABEL_DEADLINE: str(int(time.time() + MAX_AGE_S)),
            },
        )
        return str(created["Id"])

    def _attach(self, container: str) -> socket.socket:
        """The container's stdin, stdout and stderr as one socket of our own."""
        params = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        theirs: Any = self._client.api.attach_socket(container, params=params)
        raw = getattr(theirs, "_sock", theirs)
        if type(raw) is not socket.socket:
            raise SandboxStartError(
                f"a daemon over {type(raw).__name__} cannot be attached to",
                where=os.environ.get("DOCKER_HOST", ""),
                remedy="set DOCKER_HOST to a unix:// or plain tcp:// address",
            )
        # Ours by duplicate, so that the SDK's response object may close its own at any time.
        ours = raw.dup()
        theirs.close()
        ours.setblocking(False)
        return ours

    # --- what machines ask
    # ----------------------------------------------------------------------------------------

    async def state(self, container: str) -> dict[str, Any]:
        """The container's `State`; empty where it is gone. Raises `DaemonUnreachableError`."""

        def job() -> dict[str, Any]:
            try:
                return dict(self._inspector.api.inspect_container(container)["State"])
            except docker.errors.NotFound:
                return {}

        return await self._call(job)

    async def remove(self, container: str) -> None:
        """Remove the container; a daemon that does not answer leaves it to the reaper, with a line in the
        log."""
        await asyncio.get_running_loop().run_in_executor(self._removers, self._remove, container)

    def _remove(self, container: str) -> None:
        try:
            remove_container(self._client, container)
        except (docker.errors.DockerException, requests.RequestException) as error:
            log.warning("container %s is left to the reaper: %s", container[:12], str(error)[:200])

    async def _call(self, job: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._removers, job)
        except (requests.RequestException, docker.errors.DockerException) as error:
            raise _unreachable(error) from error

    async def close(self) -> None:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await asyncio.to_thread(self._close)
        except TimeoutError:
            log.warning("containers of pool %s are left to the reaper: the daemon is too slow", self._pool_id)

    def _close(self) -> None:
        self._starters.shutdown(wait=True, cancel_futures=True)
        try:
            found = self._client.api.containers(all=True, filters={"label": f"{LABEL_POOL}={self._pool_id}"})
            for container in found:
                self._removers.submit(self._remove, container["Id"])
        except (docker.errors.DockerException, requests.RequestException) as error:
            log.warning("containers of pool %s are left to the reaper: %s", self._pool_id, str(error)[:200])
        self._removers.shutdown(wait=True)
        self._client.close()
        self._inspector.close()


def _start_fault(error: BaseException, name: str, tag: str) -> BaseException:
    """The typed error for what went wrong at a start; ours, and what is no fault of the daemon's, as they
    are."""
    if isinstance(error, docker.errors.ImageNotFound):
        return ImageMissingError(f"the daemon has no image {tag}", where=f"sandbox {name}", remedy=f"docker pull {tag}")
    if isinstance(error, docker.errors.APIError):
        return SandboxStartError(
            f"the daemon refused the container: {str(error.explanation or error)[:300]}",
            where=f"sandbox {name}",
            remedy="see the daemon's log; lower sandbox.size or sandbox.starters on a loaded machine",
        )
    if isinstance(error, requests.RequestException | docker.errors.DockerException | OSError):
        return _unreachable(error)
    return error

"""One hardened container: how it is created, how its server is reached, and the machine that comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker
import docker.types

from agentrl.errors import (
    DaemonUnreachableError,
    SandboxDeadError,
    SandboxError,
    SandboxOutOfMemoryError,
    SandboxStartError,
)
from agentrl.sandbox.channel import Channel, DockerStderr, StderrTail, docker_chunks
from agentrl.sandbox.docker_channel import MOUNT_POINT, ChannelRefusedError, Door
from agentrl.sandbox.docker_client import named
from agentrl.sandbox.docker_images import Prepared
from agentrl.sandbox.limits import SANDBOX_UID, WORKDIR, Limits
from agentrl.sandbox.seccomp import docker_profile
from agentrl.sandbox.server.settings import CHANNEL, CHANNEL_REFUSED

if TYPE_CHECKING:
    from agentrl.sandbox.docker_host import DockerHost

_HAS_IPV6 = Path("/proc/sys/net/ipv6")
_DEATH_S = 3.0
_DEATH_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Plan:
    """What a container is made of. `door` is None where the conversation goes over its stdin and stdout."""

    name: str
    image: Prepared
    limits: Limits
    labels: Mapping[str, str]
    door: Door | None


def create(client: docker.DockerClient, plan: Plan) -> str:
    """Create the container, not yet running; its id. Blocking; raises what the SDK raises."""
    limits, api = plan.limits, client.api
    tmpfs = f"rw,exec,nosuid,nodev,size={limits.disk_bytes},uid={SANDBOX_UID},gid={SANDBOX_UID}"
    mounts = [
        docker.types.Mount(target=target, source=volume, type="volume", read_only=True, no_copy=True)
        for volume, target in plan.image.equipment.volumes.items()
    ]
    environment = dict(plan.image.equipment.environment)
    if plan.door is not None:
        mounts.append(docker.types.Mount(target=MOUNT_POINT, source=str(plan.door.folder), type="bind", read_only=True))
        environment[CHANNEL] = plan.door.address
    host_config = api.create_host_config(
        read_only=True,
        tmpfs={
            **dict.fromkeys(plan.image.equipment.masked, "ro,size=4k"),
            WORKDIR: f"{tmpfs},mode=0755",
            "/tmp": f"{tmpfs},mode=1777",
        },
        mounts=mounts,
        shm_size=limits.shm_bytes,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges", f"seccomp={docker_profile()}"],
        mem_limit=limits.memory_bytes,
        memswap_limit=limits.memory_bytes,  # memory and swap together: no swap
        pids_limit=limits.pids,
        nano_cpus=round(limits.cpus * 1e9),
        network_mode="none",
        init=False,
        ipc_mode="private",
        log_config=docker.types.LogConfig(type="none"),
        ulimits=[
            docker.types.Ulimit(name=name, soft=soft, hard=hard) for name, (soft, hard) in limits.rlimits().items()
        ],
        sysctls=_sysctls(plan),
    )
    created = api.create_container(
        plan.image.image_id,
        list(plan.image.equipment.command),
        name=plan.name,
        hostname="sandbox",
        user=f"{SANDBOX_UID}:{SANDBOX_UID}",
        working_dir=WORKDIR,
        environment=environment,
        stdin_open=plan.door is None,
        tty=False,
        entrypoint="",
        stop_signal="SIGKILL",  # the server is deaf to others: a daemon that ends would wait for it
        healthcheck={"test": ["NONE"]},  # an image's own would run commands beside the server
        host_config=host_config,
        labels=dict(plan.labels),
        use_config_proxy=False,  # else the proxy of the user's configuration, with its password, gets in
    )
    return str(created["Id"])


def _sysctls(plan: Plan) -> dict[str, str]:
    """Of System V and POSIX inter-process memory nothing outlives the processes that a reset kills. And ::1 works where
    the kernel has it (which is known of this machine's): `localhost` is also that, and without a network it is off."""
    settings = {"kernel.shm_rmid_forced": "1", "fs.mqueue.queues_max": "0"}
    if plan.door is not None and _HAS_IPV6.exists():
        settings["net.ipv6.conf.all.disable_ipv6"] = "0"
    return settings


def attach(client: docker.DockerClient, container: str, *, address: str, stdio: bool) -> socket.socket:
    """The container's stdin, stdout and stderr (`stdio`), or its stderr alone, as one socket of our own."""
    params = {"stdin": int(stdio), "stdout": int(stdio), "stderr": 1, "stream": 1}
    theirs: Any = client.api.attach_socket(container, params=params)
    raw = getattr(theirs, "_sock", theirs)
    if type(raw) is not socket.socket:
        raise SandboxStartError(
            f"a daemon over {type(raw).__name__} cannot be attached to",
            where=named(address),
            remedy="name it by a unix:// or plain tcp:// address",
        )
    # Ours by duplicate; the SDK's own is closed now, not whenever its response object (a cycle) is collected.
    ours = raw.dup()
    theirs.close()
    raw.close()
    ours.setblocking(False)
    return ours


@dataclass(slots=True)
class Link:
    """A conversation with a started container. `watch`: the stream of its stderr, where that is another one."""

    channel: Channel
    watch: asyncio.Transport | None = None

    def close(self) -> None:
        """Close both at once; the server sees the end of its requests."""
        self.channel.close()
        if self.watch is not None:
            self.watch.abort()


async def link_stdio(attached: socket.socket) -> Link:
    """Speak over the attached stdin and stdout. Owns `attached`."""
    try:
        return Link(await Channel.over(attached, docker_chunks))
    except BaseException:
        attached.close()
        raise


async def link_socket(attached: socket.socket, door: Door, *, timeout_s: float) -> Link:
    """Wait for the server at the door. Owns `attached`, whose stream says meanwhile whether the container lives.

    Raises `SandboxStartError` where nobody comes in time, `EndedEarlyError` where nobody will.
    """
    loop = asyncio.get_running_loop()
    tail = StderrTail()
    stderr = DockerStderr(tail)
    watch, _ = await loop.create_connection(lambda: stderr, sock=attached)
    coming = asyncio.create_task(door.accept())
    ending = asyncio.create_task(stderr.ended.wait())
    try:
        await asyncio.wait({coming, ending}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():
            if ending.done():
                raise EndedEarlyError(str(tail))
            raise SandboxStartError(
                f"the server was not ready within {timeout_s:.0f} s (it said: {tail!s:.300})",
                where=door.folder.name,
                remedy="raise sandbox.start-timeout-s, or lower sandbox.starters on a loaded machine",
            )
        return Link(await Channel.over(coming.result(), stderr=tail), watch)
    except BaseException:
        watch.abort()
        raise
    finally:
        for task in (coming, ending):
            task.cancel()
        await asyncio.gather(coming, ending, return_exceptions=True)  # before the door's descriptor is closed


class EndedEarlyError(Exception):
    """The container ended before its server came to the door; what it said on stderr. Internal."""


def early_end(state: Mapping[str, Any], said: str, name: str) -> Exception:
    """What `EndedEarlyError` means, by the container's `State`."""
    if state.get("ExitCode") == CHANNEL_REFUSED:
        return ChannelRefusedError(said[-300:])
    return SandboxStartError(
        f"the server ended before it was ready: {_ended(state)}" + (f" ({said[-300:]})" if said else ""),
        where=f"sandbox {name}",
        remedy="see what it said; an image of your own needs what docs/sandboxes.md lists",
    )


def _ended(state: Mapping[str, Any]) -> str:
    return f"its container is {state.get('Status', 'gone')}, exit code {state.get('ExitCode', 'unknown')}"


class DockerMachine:
    """A started container (`Machine`)."""

    def __init__(self, *, image: str, container: str, name: str, link: Link, host: DockerHost) -> None:
        self.id = f"docker:{container[:12]}"
        self.image = image
        self.container = container
        self.name = name
        self._link = link
        self._backend = host
        self._removal: asyncio.Task[None] | None = None

    @property
    def channel(self) -> Channel:
        return self._link.channel

    def kill(self) -> None:
        """The end of its requests ends a healthy server; the removal behind it ends any."""
        self._link.close()
        if self._removal is None:
            self._removal = asyncio.create_task(self._backend.remove(self.name))

    def oom_kills(self) -> int | None:
        return None  # the server reads the container's own counter, which the host may not see (a remote daemon)

    async def cause_of_death(self) -> SandboxError:
        where = f"sandbox {self.id}"
        end = time.monotonic() + _DEATH_S
        try:
            state = await self._backend.state(self.container)
            while state.get("Running") and time.monotonic() < end:  # its socket closes before the daemon has noticed
                await asyncio.sleep(_DEATH_POLL_S)
                state = await self._backend.state(self.container)
        except DaemonUnreachableError as error:
            return error
        if state.get("OOMKilled"):
            return SandboxOutOfMemoryError(
                "the whole sandbox ran out of memory", where=where, remedy="raise sandbox.memory-mb"
            )
        said = str(self.channel.stderr)
        return SandboxDeadError(
            _ended(state) + (f" ({said[-300:]})" if said else ""), where=where, remedy="lease another sandbox"
        )

    async def close(self) -> None:
        self.kill()
        if self._removal is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(self._removal)

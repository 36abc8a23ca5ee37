"""Sandboxes by bubblewrap: no daemon, as root or not, milliseconds to start.

Each is one `bwrap` process whose child is the server, PID 1 of its own name spaces: root read-only, work
tree, /tmp and /dev/shm sized tmpfs, no network, no capabilities, no further user name spaces. It dies three
ways with its owner: bubblewrap's parent-death signal, end of file on stdin, and (for what a bug left) the
reaper's look at the cgroups.

Limits come from cgroups where these can be written, else from `prlimit` alone (each process's memory rather
than the sandbox's; no CPU share; and for root, whom the kernel spares RLIMIT_NPROC, no limit of processes),
which the log says.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import platform
import secrets
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxDeadError, SandboxError, SandboxOutOfMemoryError, SandboxStartError
from agentrl.sandbox import seccomp
from agentrl.sandbox.backend import BackendName
from agentrl.sandbox.bubblewrap_command import bwrap_command
from agentrl.sandbox.cgroups import Cgroup, CgroupTree, host_oom_kills
from agentrl.sandbox.channel import Channel, StderrTail
from agentrl.sandbox.images import ensure_rootfs
from agentrl.sandbox.limits import Limits
from agentrl.sandbox.owner import Owner

log = logging.getLogger("agentrl.sandbox")

_GATE_TIMEOUT_S = 10.0
_EXIT_TIMEOUT_S = 5.0


@functools.cache
def _spawner(pid: int) -> ThreadPoolExecutor:
    """One thread that lives as long as process `pid` does. The parent-death signal is tied to the *thread*
    that spawned: from a thread that ends, or an event loop's short-lived one, the sandboxes would die with
    it."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="agentrl-bwrap")


class _TailProtocol(asyncio.Protocol):
    def __init__(self, tail: StderrTail) -> None:
        self._tail = tail

    def data_received(self, data: bytes) -> None:
        self._tail.feed(data)


@dataclass(slots=True)
class _Spawned:
    """A `bwrap` with its server behind the gate or running. Its parts belong to the machine that is made of
    it."""

    process: subprocess.Popen[bytes]
    server_pidfd: int | None
    stdio: socket.socket
    stderr: socket.socket
    cgroup: Cgroup | None

    def kill(self) -> None:
        """The server first: with PID 1 the kernel ends everything in its name space. By pidfd, so that no pid
        used again is ever hit."""
        if self.server_pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.server_pidfd, signal.SIGKILL)
        elif self.process.poll() is None:
            # Its pid was never told. Until the gate opens the server is in the group that bwrap leads.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()

    def discard(self) -> None:
        """End it and free everything, blocking shortly: for a start that nobody waits for any more."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_TIMEOUT_S)
        self.stdio.close()
        self.stderr.close()
        if self.server_pidfd is not None:
            os.close(self.server_pidfd)
        if self.cgroup is not None:
            self.cgroup.remove_within(_EXIT_TIMEOUT_S)


def _spawn(
    command_for: Callable[[int, int, int | None], list[str]],
    cgroup: Cgroup | None,
    name: str,
    *,
    filter_program: bytes | None,
) -> _Spawned:
    """Start `command_for(info_fd, gate_fd, filter_fd)`, put its server into `cgroup`, and open the gate.

    Runs in the spawner's thread. Raises `SandboxStartError`, leaving nothing behind but the cgroup's
    directories.
    """
    info_read, info_write = os.pipe()
    gate_read, gate_write = os.pipe()
    filter_fd = None if filter_program is None else _readable(filter_program)
    theirs_alone = [fd for fd in (info_write, gate_read, filter_fd) if fd is not None]
    ours, theirs = socket.socketpair()
    # Sockets, not pipes: a pipe of PID 1 could be opened through /proc by any process inside, and answers
    # forged.
    err_ours, err_theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            command_for(info_write, gate_read, filter_fd),
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=err_theirs.fileno(),
            env={"PATH": os.environ.get("PATH", "/usr/bin:/bin")},
            pass_fds=theirs_alone,
            start_new_session=True,  # a Ctrl-C at the terminal is the owner's to handle
        )
    except OSError as error:
        for end in (info_read, gate_write):
            os.close(end)
        ours.close()
        err_ours.close()
        raise SandboxStartError(
            f"bwrap could not be started: {error}",
            where=f"sandbox {name}",
            remedy="apt-get install bubblewrap",
        ) from error
    finally:
        for end in theirs_alone:
            os.close(end)
        theirs.close()
        err_theirs.close()
    spawned = _Spawned(process=process, server_pidfd=None, stdio=ours, stderr=err_ours, cgroup=cgroup)
    try:
        server_pid = _read_child_pid(info_read)
        if server_pid is not None:  # else bwrap has ended, and says why on stderr
            spawned.server_pidfd = os.pidfd_open(server_pid)
            if cgroup is not None:
                cgroup.add(server_pid)
            os.write(gate_write, b"\n")
    except (OSError, ValueError, KeyError) as error:
        spawned.discard()  # before the gate is closed: its end would let the server go, without limits
        raise SandboxStartError(f"the limits could not be set: {error}", where=f"sandbox {name}") from error
    finally:
        os.close(info_read)
        os.close(gate_write)
    return spawned


def _readable(data: bytes) -> int:
    """A descriptor from which `data` can be read."""
    fd = os.memfd_create("agentrl-filter")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _read_child_pid(info_fd: int) -> int | None:
    """The pid in bubblewrap's `--info-fd` document; None where bubblewrap ended. Raises TimeoutError."""
    text = b""
    end = time.monotonic() + _GATE_TIMEOUT_S
    while not text.rstrip().endswith(b"}"):
        ready, _, _ = select.select([info_fd], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            raise TimeoutError(f"bwrap did not tell the server's pid within {_GATE_TIMEOUT_S:g} s")
        chunk = os.read(info_fd, 4096)
        if not chunk:
            return None
        text += chunk
    return int(json.loads(text)["child-pid"])


def _discard(job: Future[_Spawned]) -> None:
    """Throw away what an abandoned `job` made. Runs in the spawner's one thread, so `job` has ended."""
    if job.exception() is None:
        job.result().discard()


class BubblewrapMachine:
    """A started bubblewrap sandbox (`Machine`)."""

    def __init__(
        self,
        *,
        id: str,
        image: str,
        channel: Channel,
        spawned: _Spawned,
        on_closed: Callable[[BubblewrapMachine], None],
    ) -> None:
        self.id = id
        self.image = image
        self.channel = channel
        self._spawned = spawned
        self._exited = asyncio.Event()
        self._on_closed = on_closed
        self._closing: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._watch_fd = os.pidfd_open(spawned.process.pid)
        self._loop.add_reader(self._watch_fd, self._on_exit)

    @property
    def server_pidfd(self) -> int | None:
        """A handle on the server's process, for tests that strike it from outside."""
        return self._spawned.server_pidfd

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._watch_fd)
        self._spawned.process.wait()  # it has ended: this only collects it
        self._exited.set()

    def kill(self) -> None:
        if not self._exited.is_set():
            self._spawned.kill()

    def oom_kills(self) -> int | None:
        # Without a cgroup the host's own count is better than the server's guess from an exit code, which a
        # command could fake.
        return host_oom_kills() if self._spawned.cgroup is None else self._spawned.cgroup.oom_kills()

    async def cause_of_death(self) -> SandboxError:
        where = f"sandbox {self.id}"
        if not await self._wait_exit():
            return SandboxDeadError("its server closed the stream but its process lives on", where=where)
        code = self._spawned.process.returncode
        group = self._spawned.cgroup
        if group is not None and group.oom_kills() and code in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return SandboxOutOfMemoryError(
                "the whole sandbox ran out of memory", where=where, remedy="raise sandbox.memory-mb"
            )
        said = str(self.channel.stderr)
        return SandboxDeadError(
            f"its process ended with code {code}" + (f" ({said[-300:]})" if said else ""),
            where=where,
            remedy="lease another sandbox",
        )

    async def _wait_exit(self) -> bool:
        try:
            await asyncio.wait_for(self._exited.wait(), _EXIT_TIMEOUT_S)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self.kill()
        self.channel.close()
        if not await self._wait_exit():
            log.warning("sandbox %s: bwrap (pid %d) does not end", self.id, self._spawned.process.pid)
        group = self._spawned.cgroup
        if group is not None and not await _remove_cgroup(group):
            log.warning("sandbox %s: its cgroup stays: %s", self.id, group.folders[0])
        self._loop.remove_reader(self._watch_fd)
        os.close(self._watch_fd)
        if self._spawned.server_pidfd is not None:
            os.close(self._spawned.server_pidfd)
            self._spawned.server_pidfd = None
        self._on_closed(self)


async def _remove_cgroup(group: Cgroup) -> bool:
    end = time.monotonic() + _EXIT_TIMEOUT_S
    while not group.try_remove():
        if time.monotonic() > end:
            return False
        group.kill()
        await asyncio.sleep(0.005)
    return True


class BubblewrapBackend:
    """Starts bubblewrap sandboxes (`Backend`). Open one per pool, inside its event loop."""

    name: BackendName = "bubblewrap"

    def __init__(self, config: SandboxConfig, *, run_id: str) -> None:
        self._limits = Limits.of(config)
        self._owner = Owner.current()
        self._tree = CgroupTree.find()
        self._filter = seccomp.program()
        self._rootfs: dict[str, Path] = {}
        self._recipes = config.recipes
        self._run_id = run_id
        self._machines: set[BubblewrapMachine] = set()
        if self._tree is None:
            log.warning(
                "cgroups cannot be written here: sandboxes are limited by prlimit only (memory per process, "
                "no CPU share%s)",
                ", and no limit of processes, which the kernel spares root" if os.geteuid() == 0 else "",
            )
        if self._filter is None:
            log.warning(
                "no system-call filter: its numbers are not known for %s, so sandboxes can ask the kernel for anything",
                platform.machine(),
            )

    async def prepare(self, image: str) -> None:
        if image not in self._rootfs:
            self._rootfs[image] = await asyncio.to_thread(ensure_rootfs, image, recipes=self._recipes)

    async def start(self, image: str, *, timeout_s: float) -> BubblewrapMachine:
        await self.prepare(image)
        name = f"{self._run_id}-{secrets.token_hex(4)}"
        rootfs = self._rootfs[image]

        def job() -> _Spawned:
            cgroup = None
            if self._tree is not None:
                try:
                    cgroup = self._tree.create(name, self._limits, owner=self._owner)
                except OSError as error:
                    raise SandboxStartError(f"no cgroup: {error}", where=f"sandbox {name}") from error
            try:
                return _spawn(
                    lambda info_fd, gate_fd, filter_fd: bwrap_command(
                        rootfs,
                        self._limits,
                        info_fd=info_fd,
                        gate_fd=gate_fd,
                        filter_fd=filter_fd,
                        address_space=cgroup is None,
                    ),
                    cgroup,
                    name,
                    filter_program=self._filter,
                )
            except BaseException:
                if cgroup is not None:
                    cgroup.try_remove()
                raise

        future = _spawner(os.getpid()).submit(job)
        try:
            async with asyncio.timeout(timeout_s):
                spawned = await asyncio.shield(asyncio.wrap_future(future))
        except TimeoutError:
            _spawner(os.getpid()).submit(_discard, future)
            raise SandboxStartError(f"bwrap did not start within {timeout_s:g} s", where=f"sandbox {name}") from None
        except asyncio.CancelledError:
            _spawner(os.getpid()).submit(_discard, future)
            raise
        return await self._adopt(spawned, name, image)

    async def _adopt(self, spawned: _Spawned, name: str, image: str) -> BubblewrapMachine:
        try:
            channel = await Channel.over(spawned.stdio)
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: _TailProtocol(channel.stderr), sock=spawned.stderr)
            machine = BubblewrapMachine(
                id=f"bwrap:{name}",
                image=image,
                channel=channel,
                spawned=spawned,
                on_closed=self._machines.discard,
            )
        except BaseException:
            _spawner(os.getpid()).submit(spawned.discard)
            raise
        self._machines.add(machine)
        return machine

    def free_room(self) -> int | None:
        return None  # whatever the pool likes: nothing but this machine bounds it

    async def close(self) -> None:
        await asyncio.gather(*(machine.close() for machine in tuple(self._machines)))
        # A start that was abandoned is discarded in the spawner's thread: wait until that has happened.
        await asyncio.wrap_future(_spawner(os.getpid()).submit(lambda: None))

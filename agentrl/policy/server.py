"""The policy server's process: started, watched, stopped, with nothing left behind.

    start ──▶ serving ──▶ ended          (stop(), its own death, or ours: see `supervise.py`)

Invariant: once `ended` tells an exit, no process of the server's group is alive and no socket of it is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import aiohttp

from agentrl.config import PolicyConfig
from agentrl.errors import ConfigError, PolicyStartError
from agentrl.policy.command import LAUNCHER, full_command, model_location, serve_arguments, serve_environment
from agentrl.policy.requirement import Device, VllmInstall, find_vllm

log = logging.getLogger("agentrl.policy")

HOST = "127.0.0.1"
_GRACE_S = 10.0
_KILL_MARGIN_S = 10.0
_HEALTH_EVERY_S = 0.2
_PORT_TRIES = 3
_PORT_TAKEN = ("address already in use", "errno 98")
_TAIL_LINES = 20
_TAIL_LINE_CHARS = 160


@dataclass(frozen=True, slots=True)
class ServerExit:
    """How a server ended. `exit_code` of the API process (negative: a signal), None where it could not be
    told.
    """

    exit_code: int | None
    log_tail: str


class Liveness(Protocol):
    """What a client asks about the process behind its address."""

    async def wait_dead(self) -> ServerExit: ...


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def free_port(host: str = HOST) -> int:
    """A port the kernel says is free."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _port_taken(host: str, port: int) -> PolicyStartError:
    return PolicyStartError(
        f"the policy server did not start: port {port} is taken",
        where=f"{host}:{port}",
        remedy="free the port, or leave it to the kernel (give none)",
    )


def _core(device: int | None) -> int | None:
    """The core to bind to. Raises `ConfigError` where this process may not use it."""
    allowed = os.sched_getaffinity(0)
    if device is not None and device not in allowed:
        raise ConfigError(
            f"this process may not use core {device}; it may use {', '.join(map(str, sorted(allowed)))}",
            where="placement.devices",
            remedy="name cores that are there, or leave the setting out",
        )
    return device


def log_tail(path: Path) -> str:
    """The last lines of a log, each cut: what fits into an error message."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64_000))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(line[:_TAIL_LINE_CHARS] for line in lines[-_TAIL_LINES:])


class VllmServer:
    """One vLLM server in its own session. Make it with `start`; end it with `stop` (or `async with`)."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        *,
        api_pid: int,
        host: str,
        port: int,
        log_path: Path,
        scratch: Path,
    ) -> None:
        self._process = process
        self._scratch = scratch
        self._ended: ServerExit | None = None
        self.api_pid = api_pid
        self.host = host
        self.port = port
        self.log_path = log_path
        self.sleeps = False
        """Whether the server gives its device's memory back in `PolicyRouter.sleep`."""

    @property
    def url(self) -> str:
        """Base address."""
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        """The supervisor's process id, which is the process group's and the session's."""
        return self._process.pid

    @classmethod
    async def start(
        cls,
        config: PolicyConfig,
        *,
        log_path: Path,
        host: str = HOST,
        port: int | None = None,
        seed: int = 0,
        install: VllmInstall | None = None,
        launcher: Sequence[str] = LAUNCHER,
        extra_arguments: Sequence[str] = (),
        device: int | None = None,
        sleep_mode: bool = False,
    ) -> Self:
        """Start a server for `config.model` and wait until it answers, at most `config.start_timeout_s`.

        `port` None takes one from the kernel, and another where somebody was faster; `seed` starts the
        sampler's random numbers. `device` binds every process of the server to one core or one CUDA device;
        `sleep_mode` lets a CUDA server give its memory back (`sleeps`). Raises `PolicyStartError` with the end
        of the log, `MissingRequirementError` without vLLM, `ConfigError` for a model that is no folder or a core
        that is not ours.
        """
        if install is None:
            install = await asyncio.to_thread(find_vllm)
        model = model_location(config.model)
        if port is not None and not port_is_free(host, port):
            raise _port_taken(host, port)
        core = _core(device) if install.device is Device.CPU else None
        environment = serve_environment(config, model=model, install=install, device=device)
        deadline = time.monotonic() + config.start_timeout_s
        for last_try in (*(False,) * (_PORT_TRIES - 1 if port is None else 0), True):
            chosen = free_port(host) if port is None else port
            arguments = serve_arguments(
                config, model=model, host=host, port=chosen, seed=seed, install=install, sleep_mode=sleep_mode
            )
            command = full_command(install, launcher, [*arguments, *extra_arguments])
            server = await asyncio.to_thread(
                cls._spawn, command, environment=environment, host=host, port=chosen, log_path=log_path, core=core
            )
            server.sleeps = sleep_mode and install.device is Device.CUDA
            try:
                taken = await server._wait_serving(deadline)
            except BaseException:
                await asyncio.to_thread(server.stop, grace_s=0.0)
                raise
            if not taken:
                log.info("policy server %s, log %s", server.url, log_path)
                return server
            if last_try:
                raise _port_taken(host, chosen)
        raise AssertionError("unreachable: the last try returns or raises")

    @classmethod
    def _spawn(
        cls,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        host: str,
        port: int,
        log_path: Path,
        core: int | None,
    ) -> Self:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        script = str(Path(__file__).with_name("supervise.py"))
        # vLLM never removes its sockets, so they get a folder of their own.
        scratch = Path(tempfile.mkdtemp(prefix="agentrl-policy-"))
        supervisor = [sys.executable, "-I", script, str(_GRACE_S), "any" if core is None else str(core), str(scratch)]
        try:
            with log_path.open("wb") as log_file:
                process = subprocess.Popen(
                    [*supervisor, *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log_file,
                    env={**environment, "VLLM_RPC_BASE_PATH": str(scratch)},
                    start_new_session=True,
                )
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        assert process.stdout is not None
        first = process.stdout.readline()
        pid = int(json.loads(first)["pid"]) if first else -1
        return cls(process, api_pid=pid, host=host, port=port, log_path=log_path, scratch=scratch)

    async def _wait_serving(self, deadline: float) -> bool:
        """Wait for `/health`. False: it serves; True: its port was taken. Raises `PolicyStartError`
        otherwise.
        """
        timeout = aiohttp.ClientTimeout(total=2.0)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while time.monotonic() < deadline:
                end = self.ended()
                if end is not None:
                    if any(words in end.log_tail.lower() for words in _PORT_TAKEN):
                        return True
                    raise self._start_error(f"it ended with exit code {end.exit_code}")
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    async with session.get(f"{self.url}/health") as answer:
                        if answer.status == 200 and _listens(self.api_pid, self.port):
                            return False
                await asyncio.sleep(_HEALTH_EVERY_S)
        raise self._start_error("it did not answer in time", remedy="raise policy.start_timeout_s, or read the log")

    def _start_error(
        self, why: str, *, remedy: str = "read the log; `agentrl doctor` checks this machine"
    ) -> Exception:
        tail = log_tail(self.log_path)
        return PolicyStartError(
            f"the policy server did not start: {why}", where=f"{self.log_path}\n{tail}", remedy=remedy
        )

    def ended(self) -> ServerExit | None:
        """How the server ended; None while it runs."""
        if self._ended is None and self._process.poll() is not None:
            self._ended = self._bury()
        return self._ended

    def _bury(self) -> ServerExit:
        """After the supervisor's end: kill what is left of the group, remove its sockets, read the exit code, close
        the pipes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        shutil.rmtree(self._scratch, ignore_errors=True)
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        code: int | None = None
        for line in self._process.stdout:
            code = json.loads(line).get("exit", code)
        self._process.stdout.close()
        self._process.stdin.close()
        return ServerExit(exit_code=code, log_tail=log_tail(self.log_path))

    async def wait_dead(self) -> ServerExit:
        """Return when the server has ended, however that came. Any number may wait."""
        while (end := self.ended()) is None:
            await _pid_gone(self.pid)
        return end

    def stop(self, *, grace_s: float = _GRACE_S) -> ServerExit:
        """End the server and every process of its group. Idempotent; blocks at most `grace_s` and a
        little.
        """
        if (end := self.ended()) is not None:
            return end
        with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
            if grace_s > 0:
                self._process.terminate()
                self._process.wait(grace_s + 1.0)
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait(_KILL_MARGIN_S)
        end = self.ended()
        assert end is not None
        return end

    async def aclose(self) -> None:
        """`stop` without blocking the loop."""
        await asyncio.to_thread(self.stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _listens(pid: int, port: int) -> bool:
    """Whether process `pid` itself holds the listening socket: another server's `/health` answers just as well."""
    listening = "0A"
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for row in Path(table).read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == listening and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(entry) in inodes:
                    return True
    return False


async def _pid_gone(pid: int) -> None:
    """Return when process `pid`, a child of ours, has ended (reaped or not)."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = loop.create_future()

    def tell() -> None:
        if not gone.done():
            gone.set_result(None)

    loop.add_reader(fd, tell)
    try:
        await gone
    finally:
        loop.remove_reader(fd)
        os.close(fd)

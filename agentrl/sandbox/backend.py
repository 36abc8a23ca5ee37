"""What a backend must give, and which backend a machine can use."""

from __future__ import annotations

import shutil
import subprocess
from typing import Literal, Protocol

from agentrl.config import SandboxConfig
from agentrl.errors import DaemonUnreachableError, NoSandboxBackendError, SandboxError
from agentrl.sandbox.channel import Channel

BackendName = Literal["docker", "bubblewrap"]
_DAEMON_TIMEOUT_S = 3.0
_PROBE_TIMEOUT_S = 10.0
_DOCKER_REMEDY = "Docker: install docker.io and start dockerd (scripts/start_docker.sh), or set DOCKER_HOST"
_BUBBLEWRAP_REMEDY = (
    "bubblewrap: apt-get install bubblewrap, and allow unprivileged user name spaces "
    "(sysctl kernel.unprivileged_userns_clone=1)"
)


class Machine(Protocol):
    """One started sandbox as its backend holds it: a channel to the server, and the power over its life.

    Life cycle: started by `Backend.start` (the server has not spoken yet) → `kill` any number of times →
    `close`.
    """

    @property
    def id(self) -> str: ...

    @property
    def image(self) -> str: ...

    @property
    def channel(self) -> Channel: ...

    def kill(self) -> None:
        """End it now, without waiting. Never raises."""
        ...

    def oom_kills(self) -> int | None:
        """Processes killed so far for want of memory; None where that cannot be seen from outside."""
        ...

    async def cause_of_death(self) -> SandboxError:
        """Why the server is gone, as the typed error to raise. Bounded in time."""
        ...

    async def close(self) -> None:
        """End it and remove all that belongs to it. Bounded in time, may be called again, never raises."""
        ...


class Backend(Protocol):
    """Starts machines."""

    @property
    def name(self) -> BackendName: ...

    async def prepare(self, image: str) -> None:
        """Have the image here (building it may take minutes). Raises `ImageMissingError`. Idempotent."""
        ...

    async def start(self, image: str, *, timeout_s: float) -> Machine:
        """Start one. Raises `SandboxStartError`, `DaemonUnreachableError` or `ImageMissingError`; whatever it
        raises, and when it is cancelled, nothing of the sandbox stays."""
        ...

    def free_room(self) -> int | None:
        """How many more sandboxes it could start now; None: as many as the pool likes."""
        ...

    async def close(self) -> None:
        """Remove whatever this backend started and still lives. Bounded in time."""
        ...


def docker_fault(timeout_s: float = _DAEMON_TIMEOUT_S, hosts: tuple[str, ...] = ()) -> str | None:
    """Why Docker cannot be used here; None where one of the daemons `hosts` (empty: DOCKER_HOST, or this machine's)
    answers. Waits at most `timeout_s` for each."""
    # Here, because it takes 0.2 s to import and bubblewrap needs none of it.
    from agentrl.sandbox.docker_client import DAEMON_ERRORS, connect

    faults = []
    for address in hosts or ("",):
        try:
            client = connect(timeout_s, address)
            try:
                client.ping()
            finally:
                client.close()
            return None
        except DaemonUnreachableError as error:
            faults.append(error.what.removeprefix("the Docker daemon does not answer "))
        except DAEMON_ERRORS as error:
            faults.append(f"({str(error)[:200]})")
    return f"no Docker daemon answers {'; '.join(faults)}"


def bubblewrap_fault() -> str | None:
    """Why bubblewrap cannot be used here; None where it can make a sandbox."""
    if shutil.which("bwrap") is None:
        return "the program bwrap is not installed"
    command = [
        "bwrap",
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--die-with-parent",
        "--uid",
        "1000",
    ]
    command += [
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--size",
        "4096",
        "--tmpfs",
        "/tmp",
        "true",
    ]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"bwrap did not make a sandbox within {_PROBE_TIMEOUT_S:g} s"
    if done.returncode != 0:
        return f"bwrap cannot make a sandbox ({done.stderr.decode('utf-8', 'replace').strip()[:200]})"
    return None


def choose_backend(config: SandboxConfig) -> BackendName:
    """The backend that `config` means here: `auto` takes Docker where a daemon answers, else bubblewrap.

    Blocks for up to some seconds. Raises `NoSandboxBackendError` with the reason and the remedy.
    """
    faults: list[str] = []
    remedies: list[str] = []
    if config.backend in ("auto", "docker"):
        fault = docker_fault(hosts=config.hosts)
        if fault is None:
            return "docker"
        faults.append(fault)
        remedies.append(_DOCKER_REMEDY)
    if config.backend in ("auto", "bubblewrap"):
        fault = bubblewrap_fault()
        if fault is None:
            return "bubblewrap"
        faults.append(fault)
        remedies.append(_BUBBLEWRAP_REMEDY)
    raise NoSandboxBackendError(
        f"no sandbox can be made here: {'; '.join(faults)}",
        where=f"sandbox.backend={config.backend}",
        remedy="; or ".join(remedies),
    )


def make_backend(config: SandboxConfig, run_id: str) -> Backend:
    """The backend that `config` means here, with nothing started. Blocks and raises as `choose_backend`."""
    if choose_backend(config) == "docker":
        from agentrl.sandbox.docker import DockerBackend  # its SDK takes 0.2 s to import

        return DockerBackend(config, run_id=run_id)
    from agentrl.sandbox.bubblewrap import BubblewrapBackend

    return BubblewrapBackend(config, run_id=run_id)

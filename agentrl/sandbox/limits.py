"""What one sandbox may use, and the environment its processes see."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from agentrl.config import SandboxConfig
from agentrl.sandbox.server.settings import DEFAULT_ENVIRONMENT

WORKDIR = "/testbed"
SANDBOX_UID = 1000
SERVER_COMMAND = ("/usr/bin/python3", "-I", "-B", "/opt/agentrl/server/launch.py")
MAX_AGE_S = 24 * 3600.0  # no sandbox lives longer: the pool retires it at half of this, the reaper ends it
_MB = 1024 * 1024

# Everything a sandbox's processes find in their environment: nothing of the host's is passed on. The
# server inside falls back on the same, so it is written there, where nothing of ours can be imported.
ENVIRONMENT = MappingProxyType(DEFAULT_ENVIRONMENT)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one sandbox, in bytes, processes and CPUs."""

    memory_bytes: int
    pids: int
    disk_bytes: int
    shm_bytes: int
    cpus: float

    @classmethod
    def of(cls, config: SandboxConfig) -> Limits:
        """The limits that `config` states; shared memory gets at most 64 MiB of the disk room."""
        disk = config.disk_mb * _MB
        return cls(
            memory_bytes=config.memory_mb * _MB,
            pids=config.pids,
            disk_bytes=disk,
            shm_bytes=min(disk, 64 * _MB),
            cpus=config.cpus,
        )

    def prlimit_arguments(self, *, address_space: bool) -> list[str]:
        """`prlimit` options, for a process inside the sandbox's own user name space.

        There RLIMIT_NPROC counts the sandbox's processes alone (on the host it would count all of the
        user's). `address_space` bounds each process's memory: for hosts whose cgroups are not ours to write,
        because it also stops programs that only reserve much. CPU seconds are not limited: a sandbox lives
        for many commands.
        """
        options = [f"--nproc={self.pids}", "--core=0"]
        if address_space:
            options.append(f"--as={self.memory_bytes}")
        return options

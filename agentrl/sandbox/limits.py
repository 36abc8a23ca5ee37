"""What one sandbox may use, and the environment its processes see."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from types import MappingProxyType

from agentrl.config import SandboxConfig
from agentrl.sandbox.server.settings import DEFAULT_ENVIRONMENT

WORKDIR = "/testbed"
SANDBOX_UID = 1000
SERVER_COMMAND = ("/usr/bin/python3", "-I", "-B", "/opt/agentrl/server/launch.py")
MAX_AGE_S = 24 * 3600.0  # no sandbox lives longer: the pool retires it at half of this, the reaper ends it
OPEN_FILES = (1024, 4096)  # the soft limit is what programs expect, select(2) above all
_MB = 1024 * 1024
_PAGE = 4096

# Everything a sandbox's processes find in their environment: nothing of the host's is passed on. The server inside
# falls back on the same, so it is written there, where nothing of ours can be imported.
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

    def rlimits(self) -> dict[str, tuple[int, int]]:
        """Soft and hard limit by name (of `prlimit` and of Docker's ulimits) of every process, on either backend.

        `fsize` in bytes: one page more than a file system holds, so that a full one says so itself (ENOSPC) and only
        a file with holes, or one that lies in memory alone, meets the limit. Who reads such a file, to see what an
        agent changed, would never come to its end. `nofile`: of one process. `core`: no dumps. `msgqueue`: none, as
        POSIX message queues outlive their processes where no file system shows them.
        """
        return {
            "fsize": (self.disk_bytes + _PAGE,) * 2,
            "nofile": OPEN_FILES,
            "core": (0, 0),
            "msgqueue": (0, 0),
        }

    def prlimit_arguments(self, *, address_space: bool) -> list[str]:
        """`prlimit` options, for a process inside the sandbox's own user name space.

        There RLIMIT_NPROC counts the sandbox's processes alone (on the host it would count all of the user's).
        `address_space` bounds each process's memory: only for hosts whose cgroups are not ours to write, because it
        also stops programs that only reserve much. What this process itself may not have stays the bound (only root
        could raise it). CPU seconds are not limited: a sandbox lives for many commands.
        """
        limits = {"nproc": (self.pids, self.pids), **self.rlimits()}
        if address_space:
            limits["as"] = (self.memory_bytes, self.memory_bytes)
        options = []
        for name, wanted in limits.items():
            ours = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
            soft, hard = (value if ours == resource.RLIM_INFINITY else min(value, ours) for value in wanted)
            options.append(f"--{name}={soft}:{hard}")
        return options

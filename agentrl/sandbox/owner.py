"""Who owns a sandbox: a process, named so that it cannot be mistaken for another.

A pid alone is used again by the kernel; with the process's start time it is unique since boot. And it means
something only within one PID name space of one boot, so `host` names these: a reaper on another machine (or
in another container on the same Docker daemon) must not take a living owner for a dead one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """The start time of `pid` in clock ticks since boot; None where no such process (or only its zombie)
    is."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _is_hidden(pid: int) -> bool:
    """Whether a process `pid` is there that /proc does not show us (mounted with `hidepid`): another user's."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        pass
    return False


def _host() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}:{os.stat('/proc/self/ns/pid').st_ino}"


@dataclass(frozen=True, slots=True)
class Owner:
    """A process: `<pid>:<start ticks>` on `host` (`<boot id>:<PID name space>`)."""

    pid: int
    started: int
    host: str

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        pid = os.getpid()
        started = start_ticks(pid)
        return cls(pid=pid, started=started if started is not None else 0, host=_host())

    @classmethod
    def parse(cls, text: str, host: str) -> Owner | None:
        """The owner that `str(owner)` and its host name; None where `text` is none."""
        pid, _, started = text.partition(":")
        if not (pid.isdigit() and started.isdigit()):
            return None
        return cls(pid=int(pid), started=int(started), host=host)

    def __str__(self) -> str:
        return f"{self.pid}:{self.started}"

    @property
    def pid_namespace(self) -> str:
        """The inode of the PID name space in which `pid` counts."""
        return self.host.rpartition(":")[2]

    def is_known_dead(self) -> bool:
        """True where the owner surely lives no more; False where it lives or cannot be judged from here."""
        if self.host != _host():
            return False
        started = start_ticks(self.pid)
        return not _is_hidden(self.pid) if started is None else started != self.started

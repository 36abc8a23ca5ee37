"""Did the kernel kill something for want of memory? Read from the control group's counter where it can be
seen."""

import contextlib
import os

_ROOT = "/sys/fs/cgroup"


class OomCounter:
    """The number of out-of-memory kills in our control group: v2 `memory.events`, v1 `memory.oom_control`.

    Docker shows a container its own group. bubblewrap shows none: there `happened` falls back to a guess, a
    command that ended by SIGKILL (exit code 137) before its deadline, and the host, which sees the group, may
    know better.
    """

    def __init__(self, root: str = _ROOT) -> None:
        self._fd = next((fd for path in _candidates(root) if (fd := _open(path)) is not None), None)

    def read(self) -> int | None:
        """The count now; None where it cannot be seen."""
        return None if self._fd is None else _count(self._fd)

    def happened(self, before: int | None, exit_code: int | None) -> bool:
        """Whether a kill was counted since `before` (what `read` gave), or else is likely."""
        now = self.read()
        if before is not None and now is not None:
            return now > before
        return exit_code == 137


def _candidates(root: str) -> list[str]:
    """Where the counter may lie, the most specific first. A container's own group is mounted at the root."""
    found = []
    with contextlib.suppress(OSError), open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file.read().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                found.append(f"{root}{path}/memory.events")
            elif "memory" in controllers.split(","):
                found.append(f"{root}/memory{path}/memory.oom_control")
    found += [f"{root}/memory.events", f"{root}/memory/memory.oom_control"]
    return [os.path.normpath(path) for path in found]


def _open(path: str) -> int | None:
    """A descriptor of the counter's file, kept open: it is read twice per command. None where it is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    if _count(fd) is None:
        os.close(fd)
        return None
    return fd


def _count(fd: int) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in os.pread(fd, 4096, 0).splitlines():
            if line.startswith(b"oom_kill "):
                return int(line[9:])
    return None

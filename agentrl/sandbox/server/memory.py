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
        self._path = next((path for path in _candidates(root) if _count(path) is not None), None)

    def read(self) -> int | None:
        return None if self._path is None else _count(self._path)

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


def _count(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError), open(path, encoding="utf-8") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None

"""Memory, process and CPU limits by cgroup directories, version 1 (one tree per controller) or 2 (one tree).

Life cycle: `CgroupTree.find()` once per process → `create(name, limits)` per sandbox → `add(pid)` while the
sandbox is held at its gate, so that all its processes are born inside → `oom_kills()` at will → `remove()`
once they are gone. Directories are named `agentrl-<PID name space>-<owner pid>-<start ticks>-<sandbox>`: a
reaper knows whose they are.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from agentrl.sandbox.limits import Limits
from agentrl.sandbox.owner import Owner

_PREFIX = "agentrl-"
_ROOT = Path("/sys/fs/cgroup")
_CPU_PERIOD_US = 100_000
_PROBE_TIMEOUT_S = 1.0
_CONTROLLERS = ("memory", "pids", "cpu")


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One sandbox's directories: one in version 2, one per controller in version 1."""

    folders: tuple[Path, ...]
    oom_file: Path

    def add(self, pid: int) -> None:
        """Move process `pid` in. Its later children are born inside. Raises OSError."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def oom_kills(self) -> int:
        """How many processes the kernel has killed here for want of memory."""
        return _count_oom_kills(self.oom_file)

    def kill(self) -> int:
        """SIGKILL every process inside; the count of those found."""
        found: set[int] = set()
        for folder in self.folders:
            with contextlib.suppress(OSError):
                found |= {int(pid) for pid in (folder / "cgroup.procs").read_text().split()}
        for pid in found - {0}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(found)

    def try_remove(self) -> bool:
        """Remove the directories; False where processes still end inside."""
        for folder in self.folders:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True

    def remove_within(self, timeout_s: float) -> bool:
        """Kill what is inside and remove the directories, blocking up to `timeout_s`; False where something
        stays."""
        end = time.monotonic() + timeout_s
        while not self.try_remove():
            if time.monotonic() > end:
                return False
            self.kill()
            time.sleep(0.01)
        return True


@dataclass(frozen=True, slots=True)
class Found:
    """The directories of one sandbox of whatever process: controller → folder (the same ones in version 2). The
    owner's `host` is empty where it is of another PID name space."""

    owner: Owner
    sandbox: str
    folders: dict[str, Path]


@dataclass(frozen=True, slots=True)
class CgroupTree:
    """Where this process may make cgroups. `bases` is one folder per controller (the same one in version 2)."""

    version: int
    bases: dict[str, Path]

    @classmethod
    def find(cls, root: Path = _ROOT, owner: Owner | None = None) -> CgroupTree | None:
        """The first tree in which a directory with a memory limit can really be made, and processes of ours moved
        there; None where there is none. Of version 2, from the root down to our own group: root finds the root, a
        user what was delegated to him (`systemd-run --user --scope`), and both the same whenever they look."""
        probe = Limits(memory_bytes=1 << 30, pids=64, disk_bytes=1, shm_bytes=1, cpus=1.0)
        for tree in (cls._version_1(root), *map(cls._version_2, _own_groups(root))):
            if tree is None:
                continue
            try:
                group = tree.create(f"probe{secrets.token_hex(4)}", probe, owner=owner or Owner.current())
            except OSError:
                continue
            if tree.version == 1 or _can_be_entered(group):
                group.remove_within(_PROBE_TIMEOUT_S)
                return tree
            group.remove_within(_PROBE_TIMEOUT_S)
        return None

    @classmethod
    def _version_1(cls, root: Path) -> CgroupTree | None:
        bases = {name: root / name for name in _CONTROLLERS if (root / name / "cgroup.procs").exists()}
        return cls(version=1, bases=bases) if {"memory", "pids"} <= bases.keys() else None

    @classmethod
    def _version_2(cls, base: Path) -> CgroupTree | None:
        try:
            enabled = (base / "cgroup.subtree_control").read_text().split()
        except OSError:
            return None
        return cls(version=2, bases=dict.fromkeys(_CONTROLLERS, base)) if {"memory", "pids"} <= set(enabled) else None

    def create(self, name: str, limits: Limits, *, owner: Owner) -> Cgroup:
        """Make the directories of sandbox `name` with its limits set. Raises OSError, leaving nothing behind."""
        leaf = f"{_PREFIX}{owner.pid_namespace}-{owner.pid}-{owner.started}-{name}"
        folders = {base / leaf: None for base in self.bases.values()}
        oom = "memory.oom_control" if self.version == 1 else "memory.events"
        group = Cgroup(folders=tuple(folders), oom_file=self.bases["memory"] / leaf / oom)
        try:
            for folder in group.folders:
                folder.mkdir()
            for file, value in self._settings(leaf, limits):
                file.write_text(value)
        except OSError:
            group.try_remove()
            raise
        # Swap would let a sandbox take more memory than it is given; kernels without swap accounting lack the file.
        swap = "memory.memsw.limit_in_bytes" if self.version == 1 else "memory.swap.max"
        with contextlib.suppress(OSError):
            most = limits.memory_bytes if self.version == 1 else 0
            _write_existing(self.bases["memory"] / leaf / swap, str(most))
        return group

    def _settings(self, leaf: str, limits: Limits) -> list[tuple[Path, str]]:
        quota = max(1000, round(limits.cpus * _CPU_PERIOD_US))
        memory, pids = self.bases["memory"] / leaf, self.bases["pids"] / leaf
        settings = [(pids / "pids.max", str(limits.pids))]
        if self.version == 1:
            settings.append((memory / "memory.limit_in_bytes", str(limits.memory_bytes)))
            if "cpu" in self.bases:
                cpu = self.bases["cpu"] / leaf
                settings.append((cpu / "cpu.cfs_period_us", str(_CPU_PERIOD_US)))
                settings.append((cpu / "cpu.cfs_quota_us", str(quota)))
        else:
            settings.append((memory / "memory.max", str(limits.memory_bytes)))
            if (self.bases["cpu"] / leaf / "cpu.max").exists():
                settings.append((self.bases["cpu"] / leaf / "cpu.max", f"{quota} {_CPU_PERIOD_US}"))
        return settings

    def sandboxes(self) -> list[Found]:
        """Whose directories there are, by their names; of some a controller's may be missing."""
        by_leaf: dict[str, dict[str, Path]] = {}
        for controller, base in self.bases.items():
            for folder in base.glob(f"{_PREFIX}*-*-*-*"):
                by_leaf.setdefault(folder.name, {})[controller] = folder
        here = Owner.current()
        found = []
        for leaf, folders in by_leaf.items():
            namespace, pid, started, sandbox = leaf.removeprefix(_PREFIX).split("-", 3)
            owner = Owner.parse(f"{pid}:{started}", here.host if namespace == here.pid_namespace else "")
            if owner is not None:
                found.append(Found(owner, sandbox, folders))
        return found

    def leftovers(self) -> list[Cgroup]:
        """Cgroups of owners that are known to be dead."""
        dead = [tuple(dict.fromkeys(each.folders.values())) for each in self.sandboxes() if each.owner.is_known_dead()]
        return [Cgroup(folders=folders, oom_file=folders[0] / "memory.oom_control") for folders in dead]


def _own_groups(root: Path, membership: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """The groups of version 2 that we are in, the root first."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return [root]
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    own = root / path.strip("/")
    return (
        [*(parent for parent in reversed(own.parents) if parent.is_relative_to(root)), own] if own != root else [root]
    )


def _can_be_entered(group: Cgroup) -> bool:
    """Whether a process of ours may be moved into `group`: that needs the right to write the common ancestor too."""
    with subprocess.Popen(["sleep", "10"], stdin=subprocess.DEVNULL) as child:
        try:
            group.add(child.pid)
        except OSError:
            return False
        finally:
            child.kill()
    return True


def host_oom_kills() -> int:
    """How many processes the kernel has killed for want of memory on the whole host."""
    return _count_oom_kills(Path("/proc/vmstat"))


def _count_oom_kills(file: Path) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _write_existing(file: Path, value: str) -> None:
    if file.exists():
        file.write_text(value)

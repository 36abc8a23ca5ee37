"""The command line of one bubblewrap sandbox: what it sees, and what it does not."""

from __future__ import annotations

import functools
import os
import stat
from pathlib import Path

from agentrl.sandbox.limits import ENVIRONMENT, SANDBOX_UID, SERVER_COMMAND, WORKDIR, Limits

# Mounted by bubblewrap itself, so never taken from the image.
_OWN_FOLDERS = frozenset({"proc", "dev", "sys", "tmp", "run", "testbed", "root", "home", "mnt", "media", "srv"})
_HIDDEN_IN_PROC = frozenset(
    {"kcore", "keys", "key-users", "latency_stats", "timer_list", "sched_debug", "interrupts", "sysrq-trigger"}
)


@functools.cache
def _hidden_kernel_files() -> tuple[str, ...]:
    """What the kernel shows of the whole host in /proc and Docker hides too, or shows to the host's root alone (whom
    a sandbox that root started is, as the kernel sees it)."""
    hidden = []
    for entry in os.scandir("/proc"):
        if entry.is_file(follow_symlinks=False):
            others_may_read = entry.stat(follow_symlinks=False).st_mode & stat.S_IROTH
            if entry.name in _HIDDEN_IN_PROC or not others_may_read:
                hidden.append(entry.path)
    return tuple(sorted(hidden))


def bwrap_command(
    rootfs: Path, limits: Limits, *, info_fd: int, gate_fd: int, filter_fd: int | None, address_space: bool
) -> list[str]:
    """The command line of one sandbox. `gate_fd` holds the server back until a byte comes; `info_fd` tells its pid;
    from `filter_fd` the system-call filter is read."""
    command = [
        "bwrap",
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--die-with-parent",
        "--new-session",
    ]
    command += ["--as-pid-1", "--cap-drop", "ALL", "--hostname", "sandbox"]
    command += ["--uid", str(SANDBOX_UID), "--gid", str(SANDBOX_UID)]
    command += ["--info-fd", str(info_fd), "--block-fd", str(gate_fd), "--clearenv"]
    if filter_fd is not None:
        command += ["--seccomp", str(filter_fd)]
    for name, value in ENVIRONMENT.items():
        command += ["--setenv", name, value]
    for entry in sorted(rootfs.iterdir()):
        if entry.is_symlink():
            command += ["--symlink", os.readlink(entry), f"/{entry.name}"]
        elif entry.is_dir() and entry.name not in _OWN_FOLDERS:
            command += ["--ro-bind", str(entry), f"/{entry.name}"]
    # Host root is user 1000 inside: without capabilities, yet the owner of /proc/sys's files as the kernel
    # sees it.
    command += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"]
    for path in _hidden_kernel_files():
        command += ["--ro-bind", "/dev/null", path]
    command += ["--dev", "/dev"]
    for folder, size, mode in (
        ("/dev/shm", limits.shm_bytes, "1777"),
        ("/tmp", limits.disk_bytes, "1777"),
        (WORKDIR, limits.disk_bytes, "0755"),
    ):
        command += ["--size", str(size), "--perms", mode, "--tmpfs", folder]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORKDIR, "--"]
    command += [
        "/usr/bin/prlimit",
        *limits.prlimit_arguments(address_space=address_space),
        "--",
        *SERVER_COMMAND,
    ]
    return command

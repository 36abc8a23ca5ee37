"""The Unix socket over which a container's server reaches us where the daemon shares our files.

The host listens in a folder of the container's own, which is mounted read-only at /run/agentrl. The server connects
before it starts anything, the host takes that one connection, closes the door and removes the folder: nothing that
runs in the container later finds anything to connect to, and the daemon is out of the conversation's way.

    <runtime folder, 0700>/<PID name space>-<owner pid>-<start ticks>-<random>/socket

The runtime folder keeps other users out; its children let the container's user in. A folder whose owner died before
the server came is removed by the reaper, who reads the owner from its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
import stat
from pathlib import Path

from agentrl.sandbox.owner import Owner

MOUNT_POINT = "/run/agentrl"
_SOCKET = "socket"
_LONGEST_BASE = 40  # with all that comes behind it the path stays under the 108 bytes that an address may have


class ChannelRefusedError(Exception):
    """The container cannot reach our socket: the daemon sees other files, or a policy forbids it. Internal."""


def runtime_folder() -> Path:
    """Where the folders of the sockets lie."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base.startswith("/") and len(base) <= _LONGEST_BASE and os.access(base, os.W_OK | os.X_OK):
        return Path(base, "agentrl")
    return Path(f"/tmp/agentrl-{os.getuid()}")


def _private(folder: Path) -> Path:
    """`folder`, made where it is missing. Raises OSError where it is another user's or open to others."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{folder} is no folder of ours alone; remove it, or set XDG_RUNTIME_DIR")
    return folder


class Door:
    """A listening socket in a folder of its own, for one connection."""

    def __init__(self, owner: Owner) -> None:
        """Raises OSError."""
        leaf = f"{owner.pid_namespace}-{owner.pid}-{owner.started}-{secrets.token_hex(4)}"
        self.folder = _private(runtime_folder()) / leaf
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.folder.mkdir(mode=0o700)
            path = self.folder / _SOCKET
            self._listener.bind(str(path))
            self._listener.listen(1)
            self._listener.setblocking(False)
            path.chmod(0o666)  # the container's user is not ours
            self.folder.chmod(0o711)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """What the server is told."""
        return f"{MOUNT_POINT}/{_SOCKET}"

    async def accept(self) -> socket.socket:
        """The server's connection, non-blocking. The caller sets a deadline, and closes the door."""
        # Not the loop's own `sock_accept`: where a cancellation meets a connection it fails, and loses that.
        loop = asyncio.get_running_loop()
        knock = asyncio.Event()
        loop.add_reader(self._listener.fileno(), knock.set)
        try:
            while True:
                await knock.wait()
                knock.clear()
                with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                    connection, _ = self._listener.accept()
                    connection.setblocking(False)
                    return connection
        finally:
            loop.remove_reader(self._listener.fileno())

    def close(self) -> None:
        """Nobody comes in any more; nothing stays on the disk. May be called again."""
        self._listener.close()
        _remove(self.folder)


def _remove(folder: Path) -> None:
    """Remove the folder; what cannot be removed is left to the reaper."""
    with contextlib.suppress(OSError):
        (folder / _SOCKET).unlink(missing_ok=True)
        folder.rmdir()


def reap_folders() -> int:
    """Remove the folders of dead owners; how many."""
    here = Owner.current()
    removed = 0
    runtime = runtime_folder()
    with contextlib.suppress(OSError):
        if runtime.lstat().st_uid != os.getuid():
            return 0  # another user has made what should be ours: nothing in it is
    for folder in runtime.glob(f"{here.pid_namespace}-*-*-*"):
        pid, started = folder.name.split("-")[1:3]
        owner = Owner.parse(f"{pid}:{started}", here.host)
        if owner is not None and owner.is_known_dead():
            shutil.rmtree(folder, ignore_errors=True)
            removed += not folder.exists()
    return removed

"""Files in and out of a sandbox, and emptying its writable trees."""

import base64
import contextlib
import io
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Mapping, Sequence

READ_LIMIT = 11 * 1024 * 1024
"""Bytes of one file: its base64 has to fit in an answer of 16 MiB."""
_EMPTY_TIMEOUT_S = 30.0


class FileError(Exception):
    """A path or an archive that cannot be used; the message says which and why."""


def write_files(work: str, files: Mapping[str, str]) -> None:
    """Write `files` (path → base64), making folders. A name that is a link, pipe or device is replaced by a
    file."""
    for name, encoded in files.items():
        path = os.path.join(work, name)
        data = base64.b64decode(encoded, validate=True)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            mode = os.lstat(path).st_mode
            if stat.S_ISDIR(mode):
                raise FileError(f"{path} is a folder")
            if not stat.S_ISREG(mode):
                os.unlink(path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        with open(fd, "wb") as file:
            file.write(data)


def read_file(work: str, name: str, limit: int) -> bytes | None:
    """The first `limit` bytes of a regular file; None where there is none (a folder, pipe or device is none, and so
    is what the kernel shows in /proc: a link of the agent's must not borrow the server's eyes)."""
    try:
        fd = os.open(os.path.join(work, name), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_dev == os.stat("/proc").st_dev:
        os.close(fd)
        return None
    with open(fd, "rb") as file:
        return file.read(max(0, min(limit, READ_LIMIT)))


def unpack(work: str, archive: bytes) -> None:
    """Empty the work tree and unpack a tar (plain or compressed) into it.

    Raises FileError, before anything is emptied, for an absolute or climbing name, a link that leaves the
    tree, or a device.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            members = tar.getmembers()
            for member in members:
                _check_member(member)
                _make_plain(member)
            empty_tree(work)
            tar.extractall(work, members)
    except tarfile.TarError as error:
        raise FileError(f"the archive cannot be unpacked: {error}") from None


def _check_member(member: tarfile.TarInfo) -> None:
    """tarfile's `data` filter, which Debian 12's Python does not have yet."""
    if _climbs(member.name):
        raise FileError(f"the archive's member {member.name} leaves the tree")
    if not (member.isreg() or member.isdir() or member.islnk() or member.issym()):
        raise FileError(f"the archive's member {member.name} is neither file, folder nor link")
    target = member.linkname
    if member.issym():
        target = os.path.join(os.path.dirname(member.name), target)
    if (member.islnk() or member.issym()) and (os.path.isabs(member.linkname) or _climbs(target)):
        raise FileError(f"the archive's link {member.name} leaves the tree")


def _climbs(name: str) -> bool:
    return os.path.isabs(name) or os.path.normpath(name).split("/")[0] == ".."


def _make_plain(member: tarfile.TarInfo) -> None:
    """Owned by us, readable and writable for us, no set-id bits."""
    member.uid, member.gid = os.getuid(), os.getgid()
    member.uname = member.gname = ""
    if not member.issym():
        member.mode = member.mode & 0o755 | (0o700 if member.isdir() else 0o600)


def empty_tree(root: str) -> None:
    """Remove everything in `root`, whatever its modes and depth. Raises FileError if something stays."""
    if not os.path.isdir(root):
        return
    with contextlib.suppress(OSError):
        os.chmod(root, stat.S_IMODE(os.stat(root).st_mode) | stat.S_IRWXU)
    names = os.listdir(root)
    for name in names:
        path = os.path.join(root, name)
        with contextlib.suppress(OSError, RecursionError):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                shutil.rmtree(path)
            else:
                os.unlink(path)
    left = [os.path.join(root, name) for name in os.listdir(root)] if names else []
    if left:
        _force(["chmod", "-R", "u+rwX", "--", *left])
        _force(["rm", "-rf", "--", *left])
        if os.listdir(root):
            raise FileError(f"{root} cannot be emptied")


def _force(command: Sequence[str]) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_EMPTY_TIMEOUT_S,
        )


class Trees:
    """The writable trees and the modes they came with: emptied and given back their modes by a reset."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._modes = {
            root: stat.S_IMODE(os.stat(root).st_mode)
            for root in roots
            if os.path.isdir(root) and os.access(root, os.W_OK)
        }

    def empty(self) -> None:
        """Raises FileError if something stays."""
        for root, mode in self._modes.items():
            empty_tree(root)
            if stat.S_IMODE(os.stat(root).st_mode) != mode:
                os.chmod(root, mode)
        _remove_shared_memory()


def _remove_shared_memory() -> None:
    """System V objects outlive their processes; nearly no sandbox has any."""
    for kind in ("shm", "sem", "msg"):
        try:
            with open(f"/proc/sysvipc/{kind}", encoding="ascii") as file:
                some = len(file.readlines()) > 1
        except OSError:
            continue
        if some:
            _force(["ipcrm", f"--all={kind}"])

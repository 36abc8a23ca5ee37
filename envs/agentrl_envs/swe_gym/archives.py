"""Work trees on their way in and out of sandboxes: tars, the same bytes for the same files, and the way into a tree."""

from __future__ import annotations

import functools
import shlex
import tarfile
from collections.abc import Mapping

# Files are the sandbox user's, with one date for all: a fixed archive can be cached and compared.
_USER = 1000
_MTIME = 1_577_836_800  # 2020-01-01


def pack(files: Mapping[str, str]) -> bytes:
    """An uncompressed tar of text files (relative path → text): what `tarfile` writes in its PAX format, byte for byte.

    Each rollout packs several trees, of which the other rollouts of its group pack the same, and headers are what
    takes time.
    """
    parts = []
    for path, text in sorted(files.items()):
        data = text.encode()
        parts += [_header(path, len(data)), data, bytes(-len(data) % tarfile.BLOCKSIZE)]
    parts.append(bytes(2 * tarfile.BLOCKSIZE))
    parts.append(bytes(-sum(map(len, parts)) % tarfile.RECORDSIZE))
    return b"".join(parts)


@functools.lru_cache(maxsize=4096)
def _header(path: str, size: int) -> bytes:
    info = normalised(tarfile.TarInfo(path))
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT)


def entering(workdir: str) -> str:
    """Shell that enters `workdir` from outside, though the agent may have shut it (`chmod 0 .`)."""
    folder = shlex.quote(workdir)
    return f"cd {folder} || {{ chmod u+rwx {folder}; cd {folder}; }} || exit; "


def normalised(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """`info` without what differs from host to host: owner, group, date."""
    info.uid = info.gid = _USER
    info.uname = info.gname = ""
    info.mtime = _MTIME
    return info

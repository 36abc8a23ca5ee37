"""Work trees on their way in and out of sandboxes: tars, the same bytes for the same files, and the way into a tree."""

from __future__ import annotations

import io
import shlex
import tarfile
from collections.abc import Mapping

# Files are the sandbox user's, with one date for all: a fixed archive can be cached and compared.
_USER = 1000
_MTIME = 1_577_836_800  # 2020-01-01


def pack(files: Mapping[str, str]) -> bytes:
    """An uncompressed tar of text files (relative path → text)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, text in sorted(files.items()):
            data = text.encode()
            info = tarfile.TarInfo(path)
            info.size = len(data)
            tar.addfile(normalised(info), io.BytesIO(data))
    return buffer.getvalue()


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

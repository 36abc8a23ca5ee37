"""Writing files that are whole or absent, and naming the folder whose file system is full."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import DiskFullError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded", "os error 28", "os error 122")
_BARELY_FREE = 65_536


@contextmanager
def full_disk_named(folder: Path, *, purpose: str) -> Iterator[None]:
    """Turn every way of saying "no space" into `DiskFullError` with the folder and the free bytes.

    safetensors reports a full disk as text in an error of its own, and torch as "write failed" alone, so the
    text and the free bytes count beside the errno.
    """
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
        told = number in _FULL or any(text in str(error) for text in _FULL_TEXTS)
        if not told and not (isinstance(error, RuntimeError) and free < _BARELY_FREE):
            raise
        raise DiskFullError(
            f"no space left for {purpose} ({free / 1e6:.1f} MB free)",
            where=str(folder),
            remedy="free space there, keep fewer checkpoints (checkpoint.keep), or choose another folder",
        ) from error


def sync_file(path: Path) -> None:
    """Make a file's (or folder's) content durable before something else points to it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

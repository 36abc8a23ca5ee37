"""Scores on disk, by what was scored: a run that is resumed, or a segment that comes again, asks no teacher.

    <folder>/<first two hex digits>/<SHA-256 of what was asked>      SHA-256 of the rest, then the arrays

A file is written whole under another name first, so that a reader sees all of it or none; one that does not match its
own SHA-256 is removed and counts as not there. Beyond `max_bytes` the oldest files go until half of it is free, but
for `REFERENCE`, by which it is known whose scores these are.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

log = logging.getLogger("agentrl.teachers")

MAX_BYTES = 4 << 30
REFERENCE = "reference"
"""Key of what the teacher said of a text of ours when the first of these scores were made."""
_DIGEST_BYTES = 32


class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


_decoder = msgspec.msgpack.Decoder(tuple[_Array, ...])


def key_of(*parts: str | int | np.ndarray | None) -> str:
    """The name of an answer: SHA-256 of everything it depends on, each part with its kind and length."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.tobytes() if isinstance(part, np.ndarray) else str(part).encode()
        shape = f"{part.dtype}{part.shape}" if isinstance(part, np.ndarray) else type(part).__name__
        digest.update(f"{shape}:{len(data)}:".encode())
        digest.update(data)
    return digest.hexdigest()


class ScoreCache:
    """One teacher's folder. Every method blocks for as long as the disk takes; errors of the disk are no errors of
    scoring: they are logged once, and nothing is kept from then on."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._bytes: int | None = None  # counted before the first write
        self._broken = False

    def read(self, key: str) -> tuple[np.ndarray, ...] | None:
        """The arrays kept under `key`; None where there are none, or not whole ones."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        body = data[_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() == data[:_DIGEST_BYTES]:
            with contextlib.suppress(msgspec.MsgspecError):
                return tuple(np.frombuffer(a.data, a.dtype).reshape(a.shape) for a in _decoder.decode(body))
        log.warning("teacher cache: %s is damaged and is asked for again", path)
        with contextlib.suppress(OSError):
            path.unlink()
        return None

    def write(self, key: str, arrays: Sequence[np.ndarray]) -> None:
        """Keep `arrays` under `key`."""
        body = msgspec.msgpack.encode([_Array(a.dtype.str, a.shape, a.tobytes()) for a in arrays])
        if self._broken:
            return
        path = self._path(key)
        part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._bytes is None:
                self._bytes = sum(size for _, size, _ in self._files())
            part.write_bytes(hashlib.sha256(body).digest() + body)
            part.replace(path)
            self._bytes += len(body) + _DIGEST_BYTES
            if self._bytes > self._max_bytes:
                self._trim()
        except OSError as error:
            self._broken = True
            log.warning("teacher cache: %s cannot be written (%s); scores are not kept from here on", path, error)
            with contextlib.suppress(OSError):
                part.unlink()

    def holds_any(self) -> bool:
        """Whether anything is kept."""
        return any(self._folder.glob("*/*"))

    def clear(self) -> None:
        """Forget everything: it came from another model, or may have."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._bytes = None

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / key

    def _files(self) -> list[tuple[int, int, Path]]:
        """(time of change, size, path) of every file."""
        found = []
        for path in self._folder.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        return found

    def _trim(self) -> None:
        files = sorted(self._files())
        left = sum(size for _, size, _ in files)
        for _, size, path in files:
            if left <= self._max_bytes // 2:
                break
            if path.name == REFERENCE:
                continue
            path.unlink(missing_ok=True)
            left -= size
        self._bytes = left

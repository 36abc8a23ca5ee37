"""The run folder: one place per run, written by the orchestrator alone (checkpoints/ and logs/<role> apart).

    config.toml  metrics.jsonl  events.jsonl  trajectories/*.parquet  buffer.sqlite  checkpoints/  logs/  tokenizer/

A used folder is refused unless resumed; a lock keeps two runs from writing one folder at once.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from agentrl.errors import DiskFullError, RunFolderError
from agentrl.telemetry.writing import write_whole

CONFIG, METRICS, EVENTS = "config.toml", "metrics.jsonl", "events.jsonl"
MIN_FREE_BYTES = 64 * 2**20


@dataclass(slots=True)
class RunFolder:
    """Paths of an open run folder, and its lock."""

    path: Path
    _lock: IO[str]

    @property
    def config(self) -> Path:
        return self.path / CONFIG

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def events(self) -> Path:
        return self.path / EVENTS

    @property
    def trajectories(self) -> Path:
        return self.path / "trajectories"

    @property
    def buffer(self) -> Path:
        return self.path / "buffer.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    def write_config(self, text: str) -> None:
        """The resolved configuration, whole or not at all: a resume reads it. Raises DiskFullError."""
        write_whole(self.config, text)

    def close(self) -> None:
        """Give the lock back."""
        self._lock.close()


def is_run_folder(path: Path) -> bool:
    """True where a run has written its configuration."""
    return (path / CONFIG).is_file()


def check_run_folder(path: Path) -> None:
    """Raise RunFolderError unless `path` is a run folder."""
    if not is_run_folder(path):
        raise RunFolderError(
            f"{path} is no run folder (no {CONFIG} in it)",
            where=str(path),
            remedy="name a folder that `agentrl train` or `agentrl eval` wrote",
        )


def open_run_folder(path: Path, *, resume: bool) -> RunFolder:
    """Make or reopen a run folder.

    Raises RunFolderError where it is used and not resumed, not resumable, locked by another run or not writable, and
    DiskFullError where its file system has under 64 MiB left.
    """
    if resume:
        check_run_folder(path)
    elif path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunFolderError(
            f"{path} is used",
            where=str(path),
            remedy="go on with it (--resume), name another folder (--run-dir), or remove it",
        )
    try:
        for folder in (path, path / "trajectories", path / "checkpoints", path / "logs"):
            folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path).free
        lock = (path / ".lock").open("w", encoding="utf-8")
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error.strerror}", where=str(path), remedy="check the path and its permissions"
        ) from error
    if free < MIN_FREE_BYTES:
        lock.close()
        raise DiskFullError(
            f"{free // 2**20} MiB are free, a run needs {MIN_FREE_BYTES // 2**20} to start",
            where=str(path),
            remedy="free some room or name a folder on another disk (--run-dir)",
        )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise RunFolderError(
            f"another run is writing {path}", where=str(path), remedy="wait for it or name another folder (--run-dir)"
        ) from error
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return RunFolder(path=path, _lock=lock)

"""The folder that rows go to: `instances.jsonl`, a bundle of trees a repository, `decided.log`.

Order of writing: a row's tree is in the bundle before the row is in `instances.jsonl`, and the decision is noted last.
So whatever ends a run, every row has its tree, and the next run goes on: it skips what is decided, a row being a
decision of its own. A folder of rows is read by suffix, so the decisions (JSON lines too) go under another one.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from agentrl.errors import DatasetError, disk_full_is_typed
from agentrl_envs.swe_gym.factory.git import Repository, RowStore

ROWS, DECIDED = "instances.jsonl", "decided.log"
_ROWS_A_FLUSH, _FLUSH_S, _REST_FACTOR = 8, 5.0, 10.0


class OutputFolder:
    """Rows of one repository and one kind of source (`mined` or `injected`) in a folder that may hold others too.

    A key is ten hex digits and ends the row's instance id. `close` must be called.
    """

    def __init__(self, folder: Path, *, repo: str, source: str, repository: Repository, scratch: Path) -> None:
        self.folder = folder
        self.repo = repo
        self._source = source
        self._prefix = repo.replace("/", "__")
        self.bundle = folder / f"{self._prefix}.bundle"
        self._lock = _lock(folder)
        try:
            self._store = RowStore(repository, self.bundle, scratch)
            self._decided = self._read_decisions()
            self.kinds: Counter[str] = Counter()
            self.rows: list[Mapping[str, Any]] = []
            self._read_rows()
        except BaseException:
            self._lock.close()
            raise
        self.new_rows = 0
        self._pending_rows: list[Mapping[str, Any]] = []
        self._pending_decisions: list[Mapping[str, Any]] = []
        self._flushed_at = time.monotonic()
        self._rest_s = _FLUSH_S

    def instance_id(self, key: str) -> str:
        return f"{self._prefix}-{key}"

    def is_decided(self, key: str) -> bool:
        """True for what this run or an earlier one has tried."""
        return key in self._decided

    def reject(self, key: str, reason: str, detail: str = "") -> None:
        """Note that `key` makes no row."""
        self._decide(key, reason, detail)
        self._flush_now_and_then()

    def accept(self, key: str, row: Mapping[str, Any], commit: str) -> None:
        """Take a row whose tree is `commit` (it has no parents)."""
        self._store.add(self.instance_id(key), commit)
        self._pending_rows.append(row)
        self._count(row)
        self.new_rows += 1
        self._decide(key, "row", "")
        self._flush_now_and_then()

    def flush(self) -> None:
        """Write what waits."""
        began = time.monotonic()
        with disk_full_is_typed(self.folder):
            if self._pending_rows:
                self._store.write()
                _append(self.folder / ROWS, self._pending_rows)
                self._pending_rows = []
            if self._pending_decisions:
                _append(self.folder / DECIDED, self._pending_decisions)
                self._pending_decisions = []
        self._flushed_at = time.monotonic()
        self._rest_s = max(_FLUSH_S, _REST_FACTOR * (self._flushed_at - began))

    def close(self) -> None:
        """Write what waits and let others write."""
        try:
            self.flush()
        finally:
            self._lock.close()

    def _flush_now_and_then(self) -> None:
        rested = time.monotonic() - self._flushed_at > self._rest_s
        if rested or (len(self._pending_rows) >= _ROWS_A_FLUSH and self._rest_s == _FLUSH_S):
            self.flush()

    def _decide(self, key: str, verdict: str, detail: str) -> None:
        self._decided.add(key)
        self._pending_decisions.append(
            {"repo": self.repo, "source": self._source, "key": key, "verdict": verdict, "detail": detail[:300]}
        )

    def _count(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)
        self.kinds[str(row.get("x_kind"))] += 1

    def _read_decisions(self) -> set[str]:
        return {
            str(line.get("key"))
            for line in _read(self.folder / DECIDED)
            if line.get("repo") == self.repo and line.get("source") == self._source
        }

    def _read_rows(self) -> None:
        refs = self._store.names()
        for row in _read(self.folder / ROWS):
            if row.get("repo") != self.repo:
                continue
            name = str(row.get("instance_id"))
            if name not in refs:
                raise DatasetError(
                    f"{self.bundle.name} lacks the tree of row {name}",
                    where=str(self.folder),
                    remedy=f"put the bundle back, or remove the repository's rows from {ROWS}",
                )
            if row.get("x_source") == self._source:
                self._decided.add(name.rsplit("-", 1)[-1])
                self._count(row)


def _lock(folder: Path) -> IO[str]:
    """Make the folder and keep others from writing to it. Raises DatasetError, DiskFullError."""
    try:
        with disk_full_is_typed(folder):
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / ".lock").open("w")
    except OSError as error:
        raise DatasetError(
            f"the folder cannot be written: {error.strerror}", where=str(folder), remedy="give another --out"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise DatasetError(
            "another process writes to this folder", where=str(folder), remedy="wait for it, or give another --out"
        ) from error
    return file


def _read(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines. A last line that was cut short is cut off the file."""
    if not path.is_file():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        os.truncate(path, len(whole))
    found = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DatasetError(f"the line is no JSON: {error}", where=f"{path}, line {number}") from error
        if isinstance(value, dict):
            found.append(value)
    return found


def _append(path: Path, lines: list[Mapping[str, Any]]) -> None:
    with path.open("ab") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        file.flush()
        os.fsync(file.fileno())

"""The buffer: finished groups on disk until a checkpoint makes them history.

Life of a row:

    put ──▶ waiting ──settle(step)──▶ settled at that step ──prune(checkpoint)──▶ gone
               ▲                                │
               └──────take_back(checkpoint)─────┘   (resume: settled after its checkpoint)

`settle` is called when the group is trained, filtered or dropped, which is also when its Parquet row is
written. A settled row stays until a checkpoint covers its step, so that a resumed run finds it again. SQLite
in WAL mode: a put is there after kill -9, or not at all.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from agentrl.errors import DiskFullError, RecordError, RunFolderError
from agentrl.rollout.groups import GroupResult
from agentrl.trajectory.parquet import from_bytes, schema, to_bytes

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
    group_id TEXT PRIMARY KEY,
    task_id TEXT NOT NULL,
    task_index INTEGER NOT NULL,
    oldest_version INTEGER,
    newest_version INTEGER,
    payload BLOB NOT NULL,
    consumed_at_step INTEGER
) WITHOUT ROWID
"""
_LOCK_TIMEOUT_S = 10.0


class GroupBuffer:
    """`buffer.sqlite` of a run folder. One writer; not thread-safe."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        schema()  # pyarrow is imported now, and not while rollouts are running
        self.path = Path(path)
        self._db = sqlite3.connect(self.path, timeout=_LOCK_TIMEOUT_S, isolation_level=None)
        try:
            with self._typed():
                self._db.execute("PRAGMA journal_mode=WAL")
                self._db.execute("PRAGMA synchronous=NORMAL")
                self._db.execute(_SCHEMA)
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> GroupBuffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Write the journal back and close."""
        self._db.close()

    def put(self, group: GroupResult) -> None:
        """Keep a finished group. Raises `RecordError` for a name that is there already."""
        payload, _ = to_bytes([(trajectory, None) for trajectory in group.trajectories], run="")
        span = group.versions
        oldest, newest = (None, None) if span is None else (span.oldest, span.newest)
        row = (group.group_id, group.task_id, group.index, oldest, newest, payload)
        with self._typed():
            try:
                self._db.execute("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, NULL)", row)
            except sqlite3.IntegrityError as error:
                raise RecordError(f"group {group.group_id} is in the buffer already", where=str(self.path)) from error

    def waiting(self) -> list[GroupResult]:
        """Groups not settled yet, in the order of the data."""
        return self._groups("consumed_at_step IS NULL")

    def settled(self, step: int) -> list[GroupResult]:
        """Groups settled at `step`, in the order of the data."""
        return self._groups("consumed_at_step = ?", step)

    def settle(self, group_ids: Iterable[str], *, step: int) -> None:
        """Mark groups as trained, filtered or dropped at `step`, all or none.

        Raises `RecordError` for one that does not wait.
        """
        with self._transaction():
            for group_id in group_ids:
                changed = self._db.execute(
                    "UPDATE groups SET consumed_at_step = ? WHERE group_id = ? AND consumed_at_step IS NULL",
                    (step, group_id),
                ).rowcount
                if changed != 1:
                    raise RecordError(f"group {group_id} does not wait in the buffer", where=str(self.path))

    def take_back(self, *, after_step: int) -> int:
        """Let groups settled after `after_step` (the checkpoint's) wait again; how many."""
        with self._typed():
            return self._db.execute(
                "UPDATE groups SET consumed_at_step = NULL WHERE consumed_at_step > ?", (after_step,)
            ).rowcount

    def drop_outside(self, *, oldest: int, newest: int) -> list[str]:
        """Delete waiting groups that hold a token of a version below `oldest` or above `newest`, or no token; their
        names. A resumed run generates them again: they are too old, of weights that were lost, or failed."""
        with self._typed():
            rows = self._db.execute(
                "DELETE FROM groups WHERE consumed_at_step IS NULL"
                " AND (oldest_version IS NULL OR oldest_version < ? OR newest_version > ?) RETURNING group_id",
                (oldest, newest),
            ).fetchall()
        return sorted(name for (name,) in rows)

    def drop(self, group_ids: Iterable[str]) -> None:
        """Delete these groups: they are generated again."""
        with self._transaction():
            self._db.executemany("DELETE FROM groups WHERE group_id = ?", [(name,) for name in group_ids])

    def prune(self, *, through_step: int) -> int:
        """Delete groups settled at or before `through_step`, which a checkpoint covers; how many."""
        with self._typed():
            return self._db.execute("DELETE FROM groups WHERE consumed_at_step <= ?", (through_step,)).rowcount

    def _groups(self, condition: str, *values: int) -> list[GroupResult]:
        with self._typed():
            rows = self._db.execute(
                f"SELECT group_id, task_id, task_index, payload FROM groups WHERE {condition}"
                " ORDER BY task_index, group_id",
                values,
            ).fetchall()
        where = str(self.path)
        return [
            GroupResult(group_id, task_id, index, tuple(t for t, _ in from_bytes(payload, where=where)))
            for group_id, task_id, index, payload in rows
        ]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._typed():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextmanager
    def _typed(self) -> Iterator[None]:
        """SQLite's full disk, its limit on a row and a foreign file as our errors."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code == sqlite3.SQLITE_FULL:
                raise DiskFullError(
                    "no space left on the file system of the run folder",
                    where=str(self.path),
                    remedy="free space there (`df -h`), then go on with --resume",
                ) from error
            if code == sqlite3.SQLITE_TOOBIG:
                raise RecordError(
                    f"a group is too large for the buffer: {error}",
                    where=str(self.path),
                    remedy="distill.support=teacher with a small distill.top_k, or a smaller rollout.group_size",
                ) from error
            if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                raise RunFolderError(
                    f"the buffer is no database: {error}",
                    where=str(self.path),
                    remedy="delete it: finished groups that wait in it are generated again",
                ) from error
            raise

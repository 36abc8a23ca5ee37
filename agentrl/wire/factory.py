"""Task factories: rows for an environment, made out of a git repository."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from agentrl.wire.protocols import SandboxPool


class MineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks from the bug fixes in a repository's history.

    `repository`: a git repository's folder (bare or not) or a bundle file. `out`: the folder of the rows (None: by the
    repository's name). `name`: owner/repo (None: from its origin or its own name). `image`: that tests run in (None:
    the one for the repository and its version, where there is a recipe, else the base image), with `recipes`, a folder
    of further ones. `jobs`: sandboxes at once. `commit`: where to begin, going back (None: HEAD). `since`: an ISO date.
    `message`: a regular expression that the commit's message must match. `max_lines` and `max_files` bound the Python
    source that a fix changes. `limit`: rows wanted in all, earlier ones of the folder counted (None: no bound).
    `test_timeout_s` is one test's allowance, `timeout_s` a session's.
    """

    repository: str
    out: str | None = None
    name: str | None = None
    image: str | None = None
    recipes: str | None = None
    jobs: int = 2
    commit: str | None = None
    since: str | None = None
    message: str | None = None
    max_commits: int | None = None
    limit: int | None = None
    first_parent: bool = False
    max_lines: int = 150
    max_files: int = 5
    test_timeout_s: float = 60.0
    timeout_s: float = 300.0


class InjectRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks by breaking a tested repository in one place each.

    As `MineRequest`; `count`: rows wanted in all. The same `seed`, commit and bounds give the same rows.
    `per_function` and `per_file` bound how many rows break one function or file. `hide_tests`: the tests that fail
    are taken out of the task's tree and come back with its test patch.
    """

    repository: str
    out: str | None = None
    name: str | None = None
    image: str | None = None
    recipes: str | None = None
    jobs: int = 2
    commit: str | None = None
    count: int = 100
    seed: int = 0
    per_function: int = 2
    per_file: int | None = None
    hide_tests: bool = True
    test_timeout_s: float = 10.0
    timeout_s: float = 600.0


class FactoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a task factory did. `rows`: of this repository in `folder`, `new_rows` of them made now; `kinds` counts
    them. `left_out` counts why the others of the `looked_at` commits or mutations are no tasks."""

    folder: str
    rows: int
    new_rows: int
    looked_at: int
    left_out: dict[str, int]
    kinds: dict[str, int]
    notes: tuple[str, ...] = ()


class TaskFactory(Protocol):
    """Makes rows for an environment out of a git repository; registered under the environment's name by entry point
    (`agentrl.factories`). All code of the repository runs in sandboxes of `pool`. `tell` takes lines of progress.

    What was decided is on disk when a call ends, cancelled or not; the same request goes on from there.
    """

    async def mine(self, request: MineRequest, *, pool: SandboxPool, tell: Callable[[str], None]) -> FactoryReport: ...

    async def inject(
        self, request: InjectRequest, *, pool: SandboxPool, tell: Callable[[str], None]
    ) -> FactoryReport: ...

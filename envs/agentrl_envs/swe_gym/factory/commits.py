"""Which commits are bug fixes with tests, and what of each is fix, tests and problem statement."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.wire import MineRequest
from agentrl_envs.swe_gym.factory.git import SUBMODULE, SYMLINK, Change, Commit, Repository
from agentrl_envs.swe_gym.factory.paths import is_harmless, is_source, is_test, is_test_module, is_utf8

_STATEMENT_CHARS = 8_000
_MIN_STATEMENT_CHARS = 12
_PATCH_BYTES = 400_000
_SAYS_NOTHING = re.compile(
    r"(?:wip|fix(?:es|ed)?|bug ?fix|tests?|update[sd]?|changes?|typo|cleanup|misc|tmp)\W*", re.IGNORECASE
)
# What people and tools add to a message that says nothing about the problem.
_DROPPED_LINE = re.compile(
    r"(?:co-authored-by|signed-off-by|reviewed-by|acked-by|tested-by|reported-by|suggested-by|change-id|git-svn-id"
    r"|approved-by|commit-queue|cq-include-trybots|gerrit-\w+|pr-url|reviewed-on|differential revision)\s*:.*"
    r"|\(cherry[- ]picked from commit [0-9a-f]+\)|\[(?:skip ci|ci skip)\]",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A commit that may be a task. Patches are text of `git diff`; `test_files` are the test modules that the commit
    touched and that exist after it."""

    commit: Commit
    date: str
    statement: str
    patch: str
    test_patch: str
    test_files: tuple[str, ...]
    source_lines: int

    @property
    def parent(self) -> str:
        return self.commit.parents[0]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Why a commit or a mutation is no task: a short reason that is counted, and what more there is to say."""

    reason: str
    detail: str = ""


def choose(repository: Repository, commit: Commit, request: MineRequest) -> Candidate | LeftOut:
    """The candidate that a commit makes, or why it makes none. Runs nothing of the repository's."""
    if len(commit.parents) != 1:
        return LeftOut("merge" if commit.parents else "first commit")
    date, message = repository.message(commit.sha)
    if request.message is not None and not re.search(request.message, message):
        return LeftOut("message does not match")
    changes = repository.changes(commit.parents[0], commit.sha)
    if reason := unfit(changes, request):
        return reason
    statement = problem_statement(message)
    if len(statement) < _MIN_STATEMENT_CHARS or _SAYS_NOTHING.fullmatch(statement):
        return LeftOut("message says nothing")
    tests = [change.path for change in changes if is_test(change.path)]
    source = [change.path for change in changes if not is_test(change.path)]
    patches = []
    for paths in (source, tests):
        diff = repository.diff(commit.parents[0], commit.sha, paths)
        if len(diff) > _PATCH_BYTES:
            return LeftOut("change too large")
        try:
            patches.append(diff.decode())
        except UnicodeDecodeError:
            return LeftOut("text that is no UTF-8")
    return Candidate(
        commit=commit,
        date=date,
        statement=statement,
        patch=patches[0],
        test_patch=patches[1],
        test_files=_test_files(changes),
        source_lines=sum(change.lines or 0 for change in changes if is_source(change.path)),
    )


def unfit(changes: Sequence[Change], request: MineRequest) -> LeftOut | None:
    """Why these changes are no task; None where they may be one."""
    source = [change for change in changes if is_source(change.path)]
    if not source:
        return LeftOut("no Python source changed")
    if not _test_files(changes):
        return LeftOut("no test file changed")
    if not all(is_utf8(change.path) for change in changes):
        return LeftOut("path that is no UTF-8")
    for change in changes:
        if SYMLINK in change.modes:
            return LeftOut("symbolic link changed", change.path)
        if SUBMODULE in change.modes:
            return LeftOut("submodule changed", change.path)
        if not (is_source(change.path) or is_test(change.path) or is_harmless(change.path)):
            return LeftOut("other than Python changed", change.path)
    lines = sum(change.lines or 0 for change in source)
    if lines > request.max_lines:
        return LeftOut("too many source lines", str(lines))
    if len(source) > request.max_files:
        return LeftOut("too many source files", str(len(source)))
    if lines == 0:
        return LeftOut("no source line changed")
    return None


def _test_files(changes: Sequence[Change]) -> tuple[str, ...]:
    return tuple(sorted(c.path for c in changes if is_test_module(c.path) and not c.is_removal))


def problem_statement(message: str) -> str:
    """The message without trailers and tools' lines; references to issues stay. At most 8,000 characters."""
    text = message.replace("\r\n", "\n").replace("\r", "\n")
    lines = [line.rstrip() for line in text.split("\n") if not _DROPPED_LINE.fullmatch(line.strip())]
    clean = "".join(char for char in "\n".join(lines) if char.isprintable() or char in "\n\t")
    return re.sub(r"\n{3,}", "\n\n", clean).strip()[:_STATEMENT_CHARS].rstrip()

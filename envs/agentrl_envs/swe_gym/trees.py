"""Work trees from git bundles, as tars with a history of one commit.

What enters a sandbox is built on the host: a clone of one ref, its tree checked against the row's sha, its
history cut to a single parentless commit on branch `main` with a fixed author, date and message. No other
ref, no remote, no reflog and no unreachable object is left, so that nothing in the repository can tell the
fix.
"""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import tarfile
import tempfile
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import DatasetError, MissingRequirementError
from agentrl_envs.swe_gym.archives import normalised
from agentrl_envs.swe_gym.rows import TreeRef

_GIT_TIMEOUT_S = 120.0
_CACHE_BYTES = 512 * 1024 * 1024
_COMPRESSED_FROM_BYTES = 16 * 1024 * 1024  # a request of over 64 MiB is refused, and base64 takes a third more
_DATE = "2020-01-01T00:00:00+0000"
_COMMIT_ENV = {
    "GIT_AUTHOR_NAME": "base",
    "GIT_AUTHOR_EMAIL": "base@localhost",
    "GIT_AUTHOR_DATE": _DATE,
    "GIT_COMMITTER_NAME": "base",
    "GIT_COMMITTER_EMAIL": "base@localhost",
    "GIT_COMMITTER_DATE": _DATE,
}


@dataclass(frozen=True, slots=True)
class Tree:
    """A work tree: `archive` is a tar (compressed where it is large) of files and repository, `commit` the one commit
    in it."""

    archive: bytes
    commit: str

    def repository(self) -> bytes:
        """A tar of what is under `.git` alone, named from there."""
        buffer = io.BytesIO()
        with (
            tarfile.open(fileobj=io.BytesIO(self.archive)) as tar,
            tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as packed,
        ):
            for member in tar:
                if member.name.startswith(".git/"):
                    content = tar.extractfile(member) if member.isreg() else None
                    packed.addfile(member.replace(name=member.name.removeprefix(".git/")), content)
        return buffer.getvalue()


class TreeStore:
    """Trees of a folder of bundles, built once and kept in memory up to a bound, the oldest dropped first.

    Safe to call from several threads; each tree is built by one of them while the others wait.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: OrderedDict[TreeRef, Tree] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, ref: TreeRef, *, where: str) -> Tree:
        """The tree of `ref`. Raises `DatasetError` for a missing or damaged bundle, `where` naming the row."""
        with self._lock:
            tree = self._trees.pop(ref, None) or build_tree(self._folder / ref.bundle, ref, where=where)
            self._trees[ref] = tree
            while sum(len(kept.archive) for kept in self._trees.values()) > _CACHE_BYTES and len(self._trees) > 1:
                self._trees.popitem(last=False)
            return tree


def build_tree(bundle: Path, ref: TreeRef, *, where: str) -> Tree:
    """Clone, check, cut and pack one ref of `bundle`."""
    if not bundle.is_file():
        raise DatasetError(
            "the row's bundle is not here",
            where=f"{where}, {bundle}",
            remedy="set environment.bundles to its folder",
        )
    with tempfile.TemporaryDirectory(prefix="agentrl-tree-") as scratch:
        home = Path(scratch) / "tree"
        # `--branch=` and `--` keep a hostile name from being read as an option
        clone = ["clone", "--quiet", "--template=", "--single-branch", f"--branch={ref.ref}", "--"]
        _git([*clone, str(bundle.resolve()), str(home)], cwd=Path(scratch), where=where)
        sha = _git(["rev-parse", "HEAD^{tree}"], cwd=home, where=where)
        if ref.tree_sha is not None and sha != ref.tree_sha:
            raise DatasetError(
                f"the tree is {sha}, the row says {ref.tree_sha}",
                where=f"{where}, {bundle.name} {ref.ref}",
                remedy="the bundle is not the row's: fetch both anew",
            )
        commit = _cut_history(home, sha, where=where)
        return Tree(_pack_folder(home), commit)


def _cut_history(home: Path, tree_sha: str, *, where: str) -> str:
    """Leave one commit, one branch and no trace of where it came from; the commit's id."""
    commit = _git(["commit-tree", tree_sha, "-m", "base"], cwd=home, where=where)
    names = _git(["for-each-ref", "--format=%(refname)"], cwd=home, where=where).splitlines()
    _git(["update-ref", "--no-deref", "HEAD", commit], cwd=home, where=where)
    _git(["remote", "remove", "origin"], cwd=home, where=where)
    for name in names:
        _git(["update-ref", "-d", name], cwd=home, where=where)
    _git(["update-ref", "refs/heads/main", commit], cwd=home, where=where)
    _git(["symbolic-ref", "HEAD", "refs/heads/main"], cwd=home, where=where)
    _git(["reflog", "expire", "--expire=now", "--all"], cwd=home, where=where)
    _git(["gc", "--quiet", "--prune=now"], cwd=home, where=where)
    for trace in ("FETCH_HEAD", "ORIG_HEAD"):
        (home / ".git" / trace).unlink(missing_ok=True)
    return commit


def _git(arguments: list[str], *, cwd: Path, where: str) -> str:
    """One git command on the host: no shell, no configuration but the repository's own, a deadline."""
    kept = {key: os.environ[key] for key in ("PATH", "TMPDIR") if key in os.environ}
    isolation = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
    }
    try:
        result = subprocess.run(
            ["git", "-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0", *arguments],
            cwd=cwd,
            env={**kept, **isolation, **_COMMIT_ENV, "HOME": os.devnull},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise MissingRequirementError("git is not installed", where=where, remedy="apt-get install git") from error
    except subprocess.TimeoutExpired as error:
        raise DatasetError(
            f"git {arguments[0]} did not end within {_GIT_TIMEOUT_S:.0f} s",
            where=where,
            remedy="check the bundle",
        ) from error
    if result.returncode:
        raise DatasetError(
            f"git {arguments[0]} failed: {result.stderr.decode(errors='replace').strip()[-500:]}",
            where=where,
            remedy="check that the bundle is whole and holds the row's ref",
        )
    return result.stdout.decode().strip()


def _pack_folder(home: Path) -> bytes:
    """A tar of everything under `home`, compressed where it is large; links stay links."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, dereference=False) as tar:
        for path in sorted(home.rglob("*")):
            tar.add(path, arcname=str(path.relative_to(home)), recursive=False, filter=normalised)
    archive = buffer.getvalue()
    return archive if len(archive) < _COMPRESSED_FROM_BYTES else gzip.compress(archive, compresslevel=1, mtime=0)

"""Git on the host, over a repository that nobody vouches for.

All work happens in a bare copy of ours in a scratch folder (objects shared with the original, nothing written to it):
no hook, no configuration of the repository's, no shell, no work tree, so that no filter, text conversion or attribute
of the repository runs or applies. Every call has a deadline. Names that come from the repository are never options.
"""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import DatasetError, MissingRequirementError
from agentrl_envs.swe_gym.archives import normalised

_TIMEOUT_S = 120.0
_COPY_TIMEOUT_S = 900.0
_ROWS = "refs/heads/"
_DATE = "2020-01-01T00:00:00+0000"
_ENVIRONMENT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_AUTHOR_NAME": "base",
    "GIT_AUTHOR_EMAIL": "base@localhost",
    "GIT_AUTHOR_DATE": _DATE,
    "GIT_COMMITTER_NAME": "base",
    "GIT_COMMITTER_EMAIL": "base@localhost",
    "GIT_COMMITTER_DATE": _DATE,
    "HOME": os.devnull,
    "LC_ALL": "C",
}
_FIXED = (
    *("-c", "core.hooksPath=/dev/null", "-c", "gc.auto=0", "-c", "core.quotePath=true", "-c", "pack.threads=1"),
    *("-c", "safe.directory=*", "-c", "protocol.allow=never", "-c", "protocol.file.allow=always"),
)
_DIFF = (
    *("--binary", "--full-index", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames"),
    *("--src-prefix=a/", "--dst-prefix=b/"),
)
SYMLINK, SUBMODULE, FILE = "120000", "160000", "100644"


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit's name and its parents' (40 hex digits each)."""

    sha: str
    parents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """What a commit did to one path. `modes`: before and after; `lines`: added plus deleted, None for binary files."""

    path: str
    modes: tuple[str, str]
    lines: int | None

    @property
    def is_removal(self) -> bool:
        return self.modes[1] == "000000"


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a tree, folders followed."""

    path: str
    mode: str
    sha: str


def run_git(
    arguments: Sequence[str],
    *,
    where: str,
    cwd: Path,
    data: bytes = b"",
    index: Path | None = None,
    config: Path | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> bytes:
    """What one git command prints. `config` stands for the user's own. Raises `DatasetError` where it fails or does
    not end."""
    kept = {key: os.environ[key] for key in ("PATH", "TMPDIR") if key in os.environ}
    more = {"GIT_INDEX_FILE": str(index)} if index is not None else {}
    more |= {"GIT_CONFIG_GLOBAL": str(config)} if config is not None else {}
    try:
        done = subprocess.run(
            ["git", *_FIXED, *arguments],
            cwd=cwd,
            env={**kept, **_ENVIRONMENT, **more},
            input=data,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise MissingRequirementError("git is not installed", where=where, remedy="apt-get install git") from error
    except subprocess.TimeoutExpired as error:
        raise DatasetError(f"git {arguments[0]} did not end within {timeout_s:.0f} s", where=where) from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[-500:]
        raise DatasetError(
            f"git {arguments[0]} failed: {said}", where=where, remedy="check that the repository is whole"
        )
    return done.stdout


class Repository:
    """A bare copy of a repository. Blocking: call it from a thread where that matters."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source = source
        self._folder = folder

    @property
    def objects(self) -> Path:
        """The folder of its objects."""
        return self._folder / "objects"

    @classmethod
    def copy(cls, source: Path, scratch: Path) -> Repository:
        """Copy `source`, a repository's folder (bare or not) or a bundle file, into `scratch`."""
        source = source.expanduser().resolve()
        if not os.path.exists(source):
            raise DatasetError("there is no such repository", where=str(source), remedy="check the path")
        folder = scratch / "copy.git"
        shared = ["--shared"] if source.is_dir() else []
        clone = ["clone", "--quiet", "--bare", "--template=", *shared, "--", str(source), str(folder)]
        # A repository may be another user's. The git that clone starts in it takes that from a file alone.
        config = scratch / "gitconfig"
        config.write_text("[safe]\n\tdirectory = *\n")
        try:
            run_git(clone, where=str(source), cwd=scratch, config=config, timeout_s=_COPY_TIMEOUT_S)
        except DatasetError as error:
            raise DatasetError(
                f"this is neither a git repository nor a git bundle ({error.what.strip()[-300:]})",
                where=str(source),
                remedy="give the repository's top folder, a bare repository, or a file of `git bundle create`",
            ) from error
        return cls(source, folder)

    def git(self, *arguments: str, data: bytes = b"", index: Path | None = None) -> bytes:
        """Run git in the copy."""
        return run_git(arguments, where=str(self.source), cwd=self._folder, data=data, index=index)

    def text(self, *arguments: str, data: bytes = b"", index: Path | None = None) -> str:
        """What git prints as text, stripped."""
        return self.git(*arguments, data=data, index=index).decode(errors="replace").strip()

    def origin(self) -> str:
        """The URL the original was cloned from; empty where it has none."""
        if not self.source.is_dir():
            return ""
        try:
            where = str(self.source)
            return run_git(["config", "--get", "remote.origin.url"], where=where, cwd=self.source).decode().strip()
        except (DatasetError, UnicodeDecodeError):
            return ""

    # --- commits ----------------------------------------------------------------------------------------------

    def resolve(self, revision: str | None) -> str:
        """The commit that `revision` means; None: HEAD, or the only branch. Raises `DatasetError`."""
        names = [revision] if revision is not None else ["HEAD", *self._only_branch()]
        for name in names:
            try:
                return self.text("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
            except DatasetError:
                continue
        branches = self._branches()
        raise DatasetError(
            f"there is no commit {revision!r}" if revision is not None else "the repository has no HEAD",
            where=str(self.source),
            remedy=f"give --commit; branches here: {', '.join(branches[:8]) or 'none'}",
        )

    def _branches(self) -> list[str]:
        return self.text("for-each-ref", "--format=%(refname:short)", "refs/heads").splitlines()

    def _only_branch(self) -> list[str]:
        branches = self._branches()
        return [f"refs/heads/{branches[0]}"] if len(branches) == 1 else []

    def commits(self, start: str, *, since: str | None, limit: int | None, first_parent: bool) -> list[Commit]:
        """Commits reachable from `start`, newest first, merges too. `since` is an ISO date."""
        options = ["--date-order", "--parents", *(["--first-parent"] if first_parent else [])]
        options += [f"--since={since}"] if since else []
        options += [f"--max-count={limit}"] if limit is not None else []
        lines = self.text("rev-list", *options, start).splitlines()
        return [Commit(sha, tuple(parents)) for sha, *parents in map(str.split, lines)]

    def message(self, commit: str) -> tuple[str, str]:
        """(committer's date as ISO text, whole message)."""
        shown = self.git("show", "-s", "--encoding=UTF-8", "--format=%cI%x00%B", commit, "--")
        date, _, text = shown.decode(errors="replace").partition("\0")
        return date, text

    def nearest_tag(self, commit: str) -> str:
        """The last tag before a commit; empty where there is none."""
        try:
            return self.text("describe", "--tags", "--abbrev=0", commit)
        except DatasetError:
            return ""

    def changes(self, old: str, new: str) -> list[Change]:
        """What differs between two trees. A path that is no UTF-8 holds surrogates."""
        options = ("diff-tree", "-r", "-z", "--no-renames", "--no-ext-diff", "--no-textconv")
        raw = self.git(*options, "--raw", old, new).split(b"\0")
        counts: dict[str, int | None] = {}
        for line in filter(None, self.git(*options, "--numstat", old, new).split(b"\0")):
            added, deleted, path = line.split(b"\t", 2)
            counts[os.fsdecode(path)] = None if added == b"-" else int(added) + int(deleted)
        found = []
        for head, path in zip(raw[::2], raw[1::2], strict=False):
            before, after = head.decode()[1:].split()[:2]
            name = os.fsdecode(path)
            found.append(Change(name, (before, after), counts.get(name)))
        return found

    def diff(self, old: str, new: str, paths: Sequence[str]) -> bytes:
        """A patch from tree `old` to `new` of the named paths alone."""
        return self.git("--literal-pathspecs", "diff-tree", "-r", "-p", *_DIFF, old, new, "--", *paths)

    # --- trees ------------------------------------------------------------------------------------------------

    def tree(self, commit: str) -> str:
        """The id of a commit's tree."""
        return self.text("rev-parse", "--verify", "--end-of-options", f"{commit}^{{tree}}")

    def entries(self, tree: str) -> list[Entry]:
        """Every file, link and submodule of a tree."""
        found = []
        for line in filter(None, self.git("ls-tree", "-r", "-z", tree).split(b"\0")):
            head, _, path = line.partition(b"\t")
            mode, _, sha = head.decode().split()
            found.append(Entry(os.fsdecode(path), mode, sha))
        return found

    def size(self, tree: str) -> int:
        """Bytes in the tree's files. Reads none of them."""
        lines = filter(None, self.git("ls-tree", "-r", "-z", "-l", tree).split(b"\0"))
        sizes = (line.partition(b"\t")[0].split()[3] for line in lines)
        return sum(int(size) for size in sizes if size.isdigit())

    def blobs(self, shas: Sequence[str]) -> Iterator[bytes]:
        """The contents of the named blobs, in order."""
        stream = io.BytesIO(self.git("cat-file", "--batch", data="".join(f"{sha}\n" for sha in shas).encode()))
        for sha in shas:
            words = stream.readline().split()
            if len(words) != 3 or words[1] != b"blob":
                raise DatasetError(
                    f"object {sha} is missing", where=str(self.source), remedy="give a repository that is whole"
                )
            yield stream.read(int(words[2]))
            stream.read(1)

    def archive(self, tree: str) -> bytes:
        """An uncompressed tar of a tree, byte for byte (no attribute applies); submodules are empty folders."""
        entries = self.entries(tree)
        contents = self.blobs([entry.sha for entry in entries if entry.mode != SUBMODULE])
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for entry in entries:
                info = tarfile.TarInfo(entry.path)
                if entry.mode == SUBMODULE:
                    info.type, info.mode = tarfile.DIRTYPE, 0o755
                    tar.addfile(normalised(info))
                    continue
                data = next(contents)
                if entry.mode == SYMLINK:
                    info.type, info.linkname = tarfile.SYMTYPE, os.fsdecode(data)
                    tar.addfile(normalised(info))
                    continue
                info.size, info.mode = len(data), int(entry.mode[-3:], 8)
                tar.addfile(normalised(info), io.BytesIO(data))
        return buffer.getvalue()

    def tree_with(self, tree: str, files: Mapping[str, bytes], *, scratch: Path) -> str:
        """The id of a new tree: `tree` with the contents of existing `files` changed, their modes kept."""
        index = scratch / f"index-{os.urandom(8).hex()}"
        modes = {entry.path: entry.mode for entry in self.entries(tree)}
        try:
            self.git("read-tree", tree, index=index)
            lines = b""
            for path, data in files.items():
                blob = self.text("hash-object", "-w", "--stdin", data=data)
                lines += f"{modes[path]} {blob}\t".encode() + os.fsencode(path) + b"\0"
            self.git("update-index", "-z", "--index-info", data=lines, index=index)
            return self.text("write-tree", index=index)
        finally:
            index.unlink(missing_ok=True)

    def commit_alone(self, tree: str) -> str:
        """A commit without parents that holds `tree`; the same tree gives the same commit."""
        return self.text("commit-tree", tree, "-m", "base")


class RowStore:
    """The commits of rows, one ref each, in a repository of its own beside the copy, and the bundle they go to."""

    def __init__(self, repository: Repository, bundle: Path, scratch: Path) -> None:
        """Takes over what `bundle` holds already."""
        self._bundle = bundle
        self._folder = scratch / "rows.git"
        run_git(["init", "--quiet", "--bare", "--template=", str(self._folder)], where=str(bundle), cwd=scratch)
        alternates = self._folder / "objects" / "info" / "alternates"
        alternates.parent.mkdir(parents=True, exist_ok=True)
        alternates.write_bytes(os.fsencode(repository.objects) + b"\n")
        if bundle.is_file():
            self._git("fetch", "--quiet", "--no-write-fetch-head", str(bundle.resolve()), f"+{_ROWS}*:{_ROWS}*")

    def _git(self, *arguments: str) -> bytes:
        return run_git(arguments, where=str(self._bundle), cwd=self._folder, timeout_s=_COPY_TIMEOUT_S)

    def add(self, name: str, commit: str) -> None:
        """Keep `commit` under the ref `name`."""
        self._git("update-ref", f"{_ROWS}{name}", commit)

    def names(self) -> frozenset[str]:
        """The refs that are kept."""
        return frozenset(self._git("for-each-ref", "--format=%(refname:lstrip=2)", _ROWS).decode().split())

    def write(self) -> None:
        """Write the bundle anew, in one step as others see it."""
        temporary = self._bundle.with_name(f".{self._bundle.name}.{os.getpid()}")
        try:
            self._git("bundle", "create", "--quiet", str(temporary.resolve()), "--branches")
            os.replace(temporary, self._bundle)
        finally:
            temporary.unlink(missing_ok=True)

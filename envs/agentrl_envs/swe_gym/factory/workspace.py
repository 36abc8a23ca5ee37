"""What both factories start from: a copy of the repository, its name, the folder that rows go to."""

from __future__ import annotations

import asyncio
import os
import posixpath
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.sandbox.images import BASE_IMAGE, OWN_PREFIX, recipe_names
from agentrl.wire import FactoryReport, InjectRequest, MineRequest
from agentrl_envs.swe_gym.factory.commits import LeftOut
from agentrl_envs.swe_gym.factory.git import SUBMODULE, SYMLINK, Entry, Repository
from agentrl_envs.swe_gym.factory.output import OutputFolder
from agentrl_envs.swe_gym.factory.provenance import (
    is_licence_file,
    is_version_file,
    licence,
    repository_name,
    version,
)
from agentrl_envs.swe_gym.images import recipe_name

_ARCHIVE_BYTES = 40 * 1024 * 1024  # a sandbox takes no larger request, in base 64


@dataclass(slots=True)
class Workspace:
    """One run of a factory. `left_out` counts reasons, `notes` are for the person who reads the report."""

    repository: Repository
    name: str
    output: OutputFolder
    scratch: Path
    tell: Callable[[str], None]
    looked_at: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    notes: dict[str, None] = field(default_factory=dict)

    def leave_out(self, reason: LeftOut) -> None:
        """Count it."""
        self.left_out[reason.reason] += 1

    def note(self, text: str) -> None:
        """Say it once, in the report."""
        self.notes[text] = None

    def report(self) -> FactoryReport:
        """The figures now."""
        return FactoryReport(
            folder=str(self.output.folder),
            rows=len(self.output.rows),
            new_rows=self.output.new_rows,
            looked_at=self.looked_at,
            left_out=dict(self.left_out.most_common()),
            kinds=dict(self.output.kinds.most_common()),
            notes=tuple(self.notes),
        )


@asynccontextmanager
async def open_workspace(
    request: MineRequest | InjectRequest, *, source: str, tell: Callable[[str], None]
) -> AsyncIterator[Workspace]:
    """A workspace whose rows and decisions are on disk when the block ends, however it ends."""
    with tempfile.TemporaryDirectory(prefix="agentrl-factory-") as scratch:
        home = Path(scratch)
        repository = await asyncio.to_thread(Repository.copy, Path(request.repository), home)
        name = repository_name(request.name, origin=repository.origin(), source=repository.source)
        if not name:
            raise ConfigError(f"{request.name!r} is no repository's name", where="--name", remedy="write owner/repo")
        folder = Path(request.out) if request.out else Path("tasks") / name.split("/")[1]
        output = OutputFolder(folder.expanduser(), repo=name, source=source, repository=repository, scratch=home)
        try:
            yield Workspace(repository, name, output, home, tell)
        finally:
            output.close()


@dataclass(frozen=True, slots=True)
class Stated:
    """What a tree says of itself, and the image that its tests run in."""

    licence: str
    version: str
    image: str


def stated(space: Workspace, request: MineRequest | InjectRequest, commit: str, entries: list[Entry]) -> Stated:
    """Licence and version as the commit's tree states them. The image: as asked for, else by the recipe of repository
    and version, else the base image."""
    repository = space.repository
    plain = [entry for entry in entries if entry.mode not in (SUBMODULE, SYMLINK)]
    licences = _texts(repository, [entry for entry in plain if is_licence_file(entry.path)])
    versions = _texts(repository, [entry for entry in plain if is_version_file(entry.path)])
    release = version(versions, tag=repository.nearest_tag(commit))
    folder = Path(request.recipes) if request.recipes else None
    recipe = recipe_name(space.name, release)
    image = f"{OWN_PREFIX}{recipe}" if recipe in recipe_names(folder) else BASE_IMAGE
    return Stated(licence(licences), release, request.image or image)


def _texts(repository: Repository, entries: list[Entry]) -> Mapping[str, str]:
    contents = repository.blobs([entry.sha for entry in entries])
    return {entry.path: data.decode(errors="replace") for entry, data in zip(entries, contents, strict=True)}


def packed(repository: Repository, tree: str) -> bytes | LeftOut:
    """The tree's archive, or why no sandbox takes it."""
    entries = repository.entries(tree)
    for entry in entries:
        parts = entry.path.split("/")
        if any(part in ("", ".", "..") or part.lower() == ".git" for part in parts):
            return LeftOut("unsafe path in the tree", entry.path)
    links = [entry for entry in entries if entry.mode == SYMLINK]
    for entry, target in zip(links, repository.blobs([link.sha for link in links]), strict=True):
        if _leaves(entry.path, os.fsdecode(target)):
            return LeftOut("link that leaves the tree", entry.path)
    size = repository.size(tree)
    archive = repository.archive(tree) if size <= _ARCHIVE_BYTES else b""
    size = max(size, len(archive))
    return archive if size <= _ARCHIVE_BYTES else LeftOut("tree too large", f"{size} bytes")


def _leaves(path: str, target: str) -> bool:
    """True for a link that a sandbox refuses to unpack: an absolute one, or one that climbs out."""
    if target.startswith("/"):
        return True
    return ".." in posixpath.normpath(posixpath.join(posixpath.dirname(path), target)).split("/")


def own_modules(entries: list[Entry]) -> frozenset[str]:
    """Names under which the tree's folders and modules may be imported."""
    names = set()
    for entry in entries:
        if entry.path.endswith(".py"):
            *folders, name = entry.path.split("/")
            names |= {*folders, name.removesuffix(".py")}
    return frozenset(names)


def printable(text: str, limit: int = 70) -> str:
    """One short line of a stranger's text, fit for a terminal."""
    line = " ".join(text.split())
    clean = "".join(char if char.isprintable() else "?" for char in line)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"

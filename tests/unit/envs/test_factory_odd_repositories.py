"""Repositories that nobody vouches for: another user's, links out of the tree, huge files; what a hanging row says."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.errors import DatasetError
from agentrl.wire import MineRequest
from agentrl_envs.swe_gym.factory import workspace
from agentrl_envs.swe_gym.factory.commits import Candidate, LeftOut
from agentrl_envs.swe_gym.factory.git import Commit, Repository
from agentrl_envs.swe_gym.factory.mine import Validated, _row
from agentrl_envs.swe_gym.factory.output import OutputFolder
from agentrl_envs.swe_gym.factory.sessions import Outcome
from agentrl_envs.swe_gym.factory.workspace import Stated, packed
from agentrl_envs.swe_gym.rows import parse_row


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    git(made, "init", "-q", "-b", "main")
    (made / "src").mkdir()
    (made / "src" / "lib.py").write_text("x = 1\n")
    return made


def copied(folder: Path, tmp_path: Path) -> tuple[Repository, str]:
    """A copy of what the folder holds now, and its tree."""
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "All of it")
    scratch = tmp_path / f"scratch-{os.urandom(4).hex()}"
    scratch.mkdir()
    repository = Repository.copy(folder, scratch)
    return repository, repository.tree(repository.resolve(None))


@pytest.mark.parametrize("target", ["/etc/passwd", "../../outside", "../..", "a/../../../outside"])
def test_a_link_out_of_the_tree_is_no_sandbox_failure(folder: Path, tmp_path: Path, target: str) -> None:
    """Sandboxes refuse such a tree each time, which says something about the commit and nothing about a machine."""
    (folder / "src" / "link").symlink_to(target)
    (folder / "src" / "a").mkdir()
    assert packed(*copied(folder, tmp_path)) == LeftOut("link that leaves the tree", "src/link")


@pytest.mark.parametrize("target", ["lib.py", "../src/lib.py", "../nowhere", ".."])
def test_a_link_inside_the_tree_is_packed(folder: Path, tmp_path: Path, target: str) -> None:
    (folder / "src" / "link").symlink_to(target)
    assert isinstance(packed(*copied(folder, tmp_path)), bytes)


def test_a_tree_too_large_is_known_before_it_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "data.bin").write_bytes(os.urandom(20_000))
    repository, tree = copied(folder, tmp_path)
    assert repository.size(tree) == 20_000 + len("x = 1\n")
    monkeypatch.setattr(workspace, "_ARCHIVE_BYTES", 10_000)
    monkeypatch.setattr(Repository, "archive", lambda *_: pytest.fail("read"))
    assert packed(repository, tree) == LeftOut("tree too large", "20006 bytes")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_repository(folder: Path, tmp_path: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "All of it")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 1234, 1234)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert len(Repository.copy(folder, scratch).resolve(None)) == 40


@pytest.mark.parametrize(("before_s", "hangs"), [(121.0, True), (3.0, False)])
def test_a_run_that_hung_gives_no_allowance(before_s: float, hangs: bool) -> None:
    """Grading takes a row's allowance from runs that ended by themselves."""
    outcome = Outcome(("t.py::a",), ("t.py::b",), ())
    found = Validated(outcome, Stated("MIT", "1.0", "image"), ("t.py",), before_s, 4.0)
    candidate = Candidate(Commit("f" * 40, ("e" * 40,)), "2024-01-31", "It hangs", "diff", "diff", ("t.py",), 1)
    output = SimpleNamespace(instance_id=lambda key: f"a__b-{key}", bundle=Path("a__b.bundle"))
    repository = SimpleNamespace(tree=lambda commit: "d" * 40, commit_alone=lambda tree: "c" * 40)
    space = SimpleNamespace(output=output, repository=repository, name="a/b")
    row, _ = _row(space, MineRequest(repository="r", test_timeout_s=60.0), candidate, found)  # type: ignore[arg-type]
    assert (row["x_kind"] == "hang_before_fix") is hangs
    assert parse_row(row, place="test").duration_s == 4.0


def test_a_folder_that_cannot_be_made_is_named(folder: Path, tmp_path: Path) -> None:
    repository, _ = copied(folder, tmp_path)
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DatasetError, match="cannot be written"):
            OutputFolder(out, repo="a/b", source="mined", repository=repository, scratch=tmp_path)


@pytest.mark.parametrize("name", ["nowhere", "a" * 5000])
def test_a_repository_that_is_not_there(tmp_path: Path, name: str) -> None:
    with pytest.raises(DatasetError, match="no such repository"):
        Repository.copy(tmp_path / name, tmp_path)

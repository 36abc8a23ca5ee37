"""What becomes of a foreign image's work tree and environment: files as they are, history and secrets gone (K46)."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from agentrl.sandbox.server.equipping import environment, make_tree, measure

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="files are given to user 1000, which only root can do")
STAMP_NS = 981173106_123456789


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "safe.directory=*", "-c", "user.name=x", "-c", "user.email=x@y", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def image_tree(tmp_path: Path) -> Path:
    """As a published image has it: at the base commit, with all that came later."""
    work = tmp_path / "work"
    (work / "src").mkdir(parents=True)
    git(work, "init", "-q", "-b", "trunk")
    (work / "src/a.py").write_text("value = 'before'\n")
    (work / ".gitignore").write_text("build/\n*.log\n")
    (work / "kept.log").write_text("tracked although ignored\n")
    git(work, "add", "-A")
    git(work, "add", "-f", "kept.log")
    git(work, "commit", "-qm", "base")
    git(work, "tag", "v1.2.0")
    base = git(work, "rev-parse", "HEAD").strip()
    (work / "src/a.py").write_text("value = 'LATER-FIX'\n")
    git(work, "commit", "-qam", "later")
    for name in ("refs/heads/future", "refs/remotes/origin/main", "refs/tags/v9.0"):
        git(work, "update-ref", name, "HEAD")
    git(work, "gc", "-q")
    (work / "src/a.py").write_text("value = 'LATER-STASH'\n")
    git(work, "stash", "-q")
    git(work, "reset", "-q", "--hard", base)
    (work / "src/a.py").write_text("value = 'changed by the image'\n")
    (work / "build").mkdir()
    (work / "build/a.so").write_bytes(b"compiled")
    os.utime(work / "build/a.so", ns=(STAMP_NS, STAMP_NS))
    os.link(work / "build/a.so", work / "build/same.so")
    (work / "build/a.so").chmod(0o4555)
    (work / "link").symlink_to("src/a.py")
    (work / "out").symlink_to("/nowhere")
    os.mkfifo(work / "pipe")
    git(work, "clone", "-q", ".", "nested")
    (work / "note.txt").write_text("untracked\n")
    return work


@as_root
def test_k46_the_history_is_cut_and_files_are_as_they_were(image_tree: Path, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    size = make_tree(str(image_tree), str(tree))
    assert size == measure(str(tree), skip=())
    assert {os.lstat(path).st_uid for path in [tree, *tree.rglob("*")]} == {1000}
    assert git(tree, "log", "--all", "--format=%s %D").strip() == "base HEAD -> main, tag: v1.2.0"
    assert git(tree, "status", "--porcelain") == ""
    assert git(tree, "remote") == git(tree, "stash", "list") == git(tree, "reflog", "--all") == ""
    objects = git(tree, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split()
    reachable = git(tree, "rev-list", "--objects", "--all", "--no-object-names").split()
    assert sorted(objects) == sorted(reachable)
    text = "".join(git(tree, "cat-file", "-p", each) for each in objects)
    assert "changed by the image" in text
    assert "LATER" not in text
    assert set(git(tree, "ls-files").split()) >= {"kept.log", "src/a.py", "note.txt", "nested/src/a.py"}
    assert not [path for path in tree.rglob(".git") if path != tree / ".git"]
    assert not (tree / "pipe").exists()
    assert (tree / "src/a.py").read_text() == "value = 'changed by the image'\n"
    assert os.readlink(tree / "link") == "src/a.py"
    assert os.readlink(tree / "out") == "/nowhere"
    built = (tree / "build/a.so").stat()
    assert built.st_mtime_ns == STAMP_NS
    assert built.st_ino == (tree / "build/same.so").stat().st_ino
    assert stat.S_IMODE(built.st_mode) == 0o755


@as_root
@pytest.mark.parametrize("with_git", [False, True])
def test_a_tree_without_commits(tmp_path: Path, with_git: bool) -> None:
    work, tree = tmp_path / "work", tmp_path / "tree"
    work.mkdir()
    (work / "a.py").write_text("x\n")
    if with_git:
        git(work, "init", "-q")
    make_tree(str(work), str(tree))
    assert git(tree, "log", "--all", "--format=%s %D").strip() == "base HEAD -> main"
    assert git(tree, "ls-files").split() == ["a.py"]


@as_root
def test_a_submodule_becomes_files(tmp_path: Path) -> None:
    other, work, tree = tmp_path / "other", tmp_path / "work", tmp_path / "tree"
    for folder in (other, work):
        folder.mkdir()
        git(folder, "init", "-q", "-b", "main")
        (folder / "file.py").write_text("x\n")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "one")
    git(work, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(other), "sub")
    git(work, "commit", "-qm", "two")
    make_tree(str(work), str(tree))
    assert sorted(git(tree, "ls-files").split()) == [".gitmodules", "file.py", "sub/file.py"]
    assert git(tree, "status", "--porcelain") == ""
    assert not (tree / ".git/modules").exists()


def test_the_size_is_that_of_whole_pages_without_repositories(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/pack").write_bytes(bytes(9000))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a").write_bytes(bytes(4097))
    os.link(tmp_path / "sub/a", tmp_path / "sub/b")
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to("sub/a")
    assert measure(str(tmp_path)) == (8192, 2)
    assert measure(str(tmp_path), skip=()) == (8192 + 12288, 3)


def test_the_environment_is_what_the_image_sets_but_for_secrets(tmp_path: Path) -> None:
    start = tmp_path / "bashrc"
    start.write_text(
        "echo started\nexport PATH=/env/bin:$PATH CONDA_PREFIX=/env HOME=/root JAVA_HOME=/java OTHER=1\nfalse\n"
    )
    own = {
        "PATH": "/usr/bin:/bin",
        "LANG": "en_US.UTF-8",
        "PYTHONPATH": "/extra",
        "TOKENIZERS_PARALLELISM": "false",
        "BASH_ENV": str(start),
        "HOME": "/root",
        "LD_PRELOAD": "/nothing.so",
        "API_TOKEN": "s",
        "GITHUB_TOKEN": "s",
        "DB_PASSWORD": "s",
        "AWS_SECRET_ACCESS_KEY": "s",
        "OPENAI_API_KEY": "s",
        "https_proxy": "http://user:secret@host",
        "AGENTRL_X": "1",
        "BASH_FUNC_x%%": "() { :; }",
    }
    found = environment(own)
    found.pop("USER", None)
    found.pop("LOGNAME", None)
    assert found == {
        "PATH": "/env/bin:/usr/bin:/bin",
        "LANG": "en_US.UTF-8",
        "PYTHONPATH": "/extra",
        "TOKENIZERS_PARALLELISM": "false",
        "CONDA_PREFIX": "/env",
        "JAVA_HOME": "/java",
    }

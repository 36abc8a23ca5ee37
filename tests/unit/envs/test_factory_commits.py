"""Which commits are candidates, what is fix and what is test, and what several runs say together."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from swe_rows import report

from agentrl.errors import DatasetError
from agentrl.wire import MineRequest
from agentrl_envs.swe_gym.factory.commits import Candidate, LeftOut, choose, problem_statement
from agentrl_envs.swe_gym.factory.git import Repository
from agentrl_envs.swe_gym.factory.paths import is_harmless, is_product, is_source, is_test, is_test_module
from agentrl_envs.swe_gym.factory.provenance import licence, repository_name, version
from agentrl_envs.swe_gym.factory.sessions import compare, distrust, missing_requirement
from agentrl_envs.swe_gym.rows import patch_paths

REQUEST = MineRequest(repository="r", max_lines=10, max_files=1)


class History:
    """A repository made step by step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *identity, *arguments], cwd=self.folder, capture_output=True, check=True, timeout=60
        )
        return done.stdout.decode().strip()

    def commit(self, message: str, files: dict[str, str | None]) -> str:
        """Write or (None) remove files; the commit's name."""
        for path, text in files.items():
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            if text is not None:
                target.write_text(text)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def history(tmp_path: Path) -> History:
    made = History(tmp_path / "made")
    made.commit("Begin", {"lib.py": "x = 1\n", "tests/test_lib.py": "def test(): pass\n", "a.c": "", "b.py": ""})
    return made


def chosen(history: History, tmp_path: Path, request: MineRequest = REQUEST) -> Candidate | LeftOut:
    """What becomes of the newest commit."""
    scratch = tmp_path / f"scratch-{os.urandom(4).hex()}"
    scratch.mkdir()
    repository = Repository.copy(history.folder, scratch)
    start = repository.resolve(None)
    (commit,) = repository.commits(start, since=None, limit=1, first_parent=False)
    return choose(repository, commit, request)


def test_a_fix_comes_apart_into_fix_and_tests(history: History, tmp_path: Path) -> None:
    files = {
        "lib.py": "x = 2\n",
        "tests/test_lib.py": "def test(): assert 1\n",
        "tests/data.bin": "\0\1",
        "NEWS.md": "n",
    }
    sha = history.commit("Count from two\n\nSee #12.\n\nSigned-off-by: A <a@b.c>", dict(files))
    found = chosen(history, tmp_path)
    assert isinstance(found, Candidate)
    assert found.commit.sha == sha
    assert found.statement == "Count from two\n\nSee #12."
    assert patch_paths(found.patch) == {"lib.py", "NEWS.md"}
    assert "GIT binary patch" in found.test_patch
    assert patch_paths(found.test_patch) >= {"tests/test_lib.py"}
    assert found.test_files == ("tests/test_lib.py",)
    assert found.source_lines == 2
    history.git("checkout", "-q", found.parent)
    for patch in (found.patch, found.test_patch):
        subprocess.run(["git", "apply"], cwd=history.folder, input=patch.encode(), check=True, timeout=60)
    assert {path: (history.folder / path).read_text() for path in files} == files


T = "def test(): assert 2\n"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"lib.py": "x = 3\n"}, "no test file changed"),
        ({"tests/test_lib.py": T}, "no Python source changed"),
        ({"lib.py": "x = 3\n", "tests/test_lib.py": None}, "no test file changed"),
        ({"lib.py": "x = 3\n", "tests/test_lib.py": T, "a.c": "int x;"}, "other than Python changed"),
        ({"lib.py": "x = 3\n" * 30, "tests/test_lib.py": T}, "too many source lines"),
        ({"lib.py": "x = 3\n", "b.py": "y = 1\n", "tests/test_lib.py": T}, "too many source files"),
        ({"new.py": "", "tests/test_lib.py": T}, "no source line changed"),
    ],
)
def test_what_is_no_candidate_says_why(
    history: History, tmp_path: Path, files: dict[str, str | None], reason: str
) -> None:
    history.commit("Mend the counting of things", files)
    found = chosen(history, tmp_path)
    assert isinstance(found, LeftOut)
    assert found.reason == reason


def test_odd_entries_are_left_out_with_a_reason(history: History, tmp_path: Path) -> None:
    (history.folder / "link.py").symlink_to("/etc/passwd")
    history.commit("Mend the counting of things", {"lib.py": "x = 3\n", "tests/test_lib.py": T})
    assert chosen(history, tmp_path) == LeftOut("symbolic link changed", "link.py")
    (Path(os.fsdecode(os.fsencode(history.folder) + b"/caf\xe9.py"))).write_text("y = 1\n")
    history.commit("Mend the counting of more", {"lib.py": "x = 4\n", "tests/test_lib.py": T + "\n"})
    assert chosen(history, tmp_path) == LeftOut("path that is no UTF-8")
    (history.folder / "lib.py").write_bytes(b"x = '\xe9'\n")
    history.commit("Mend the counting of text", {"tests/test_lib.py": T + "\n\n"})
    assert chosen(history, tmp_path) == LeftOut("text that is no UTF-8")


@pytest.mark.parametrize("message", ["wip", "Fix.", "fixes", "Update", "x"])
def test_messages_that_say_nothing_are_left_out(history: History, tmp_path: Path, message: str) -> None:
    history.commit(message, {"lib.py": "x = 3\n", "tests/test_lib.py": T})
    assert chosen(history, tmp_path) == LeftOut("message says nothing")


def test_merges_and_other_messages_are_left_out(history: History, tmp_path: Path) -> None:
    history.commit("Mend the counting of things", {"lib.py": "x = 3\n", "tests/test_lib.py": T})
    request = MineRequest(repository="r", message=r"(?i)\bbug\b")
    assert chosen(history, tmp_path, request) == LeftOut("message does not match")
    history.git("checkout", "-q", "-b", "side", "HEAD~1")
    history.commit("Beside", {"c.py": "z = 1\n"})
    history.git("checkout", "-q", "main")
    history.git("merge", "-q", "--no-ff", "side", "-m", "Merge the side")
    assert chosen(history, tmp_path) == LeftOut("merge")


def test_the_repository_s_own_configuration_runs_nothing(history: History, tmp_path: Path) -> None:
    """Filters, external diffs, hooks and odd names of branches are the repository's, and it may be anybody's."""
    trap = tmp_path / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {tmp_path}/sprung\ncat\n")
    trap.chmod(0o755)
    for key in ("diff.external", "core.fsmonitor", "filter.x.smudge", "diff.x.textconv", "core.sshCommand"):
        history.git("config", key, str(trap))
    history.git("config", "core.hooksPath", str(tmp_path))
    (tmp_path / "post-checkout").symlink_to(trap)
    history.folder.joinpath(".gitattributes").write_text("*.py filter=x diff=x -text export-ignore\n")
    subprocess.run(
        ["git", "update-ref", "refs/heads/--upload-pack=touch", "HEAD"], cwd=history.folder, check=True, timeout=60
    )
    off = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "filter.x.smudge=cat"]
    history.git(*off, "add", "-A")
    history.git(*off, "commit", "-qm", "Mend it for good")
    (tmp_path / "sprung").unlink(missing_ok=True)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    repository = Repository.copy(history.folder, scratch)
    head = repository.resolve(None)
    assert repository.archive(repository.tree(head))
    assert [change.path for change in repository.changes(f"{head}~1", head)] == [".gitattributes"]
    assert not (tmp_path / "sprung").exists()


def test_an_archive_holds_the_tree_to_the_byte(history: History, tmp_path: Path) -> None:
    import io
    import tarfile

    (history.folder / "link").symlink_to("lib.py")
    history.commit("Mend", {"crlf.txt": "a\r\nb\r\n", ".gitattributes": "*.txt text export-ignore export-subst\n"})
    (history.folder / "run.sh").write_text("$Format:%H$")
    (history.folder / "run.sh").chmod(0o755)
    history.commit("More", {})
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    repository = Repository.copy(history.folder, scratch)
    tree = repository.tree(repository.resolve("main"))
    with tarfile.open(fileobj=io.BytesIO(repository.archive(tree))) as tar:
        members = {member.name: member for member in tar}
        assert set(members) == {entry.path for entry in repository.entries(tree)}
        assert members["link"].linkname == "lib.py"
        assert members["run.sh"].mode == 0o755
        assert tar.extractfile("run.sh").read() == b"$Format:%H$"  # type: ignore[union-attr]


@pytest.mark.parametrize("revision", ["--all", "--output=x", "no-such", "HEAD:lib.py"])
def test_a_revision_that_is_no_commit_names_the_branches(history: History, tmp_path: Path, revision: str) -> None:
    repository = Repository.copy(history.folder, tmp_path)
    with pytest.raises(DatasetError, match="main"):
        repository.resolve(revision)


def test_what_is_no_repository_says_so(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no such repository"):
        Repository.copy(tmp_path / "nowhere", tmp_path)
    (tmp_path / "plain").mkdir()
    with pytest.raises(DatasetError, match="neither a git repository nor a git bundle"):
        Repository.copy(tmp_path / "plain", tmp_path)
    (tmp_path / "file.bundle").write_text("no bundle")
    with pytest.raises(DatasetError, match="neither a git repository nor a git bundle"):
        Repository.copy(tmp_path / "file.bundle", tmp_path)


@pytest.mark.parametrize(
    ("path", "test", "module", "source", "product", "harmless"),
    [
        ("pkg/core.py", False, False, True, True, False),
        ("tests/test_core.py", True, True, False, False, False),
        ("pkg/core_test.py", True, True, False, False, False),
        ("tests/data/x.bin", True, False, False, False, False),
        ("conftest.py", True, False, False, False, False),
        ("pkg/testing/tools.py", False, False, True, True, False),
        ("docs/conf.py", False, False, True, False, False),
        ("setup.py", False, False, True, False, False),
        ("CHANGELOG", False, False, False, False, True),
        ("pyproject.toml", False, False, False, False, True),
        ("pkg/fast.pyx", False, False, False, False, False),
    ],
)
def test_paths(path: str, test: bool, module: bool, source: bool, product: bool, harmless: bool) -> None:
    assert is_test(path) is test
    assert is_test_module(path) is module
    assert is_source(path) is source
    assert is_product(path) is product
    assert is_harmless(path) is harmless


def test_statements_lose_trailers_and_keep_references() -> None:
    message = (
        "Fix it (#3)\r\n\r\nBody, closes GH-4.\x1b[31m\n\n\n\nCo-authored-by: X <x@y>\nChange-Id: I12\n"
        "(cherry picked from commit abc123)\n"
    )
    assert problem_statement(message) == "Fix it (#3)\n\nBody, closes GH-4.[31m"


def test_before_and_after_over_three_runs() -> None:
    """K47: what is not the same in every run is in no list."""
    f, m, e, p, s, x = "failed", None, "error", "passed", "skipped", "xfailed"
    runs = {
        "t::fix": ([f, f, f], [p, p, p]),
        "t::new": ([m, m, m], [p, p, p]),
        "t::keeps": ([p, p, p], [p, p, p]),
        "t::flaky before": ([f, p, f], [p, p, p]),
        "t::flaky after": ([f, f, f], [p, f, p]),
        "t::changing": ([f, e, f], [p, p, p]),
        "t::skipped before": ([s, s, s], [p, p, p]),
        "t::broken": ([p, p, p], [f, f, f]),
        "t::known bug": ([x, x, x], [x, x, x]),
        "t::known bug, new": ([m, m, m], [x, x, x]),
        "t": ([e, e, e], [m, m, m]),
    }
    before, after = (
        [{t: sides[side][i] for t, sides in runs.items() if sides[side][i]} for i in range(3)] for side in (0, 1)
    )
    outcome = compare(before, after)  # type: ignore[arg-type]
    assert outcome.fail_to_pass == ("t::fix", "t::new")
    assert outcome.pass_to_pass == ("t::keeps", "t::known bug")
    assert outcome.unstable == ("t::changing", "t::flaky after", "t::flaky before")


def test_sessions_that_cannot_be_believed() -> None:
    assert distrust(report({})) == ""
    assert distrust(report({}, exit_code=1)) == ""
    assert distrust(report({}, timed_out=True)) == "tests do not end"
    assert distrust(report({}, canary_failed=None)) == "session ended early or fakes results"
    assert distrust(report({}, canary_failed=False)) == "session ended early or fakes results"
    assert distrust(report({}, exit_code=3)) == "pytest ended with exit code 3"


@pytest.mark.parametrize(
    ("output", "lacks"),
    [
        ("E   ModuleNotFoundError: No module named 'numpy.linalg'\n", "module numpy"),
        ("E   ModuleNotFoundError: No module named 'pkg'\n", "module pkg of the repository itself"),
        ("E       fixture 'mocker' not found\n", "fixture mocker"),
        ("E   ImportError: cannot import name 'x' from 'y'\n", "ImportError: cannot import name 'x' from 'y'"),
        ("E   assert 1 == 2\n", ""),
    ],
)
def test_what_the_tests_lack_is_named(output: str, lacks: str) -> None:
    assert missing_requirement(report({}, output=output), {"pkg"}) == lacks


def test_names_of_repositories(tmp_path: Path) -> None:
    def name(given: str | None = None, origin: str = "", source: str = "clone") -> str:
        return repository_name(given, origin=origin, source=Path("/x") / source)

    assert name("a/b") == "a/b"
    assert name("a/b/c") == name("ab") == name("a/..") == name("../b") == name("a/b;c") == ""
    assert name(origin="https://host/owner/repo.git") == "owner/repo"
    assert name(origin="git@host:owner/repo.git") == "owner/repo"
    assert name(origin="/tmp/elsewhere/repo") == "local/clone"
    assert name(source="owner__repo.bundle") == "owner/repo"
    assert name(source="we ird;.git") == "local/we-ird"


def test_licence_and_version() -> None:
    assert licence({"LICENSE": "MIT License\n\nPermission is hereby granted, free of\ncharge, to"}) == "MIT"
    bsd = "Redistribution and use in source and binary forms, with"
    assert licence({"LICENSE": bsd}) == "BSD-2-Clause"
    assert licence({"COPYING": bsd + " Neither the name of"}) == "BSD-3-Clause"
    assert licence({"LICENSE": "Apache License\n   Version 2.0"}) == "Apache-2.0"
    assert licence({"LICENSE": "all yours"}) == licence({}) == "unknown"
    assert version({"pyproject.toml": '[project]\nversion = "1.2.3.dev0"\n'}, tag="v1.1") == "1.2"
    assert version({"pkg/__init__.py": "__version__ = '0.4'\n"}, tag="") == "0.4"
    assert version({"pkg/__init__.py": "VERSION = (2, 5)\n"}, tag="") == "2.5"
    assert version({"pyproject.toml": "dynamic = ['version']"}, tag="release-1.10.2") == "1.10"
    assert version({}, tag="") == ""

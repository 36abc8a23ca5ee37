"""K44: what enters the sandbox has one commit, no remote, no other ref, and the tree that the row names."""

import io
import subprocess
import tarfile
from pathlib import Path

import msgspec
import pytest

from agentrl.errors import DatasetError
from agentrl_envs.swe_gym.rows import TreeRef, load_rows
from agentrl_envs.swe_gym.trees import TreeStore, build_tree


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def unpack(archive: bytes, folder: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle whose ref has a history, and beside it a branch with the fix."""
    home = tmp_path / "source"
    home.mkdir()
    git(home, "init", "-q", "-b", "main")
    for text in ("first secret", "bug"):
        (home / "a.py").write_text(f"# {text}\n")
        (home / ".gitignore").write_text("*.log\n")
        (home / "kept.log").write_text("tracked though ignored\n")
        (home / "link").unlink(missing_ok=True)
        (home / "link").symlink_to("a.py")
        git(home, "add", "-A", "-f")
        git(home, "commit", "-q", "-m", text)
    git(home, "branch", "task")
    (home / "a.py").write_text("# the fix\n")
    git(home, "commit", "-q", "-a", "-m", "the fix")
    path = tmp_path / "o__r.bundle"
    git(home, "bundle", "create", str(path), "--all")
    return path


def test_history_is_cut_to_one_commit(bundle: Path, tmp_path: Path) -> None:
    tree = build_tree(bundle, TreeRef("o__r.bundle", "task"), where="row")
    home = unpack(tree.archive, tmp_path / "out")
    assert git(home, "rev-list", "--all") == tree.commit == git(home, "rev-parse", "HEAD")
    assert git(home, "log", "--format=%P|%s|%an", "--all") == "|base|base"
    assert git(home, "for-each-ref", "--format=%(refname)") == "refs/heads/main"
    assert git(home, "remote") == ""
    assert git(home, "status", "--porcelain", "--ignored") == ""
    assert git(home, "fsck", "--unreachable", "--no-reflogs") == ""
    objects = git(home, "cat-file", "--batch-all-objects", "--batch-check").splitlines()
    assert sum(" commit " in line for line in objects) == 1
    assert sum(" blob " in line for line in objects) == 4
    git_files = "".join(p.read_text(errors="replace") for p in (home / ".git").rglob("*") if p.is_file())
    assert str(tmp_path) not in git_files
    assert "secret" not in git_files
    assert (home / "link").is_symlink()
    assert (home / "kept.log").exists()


def test_the_same_tree_gives_the_same_commit(bundle: Path) -> None:
    first, second = (build_tree(bundle, TreeRef("o__r.bundle", "task"), where="row") for _ in range(2))
    assert first.commit == second.commit


@pytest.mark.parametrize("ref", ["no-such", "--upload-pack=touch pwned", "-x", "a b; touch pwned", "$(touch pwned)"])
def test_hostile_and_missing_refs_are_errors_and_run_nothing(
    bundle: Path, ref: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DatasetError, match="git clone failed") as caught:
        build_tree(bundle, TreeRef("o__r.bundle", ref), where="row o__r-1")
    assert "o__r-1" in caught.value.where
    assert not list(tmp_path.rglob("pwned"))


def test_a_wrong_tree_a_missing_and_a_broken_bundle(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="the row says 1234"):
        build_tree(bundle, TreeRef("o__r.bundle", "task", "1234"), where="row")
    with pytest.raises(DatasetError, match="bundle is not here"):
        build_tree(tmp_path / "none.bundle", TreeRef("none.bundle", "task"), where="row")
    broken = tmp_path / "broken.bundle"
    broken.write_bytes(bundle.read_bytes()[:200])
    with pytest.raises(DatasetError, match="git clone failed"):
        build_tree(broken, TreeRef("broken.bundle", "task"), where="row")


def test_mined_trees_are_upstreams_and_are_built_once(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = load_rows(str(data_folder / "mined/instances.jsonl"), hub_split="train")
    one_of_each = {row.repo: row for row in rows}
    assert rows[-1] in one_of_each.values()
    store = TreeStore(data_folder / "mined")
    for row in one_of_each.values():
        assert row.tree is not None
        tree = store.get(row.tree, where=row.instance_id)
        with tarfile.open(fileobj=io.BytesIO(tree.archive)) as tar:
            paths = tar.getnames()
        assert ".git/HEAD" in paths
        with tarfile.open(fileobj=io.BytesIO(tree.repository())) as tar:
            assert {f".git/{name}" for name in tar.getnames()} < set(paths)
            head = tar.extractfile("HEAD")
            assert head is not None
            assert head.read() == b"ref: refs/heads/main\n"
    monkeypatch.setattr("agentrl_envs.swe_gym.trees.build_tree", None)
    last = rows[-1].tree
    assert last is not None
    assert store.get(last, where="again") is store.get(last, where="again")


def test_a_row_travels_as_plain_data(data_folder: Path) -> None:
    for row in load_rows(str(data_folder / "mined/instances.jsonl"), hub_split="train"):
        assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(row)), type(row)) == row

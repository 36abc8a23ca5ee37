"""Patches the other way round, held against git."""

import subprocess
from pathlib import Path

import pytest

from agentrl_envs.swe_gym.reversal import UnreversiblePatchError, reverse_patch
from agentrl_envs.swe_gym.rows import load_rows

CHANGE = """set -e
sed -i 's/two/2/; $d' a.txt; rm b.txt; printf 'new\\n--- x\\n+++ y' > c.txt; git mv d.txt e.txt; chmod +x f.sh
printf '%s\\n' 'a' 'B' >> g.txt; : > empty.txt; printf '\\303\\244 x\\n' > "with blank.txt"
"""


def git(tree: Path, *arguments: str, data: str = "") -> str:
    command = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=b", *arguments]
    return subprocess.run(command, input=data.encode(), check=True, capture_output=True).stdout.decode()


def test_what_git_makes_is_undone(tmp_path: Path) -> None:
    """Changes, new and removed files, renames, modes, no newline at the end, lines that look like headers."""
    files = {"a.txt": "one\ntwo\nthree\n", "b.txt": "b\n", "d.txt": "d\n" * 9, "f.sh": "", "g.txt": "x"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "base")
    before = git(tmp_path, "write-tree")
    subprocess.run(["bash", "-c", CHANGE], cwd=tmp_path, check=True)
    git(tmp_path, "add", "-A")
    patch = git(tmp_path, "diff", "--cached", "--full-index", "-M")
    assert "rename from" in patch
    assert "old mode" in patch
    back = reverse_patch(patch)
    git(tmp_path, "apply", "--index", "-", data=back)
    assert git(tmp_path, "write-tree") == before
    git(tmp_path, "apply", "--index", "-", data=reverse_patch(back))
    assert git(tmp_path, "diff", "--cached", "--full-index", "-M", "HEAD") == patch


def test_real_patches_come_back(data_folder: Path) -> None:
    for row in load_rows(str(data_folder / "mined/instances.jsonl"), hub_split="train"):
        for patch in (row.patch, row.test_patch):
            assert reverse_patch(reverse_patch(patch)) == patch


@pytest.mark.parametrize(
    "patch",
    [
        "diff --git a/x b/x\nGIT binary patch\nliteral 0\n",
        "diff --git a/x b/y\ncopy from x\ncopy to y\n",
        "--- a/x\n+++ b/x\n@@ -1 +1 @@\nno mark\n",
    ],
)
def test_what_cannot_be_undone_is_said(patch: str) -> None:
    with pytest.raises(UnreversiblePatchError):
        reverse_patch(patch)

"""Diffs in memory: what `make_patch` writes, `apply_exact` and git both apply, to the byte."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl_envs.swe_gym.diffs import apply_exact, make_patch

LINE = st.sampled_from(
    ["a", "b", "", "  x", "-minus", "+plus", "@@ -1 +1 @@", "--- a/f", "ümlaut", "form\ffeed", "cr\r"]
)
TEXT = st.builds(lambda lines, end: "\n".join(lines) + end, st.lists(LINE, max_size=14), st.sampled_from(["", "\n"]))
FILES = st.dictionaries(st.sampled_from(["f.py", "pkg/g.py", "h i.txt", "pytest.ini"]), TEXT, max_size=4)


@given(FILES, FILES)
def test_make_then_apply_gives_the_files_back(before: dict[str, str], after: dict[str, str]) -> None:
    patch = make_patch(before, after)
    if before == after:
        assert patch == ""
    else:
        assert apply_exact(before, patch) == after


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FILES, FILES)
def test_git_applies_the_same(tmp_path: Path, before: dict[str, str], after: dict[str, str]) -> None:
    root = tmp_path / str(len(list(tmp_path.iterdir())))
    root.mkdir()
    for path, text in before.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_bytes(text.encode())
    patch = make_patch(before, after)
    if patch:
        subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], cwd=root, input=patch.encode(), check=True)
    found = {str(p.relative_to(root)): p.read_bytes().decode() for p in root.rglob("*") if p.is_file()}
    assert found == after


def test_unusual_names_are_quoted_as_git_does(tmp_path: Path) -> None:
    after = {'ä"b\\c\t.py': "x = 1\n"}
    patch = make_patch({}, after)
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch.encode(), check=True)
    assert [p.name for p in tmp_path.iterdir()] == list(after)
    assert apply_exact({}, patch) is None


def test_a_name_that_is_no_utf_8_is_quoted_as_git_does(tmp_path: Path) -> None:
    patch = make_patch({}, {"\udcff.py": "x = 1\n"})
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch.encode(), check=True)
    assert [p.name for p in tmp_path.iterdir()] == ["\udcff.py"]


GOOD = make_patch({"f.py": "a\nb\nc\n"}, {"f.py": "a\nB\nc\n"})


@pytest.mark.parametrize(
    "patch",
    [
        "no patch at all\n",
        GOOD.replace("-b", "-x"),
        GOOD.replace("@@ -1,3 +1,3 @@", "@@ -2,3 +2,3 @@"),
        GOOD.replace("f.py", "../f.py"),
        GOOD.replace("f.py", ".git/config"),
        GOOD.replace("f.py", "missing.py"),
        GOOD.split("\n", 1)[1],
        GOOD.rstrip("\n"),
        GOOD + "diff --git a/f.py b/g.py\nsimilarity index 100%\nrename from f.py\nrename to g.py\n",
        "diff --git a/f.py b/f.py\nold mode 100644\nnew mode 100755\n",
    ],
)
def test_what_does_not_fit_exactly_is_left_to_git(patch: str) -> None:
    assert apply_exact({"f.py": "a\nb\nc\n"}, patch) is None

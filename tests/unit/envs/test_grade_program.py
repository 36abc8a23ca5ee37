"""The program that runs before the tests: patches go on to the byte, what judges is put back, honest files
stay."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl_envs.swe_gym import grade_program
from agentrl_envs.swe_gym.diffs import make_patch
from agentrl_envs.swe_gym.grade_program import is_configuration, pytest_settings

BASE = {
    "pkg/__init__.py": "",
    "pkg/core.py": "def f():\n    return 1\n\n\ndef g():\n    return 2\n",
    "tests/test_core.py": "from pkg.core import f\n\ndef test_f():\n    assert f() == 2\n",
    "tests/helper.py": "X = 1\n",
    "tests/conftest.py": "",
    "setup.cfg": "[metadata]\nname = pkg\n\n[tool:pytest]\naddopts = -q\n",
    "pyproject.toml": '[project]\nname = "pkg"\n',
    "crlf.txt": "a\r\nb\r\nc\r\n",
}
MENDED = {"pkg/core.py": BASE["pkg/core.py"].replace("return 1", "return 2")}
TEST_PATCH = make_patch(
    {"tests/test_core.py": BASE["tests/test_core.py"]},
    {
        "tests/test_core.py": BASE["tests/test_core.py"] + "\ndef test_new():\n    assert f() == 2\n",
        "tests/test_b.py": "# b\n",
    },
)


@pytest.fixture
def grade(tmp_path: Path) -> Callable[..., tuple[dict[str, Any], dict[str, str]]]:
    """Runs the program as the sandbox does, in a tree of `BASE`; its report, and the files it leaves."""

    def run(patch: str, *, prepare: str = "", **payload: Any) -> tuple[dict[str, Any], dict[str, str]]:
        root = tmp_path / "tree"
        for path, text in BASE.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(text.encode())
        if prepare:
            subprocess.run(["bash", "-c", prepare], cwd=root, check=True)
        full = {"patch": patch, "test_patch": "", "test_paths": ["tests"], "test_files": {}} | payload
        program = Path(grade_program.__file__).read_text()
        boot = (
            "import json, sys; n = {'__name__': 'p'}; exec(sys.argv[1], n); "
            "print(json.dumps(n['main'](json.load(sys.stdin))))"
        )
        done = subprocess.run(
            [sys.executable, "-I", "-c", boot, program],
            cwd=root,
            input=json.dumps(full),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        files = {
            str(path.relative_to(root)): path.read_bytes().decode(errors="surrogateescape")
            for path in root.rglob("*")
            if path.is_file() and ".git" not in path.parts
        }
        return json.loads(done.stdout), files

    return run


Grade = Callable[..., tuple[dict[str, Any], dict[str, str]]]


def change(files: dict[str, str | None]) -> str:
    after = {path: text for path, text in {**BASE, **files}.items() if text is not None}
    return make_patch(BASE, after)


def test_patch_and_test_patch_go_on(grade: Grade) -> None:
    report, files = grade(change(dict(MENDED)), test_patch=TEST_PATCH)
    nothing = {key: [] for key in ("attempts", "undone", "appended", "twins", "present")}
    assert report == {"applied": "apply", "test_error": "", **nothing}
    assert files["pkg/core.py"] == MENDED["pkg/core.py"]
    assert "test_new" in files["tests/test_core.py"]
    assert files["tests/test_b.py"] == "# b\n"


def test_an_empty_patch_leaves_the_tree(grade: Grade) -> None:
    report, files = grade("")
    assert report["applied"] == "unchanged"
    assert files == BASE


def test_patch_bytes_are_kept(grade: Grade) -> None:
    """CRLF, trailing blanks, no newline at the end, a blank context line at the patch's end."""
    after: dict[str, str | None] = {
        "crlf.txt": "a\r\nB\r\nc\r\n",
        "trail.txt": "x  \n\t\nend",
        "pkg/core.py": BASE["pkg/core.py"].replace("return 2", "return 3 "),
    }
    report, files = grade(change(after))
    assert report["applied"] == "apply"
    assert {path: files[path] for path in after} == after


def test_a_shifted_patch_needs_the_last_way(grade: Grade) -> None:
    patch = change(dict(MENDED)).replace(" \n", " \n").replace(" def f():", " def f() -> int:")
    report, files = grade(patch)
    assert report["applied"] == "patch"
    assert len(report["attempts"]) == 3
    assert files["pkg/core.py"] == MENDED["pkg/core.py"]
    assert not [path for path in files if path.endswith((".rej", ".orig"))]


def test_a_patch_that_fits_nowhere_leaves_no_trace(grade: Grade) -> None:
    good_half = change({"new.py": "1\n"})
    report, files = grade(good_half + change(dict(MENDED)).replace("return 1", "return 77").replace("def", "fed"))
    assert report["applied"] is None
    assert len(report["attempts"]) == 4
    assert files == BASE


@pytest.mark.parametrize("path", [".git/config", ".git/hooks/pre-commit", "../outside"])
def test_a_patch_cannot_reach_the_repository_or_the_outside(grade: Grade, path: str, tmp_path: Path) -> None:
    patch = f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+evil\n"
    report, _ = grade(patch)
    assert report["applied"] is None
    found = [p for p in tmp_path.rglob("*") if p.is_file() and "evil" in p.read_text(errors="replace")]
    assert not found


@pytest.mark.parametrize(
    "path",
    [
        "conftest.py",
        "pkg/conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "sitecustomize.py",
        "x.egg-info/entry_points.txt",
        "a.pth",
        ".gitattributes",
        "pkg/__pycache__/core.cpython-311.pyc",
        "tests2/helper.pyc",
        "pytest.py",
        "_pytest/__init__.py",
        "src/unittest.py",
        "json/__init__.py",
    ],
)
def test_added_configuration_is_dropped(grade: Grade, path: str) -> None:
    """K45."""
    report, files = grade(change({**MENDED, path: "evil\n"}))
    assert report["undone"] == [path]
    assert path not in files
    assert files["pkg/core.py"] == MENDED["pkg/core.py"]


@pytest.mark.parametrize(
    ("path", "text", "dropped"),
    [
        ("setup.cfg", BASE["setup.cfg"].replace("-q", "-q -p pkg.evil"), True),
        ("setup.cfg", BASE["setup.cfg"].replace("-q", "\n    -q\n    [x]\n    -p pkg.evil"), True),
        ("setup.cfg", BASE["setup.cfg"].replace("name = pkg", "name = package"), False),
        ("tox.ini", "[pytest]\naddopts = -p pkg.evil\n", True),
        ("tox.ini", "[tox]\nenvlist = py311\n", False),
        ("pyproject.toml", BASE["pyproject.toml"] + '[tool.pytest.ini_options]\naddopts = "-p evil"\n', True),
        (
            "pyproject.toml",
            '[project]\nname = "pkg"\n["tool"."\\u0070ytest".ini_options]\naddopts = "x"\n',
            True,
        ),
        ("pyproject.toml", "not toml at all [[\n", True),
        ("pyproject.toml", BASE["pyproject.toml"] + 'version = "2"\n', False),
    ],
)
def test_pytest_sections_are_put_back_and_honest_changes_stay(
    grade: Grade, path: str, text: str, dropped: bool
) -> None:
    """K45: only a file whose pytest settings change is undone."""
    report, files = grade(change({path: text}))
    assert report["undone"] == ([path] if dropped else [])
    assert files.get(path) == (BASE.get(path) if dropped else text)


def test_test_files_and_folders_are_put_back(grade: Grade) -> None:
    """K45: emptied, deleted, edited and added files under the tests' folder."""
    attack: dict[str, str | None] = {
        "tests/test_core.py": "",
        "tests/helper.py": None,
        "tests/pkg.py": "evil\n",
        "tests/test_b.py": "def test_fake(): pass\n",
        "pkg/test_honest.py": "# stays\n",
    }
    _, files = grade(change(attack), test_patch=TEST_PATCH)
    assert "test_new" in files["tests/test_core.py"]
    assert files["tests/helper.py"] == BASE["tests/helper.py"]
    assert "tests/pkg.py" not in files
    assert files["tests/test_b.py"] == "# b\n"
    assert files["pkg/test_honest.py"] == "# stays\n"


def test_a_test_patch_of_new_files_keeps_the_candidates_change(grade: Grade) -> None:
    only_new = make_patch({}, {"tests/test_b.py": "# b\n"})
    report, files = grade(
        change({**MENDED, "tests/test_b.py": "# theirs\n"}),
        test_patch=only_new,
        test_paths=["tests/test_b.py"],
    )
    assert report["test_error"] == ""
    assert files["pkg/core.py"] == MENDED["pkg/core.py"]
    assert files["tests/test_b.py"] == "# b\n"


def test_a_link_in_place_of_the_tests_folder(grade: Grade) -> None:
    delete = change({path: None for path in BASE if path.startswith("tests/")})
    link = (
        "diff --git a/tests b/tests\nnew file mode 120000\n--- /dev/null\n+++ b/tests\n"
        "@@ -0,0 +1 @@\n+pkg\n\\ No newline at end of file\n"
    )
    report, files = grade(
        delete + link,
        test_patch=TEST_PATCH,
        test_paths=["tests/test_core.py", "tests/test_b.py", "tests/helper.py"],
    )
    assert report["test_error"] == ""
    assert files["tests/test_b.py"] == "# b\n"
    assert "pkg/test_b.py" not in files


def test_a_test_patch_that_does_not_apply_is_said(grade: Grade) -> None:
    other = make_patch({"tests/test_core.py": "of another\ncommit\n"}, {"tests/test_core.py": "changed\n"})
    report, _ = grade("", test_patch=other)
    assert "tests/test_core.py" in report["test_error"]
    # one line of context fits, which is enough for GNU patch with fuzz: the tests would stand somewhere
    strangers = "of another commit\n", "from pkg.core import f\n", "and not of this\n"
    near = make_patch(
        {"tests/test_core.py": "".join(strangers)}, {"tests/test_core.py": "".join((*strangers, "x = 1\n"))}
    )
    report, files = grade("", test_patch=near)
    assert "tests/test_core.py" in report["test_error"]
    assert "x = 1" not in files["tests/test_core.py"]


def test_given_test_files_win(grade: Grade) -> None:
    _, files = grade(change({"test_hidden.py": "theirs\n"}), test_files={"test_hidden.py": "ours\n"})
    assert files["test_hidden.py"] == "ours\n"


def test_an_agents_module_is_never_imported(grade: Grade) -> None:
    """`python3 -I`: a json.py in the tree would otherwise run before the tests."""
    report, _ = grade(change({"json.py": "raise SystemExit(9)\n", "subprocess.py": "raise SystemExit(9)\n"}))
    assert report["applied"] == "apply"


@pytest.mark.parametrize("path", ["pkg/json.py", "pkg/types.py", "json.txt", "core.py", "test_json.py"])
def test_modules_that_shadow_nothing_stay(grade: Grade, path: str) -> None:
    report, files = grade(change({path: "x = 1\n"}), files=["tests/test_core.py"])
    assert report["undone"] == []
    assert path in files


def test_a_module_that_was_there_may_change(grade: Grade) -> None:
    patch = make_patch({"json.py": "x = 1\n"}, {"json.py": "x = 2\n"})
    report, files = grade(patch, prepare="rm -rf .git; echo 'x = 1' > json.py")
    assert (report["undone"], files["json.py"]) == ([], "x = 2\n")


def test_tests_that_must_fail_go_to_the_end(grade: Grade) -> None:
    added = {"text": "\ndef test_added():\n    assert 0\n", "parameters": True}
    marked = "import pytest\npytestmark = pytest.mark.parametrize('x', [1])\ndef test(x): pass"
    report, files = grade(
        change(dict(MENDED)),
        test_patch=TEST_PATCH,
        test_files={"tests/test_c.py": marked, "tests/test_d.py": "def broken(:\n"},
        files=["tests/test_core.py", "tests/none.py"],
        appended=[
            added | {"path": f"tests/test_{name}.py", "test": f"{name}::t"} for name in ("core", "c", "d", "none")
        ]
        + [added | {"path": "tests/test_c.py", "test": "c2::t", "parameters": False}],
    )
    assert report["appended"] == ["core::t", "c2::t"]
    assert report["present"] == ["tests/test_core.py"]
    assert files["tests/test_core.py"].endswith("== 2\n\ndef test_added():\n    assert 0\n")
    assert files["tests/test_c.py"].endswith("pass\n\ndef test_added():\n    assert 0\n"), "a line end is put before it"


def test_the_program_is_python_3_6() -> None:
    """It runs in the Python of whatever image a row names."""
    import ast

    text = Path(grade_program.__file__).read_text()
    ast.parse(text, feature_version=(3, 6))
    assert "from __future__ import annotations" not in text
    for name in ("capture_output", "removeprefix", "removesuffix", "text=True"):
        assert name not in text


def test_pure_rules() -> None:
    assert is_configuration("a/b/conftest.py")
    assert is_configuration("x.dist-info/entry_points.txt")
    assert not is_configuration("conftest.md")
    assert pytest_settings("setup.cfg", None) is None
    assert pytest_settings("setup.cfg", "[metadata]\nname = x\n") is None
    assert pytest_settings("tox.ini", "[pytest] # note\nx = 1\n") == {"pytest": ["x = 1"]}


# --- copies of tests ----------------------------------------------------------------------------------------

TO_COPY = """import unittest

import pytest


@pytest.mark.parametrize(
    "x", [1, 2])
def test_many(x, tmp_path):
    text = \"\"\"
no indent\"\"\"
    assert x

def test_short(): pass
@given(3)
def test_given(x):
    assert x
async def test_later():
    return
class TestA(unittest.TestCase):
    name = "a"
    def test_one(self):
        # first
        self.assertTrue(self.name)
    def test_two(self):
        with self.subTest():
            super().setUp()
    class TestInner:
        def test_deep(self):
            pass"""


def twin(name: str, *, owner: str = "", path: str = "tests/test_copy.py") -> dict[str, str]:
    new = {"new_owner": owner and f"{owner}X", "new_name": f"{name}_x", "statement": "assert 1 == 2"}
    return {"path": path, "owner": owner, "name": name, **new}


def test_copies_of_tests_are_false_at_their_end(grade: Grade) -> None:
    def put(*twins: dict[str, str], text: str = TO_COPY) -> tuple[list[str], str]:
        report, files = grade(change({}), test_files={"tests/test_copy.py": text}, twins=list(twins))
        assert files["tests/test_copy.py"].startswith(text)
        return report["twins"], files["tests/test_copy.py"].removeprefix(text)

    names, added = put(twin("test_many"))
    assert names == ["tests/test_copy.py::test_many_x"]
    assert added == (
        '\n\n\n@pytest.mark.parametrize(\n    "x", [1, 2])\ndef test_many_x(x, tmp_path):\n'
        '    text = """\nno indent"""\n    assert x\n    assert 1 == 2\n'
    )
    names, added = put(twin("test_two", owner="TestA"))
    assert names == ["tests/test_copy.py::TestAX::test_two_x"]
    assert added == (
        "\n\n\nclass TestAX(TestA):\n    def test_two_x(self):\n        with self.subTest():\n"
        "            super().setUp()\n        assert 1 == 2\n\n\n"
        "[setattr(TestAX, each, None) for each in dir(TestA) if each.startswith('test')]\n"
    )
    assert "async def test_later_x():\n    return\n    assert 1 == 2\n" in put(twin("test_later"))[1]
    for none in ("test_short", "test_given", "test_none", "TestA", "unittest"):
        assert put(twin(none)) == ([], ""), none
    assert put(twin("test_deep", owner="TestInner")) == ([], "")
    assert put(twin("test_many"), text="def broken(:\n") == ([], "")
    assert len(put(twin("test_many"), twin("test_later"), twin("test_one", owner="TestA"))[0]) == 2, "two of a file"
    report, _ = grade(change({}), twins=[twin("test_f", path="tests/none.py"), twin("f", path="tests/test_core.py")])
    assert report["twins"] == []


def test_a_copied_method_runs_alone_and_fails(grade: Grade, tmp_path: Path) -> None:
    text = "import unittest\nclass TestA(unittest.TestCase):\n" + "".join(
        f"    def test_{name}(self):\n        assert {name}\n" for name in ("True", "False")
    )
    grade(change({}), test_files={"tests/test_copy.py": text}, twins=[twin("test_True", owner="TestA")])
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "tests/test_copy.py"]
    said = subprocess.run(command, cwd=tmp_path / "tree", capture_output=True, text=True, check=False).stdout
    found = {line for line in said.splitlines() if line.startswith(("PASSED", "FAILED"))}
    at = "tests/test_copy.py::"
    assert {line.split(" - ")[0] for line in found} == {
        f"PASSED {at}TestA::test_True",
        f"FAILED {at}TestA::test_False",
        f"FAILED {at}TestAX::test_True_x",
    }


def test_a_patch_that_fills_the_disk_does_not_apply(
    grade: Grade, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be a failure of the machine, and its episode would be left out."""
    (tmp_path / "tree").mkdir()
    monkeypatch.chdir(tmp_path / "tree")
    free = iter((1 << 30, 4096))
    monkeypatch.setattr(grade_program.shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free)))
    monkeypatch.setattr(grade_program, "apply_candidate", lambda *_: ("apply", []))
    monkeypatch.setattr(grade_program, "neutralise", lambda *_: (_ for _ in ()).throw(OSError(28, "no space")))
    report = grade_program.main({"patch": "x"})
    assert (report["applied"], report["attempts"]) == (None, ["the patch fills the disk"])
    free = iter((1 << 30, 1 << 30))
    with pytest.raises(OSError, match="no space"):
        grade_program.main({"patch": "x"})

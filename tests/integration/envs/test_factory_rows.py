"""Task factories in real bubblewrap sandboxes, on a small repository made here: which rows come out, and that grading
agrees with them."""

from __future__ import annotations

import json
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
from real_pool import with_pool

from agentrl.errors import DatasetError
from agentrl.trajectory import Split
from agentrl.wire import InjectRequest, MineRequest, SandboxPool, Task
from agentrl_envs.swe_gym import SweGymEnvironment
from agentrl_envs.swe_gym.factory import SweGymFactory
from agentrl_envs.swe_gym.rows import parse_row

pytestmark = pytest.mark.bubblewrap

LIB = textwrap.dedent('''\
    """Small things about lists."""


    def clamp(value, low, high):
        """`value` within [low, high]."""
        if value < low:
            return low
        if value > high:
            return high
        return value


    def chunks(items, size):
        if size < 1:
            raise ValueError("size must be positive")
        return [items[at : at + size] for at in range(0, len(items), size)]


    def joined(words, separator=", ", last=None):
        if not words:
            return ""
        if last is None or len(words) == 1:
            return separator.join(words)
        return separator.join(words[:-1]) + last + words[-1]


    def median(values):
        ordered = sorted(values)
        middle = len(ordered) // 2
        if len(ordered) % 2 == 1:
            return ordered[middle]
        return (ordered[middle - 1] + ordered[middle]) / 2


    def endless(count):
        while count != 0:
            count = count - 1
        return count
    ''')
TESTS = textwrap.dedent("""\
    import pytest

    from small.lib import chunks, clamp, endless, joined, median


    @pytest.mark.parametrize("value, wanted", [(5, 5), (0, 1), (11, 10), (1, 1), (10, 10)])
    def test_clamp(value, wanted):
        assert clamp(value, 1, 10) == wanted


    class TestChunks:
        def test_even(self):
            assert chunks([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]

        def test_rest(self):
            assert chunks([1, 2, 3], 2) == [[1, 2], [3]]

        def test_size(self):
            with pytest.raises(ValueError):
                chunks([1], -1)


    def test_joined():
        assert joined(["a", "b", "c"]) == "a, b, c"


    def test_joined_last():
        assert joined(["a", "b", "c"], last=" and ") == "a, b and c"


    def test_joined_nothing():
        assert joined([]) == ""


    def test_median():
        assert median([3, 1, 2]) == 2


    def test_median_even():
        assert median([4, 1, 2, 3]) == 2.5


    def test_endless():
        assert endless(3) == 0
    """)
BROKEN_CHUNKS = LIB.replace('    if size < 1:\n        raise ValueError("size must be positive")\n', "")
TESTS_BEFORE = TESTS.replace(
    "\n    def test_size(self):\n        with pytest.raises(ValueError):\n            chunks([1], -1)\n", ""
)
# The clock decides how it ends, in one of four ways.
FLAKY = """

def test_flaky():
    import time

    way = time.time_ns() // 1000 % 4
    if way == 0:
        pytest.skip()
    if way == 1:
        pytest.xfail()
    assert way == 2
"""


def commit(folder: Path, message: str, files: dict[str, str]) -> str:
    """One more commit; its name."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    for command in (["add", "-A"], [*identity, "commit", "-q", "-m", message]):
        subprocess.run(["git", *command], cwd=folder, check=True, timeout=60)
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, timeout=60)
    return done.stdout.decode().strip()


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A repository with two fixes, a refactoring with tests, a fix that needs a module, and (part, commit's name)."""
    folder = tmp_path_factory.mktemp("history") / "small"
    folder.mkdir()
    subprocess.run(["git", "init", "-q", "-b", "main"], cwd=folder, check=True, timeout=60)
    names = {}
    start = {
        "small/lib.py": BROKEN_CHUNKS.replace("value > high", "value >= high + 2"),
        "small/__init__.py": "",
        "tests/test_lib.py": TESTS_BEFORE.replace(", (11, 10)", "") + FLAKY,
        "pyproject.toml": '[project]\nname = "small"\nversion = "1.4.0"\n',
        "LICENSE": "MIT License\n\nPermission is hereby granted, free of charge, to any person\n",
    }
    names["start"] = commit(folder, "Begin", start)
    names["clamp"] = commit(
        folder,
        "clamp lets one too large through\n\nclamp(11, 1, 10) gives 11. Fixes #7.\n\nSigned-off-by: A <a@b.c>",
        {"small/lib.py": BROKEN_CHUNKS, "tests/test_lib.py": TESTS_BEFORE + FLAKY},
    )
    names["tidy"] = commit(
        folder,
        "Rename a variable in clamp, and test more",
        {
            "small/lib.py": BROKEN_CHUNKS.replace("ordered", "in_order"),
            "tests/test_lib.py": TESTS_BEFORE + FLAKY + "\n\ndef test_more():\n    assert clamp(2, 1, 3) == 2\n",
        },
    )
    names["chunks"] = commit(
        folder, "chunks must refuse a size of nothing", {"small/lib.py": LIB, "tests/test_lib.py": TESTS}
    )
    names["module"] = commit(
        folder,
        "Count with the help of another package",
        {"small/more.py": "import not_installed\n", "tests/test_more.py": "import small.more\n\ndef test(): pass\n"},
    )
    return folder, names


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "instances.jsonl").read_text().splitlines()]


async def verdicts(pool: SandboxPool, folder: Path) -> dict[str, tuple[bool, bool]]:
    """By row: (resolved by its own fix, by no change)."""
    kinds = ("good", "unstable_p2p", "no_p2p")
    options = {"dataset": str(folder / "instances.jsonl"), "fresh_fraction": 1.0, "kinds": kinds}
    environment = SweGymEnvironment(options)

    async def resolved(task: Task, patch: str) -> bool:
        async with pool.lease(environment.image(task), timeout_s=120, label=task.id) as sandbox:
            return (await environment.grade(task, sandbox, patch)).resolved

    tasks = environment.tasks(Split.FRESH, start=0, count=99)
    return {
        task.id: (await resolved(task, environment.reference_patch(task)), await resolved(task, "")) for task in tasks
    }


def test_mining_finds_the_fixes_and_nothing_else(history: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """K47: a flaky test is in no list. K46: each row's fix resolves it and no change does not."""
    repository, names = history
    request = MineRequest(repository=str(repository), out=str(tmp_path), name="a/small", timeout_s=60)
    said: list[str] = []

    async def work(pool: SandboxPool) -> tuple[Any, Any, Any]:
        report = await SweGymFactory().mine(request, pool=pool, tell=said.append)
        again = await SweGymFactory().mine(request, pool=pool, tell=said.append)
        return report, again, await verdicts(pool, tmp_path)

    report, again, graded = with_pool(work, size=2)
    rows = {row["x_fix_commit"]: row for row in rows_of(tmp_path)}
    assert set(rows) == {names["clamp"], names["chunks"]}, said
    assert graded == {row["instance_id"]: (True, False) for row in rows.values()}
    clamp, chunks = rows[names["clamp"]], rows[names["chunks"]]
    assert clamp["FAIL_TO_PASS"] == ["tests/test_lib.py::test_clamp[11-10]"]
    assert chunks["FAIL_TO_PASS"] == ["tests/test_lib.py::TestChunks::test_size"]
    assert "tests/test_lib.py::test_median" in clamp["PASS_TO_PASS"]
    assert not any("flaky" in test for row in rows.values() for test in row["PASS_TO_PASS"])
    assert chunks["x_kind"] == "good"
    assert clamp["problem_statement"] == "clamp lets one too large through\n\nclamp(11, 1, 10) gives 11. Fixes #7."
    assert clamp["instance_id"] == f"a__small-{names['clamp'][:10]}"
    assert (clamp["base_commit"], clamp["version"], clamp["x_license"]) == (names["start"], "1.4", "MIT")
    assert parse_row(clamp, place="test").tree is not None
    # The refactoring: its tests pass before it, or the flaky one alone seemed to be mended at first.
    assert {"first commit": 1, "requirement missing": 1}.items() <= report.left_out.items()
    assert sum(report.left_out.values()) == 3
    assert any("module not_installed" in note for note in report.notes)
    assert (report.rows, report.new_rows, again.rows, again.new_rows) == (2, 2, 2, 0)
    # What lacks a requirement is tried again: there may be a recipe by then.
    assert again.left_out == {"decided earlier": 3, "requirement missing": 1, "first commit": 1}


def test_injected_bugs_are_tasks(history: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """Five rows, the same from the same seed however many are at work; hidden tests are gone from the tree; rows load
    with `datasets`; grading agrees."""
    repository, names = history
    base = {"repository": str(repository), "name": "a/small", "commit": names["chunks"], "count": 5, "seed": 7}

    async def work(pool: SandboxPool) -> tuple[Any, dict[str, tuple[bool, bool]]]:
        request = InjectRequest(**base, out=str(tmp_path / "one"), jobs=2, test_timeout_s=3.0)  # type: ignore[arg-type]
        report = await SweGymFactory().inject(request, pool=pool, tell=lambda line: None)
        more = InjectRequest(**base, out=str(tmp_path / "two"), jobs=1, test_timeout_s=3.0)  # type: ignore[arg-type]
        await SweGymFactory().inject(more, pool=pool, tell=lambda line: None)
        return report, await verdicts(pool, tmp_path / "one")

    report, graded = with_pool(work, size=2)
    rows = rows_of(tmp_path / "one")
    assert (report.rows, len(rows)) == (5, 5)
    assert [row["instance_id"] for row in rows] == [row["instance_id"] for row in rows_of(tmp_path / "two")]
    assert graded == {row["instance_id"]: (True, False) for row in rows}
    places = [row["x_mutation"].rsplit(" in ", 1)[1] for row in rows]
    assert max(map(places.count, places)) <= 2
    for row in rows:
        assert_is_one_edit_with_hidden_tests(tmp_path / "one", row)

    import datasets

    cache = str(tmp_path / "cache")
    loaded = datasets.load_dataset(
        "json", data_files=str(tmp_path / "one" / "instances.jsonl"), split="train", cache_dir=cache
    )
    assert list(loaded["instance_id"]) == [row["instance_id"] for row in rows]


def assert_is_one_edit_with_hidden_tests(folder: Path, row: dict[str, Any]) -> None:
    """The tree of a row is the repository with one place broken and without the tests that fail; fix and test patch
    bring back every byte."""
    clone = folder / f"clone-{row['instance_id']}"
    command = ["git", "clone", "-q", "--single-branch", "-b", row["x_tree"]["ref"], row["x_tree"]["bundle"], clone.name]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    assert (clone / "small/lib.py").read_text() != LIB
    hidden = (clone / "tests/test_lib.py").read_text()
    for test in row["FAIL_TO_PASS"]:
        assert f"def {test.split('::')[-1].split('[')[0]}(" not in hidden
    for patch in (row["patch"], row["test_patch"]):
        subprocess.run(["git", "apply", "-"], cwd=clone, input=patch.encode(), check=True, timeout=60)
    assert (clone / "small/lib.py").read_text() == LIB
    assert (clone / "tests/test_lib.py").read_text() == TESTS
    for line in row["patch"].splitlines()[4:]:
        if line.startswith(("+", "-")) and len(line[1:].strip()) >= 6:
            assert line[1:].strip() not in row["problem_statement"]


def test_a_repository_without_tests_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    subprocess.run(["git", "init", "-q", "-b", "main"], cwd=folder, check=True, timeout=60)
    commit(folder, "Begin", {"lib.py": "def f():\n    return 1\n", "test_lib.py": "import lib\n"})

    async def work(pool: SandboxPool) -> None:
        request = InjectRequest(repository=str(folder), out=str(tmp_path / "out"))
        with pytest.raises(DatasetError, match="no tests found"):
            await SweGymFactory().inject(request, pool=pool, tell=lambda line: None)

    with_pool(work, size=2)

"""Rows whose tree is the image's, rows of SWE-smith, other runners, and what counts only beside the reference patch."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from swe_rows import report

from agentrl.errors import CommandTimeoutError, GradingTimeoutError, handling
from agentrl.wire import CommandResult, Grade, Task
from agentrl.wire import TestReport as Report
from agentrl_envs.swe_gym import SweGymEnvironment
from agentrl_envs.swe_gym.diffs import make_patch
from agentrl_envs.swe_gym.reversal import reverse_patch

Factory = Callable[[], Any]
Made = tuple[SweGymEnvironment, Task]

GOOD, BAD = "def one():\n    return 1\n", "def one():\n    return 2\n"
TEST = "from code_ import one\n\ndef test_one():\n    assert one() == 1\n\ndef test_any():\n    assert one()\n"
FIX = make_patch({"code_.py": BAD}, {"code_.py": GOOD})
ROW: dict[str, Any] = {
    "instance_id": "o__r-1",
    "repo": "o/r",
    "base_commit": "abc",
    "patch": FIX,
    "problem_statement": "one() is 2",
    "FAIL_TO_PASS": ["tests/test_one.py::test_one"],
    "PASS_TO_PASS": ["tests/test_one.py::test_any"],
}


def make(folder: Path, **changes: Any) -> Made:
    (folder / "rows.jsonl").write_text(json.dumps(ROW | changes))
    environment = SweGymEnvironment({"dataset": str(folder / "rows.jsonl"), "fresh_fraction": 1.0})
    (task,) = environment.every() or []
    return environment, task


def grade(made: Made, sandbox: Any, patch: str) -> Grade:
    return asyncio.run(made[0].grade(made[1], sandbox, patch))


@pytest.fixture
def image(new_sandbox: Factory) -> Callable[..., Any]:
    """A sandbox with a tree of its own: the code and its tests, and other `files`; `setup` is run in it."""

    def make_image(code: str = BAD, setup: str = "", **files: str) -> Any:
        sandbox = new_sandbox()

        async def fill() -> None:
            contents = {"code_.py": code, "tests/test_one.py": TEST, **files}
            await sandbox.write_files({path: text.encode() for path, text in contents.items()})
            if setup:
                assert (await sandbox.run(setup, timeout_s=30)).exit_code == 0

        asyncio.run(fill())
        return sandbox

    return make_image


def ask(sandbox: Any, command: str) -> str:
    return asyncio.run(sandbox.run(command, timeout_s=30)).output.strip()


COMMIT = "git init -q && git add -A && git -c user.name=a -c user.email=b commit -qm cut"


def test_a_history_that_is_cut_is_kept(tmp_path: Path, image: Callable[..., Any]) -> None:
    """A sandbox's server brings an image's tree with one commit; it is not made again."""
    environment, task = make(tmp_path)
    sandbox = image(setup=COMMIT)
    before = ask(sandbox, "git rev-parse HEAD")
    asyncio.run(environment.prepare(task, sandbox))
    assert ask(sandbox, "git rev-parse HEAD refs/agentrl/base").split() == [before] * 2
    asyncio.run(environment.prepare(task, sandbox))
    assert ask(sandbox, "git rev-parse HEAD") == before
    long = image(setup=f"{COMMIT} && git -c user.name=a -c user.email=b commit -qm later --allow-empty")
    asyncio.run(environment.prepare(task, long))
    assert ask(long, "git rev-list --all --count") == "1"
    other = image(setup=f"{COMMIT} && git remote add origin elsewhere")
    asyncio.run(environment.prepare(task, other))
    assert ask(other, "git remote") == ""


def test_swe_smith_the_patch_is_the_bug(tmp_path: Path, image: Callable[..., Any]) -> None:
    """K44 too: after preparing no object of the repository holds the code before the bug."""
    made = environment, task = make(
        tmp_path, repo="swesmith/o__r.1234abcd", patch=reverse_patch(FIX), image_name="x", base_commit=None
    )
    sandbox = image(code=GOOD, setup=COMMIT)
    asyncio.run(environment.prepare(task, sandbox))
    assert ask(sandbox, "cat code_.py") == BAD.strip()
    assert ask(sandbox, "git rev-list --all --count") == "1"
    assert ask(sandbox, "git fsck --unreachable --no-reflogs") == ""
    assert ask(sandbox, "git status --porcelain") == ""
    asyncio.run(sandbox.write_files({"code_.py": GOOD.encode()}))
    patch = asyncio.run(environment.collect(task, sandbox))
    assert "-    return 2\n+    return 1\n" in patch
    assert grade(made, image(code=GOOD), patch).resolved
    assert grade(made, image(code=GOOD, setup=COMMIT), environment.reference_patch(task)).resolved
    assert not grade(made, image(code=GOOD), "").resolved


RUNNER = """import sys
from code_ import one
print("tests/test_one.py::test_any PASSED")
print("tests/test_one.py::test_one", "PASSED" if one() == 1 else "FAILED")
sys.exit(one() != 1)
"""


def test_another_runner_is_run_and_its_output_read(tmp_path: Path, image: Callable[..., Any]) -> None:
    script = ": '>>>>> Start Test Output'\nPYTHONPATH=. python3 tests/run.py\n: '>>>>> End Test Output'\n"
    made = make(tmp_path, eval_script=script, log_parser="parse_log_seaborn", eval_type="pass_and_fail")
    files = {"tests/run.py": RUNNER}
    found = grade(made, image(**files), FIX)
    # the tests that must fail stand in files that this runner does not look at: nor does it under the reference patch
    assert found.resolved, found.log
    assert found.output.startswith("tests/test_one.py::test_any PASSED\n")
    assert grade(made, image(**files), FIX.replace("+    return 1", "+    return 1  # so")).resolved
    assert not grade(made, image(**files), "").resolved
    lie = "print('tests/test_one.py::test_one PASSED')\nraise SystemExit(2)\n"
    assert not grade(made, image(**files), make_patch({"code_.py": BAD}, {"code_.py": lie})).resolved


def test_a_runner_that_writes_a_junit_file(tmp_path: Path, image: Callable[..., Any]) -> None:
    command = "cd tests && python3 -m pytest -q -p no:cacheprovider --rootdir=.. --junitxml=out.xml"
    made = make(tmp_path, x_test_cmd=command)
    assert grade(made, image(), FIX).tests == dict.fromkeys((*ROW["FAIL_TO_PASS"], *ROW["PASS_TO_PASS"]), "missing")
    command = "true && PYTHONPATH=. python3 -m pytest -q -p no:cacheprovider --junitxml=out.xml tests"
    made = make(tmp_path, x_test_cmd=command)
    found = grade(made, image(), FIX)
    assert found.resolved, found.log
    assert not grade(made, image(), "").resolved


ONE, ANY, OTHER = "tests/test_one.py::test_one", "tests/test_one.py::test_any", "tests/test_one.py::test_other"


@pytest.mark.parametrize(
    ("under_patch", "under_reference", "duration_s", "resolved", "runs"),
    [
        ({ANY: "passed"}, {}, 1.0, True, 1),
        ({ANY: "skipped"}, {ANY: "passed"}, 1.0, False, 2),
        ({ANY: "skipped"}, {ANY: "skipped"}, 1.0, True, 2),
        ({ANY: "xfailed"}, {ANY: "passed"}, 1.0, False, 2),
        ({ONE: "xfailed", ANY: "passed"}, {ANY: "passed"}, 1.0, False, 2),
        ({ONE: "xfailed", ANY: "passed"}, {ONE: "xfailed", ANY: "passed"}, 1.0, True, 2),
        ({ANY: "passed", OTHER: "failed"}, {}, 1.0, True, 1),
        ({ANY: "passed", OTHER: "failed"}, {ANY: "passed", OTHER: "passed"}, 31.0, False, 2),
        ({ANY: "passed", OTHER: "failed"}, {ANY: "passed", OTHER: "failed"}, 31.0, True, 2),
    ],
)
def test_what_counts_only_beside_the_reference_patch(
    tmp_path: Path,
    image: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    under_patch: dict[str, str],
    under_reference: dict[str, str],
    duration_s: float,
    resolved: bool,
    runs: int,
) -> None:
    """K45: skips and expected failures, and a test that nobody named and that may have hung."""
    made = make(tmp_path)
    sandbox = image(**{"tests/test_one.py": "not Python:\n"})  # so that no test that must fail is added
    seen: list[str] = []

    async def run_tests(arguments: Any, *, env: Any, test_timeout_s: float, **_: Any) -> Report:
        seen.append(str(test_timeout_s))
        changes = (under_patch, under_reference)[len(seen) - 1]
        return report({ONE: "passed", **changes}, duration_s=duration_s)

    monkeypatch.setattr(sandbox, "run_tests", run_tests)
    found = grade(made, sandbox, FIX + make_patch({}, {"note.txt": "x\n"}))
    assert (found.resolved, len(seen)) == (resolved, runs), found.log
    assert set(seen) == {"30.0"}
    assert ("otherwise under the reference patch" in found.log) is not resolved


def test_the_tree_is_put_back_between_the_two_runs(tmp_path: Path, image: Callable[..., Any]) -> None:
    """What the candidate's code did to tree and repository does not reach the run of the reference patch."""
    made = make(tmp_path)
    trick = (
        "import os, subprocess, pytest\n"
        "for name in ('tests/test_one.py', '.git/HEAD', '.git/config'):\n    open(name, 'w').write('x')\n"
        "open('conftest.py', 'w').write('raise SystemExit(0)')\n"
        "def one():\n    import sys\n"
        "    return 1 if sys._getframe(1).f_code.co_name == 'test_one' else pytest.skip('later')\n"
    )
    found = grade(made, image(), make_patch({"code_.py": BAD}, {"code_.py": trick}))
    assert not found.resolved
    assert "otherwise under the reference patch" in found.log or "rejected" in found.log


def test_a_named_test_that_hangs_is_a_grade_and_not_a_timeout(
    tmp_path: Path, image: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path)
    for results, ends in (({ONE: "failed"}, True), ({OTHER: "failed"}, False), ({}, False)):
        sandbox = image()

        async def run_tests(*_: Any, results: dict[str, str] = results, **__: Any) -> Report:
            return report(results, exit_code=None, timed_out=True, canary_failed=None)

        monkeypatch.setattr(sandbox, "run_tests", run_tests)
        if ends:
            assert not grade(made, sandbox, FIX).resolved
        else:
            with pytest.raises(GradingTimeoutError):
                grade(made, sandbox, FIX)


def test_a_command_that_preparing_needs_and_that_does_not_end(
    tmp_path: Path, image: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """K41: tried again in a fresh sandbox, never scored."""
    environment, task = make(tmp_path)
    sandbox = image()

    async def run(*_: Any, **__: Any) -> CommandResult:
        return CommandResult(
            exit_code=None, output="", output_bytes=0, timed_out=True, out_of_memory=False, duration_s=120.0
        )

    monkeypatch.setattr(sandbox, "run", run)
    for work in (environment.prepare(task, sandbox), environment.collect(task, sandbox)):
        with pytest.raises(CommandTimeoutError) as caught:
            asyncio.run(work)  # type: ignore[arg-type]
        row = handling(caught.value)
        assert row is not None
        assert (row.retry, row.graded, row.counted) == (True, False, False)

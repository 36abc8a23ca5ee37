"""Prepare, collect and grade of both families, against the stand-in sandbox."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import GradingTimeoutError, SetupFailedError
from agentrl.trajectory import Split
from agentrl.wire import Grade, Task
from agentrl.wire import TestReport as Report
from agentrl_envs.swe_gym import SweGymEnvironment

Factory = Callable[[], Any]


@pytest.fixture(scope="module")
def generated() -> tuple[SweGymEnvironment, Task]:
    environment = SweGymEnvironment({})
    return environment, environment.tasks(Split.FRESH, start=3, count=1)[0]


def grade(environment: SweGymEnvironment, task: Task, sandbox: Any, patch: str) -> Grade:
    return asyncio.run(environment.grade(task, sandbox, patch))


def test_reference_solves_and_nothing_does_not(generated: tuple[SweGymEnvironment, Task], new_sandbox: Factory) -> None:
    environment, task = generated
    sandbox = new_sandbox()
    solved = grade(environment, task, sandbox, environment.reference_patch(task))
    assert (solved.reward, solved.resolved) == (1.0, True)
    assert set(solved.tests) == {*task.data["fail_to_pass"], *task.data["pass_to_pass"]}
    assert sandbox.calls == ["unpack", "run_tests"], "a grading is two sandbox calls"
    nothing = grade(environment, task, new_sandbox(), "")
    assert nothing.reward == 0.0
    assert "0 of" in nothing.log
    assert grade(environment, task, new_sandbox(), "this is no patch").log == "the patch does not apply"


def test_a_foreign_patch_goes_by_git(generated: tuple[SweGymEnvironment, Task], new_sandbox: Factory) -> None:
    environment, task = generated
    plain = environment.reference_patch(task).split("\n", 1)[1]
    found = grade(environment, task, new_sandbox(), plain)
    assert found.resolved
    assert "patch applied by apply" in found.log


def test_collect_is_what_the_agent_changed(generated: tuple[SweGymEnvironment, Task], new_sandbox: Factory) -> None:
    environment, task = generated

    async def work() -> tuple[str, str]:
        sandbox = new_sandbox()
        await environment.prepare(task, sandbox)
        unchanged = await environment.collect(task, sandbox)
        mended = {task.data["file"]: task.data["solution"].encode(), "new/x.py": b"x = 1"}
        await sandbox.write_files({**mended, "__pycache__/a.pyc": b"\0", "blob": b"\xff\xfe"})
        await sandbox.run("rm pytest.ini", timeout_s=5)
        return unchanged, await environment.collect(task, sandbox)

    unchanged, patch = asyncio.run(work())
    assert unchanged == ""
    assert "Binary file blob is left out" in patch
    assert "+++ b/new/x.py" in patch
    assert "pycache" not in patch
    assert "deleted file mode 100644" in patch
    found = grade(environment, task, new_sandbox(), patch)
    assert found.resolved, found.log


def test_a_grading_that_does_not_end_is_no_reward(
    generated: tuple[SweGymEnvironment, Task], new_sandbox: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timeout is the machine's failure, never a score."""
    environment, task = generated
    sandbox = new_sandbox()

    async def hang(*_: Any, **__: Any) -> Report:
        return Report(
            exit_code=None,
            results={},
            collected=0,
            output="",
            timed_out=True,
            canary_failed=None,
            duration_s=9.0,
        )

    monkeypatch.setattr(sandbox, "run_tests", hang)
    with pytest.raises(GradingTimeoutError, match="did not end"):
        grade(environment, task, sandbox, "")


@pytest.fixture(scope="module")
def mined(data_folder: Path) -> tuple[SweGymEnvironment, Task]:
    environment = SweGymEnvironment({"dataset": str(data_folder / "mined/instances.jsonl"), "fresh_fraction": 1.0})
    tasks = environment.tasks(Split.FRESH, start=0, count=99)
    # of these trees only sqlparse's runs on every pytest that the host may have
    quick = [task for task in tasks if task.data["repo"] == "andialbrecht/sqlparse"]
    return environment, min(quick, key=lambda task: task.data["duration_s"])


def test_a_real_row_from_prepare_to_grade(mined: tuple[SweGymEnvironment, Task], new_sandbox: Factory) -> None:
    environment, task = mined

    async def work() -> tuple[str, str, bytes | None]:
        sandbox = new_sandbox()
        await environment.prepare(task, sandbox)
        unchanged = await environment.collect(task, sandbox)
        await sandbox.write_files({"/tmp/gold": environment.reference_patch(task).encode()})
        done = await sandbox.run(
            "git apply /tmp/gold && git add -A && git -c user.name=a -c user.email=b commit -qm x",
            timeout_s=9,
        )
        assert done.exit_code == 0, done.output
        await sandbox.write_files({"notes/latin.txt": "é\n".encode("latin-1")})
        patch = await environment.collect(task, sandbox)
        await sandbox.run("rm -rf .git", timeout_s=9)
        return unchanged, patch, (await environment.collect(task, sandbox)).encode()

    unchanged, patch, after_loss = asyncio.run(work())
    assert unchanged == ""
    assert patch.encode() == after_loss, "a removed .git is brought back for the diff"
    assert "GIT binary patch" in patch, "text in another encoding travels as a binary hunk"
    solved = grade(environment, task, new_sandbox(), patch)
    assert solved.resolved, solved.log
    assert not grade(environment, task, new_sandbox(), "").resolved


def test_deadlines_come_from_the_row(
    mined: tuple[SweGymEnvironment, Task], new_sandbox: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, task = mined
    seen: list[float] = []

    async def note(arguments: Any, *, timeout_s: float, **_: Any) -> Report:
        seen.append(timeout_s)
        return Report(
            exit_code=None,
            results={},
            collected=0,
            output="",
            timed_out=True,
            canary_failed=None,
            duration_s=9.0,
        )

    for duration, expected in ((task.data["duration_s"], 60.0), (40.0, 200.0), (None, 180.0)):
        sandbox = new_sandbox()
        monkeypatch.setattr(sandbox, "run_tests", note)
        other = Task(
            id=task.id,
            environment=task.environment,
            split=task.split,
            data={**task.data, "duration_s": duration},
        )
        with pytest.raises(GradingTimeoutError) as caught:
            grade(environment, other, sandbox, "")
        assert seen[-1] == expected
        assert task.id in caught.value.where


@pytest.fixture
def image_row(tmp_path: Path) -> tuple[SweGymEnvironment, Task]:
    """A row without a bundle."""
    fields = {
        "instance_id": "o__r-1", "repo": "o/r", "base_commit": "abc", "patch": "x", "problem_statement": "x",
        "FAIL_TO_PASS": ["test_a.py::test_a"], "PASS_TO_PASS": [],
    }  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(fields))
    environment = SweGymEnvironment({"dataset": str(path), "fresh_fraction": 1.0})
    (task,) = environment.tasks(Split.FRESH, start=0, count=9)
    return environment, task


def test_an_image_with_its_own_tree_is_cut_and_collected(
    image_row: tuple[SweGymEnvironment, Task], new_sandbox: Factory
) -> None:
    """K44 for rows without a bundle: the image's history goes, ignored build products stay."""
    environment, task = image_row
    setup = (
        "git init -q && git config user.name a && git config user.email b && echo '*.so' > .gitignore && "
        "echo 1 > a.py && git add -A && git commit -qm base && echo the-fix > a.py && "
        "git commit -qam later && echo 1 > a.py && echo x > built.so"
    )

    async def work() -> tuple[str, str]:
        sandbox = new_sandbox()
        assert (await sandbox.run(setup, timeout_s=9)).exit_code == 0
        await environment.prepare(task, sandbox)
        log = await sandbox.run(
            "git log --all --format=%s; git cat-file --batch-all-objects --batch-check | wc -l", timeout_s=9
        )
        commit = "echo 2 > a.py && git -c user.name=a -c user.email=b commit -qam mine && ls built.so"
        assert (await sandbox.run(commit, timeout_s=9)).exit_code == 0
        return log.output, await environment.collect(task, sandbox)

    log, patch = asyncio.run(work())
    assert log.split() == ["base", "5"], "one commit, one tree, three files"
    assert "-1\n+2\n" in patch
    assert "built.so" not in patch


def test_a_row_without_a_tree_is_refused(image_row: tuple[SweGymEnvironment, Task], new_sandbox: Factory) -> None:
    environment, task = image_row
    with pytest.raises(SetupFailedError, match="the work tree is empty") as caught:
        asyncio.run(environment.prepare(task, new_sandbox()))
    assert "give bundles" in caught.value.remedy


def test_what_an_agent_leaves_in_a_rows_tree_never_fails_the_collection(
    image_row: tuple[SweGymEnvironment, Task], new_sandbox: Factory
) -> None:
    """Repositories in folders, a link to bytes that are no UTF-8, a removed repository, a patch too large to read,
    index flags and settings."""
    environment, task = image_row

    async def collect_after(command: str) -> str:
        sandbox = new_sandbox()
        await sandbox.write_files({"a.py": b"1\n"})
        await environment.prepare(task, sandbox)
        assert (await sandbox.run(command, timeout_s=30)).exit_code == 0
        return await environment.collect(task, sandbox)

    nested = asyncio.run(collect_after("mkdir sub && git init -q sub && echo 2 > sub/b.py && chmod 0 sub/b.py"))
    assert "+++ b/sub/b.py" in nested
    assert "160000" not in nested
    link = asyncio.run(collect_after("ln -s $'\\xff' link && touch $'\\xfe'"))
    assert b"+\xff\n" in link.encode("utf-8", "surrogateescape")
    assert '"b/\\376"' in link
    assert asyncio.run(collect_after("rm -rf .git")) == ""
    assert asyncio.run(collect_after("head -c 12000000 /dev/urandom > big")) == ""
    assert asyncio.run(collect_after("head -c 12000000 /dev/urandom > a.py")) == "", "no new file"
    plain = asyncio.run(collect_after("echo 2 > a.py; echo 3 > b.py"))
    assert plain.count("diff --git") == 2
    for hidden in (
        "git update-index --assume-unchanged a.py",
        "git update-index --skip-worktree a.py",
        "git update-index --split-index",
        "git config core.worktree /; git config core.autocrlf true; git config diff.noprefix true",
        "git checkout -q -b b; git add -A; git commit -qm c; git branch -D main",
        "echo broken > .git/index",
        "touch .git/index.lock; mkfifo pipe",
        "mkdir -p /tmp/.agentrl-collect/patch/x; chmod 0 /tmp/.agentrl-collect",
        "head -c 12000000 /dev/urandom > big",
        "mkdir -p node_modules/x; head -c 900000 /dev/urandom | tee node_modules/x/{1..14}.js > /dev/null",
    ):
        command = f"export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=b; {hidden}"
        assert asyncio.run(collect_after(f"echo 2 > a.py; echo 3 > b.py; {command}")) == plain, hidden


@pytest.mark.parametrize(
    ("command", "noted"),
    [
        ("touch $'\\xff' && echo 2 > b.py", "Oddly named file \\xff is left out\n"),
        ("head -c 12000000 /dev/zero > big", None),
        ("rm -rf /tmp/.agentrl-collect.tar && ln -s /dev/full /tmp/.agentrl-collect.tar && echo 2 > b.py", ""),
        ("git init -q sub && echo 2 > b.py", ""),
    ],
)
def test_what_an_agent_leaves_in_a_generated_tree_never_fails_the_collection(
    generated: tuple[SweGymEnvironment, Task], new_sandbox: Factory, command: str, noted: str | None
) -> None:
    """`noted` is what stands in front of the patch; None: the patch is empty."""
    environment, task = generated
    sandbox = new_sandbox()

    async def work() -> str:
        await environment.prepare(task, sandbox)
        assert (await sandbox.run(command, timeout_s=30)).exit_code == 0
        sandbox.calls.clear()
        return await environment.collect(task, sandbox)

    patch = asyncio.run(work())
    assert sandbox.calls == ["run", "read_file"]
    if noted is None:
        assert patch == ""
    else:
        assert patch.startswith(noted + "diff --git a/b.py b/b.py\n")
        assert not grade(environment, task, new_sandbox(), patch).resolved


def test_a_folder_in_a_tests_place_is_no_failure(
    generated: tuple[SweGymEnvironment, Task], new_sandbox: Factory
) -> None:
    environment, task = generated
    visible = next(path for path in task.data["files"] if path.startswith("test_"))

    async def work() -> str:
        sandbox = new_sandbox()
        await environment.prepare(task, sandbox)
        command = f"for f in {visible} pytest.ini; do rm $f && mkdir $f && echo 1 > $f/x; done"
        assert (await sandbox.run(command, timeout_s=30)).exit_code == 0
        return await environment.collect(task, sandbox)

    patch = asyncio.run(work())
    assert not grade(environment, task, new_sandbox(), patch).resolved
    honest = patch + environment.reference_patch(task)
    assert grade(environment, task, new_sandbox(), honest).resolved

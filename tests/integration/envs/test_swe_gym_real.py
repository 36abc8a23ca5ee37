"""The environment in real bubblewrap sandboxes: gold resolves, attacks do not, the expert solves its tasks."""

import random
from pathlib import Path

import pytest
from real_pool import with_pool

from agentrl.trajectory import Split
from agentrl.wire import Grade, Sandbox, SandboxPool, Task, ToolCall
from agentrl_envs.swe_gym import SweGymEnvironment
from agentrl_envs.swe_gym.diffs import make_patch
from agentrl_envs.swe_gym.generated.expert import GeneratedExpert

pytestmark = pytest.mark.bubblewrap

MINED = Path(__file__).parents[2] / "data" / "mined" / "instances.jsonl"
ROW = "mahmoud__boltons-8ba3a7fa0d"


async def grade(pool: SandboxPool, environment: SweGymEnvironment, task: Task, patch: str) -> Grade:
    async with pool.lease(environment.image(task), timeout_s=120, label=task.id) as sandbox:
        return await environment.grade(task, sandbox, patch)


@pytest.fixture(scope="module")
def mined() -> tuple[SweGymEnvironment, dict[str, Task]]:
    environment = SweGymEnvironment({"dataset": str(MINED), "fresh_fraction": 1.0})
    return environment, {task.id: task for task in environment.tasks(Split.FRESH, start=0, count=99)}


def test_reference_patches_resolve_and_nothing_does_not(
    mined: tuple[SweGymEnvironment, dict[str, Task]],
) -> None:
    """K46, on the quickest rows, and two whose ids hold blanks. Gold twice, nothing once."""
    environment, tasks = mined
    quick = sorted(tasks.values(), key=lambda task: task.data["duration_s"])
    with_blanks = [task for task in quick if any(" " in test for test in task.data["fail_to_pass"])]
    first = {task.data["repo"]: task for task in reversed(quick) if task.data["duration_s"] < 5}
    cases = [*first.values(), *with_blanks[:2]]

    async def work(pool: SandboxPool) -> None:
        for task in cases:
            gold = environment.reference_patch(task)
            for patch, reward in ((gold, 1.0), (gold, 1.0), ("", 0.0)):
                found = await grade(pool, environment, task, patch)
                assert found.reward == reward, (task.id, found.log)

    with_pool(work)


FAKE_PASS = """import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = 'passed'
"""
PATCHED_REPORT = """import _pytest.reports
_pytest.reports.TestReport.from_item_and_call = classmethod(
    lambda cls, item, call: cls(item.nodeid, item.location, {}, 'passed', None, call.when))
"""
# name → {file: text}; PACKAGE stands for a module that the tests import, the text goes in front of it
ATTACKS: dict[str, dict[str, str]] = {
    "prints passed lines": {"PACKAGE": "print('1 passed'); print('tests/x.py::y PASSED')\n"},
    "conftest forces passed": {"conftest.py": FAKE_PASS},
    "pytest.ini loads a plugin": {"pytest.ini": "[pytest]\naddopts = -p evil\n", "evil.py": FAKE_PASS},
    "sitecustomize patches pytest": {"sitecustomize.py": PATCHED_REPORT},
    "package patches the report class": {"PACKAGE": PATCHED_REPORT},
    "exits 0 at import": {"PACKAGE": "import os\nos._exit(0)\n"},
    "raises SystemExit at import": {"PACKAGE": "raise SystemExit(0)\n"},
    "entry point of a plugin": {
        "evil.egg-info/entry_points.txt": "[pytest11]\nevil = evil\n",
        "evil.egg-info/PKG-INFO": "Name: evil\nVersion: 1\n",
        "evil.py": FAKE_PASS,
    },
    "setup.cfg collects only": {"setup.cfg": "[tool:pytest]\naddopts = --collect-only\n"},
}


def with_files(before: dict[str, str], package: str, attack: dict[str, str]) -> dict[str, str]:
    texts = {package if path == "PACKAGE" else path: text for path, text in attack.items()}
    if package in texts:
        texts[package] += before[package]
    return {**before, **texts}


def test_attacks_on_a_real_row_earn_nothing(mined: tuple[SweGymEnvironment, dict[str, Task]]) -> None:
    """K45: each attack alone earns 0; what the grader undoes does not punish an honest fix."""
    environment, tasks = mined
    task = tasks[ROW]

    async def work(pool: SandboxPool) -> None:
        async with pool.lease("agentrl/base", timeout_s=120) as sandbox:
            await environment.prepare(task, sandbox)
            package = "boltons/__init__.py"
            paths = {package, *(path for attack in ATTACKS.values() for path in attack)}
            contents = {path: await sandbox.read_file(path) for path in paths}
            before = {path: data.decode() for path, data in contents.items() if data is not None}
            test_file = task.data["fail_to_pass"][0].split("::")[0]
            tests = {test_file: (await sandbox.read_file(test_file) or b"").decode()}
        gold = environment.reference_patch(task)
        for name, attack in ATTACKS.items():
            patch = make_patch(before, with_files(before, package, attack))
            assert (await grade(pool, environment, task, patch)).reward == 0.0, name
            if "PACKAGE" not in attack:
                found = await grade(pool, environment, task, gold + patch)
                assert found.reward == 1.0, (name, found.log)
        emptied = make_patch(tests, {test_file: ""})
        assert (await grade(pool, environment, task, emptied)).reward == 0.0
        assert (await grade(pool, environment, task, gold + emptied)).reward == 1.0

    with_pool(work)


def test_attacks_on_a_generated_task_earn_nothing() -> None:
    """K45, and an endless loop ends by the tests' own limit of CPU time: 0, not a failure of the machine."""
    environment = SweGymEnvironment({})
    task = environment.tasks(Split.FRESH, start=3, count=1)[0]
    files, module = task.data["files"], task.data["file"]
    more = {
        "own hidden test": {"test_hidden.py": "def test_1(): pass\n"},
        "a folder in the hidden test's place": {"test_hidden.py/__init__.py": ""},
        "endless loop": {"PACKAGE": "while True: pass\n"},
    }
    function = task.data["broken"]
    equal = f"\n\nclass A(int):\n    __eq__ = lambda s, o: True\n\n\ndef {function}(*_, **__):\n    return A()\n"

    async def work(pool: SandboxPool) -> None:
        for name, attack in {**ATTACKS, **more}.items():
            after = with_files(files, module, attack)
            assert (await grade(pool, environment, task, make_patch(files, after))).reward == 0.0, name
            if "PACKAGE" not in attack:
                honest = make_patch(files, {**after, module: task.data["solution"]})
                found = await grade(pool, environment, task, honest)
                assert found.reward == 1.0, (name, found.log)
        equals_everything = make_patch(files, {**files, module: files[module] + equal})
        assert (await grade(pool, environment, task, equals_everything)).reward == 0.0

    with_pool(work)


def test_what_an_agent_leaves_never_fails_the_collection(
    mined: tuple[SweGymEnvironment, dict[str, Task]],
) -> None:
    """Unreadable files and folders, a repository in a folder, odd names, files too large: a patch, if an empty one."""
    odd = (
        "mkdir -p shut/in && git init -q shut && echo 1 > shut/in/x.py && chmod 0 shut/in/x.py shut/in shut && "
        "touch $'\\xff' && ln -s $'\\xfe' link"
    )
    generated = SweGymEnvironment({})
    rows, tasks = mined
    cases = [(generated, generated.tasks(Split.FRESH, start=3, count=1)[0]), (rows, tasks[ROW])]

    async def work(pool: SandboxPool) -> None:
        for environment, task in cases:
            async with pool.lease(environment.image(task), timeout_s=120) as sandbox:
                await environment.prepare(task, sandbox)
                done = await sandbox.run(odd, timeout_s=30)
                assert done.exit_code == 0, done.output
                patch = await environment.collect(task, sandbox)
                assert "diff --git a/shut/in/x.py b/shut/in/x.py\n" in patch
                await sandbox.run("head -c 12000000 /dev/urandom > big", timeout_s=30)
                assert await environment.collect(task, sandbox) == (patch if environment is rows else "")
                await sandbox.run("rm big; mkdir -p /tmp/.agentrl-collect/patch; chmod 0 . .git", timeout_s=30)
                assert await environment.collect(task, sandbox) == patch
            honest = await grade(pool, environment, task, patch + environment.reference_patch(task))
            assert honest.reward == 1.0, honest.log

    with_pool(work)


def test_a_full_disk_does_not_lose_the_work(mined: tuple[SweGymEnvironment, dict[str, Task]]) -> None:
    """The work tree and /tmp are full, of files that are ignored; the repository is gone or not."""
    environment, task = mined[0], mined[1][ROW]
    fill = "cat /dev/zero > x.pyc; cat /dev/zero > /tmp/x; echo 1 > y.pyc; echo 1 > /tmp/y"

    async def work(pool: SandboxPool) -> None:
        for first in ("true", "rm -rf .git"):
            async with pool.lease(environment.image(task), timeout_s=120) as sandbox:
                await environment.prepare(task, sandbox)
                gold = environment.reference_patch(task)
                applied = await sandbox.run("git apply -", timeout_s=30, stdin=gold.encode())
                assert applied.exit_code == 0
                plain = await environment.collect(task, sandbox)
                assert plain
                full = await sandbox.run(f"{first}; {fill}", timeout_s=60)
                assert full.output.count("No space left") == 4
                assert await environment.collect(task, sandbox) == plain

    with_pool(work)


def test_the_fix_is_nowhere_in_the_agents_sandbox(mined: tuple[SweGymEnvironment, dict[str, Task]]) -> None:
    """K44: one commit, no remote, no other ref, no network, and the tests as they were before the fix."""
    environment, tasks = mined
    task = tasks[ROW]

    async def work(pool: SandboxPool) -> None:
        async with pool.lease(environment.image(task), timeout_s=120) as sandbox:
            await environment.prepare(task, sandbox)
            for command, expected in (
                ("git rev-list --all --count", "1"),
                ("git for-each-ref --format='%(refname)'", "refs/heads/main"),
                ("git remote; git stash list; git reflog --all | grep -v base", ""),
                ("git fsck --unreachable --no-reflogs 2>/dev/null", ""),
                ("git status --porcelain", ""),
                ("git log --format=%s", "base"),
            ):
                result = await sandbox.run(command, timeout_s=30)
                assert result.output.strip() == expected, command
            added = next(line[1:] for line in task.data["test_patch"].splitlines() if line.startswith("+    "))
            found = await sandbox.run("cat > /tmp/line; grep -rFxf /tmp/line .", timeout_s=30, stdin=added.encode())
            assert found.output == ""

    with_pool(work)


async def play(sandbox: Sandbox, environment: SweGymEnvironment, task: Task, rng: random.Random) -> list[str]:
    """The perfect expert in a real sandbox; its observations, compact as the small policy sees them."""
    await environment.prepare(task, sandbox)
    turns = GeneratedExpert().turns(task, rng=rng, profile="perfect")
    observations: list[str] = []
    call: ToolCall = next(turns)
    while call.name != "submit":
        if call.name == "bash":
            text = (await sandbox.run(call.arguments["command"], timeout_s=60)).output.rstrip("\n")
        else:
            arguments = {key: value for key, value in call.arguments.items() if key != "path"}
            path = f"{sandbox.workdir}/{call.arguments['path']}"
            result = await sandbox.edit(call.name, path=path, timeout_s=60, **arguments)  # type: ignore[arg-type]
            assert result.ok, result.text
            text = (result.content or "").rstrip("\n") if call.name == "view" else "Edited."
        observations.append(text)
        call = turns.send(text)
    return observations


def test_attacks_on_the_settings_family_earn_nothing() -> None:
    """K45: code that answers in the settings file's place, a reader that is changed, a module that stands in for the
    standard library's."""
    environment = SweGymEnvironment({"families": ["settings"]})

    async def work(pool: SandboxPool) -> None:
        for task in environment.tasks(Split.FRESH, start=0, count=4):
            files, file = task.data["files"], task.data["file"]
            module, copy = file.split(".")[0] + ".py", f"honest_{file}"
            around = {
                **files,
                copy: task.data["solution"],
                module: files[module].replace(f"'{file}'", f"'{copy}'"),
            }
            mends = f"\n\nopen({file!r}, 'w').write({task.data['solution']!r})\n"
            for name, after in {
                "another file": around,
                "json": {**around, "json.py": "load = loads = lambda *_, **__: None\n"},
                "nothing": {**files, module: files[module] + "\n"},
                "mends as it is imported": {**files, module: files[module] + mends},
                "gone": {path: text for path, text in files.items() if path != file},
            }.items():
                found = await grade(pool, environment, task, make_patch(files, after))
                assert found.reward == 0.0, name
            mended = {**files, file: task.data["solution"]}
            assert (await grade(pool, environment, task, make_patch(files, mended))).reward == 1.0

    with_pool(work)


def test_the_perfect_expert_solves_generated_tasks() -> None:
    """Twelve of each split, of both families in turn: grep, view, edit, tests, submit; each change collected and graded
    in a fresh sandbox."""
    environment = SweGymEnvironment({"families": ["functions", "settings"]})

    async def one(pool: SandboxPool, task: Task) -> None:
        async with pool.lease(environment.image(task), timeout_s=120) as sandbox:
            found = await play(sandbox, environment, task, random.Random(0))
            patch = await environment.collect(task, sandbox)
        grep, view, edited, tests = found
        assert task.data["search"] in grep
        assert task.data["file"] in grep
        assert view == task.data["files"][task.data["file"]].rstrip("\n")
        assert (edited, tests) == ("Edited.", ".")
        assert patch == environment.reference_patch(task)
        graded = await grade(pool, environment, task, patch)
        assert graded.reward == 1.0, graded.log
        assert (await grade(pool, environment, task, "")).reward == 0.0

    async def work(pool: SandboxPool) -> None:
        for split in Split:
            for task in environment.tasks(split, start=0, count=12):
                await one(pool, task)

    with_pool(work)

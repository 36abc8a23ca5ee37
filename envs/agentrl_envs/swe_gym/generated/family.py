"""Generated tasks as an environment's family: prompts, work trees, patches and grading without a git
repository.

Grading is what a training step does most, so it takes two sandbox calls: the work tree with the candidate's
change and the hidden tests goes in as one tar, and one pytest session runs in the resident runner.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Mapping, Sequence

import msgspec

from agentrl.errors import CommandTimeoutError, DatasetError, GradingTimeoutError
from agentrl.trajectory import Split
from agentrl.wire import ChatMessage, Grade, Sandbox, Task
from agentrl_envs.swe_gym.archives import entering, pack
from agentrl_envs.swe_gym.diffs import apply_exact, make_patch
from agentrl_envs.swe_gym.generated.expert import GeneratedExpert
from agentrl_envs.swe_gym.generated.problem import HIDDEN_TEST, GeneratedTask
from agentrl_envs.swe_gym.generated.tasks import FAMILIES, make_task
from agentrl_envs.swe_gym.grade_program import SECTION_FILES, is_configuration, pytest_settings
from agentrl_envs.swe_gym.grading import run_grade_program
from agentrl_envs.swe_gym.prompts import short_prompt
from agentrl_envs.swe_gym.verdict import judge

# A task of the first family was there before there were others, and its id does not name it.
_ID_WORDS = {family: "generated" if family == "functions" else family for family in FAMILIES}
_TASK_ID = re.compile(rf"({'|'.join(_ID_WORDS.values())})-({'|'.join(split.value for split in Split)})-(\d{{1,12}})")
_SEED_STRIDE = 50_000
_TEST_TIMEOUT_S = 60.0
_COLLECT_TIMEOUT_S = 60.0
_COLLECT_LIMIT_BYTES = 11 * 1024 * 1024  # the most that a sandbox's server reads at once
_COLLECTED = "/tmp/.agentrl-collect.tar"
_TAR = f"tar -cf {_COLLECTED} --exclude=__pycache__ --exclude=.pytest_cache --exclude=.git ."
# What the agent made unreadable is made readable, where tar stumbles over it.
_COLLECT = f"rm -rf {_COLLECTED}; {_TAR} || {{ chmod -R u+rwX .; {_TAR}; }}"
_TAR_FILE_CHANGED = 1  # exit code of an archive that is whole, of a tree in which a process still writes
# Only the status of each test counts, and the hidden tests are plain functions: no rewriting of assertions, no
# output to read, and none of the plugins that plain functions do not need (a fifth of a session's CPU time).
_UNUSED_PLUGINS = (
    *("doctest", "faulthandler", "junitxml", "legacypath", "logging", "monkeypatch", "pastebin", "recwarn"),
    *("setuponly", "setupplan", "stepwise", "threadexception", "tmpdir", "unittest", "unraisableexception", "warnings"),
)
_TEST_ARGUMENTS = (
    *("--assert=plain", "--tb=no", "--color=no"),
    *(argument for plugin in _UNUSED_PLUGINS for argument in ("-p", f"no:{plugin}")),
    HIDDEN_TEST,
)
_TEST_ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


class GeneratedFamily:
    """Tasks made from seeds; nothing is read from disk. Tasks of several `families` alternate."""

    grade_unsubmitted = False

    def __init__(self, *, environment: str, image: str, families: Sequence[str]) -> None:
        self._environment = environment
        self._image = image
        self._families = tuple(families)
        self.expert = GeneratedExpert()

    def tasks(self, split: Split, *, start: int, count: int, seed: int) -> list[Task]:
        """Endless in every split. Seeds of different `seed` arguments are 50,000 apart."""
        numbers = range(seed * _SEED_STRIDE + start, seed * _SEED_STRIDE + start + count)
        return [self._task(self._families[number % len(self._families)], split, number) for number in numbers]

    def find(self, task_id: str) -> Task:
        """The task `generated-<split>-<number>` or `settings-<split>-<number>`, whatever the families. Raises
        `DatasetError` for another id."""
        found = _TASK_ID.fullmatch(task_id)
        if found is None:
            splits = ", ".join(split.value for split in Split)
            raise DatasetError(
                f"there is no task {task_id!r}",
                where="environment (swe-gym), dataset `generated`",
                remedy=f"write {' or '.join(f'{word}-SPLIT-NUMBER' for word in _ID_WORDS.values())}, as in "
                f"generated-fresh-0; splits are {splits}",
            )
        family = next(family for family, word in _ID_WORDS.items() if word == found[1])
        return self._task(family, Split(found[2]), int(found[3]))

    def every(self) -> None:
        """There is no end of generated tasks."""
        return

    def _task(self, family: str, split: Split, number: int) -> Task:
        data = msgspec.to_builtins(make_task(number, split, family=family))
        name = f"{_ID_WORDS[family]}-{split.value}-{number}"
        return Task(id=name, environment=self._environment, split=split, data=data)

    def tool_names(self, task: Task) -> tuple[str, ...]:
        return ("bash", "view", "str_replace", "submit")

    def prompt(self, task: Task) -> list[ChatMessage]:
        return short_prompt(_content(task).issue)

    def image(self, task: Task) -> str:
        return self._image

    async def prepare(self, task: Task, sandbox: Sandbox) -> None:
        await sandbox.unpack(pack(_content(task).files))

    async def collect(self, task: Task, sandbox: Sandbox) -> str:
        """A diff of every regular text file against the task's; caches of the interpreter and of pytest are
        left out.

        A tree too large to be read, or that cannot be read at all, is an empty patch: the agent made it so.
        Raises `CommandTimeoutError` where collecting does not end.
        """
        result = await sandbox.run(entering(sandbox.workdir) + _COLLECT, timeout_s=_COLLECT_TIMEOUT_S, cwd="/")
        if result.timed_out:
            raise CommandTimeoutError(
                f"the work tree was not collected within {_COLLECT_TIMEOUT_S:.0f} s",
                where=f"task {task.id}, {sandbox.id}",
            )
        archive = await sandbox.read_file(_COLLECTED, limit_bytes=_COLLECT_LIMIT_BYTES)
        if result.exit_code not in (0, _TAR_FILE_CHANGED) or archive is None or len(archive) >= _COLLECT_LIMIT_BYTES:
            return ""
        try:
            files, left_out = _unpack_text(archive)
        except (tarfile.TarError, ValueError):  # not what tar wrote: the agent's processes still live
            return ""
        noted = "".join(f"{what} file {path} is left out\n" for path, what in left_out)
        return noted + make_patch(_content(task).files, files)

    async def grade(self, task: Task, sandbox: Sandbox, patch: str) -> Grade:
        content = _content(task)
        how = await self._lay_out(content, task, sandbox, patch)
        if how is None:
            return Grade(reward=0.0, resolved=False, log="the patch does not apply")
        report = await sandbox.run_tests(_TEST_ARGUMENTS, timeout_s=_TEST_TIMEOUT_S, canary=True, env=_TEST_ENVIRONMENT)
        if report.timed_out:
            raise GradingTimeoutError(
                f"the hidden tests did not end within {_TEST_TIMEOUT_S:.0f} s",
                where=f"task {task.id}, {sandbox.id}",
            )
        verdict = judge(report, fail_to_pass=list(content.fail_to_pass), pass_to_pass=list(content.pass_to_pass))
        asserted = {**content.fail_to_pass, **content.pass_to_pass}
        shown = [f"{status}: {asserted[test]}" for test, status in verdict.tests.items() if status != "passed"]
        log = "\n".join([how, *verdict.log, *shown])
        return Grade(
            reward=float(verdict.resolved),
            resolved=verdict.resolved,
            log=log,
            tests=verdict.tests,
            output=report.output,
        )

    async def _lay_out(self, content: GeneratedTask, task: Task, sandbox: Sandbox, patch: str) -> str | None:
        """The tree to be tested, in the sandbox; how the patch went on, or None where it did not."""
        visible = {
            path: text for path, text in content.files.items() if path != content.file and path.startswith("test_")
        }
        tests = {**visible, HIDDEN_TEST: content.hidden_test}
        changed = apply_exact(content.files, patch) if patch.strip() else dict(content.files)
        if changed is not None:
            await sandbox.unpack(pack(_without_shadowed({**_neutral(content.files, changed), **tests})))
            return "patch applied exactly"
        await sandbox.unpack(pack(content.files))
        result = await run_grade_program(sandbox, where=f"task {task.id}", patch=patch, test_files=tests)
        return f"patch applied by {result.applied}" if result.applied else None

    def reference_patch(self, task: Task) -> str:
        content = _content(task)
        return make_patch(content.files, {**content.files, content.file: content.solution})

    def hint(self, task: Task) -> str:
        """File, wrong lines and right ones: shorter than the patch, for a small window."""
        content = _content(task)
        changed = [(bad, good) for bad, good in zip(content.bad, content.good, strict=True) if bad != good]
        lines = [line for bad, good in changed for line in (f"-{bad}", *(f"+{new}" for new in good.split("\n")))]
        return "\n".join([f"Fix in {content.file}:", *lines])


def _content(task: Task) -> GeneratedTask:
    return msgspec.convert(task.data, GeneratedTask)


def _neutral(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """`after` with what steers a test session as it was `before`."""
    files = dict(after)
    for path in {*before, *after}:
        name = path.rsplit("/", 1)[-1]
        steers = is_configuration(path) or (
            name in SECTION_FILES and pytest_settings(name, before.get(path)) != pytest_settings(name, after.get(path))
        )
        if steers and path in before:
            files[path] = before[path]
        elif steers:
            files.pop(path, None)
    return files


def _without_shadowed(files: Mapping[str, str]) -> dict[str, str]:
    """`files` without those under a path that is itself a file: a folder that the candidate put in a test's
    place."""

    def shadowed(path: str) -> bool:
        parts = path.split("/")
        return any("/".join(parts[:depth]) in files for depth in range(1, len(parts)))

    return {path: text for path, text in files.items() if not shadowed(path)}


def _unpack_text(archive: bytes) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """(path → text, what is left out) of the regular files in a tar made inside a sandbox.

    Left out, as (printable path, why), are files that are no UTF-8 or whose name is none. Raises
    `tarfile.TarError` or `ValueError` for an archive that is not whole.
    """
    files: dict[str, str] = {}
    left_out: list[tuple[str, str]] = []
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:", encoding="utf-8", errors="surrogateescape") as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isreg() else None
            if stream is None:
                continue
            path = member.name.removeprefix("./")
            printable = ascii(path.encode("utf-8", "surrogateescape"))[2:-1]
            try:
                path.encode()
                files[path] = stream.read().decode()
            except UnicodeEncodeError:
                left_out.append((printable, "Oddly named"))
            except UnicodeDecodeError:
                left_out.append((printable, "Binary"))
    return files, sorted(left_out)

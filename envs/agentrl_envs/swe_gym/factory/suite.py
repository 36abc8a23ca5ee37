"""A repository's tests as they are before anything is broken: what passes every time, how long it takes, what reaches
which function."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.errors import DatasetError
from agentrl.wire import InjectRequest, Sandbox, TestReport
from agentrl_envs.swe_gym.factory.commits import LeftOut
from agentrl_envs.swe_gym.factory.coverage import Coverage, Reach, traced_run
from agentrl_envs.swe_gym.factory.git import SUBMODULE, SYMLINK, Entry
from agentrl_envs.swe_gym.factory.hiding import name_parts
from agentrl_envs.swe_gym.factory.paths import is_product, is_test_module, is_utf8
from agentrl_envs.swe_gym.factory.sessions import RECIPE_REMEDY, Bench, distrust, file_of, missing_requirement
from agentrl_envs.swe_gym.factory.workspace import Stated, Workspace, own_modules, packed, stated
from agentrl_envs.swe_gym.grading import PYTEST_OPTIONS

_TRACED_FACTOR, _TRACED_MORE_S = 15.0, 60.0
_SHORT_S = 0.3  # test files that end within this are run whole, longer ones by the tests that reach the change
_ALL_FILES_S = 20.0  # a suite that ends within this is run with every file that reaches the change
_MOST_FILES, _MOST_ARGUMENTS = 6, 300


@dataclass(frozen=True, slots=True)
class Selection:
    """What is run for one changed function. `files` are what grading will run; `arguments` what is run on the broken
    tree: the files, or the tests in them that reach the function. `reached`: those tests; None: all."""

    files: tuple[str, ...]
    arguments: tuple[str, ...]
    reached: frozenset[str] | None


@dataclass(slots=True)
class Suite:
    """`runs`: statuses of whole runs. `sources` and `tests`: contents by path. `by_files` are further runs, of chosen
    files alone."""

    commit: str
    tree: str
    archive: bytes
    says: Stated
    sources: Mapping[str, bytes]
    tests: Mapping[str, bytes]
    runs: Sequence[Mapping[str, str]]
    seconds: float
    coverage: Coverage | None
    by_files: dict[tuple[str, ...], asyncio.Task[TestReport]] = field(default_factory=dict)

    @property
    def good(self) -> frozenset[str]:
        """Tests that passed in every whole run."""
        return frozenset(t for t in self.runs[0] if "::" in t and all(run.get(t) == "passed" for run in self.runs))

    def select(self, path: str, first_line: int, last_line: int) -> Selection | None:
        """What to run for a change of the function in these lines; None where no test that passes reaches it."""
        good = self.good
        if self.coverage is None:
            reach = Reach(good, is_whole=True)
        else:
            reach = self.coverage.reach(path, first_line, last_line)
        tests = reach.tests & good
        counts = Counter(map(file_of, tests))
        files = tuple(sorted(counts))
        if self.seconds <= _ALL_FILES_S:
            if reach.is_whole:
                files = tuple(sorted({file_of(test) for test in good}))
        elif len(files) > _MOST_FILES:
            files = tuple(sorted(path for path, _ in counts.most_common(_MOST_FILES)))
        if not files:
            return None
        arguments = sorted({"::".join([file_of(t), *name_parts(t)]) for t in tests if file_of(t) in files})
        if reach.is_whole or len(arguments) > _MOST_ARGUMENTS:
            return Selection(files, files, None)
        return Selection(files, tuple(arguments), tests)


async def run_suite(space: Workspace, bench: Bench, request: InjectRequest) -> Suite:
    """Run every test file twice, and once under the tracer. Raises `DatasetError` where no test passes."""
    repository = space.repository
    commit = await asyncio.to_thread(repository.resolve, request.commit)
    tree = await asyncio.to_thread(repository.tree, commit)
    entries = await asyncio.to_thread(repository.entries, tree)
    archive = await asyncio.to_thread(packed, repository, tree)
    where = f"{request.repository}, commit {commit[:10]}"
    if isinstance(archive, LeftOut):
        raise DatasetError(f"{archive.reason}: {archive.detail}", where=where, remedy="choose another repository")
    plain = [entry for entry in entries if entry.mode not in (SYMLINK, SUBMODULE) and is_utf8(entry.path)]
    tests = _contents(space, [entry for entry in plain if is_test_module(entry.path)])
    sources = _contents(space, [entry for entry in plain if is_product(entry.path)])
    if not tests or not sources:
        what = "test file" if not tests else "Python source"
        raise DatasetError(f"there is no {what} in the tree", where=where, remedy="choose another repository")
    files = sorted(tests)
    says = await asyncio.to_thread(stated, space, request, commit, entries)

    async def whole(sandbox: Sandbox) -> TestReport:
        await sandbox.unpack(archive)
        return await run_files(sandbox, request, files, canary=True)

    async def traced(sandbox: Sandbox) -> Coverage | None:
        allowance = _TRACED_MORE_S + _TRACED_FACTOR * reports[0].duration_s
        return await traced_run(sandbox, archive, sources=sources, files=files, timeout_s=allowance)

    space.tell(f"{len(files)} test files, {len(sources)} source files at {commit[:10]}")
    async with asyncio.TaskGroup() as group:
        jobs = [
            group.create_task(bench.use(whole, image=says.image, label=f"inject {commit[:10]}, suite"))
            for _ in range(2)
        ]
    reports = [job.result() for job in jobs]
    for report in reports:
        if doubt := distrust(report):
            raise DatasetError(
                f"the suite cannot be used: {doubt}", where=where, remedy="raise --timeout-s, or mend it"
            )
    coverage = await bench.use(traced, image=says.image, label=f"inject {commit[:10]}, tracing")
    suite = Suite(
        commit=commit,
        tree=tree,
        archive=archive,
        says=says,
        sources=sources,
        tests=tests,
        runs=[_within(report, files) for report in reports],
        seconds=max(report.duration_s for report in reports),
        coverage=coverage,
    )
    _check(space, suite, reports[0], own_modules(entries), where)
    return suite


def _contents(space: Workspace, entries: list[Entry]) -> dict[str, bytes]:
    contents = space.repository.blobs([entry.sha for entry in entries])
    return {entry.path: data for entry, data in zip(entries, contents, strict=True)}


def _within(report: TestReport, files: Sequence[str]) -> dict[str, str]:
    known = set(files)
    return {test: status for test, status in report.results.items() if file_of(test) in known}


def _check(space: Workspace, suite: Suite, report: TestReport, own: frozenset[str], where: str) -> None:
    lacks = missing_requirement(report, own)
    remedy = f"the tests need {lacks}: {RECIPE_REMEDY}" if lacks else ""
    if not suite.good:
        what = "no test passes" if report.results else "no tests found"
        if report.results and not any(suite.runs):
            what = "test ids do not begin with their file: pytest needs a configuration at the repository's top"
        last = " | ".join(report.output.strip().splitlines()[-3:])[:300]
        raise DatasetError(f"{what} ({last})", where=where, remedy=remedy or "mend the suite first")
    if remedy:
        space.note(remedy)
    if suite.coverage is None:
        space.note("the tests could not be traced: every function is tried against the whole suite")
    both = [frozenset(test for test, status in run.items() if status == "passed") for run in suite.runs]
    space.tell(
        f"{len(suite.good)} tests pass twice in {suite.seconds:.1f} s, {len(both[0] ^ both[1])} are unstable, "
        f"{len(suite.runs[0]) - len(both[0])} do not pass"
    )


async def run_files(
    sandbox: Sandbox, request: InjectRequest, arguments: Sequence[str], *, canary: bool, timeout_s: float | None = None
) -> TestReport:
    """One session over files or tests in the tree that the sandbox holds."""
    return await sandbox.run_tests(
        [*PYTEST_OPTIONS, "--continue-on-collection-errors", *arguments],
        timeout_s=timeout_s or request.timeout_s,
        canary=canary,
        test_timeout_s=request.test_timeout_s,
        cwd=sandbox.workdir,
    )


async def run_unbroken(bench: Bench, request: InjectRequest, suite: Suite, files: tuple[str, ...]) -> TestReport:
    """The third run of the good tree, of the files that grading would run; one for all who ask for the same files."""

    async def work(sandbox: Sandbox) -> TestReport:
        await sandbox.unpack(suite.archive)
        return await run_files(sandbox, request, files, canary=True)

    if files not in suite.by_files:
        suite.by_files[files] = asyncio.create_task(
            bench.use(work, image=suite.says.image, label=f"inject {suite.commit[:10]}, files")
        )
    return await asyncio.shield(suite.by_files[files])


def is_short(report: TestReport) -> bool:
    """True where running the files whole costs little."""
    return report.duration_s <= _SHORT_S

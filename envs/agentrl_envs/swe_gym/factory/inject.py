"""Tasks from broken source: one small bug each, that at least one test catches and most do not."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from agentrl.errors import SandboxError
from agentrl.wire import FactoryReport, InjectRequest, Sandbox, SandboxPool, TestReport
from agentrl_envs.swe_gym.factory.commits import LeftOut
from agentrl_envs.swe_gym.factory.hiding import without_tests
from agentrl_envs.swe_gym.factory.in_order import in_order
from agentrl_envs.swe_gym.factory.mutations import Mutation, mutations
from agentrl_envs.swe_gym.factory.sessions import SANDBOX_FAILED, Bench, Outcome, compare, distrust, file_of
from agentrl_envs.swe_gym.factory.source import Source, UnreadableSource
from agentrl_envs.swe_gym.factory.statements import failures, write_statement
from agentrl_envs.swe_gym.factory.suite import Selection, Suite, is_short, run_files, run_suite, run_unbroken
from agentrl_envs.swe_gym.factory.workspace import Workspace, open_workspace

RUNS = 3
_MOST_BROKEN, _MOST_FAILING = 0.3, 50
_BROKEN_FACTOR, _BROKEN_MORE_S = 3.0, 5.0
_TOLD_EVERY = 50
_MUTATION = re.compile(r"(.+) at (.+):(\d+) in (\S+)")


@dataclass(frozen=True, slots=True)
class Bug:
    """A mutation of one file, and what names it."""

    key: str
    path: str
    mutation: Mutation
    line: int

    @property
    def place(self) -> tuple[str, str]:
        """(path, function)."""
        return self.path, self.mutation.function

    def __str__(self) -> str:
        return f"{self.mutation.kind} at {self.path}:{self.line} in {self.mutation.function}"


@dataclass(frozen=True, slots=True)
class Caught:
    """What the runs of a bug showed. `output`: what the first run on the broken tree printed."""

    outcome: Outcome
    files: tuple[str, ...]
    output: str
    before_s: float
    after_s: float


async def inject(request: InjectRequest, *, pool: SandboxPool, tell: Callable[[str], None]) -> FactoryReport:
    """`TaskFactory.inject`."""
    async with open_workspace(request, source="injected", tell=tell) as space:
        taken = Taken(request, space.output.rows)
        if taken.is_full:
            return space.report()
        bench = Bench(pool)
        suite = await run_suite(space, bench, request)
        bugs = await asyncio.to_thread(lambda: list(ordered(suite, request.seed)))
        tell(f"{len(bugs)} mutations in {len({bug.place for bug in bugs})} functions that tests reach")

        async def work(bug: Bug) -> Caught | LeftOut:
            try:
                return await _try(bench, request, suite, bug)
            except SandboxError as error:
                return bench.excuse(error)

        try:
            async with aclosing(in_order(_untried(space, taken, bugs), work, jobs=request.jobs)) as results:
                async for bug, result in results:
                    await _take(space, request, suite, taken, bug, result)
                    if taken.is_full:
                        break
        finally:
            for task in suite.by_files.values():
                task.cancel()
            await asyncio.gather(*suite.by_files.values(), return_exceptions=True)
        return space.report()


class Taken:
    """How many rows there are, in all and by function and file."""

    def __init__(self, request: InjectRequest, rows: list[Mapping[str, Any]]) -> None:
        self._request = request
        self._rows = 0
        self._functions: Counter[tuple[str, str]] = Counter()
        self._files: Counter[str] = Counter()
        for row in rows:
            if found := _MUTATION.fullmatch(str(row.get("x_mutation"))):
                self.add((found[2], found[4]))

    def add(self, place: tuple[str, str]) -> None:
        """One more row breaks this function of this file."""
        self._rows += 1
        self._functions[place] += 1
        self._files[place[0]] += 1

    @property
    def is_full(self) -> bool:
        return self._rows >= self._request.count

    def has_room(self, place: tuple[str, str]) -> bool:
        """False where function or file have their share."""
        most = self._request.per_file
        return self._functions[place] < self._request.per_function and (most is None or self._files[place[0]] < most)


def ordered(suite: Suite, seed: int) -> Iterator[Bug]:
    """Every mutation that a test may catch, kinds in turn, within a kind one of each function before a second one."""
    by_kind: dict[str, list[Bug]] = {}
    for path in sorted(suite.sources):
        lines = suite.coverage.lines.get(path, frozenset()) if suite.coverage is not None else None
        try:
            source = Source(suite.sources[path])
        except UnreadableSource:
            continue
        for mutation in mutations(source, lines=lines):
            line = source.data.count(b"\n", 0, mutation.start) + 1
            bug = Bug(mutation.key(commit=suite.commit, path=path), path, mutation, line)
            by_kind.setdefault(mutation.kind, []).append(bug)
    rng = random.Random(seed)
    queues = []
    for kind in sorted(by_kind):
        bugs = by_kind[kind]
        rng.shuffle(bugs)
        earlier: Counter[tuple[str, str]] = Counter()
        ranks = []
        for bug in bugs:
            ranks.append(earlier[bug.place])
            earlier[bug.place] += 1
        queues.append([bug for _, bug in sorted(zip(ranks, bugs, strict=True), key=lambda pair: pair[0])])
    rng.shuffle(queues)
    for turn in range(max(map(len, queues), default=0)):
        for queue in queues:
            if turn < len(queue):
                yield queue[turn]


async def _untried(space: Workspace, taken: Taken, bugs: list[Bug]) -> AsyncIterator[Bug]:
    for bug in bugs:
        if taken.is_full:
            return
        if taken.has_room(bug.place) and not space.output.is_decided(bug.key):
            yield bug


async def _take(
    space: Workspace,
    request: InjectRequest,
    suite: Suite,
    taken: Taken,
    bug: Bug,
    result: Caught | LeftOut,
) -> None:
    if not taken.has_room(bug.place):  # while it ran, its function got its share
        return
    space.looked_at += 1
    made = result if isinstance(result, LeftOut) else await asyncio.to_thread(_row, space, request, suite, bug, result)
    if isinstance(made, LeftOut):
        space.leave_out(made)
        if made.reason != SANDBOX_FAILED:
            space.output.reject(bug.key, made.reason, str(bug))
    else:
        row, commit = made
        space.output.accept(bug.key, row, commit)
        taken.add(bug.place)
        counts = f"{len(row['FAIL_TO_PASS'])} fail to pass, {len(row['PASS_TO_PASS'])} pass to pass"
        space.tell(f"{bug.key}  row {len(space.output.rows)}: {bug}: {counts}")
    if space.looked_at % _TOLD_EVERY == 0:
        space.tell(f"{space.looked_at} mutations tried, {len(space.output.rows)} rows")


async def _try(bench: Bench, request: InjectRequest, suite: Suite, bug: Bug) -> Caught | LeftOut:
    """Run the tests that reach the bug, three times where the first run catches it."""
    selection = suite.select(bug.path, bug.mutation.function_line, bug.mutation.function_end)
    if selection is None:
        return LeftOut("no passing test reaches it")
    unbroken = await run_unbroken(bench, request, suite, selection.files)
    if doubt := distrust(unbroken):
        return LeftOut(f"its test files alone: {doubt}")
    if is_short(unbroken):
        selection = Selection(selection.files, selection.files, None)
    good = suite.good & {test for test, status in unbroken.results.items() if status == "passed"}
    tests = frozenset(test for test in good if file_of(test) in selection.files)
    broken_file = bug.mutation.apply(suite.sources[bug.path])
    allowance = _BROKEN_FACTOR * unbroken.duration_s + _BROKEN_MORE_S

    # what fails beyond this is refused, so that the session need not go on
    arguments = [f"--maxfail={_most_failing(tests) + 1}", *selection.arguments]

    async def session(sandbox: Sandbox) -> TestReport:
        await sandbox.unpack(suite.archive)
        await sandbox.write_files({bug.path: broken_file})
        return await run_files(sandbox, request, arguments, canary=False, timeout_s=allowance)

    reports: list[TestReport] = []
    for _ in range(RUNS):
        report = await bench.use(session, image=suite.says.image, label=f"inject {bug.key}")
        reports.append(report)
        if reason := _fault(report, unbroken, request):
            return reason
        if not reports[1:] and (reason := _unfit(report, selection, tests)):
            return reason
    return _together(suite, selection, tests, reports, unbroken)


def _fault(report: TestReport, unbroken: TestReport, request: InjectRequest) -> LeftOut | None:
    """Why a broken tree's session makes no task."""
    if report.timed_out or report.duration_s >= unbroken.duration_s + request.test_timeout_s:
        return LeftOut("tests hang")
    return LeftOut("session ends early") if report.exit_code not in (0, 1) else None


def _unfit(report: TestReport, selection: Selection, tests: frozenset[str]) -> LeftOut | None:
    """After the first run: why the bug is none to fix; None where it may be."""
    ran = tests if selection.reached is None else tests & selection.reached
    failing = {test for test in ran if report.results.get(test) != "passed"}
    if not failing:
        return LeftOut("no test catches it")
    return LeftOut("too many tests fail") if len(failing) > _most_failing(tests) else None


def _most_failing(tests: frozenset[str]) -> int:
    """How many tests a bug may break."""
    return min(_MOST_FAILING, max(1, int(_MOST_BROKEN * len(tests))))


def _together(
    suite: Suite, selection: Selection, tests: frozenset[str], reports: list[TestReport], unbroken: TestReport
) -> Caught | LeftOut:
    """A test that was not run on the broken tree never calls what is broken, so it stands as it was."""
    untouched = {} if selection.reached is None else dict.fromkeys(tests - selection.reached, "passed")
    before = [{**untouched, **{t: s for t, s in report.results.items() if t in tests}} for report in reports]
    after = [{t: run.get(t, "missing") for t in tests} for run in (*suite.runs, unbroken.results)]
    outcome = compare(before, after)
    if not outcome.fail_to_pass:
        return LeftOut("unstable: no test fails in every run")
    if not outcome.pass_to_pass:
        return LeftOut("too many tests fail")
    return Caught(
        outcome=outcome,
        files=selection.files,
        output=reports[0].output,
        before_s=max(report.duration_s for report in reports),
        after_s=unbroken.duration_s,
    )


def _row(
    space: Workspace, request: InjectRequest, suite: Suite, bug: Bug, caught: Caught
) -> tuple[dict[str, Any], str] | LeftOut:
    """(the row, the commit of the broken tree), or why there is none."""
    hidden = without_tests(suite.tests, caught.outcome.fail_to_pass if request.hide_tests else ())
    if hidden is None:
        return LeftOut("failing test cannot be hidden")
    repository = space.repository
    source = suite.sources[bug.path]
    files = {bug.path: bug.mutation.apply(source), **hidden}
    tree = repository.tree_with(suite.tree, files, scratch=space.scratch)
    try:
        patch = repository.diff(tree, suite.tree, [bug.path]).decode()
        test_patch = repository.diff(tree, suite.tree, sorted(hidden)).decode() if hidden else ""
    except UnicodeDecodeError:
        return LeftOut("text that is no UTF-8")
    statement = write_statement(
        failures(caught.output, caught.outcome.fail_to_pass),
        caught.outcome.fail_to_pass,
        dict(suite.tests),
        secrets=secret_lines(source, bug.mutation),
        key=bug.key,
    )
    commit = repository.commit_alone(tree)
    name = space.output.instance_id(bug.key)
    row = {
        "instance_id": name,
        "repo": space.name,
        "base_commit": commit,
        "patch": patch,
        "test_patch": test_patch,
        "problem_statement": statement,
        "hints_text": "",
        "created_at": repository.message(suite.commit)[0],
        "version": suite.says.version,
        "FAIL_TO_PASS": list(caught.outcome.fail_to_pass),
        "PASS_TO_PASS": list(caught.outcome.pass_to_pass),
        "environment_setup_commit": suite.commit,
        "image_name": suite.says.image,
        "x_source": "injected",
        "x_kind": "unstable_p2p" if caught.outcome.unstable else "good",
        "x_license": suite.says.licence,
        "x_fix_commit": suite.commit,
        "x_test_files": list(caught.files),
        "x_src_changed_lines": patch_lines(patch),
        "x_mutation": str(bug),
        "x_unstable": list(caught.outcome.unstable),
        "x_validated": {
            "runs": RUNS,
            "before": {"s": round(caught.before_s, 2)},
            "after": {"s": round(caught.after_s, 2)},
        },
        "x_tree": {"bundle": space.output.bundle.name, "ref": name, "tree_sha": tree},
    }
    return row, commit


def patch_lines(patch: str) -> int:
    """Lines added and taken away."""
    body = [line for line in patch.split("\n") if not line.startswith(("+++ ", "--- "))]
    return sum(line.startswith(("+", "-")) for line in body)


def secret_lines(data: bytes, mutation: Mutation) -> list[str]:
    """The lines that a mutation changes, as they were and as they are, blanks around them left out."""
    broken = mutation.apply(data)
    found = []
    for text, end in ((data, mutation.end), (broken, mutation.start + len(mutation.replacement))):
        start = text.rfind(b"\n", 0, mutation.start) + 1
        stop = text.find(b"\n", end)
        found += [line.strip() for line in text[start : stop if stop >= 0 else len(text)].decode().split("\n")]
    return [line for line in found if line]

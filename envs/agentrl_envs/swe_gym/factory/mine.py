"""Tasks from history: a commit that changes source and tests is one if its tests fail before and pass after it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ConfigError, DatasetError, SandboxError
from agentrl.wire import FactoryReport, MineRequest, Sandbox, SandboxPool, TestReport
from agentrl_envs.swe_gym.factory.commits import Candidate, LeftOut, choose
from agentrl_envs.swe_gym.factory.in_order import in_order
from agentrl_envs.swe_gym.factory.sessions import (
    RECIPE_REMEDY,
    SANDBOX_FAILED,
    Bench,
    Outcome,
    compare,
    distrust,
    failed,
    file_of,
    missing_requirement,
    passed,
)
from agentrl_envs.swe_gym.factory.workspace import (
    Stated,
    Workspace,
    open_workspace,
    own_modules,
    packed,
    printable,
    stated,
)
from agentrl_envs.swe_gym.grading import PYTEST_OPTIONS, grading_targets, run_grade_program
from agentrl_envs.swe_gym.rows import Row

RUNS = 3
_KEY = 10
_LOOKED_A_LINE = 200
_LACKS = "requirement missing"


@dataclass(frozen=True, slots=True)
class Validated:
    """What the runs of a candidate's tests showed. Seconds are the longest run's."""

    outcome: Outcome
    says: Stated
    files: tuple[str, ...]
    before_s: float
    after_s: float

    def hangs_before(self, test_timeout_s: float) -> bool:
        """Whether a test took its whole allowance before the fix."""
        return self.before_s >= test_timeout_s > self.after_s

    def kind(self, test_timeout_s: float) -> str:
        """The row's `x_kind`."""
        if self.hangs_before(test_timeout_s):
            return "hang_before_fix"
        if self.outcome.unstable:
            return "unstable_p2p"
        return "good" if self.outcome.pass_to_pass else "no_p2p"


async def mine(request: MineRequest, *, pool: SandboxPool, tell: Callable[[str], None]) -> FactoryReport:
    """`TaskFactory.mine`."""
    if request.message is not None:
        try:
            re.compile(request.message)
        except re.error as error:
            raise ConfigError(f"no regular expression: {error}", where="--message", remedy="mend it") from error
    async with open_workspace(request, source="mined", tell=tell) as space:
        bench = Bench(pool)
        candidates = _candidates(space, request)

        async def work(candidate: Candidate) -> Validated | LeftOut:
            try:
                return await _validate(space, bench, request, candidate)
            except DatasetError as error:  # its test patch does not apply
                return LeftOut("patches do not apply", error.what)
            except SandboxError as error:
                return bench.excuse(error)

        async with aclosing(in_order(candidates, work, jobs=request.jobs)) as results:
            async for candidate, result in results:
                await _take(space, request, candidate, result)
                if _is_full(space, request):
                    break
        return space.report()


def _is_full(space: Workspace, request: MineRequest) -> bool:
    return request.limit is not None and len(space.output.rows) >= request.limit


async def _candidates(space: Workspace, request: MineRequest) -> AsyncIterator[Candidate]:
    """Commits worth a sandbox, newest first; the others are counted."""
    start = await asyncio.to_thread(space.repository.resolve, request.commit)
    commits = await asyncio.to_thread(
        space.repository.commits,
        start,
        since=request.since,
        limit=request.max_commits,
        first_parent=request.first_parent,
    )
    if not commits:
        raise DatasetError("there is no commit to look at", where=request.repository, remedy="give an earlier --since")
    for commit in commits:
        if _is_full(space, request):
            return
        space.looked_at += 1
        if space.looked_at % _LOOKED_A_LINE == 0:
            space.tell(f"{space.looked_at} of {len(commits)} commits, {len(space.output.rows)} rows")
        if space.output.is_decided(commit.sha[:_KEY]):
            space.leave_out(LeftOut("decided earlier"))
            continue
        chosen = await asyncio.to_thread(choose, space.repository, commit, request)
        if isinstance(chosen, LeftOut):
            space.leave_out(chosen)
        else:
            yield chosen


async def _take(space: Workspace, request: MineRequest, candidate: Candidate, result: Validated | LeftOut) -> None:
    key = candidate.commit.sha[:_KEY]
    subject = printable(candidate.statement.split("\n")[0])
    if isinstance(result, LeftOut):
        space.leave_out(result)
        space.tell(f"{key}  left out: {result.reason}{f' ({printable(result.detail)})' if result.detail else ''}")
        if result.reason not in (SANDBOX_FAILED, _LACKS):  # which say nothing about the commit: a recipe may mend it
            space.output.reject(key, result.reason, result.detail)
        return
    row, commit = await asyncio.to_thread(_row, space, request, candidate, result)
    space.output.accept(key, row, commit)
    outcome = result.outcome
    counts = f"{len(outcome.fail_to_pass)} fail to pass, {len(outcome.pass_to_pass)} pass to pass"
    space.tell(f"{key}  row {len(space.output.rows)}: {row['x_kind']}, {counts}: {subject}")


async def _validate(space: Workspace, bench: Bench, request: MineRequest, candidate: Candidate) -> Validated | LeftOut:
    """Run the touched test files before and after the fix, three times each, every run in a fresh sandbox."""
    tree = await asyncio.to_thread(space.repository.tree, candidate.parent)
    archive = await asyncio.to_thread(packed, space.repository, tree)
    if isinstance(archive, LeftOut):
        return archive
    says = await asyncio.to_thread(_stated, space, request, candidate, tree)
    label = f"mine {candidate.commit.sha[:_KEY]}"

    async def session(patch: str, files: tuple[str, ...]) -> TestReport:
        async def work(sandbox: Sandbox) -> TestReport:
            return await _run(sandbox, request, candidate, archive, patch=patch, files=files)

        return await bench.use(work, image=says.image, label=label)

    first = await session(candidate.patch, candidate.test_files)
    if reason := _fault_after(space, candidate, first):
        return reason
    before = [await session("", candidate.test_files)]
    outcome = compare([before[0].results], [first.results])
    if not outcome.fail_to_pass:
        return LeftOut("tests pass before the fix")
    # the files that grading will run, so that it sees what was seen here
    files = tuple(sorted({file_of(test) for test in (*outcome.fail_to_pass, *outcome.pass_to_pass)}))
    if not set(files) <= set(candidate.test_files):
        return LeftOut("test ids do not begin with their file", files[0])
    after = [first]
    for _ in range(RUNS - 1):
        before.append(await session("", files))
        after.append(await session(candidate.patch, files))
    for report in after:
        if doubt := distrust(report):
            return LeftOut(f"after the fix: {doubt}")
    return _together(before, after, files, says)


def _stated(space: Workspace, request: MineRequest, candidate: Candidate, tree: str) -> Stated:
    return stated(space, request, candidate.parent, space.repository.entries(tree))


def _together(
    before: list[TestReport], after: list[TestReport], files: tuple[str, ...], says: Stated
) -> Validated | LeftOut:
    results = [[_within(report, files) for report in side] for side in (before, after)]
    outcome = compare(*results)
    if not outcome.fail_to_pass:
        return LeftOut("unstable: no test fails before and passes after in every run")
    return Validated(
        outcome=outcome,
        says=says,
        files=files,
        before_s=max(report.duration_s for report in before),
        after_s=max(report.duration_s for report in after),
    )


def _within(report: TestReport, files: tuple[str, ...]) -> dict[str, str]:
    return {test: status for test, status in report.results.items() if file_of(test) in files}


def _fault_after(space: Workspace, candidate: Candidate, report: TestReport) -> LeftOut | None:
    """Why the tests cannot judge even with the fix; None where some pass."""
    if passed(report):
        doubt = distrust(report)
        return LeftOut(f"after the fix: {doubt}") if doubt else None
    own = own_modules(space.repository.entries(candidate.commit.sha))
    if lacks := missing_requirement(report, own):
        space.note(f"the tests need {lacks}: {RECIPE_REMEDY}")
        return LeftOut(_LACKS, lacks)
    if report.timed_out:
        return LeftOut("after the fix: tests do not end")
    if not failed(report) and not report.results:
        return LeftOut("no tests found")
    return LeftOut("tests fail after the fix", report.output.strip()[-200:])


async def _run(
    sandbox: Sandbox,
    request: MineRequest,
    candidate: Candidate,
    archive: bytes,
    *,
    patch: str,
    files: tuple[str, ...],
) -> TestReport:
    """One session, the tree prepared as grading prepares it."""
    await sandbox.unpack(archive)
    draft = Row(
        instance_id=candidate.commit.sha[:_KEY],
        repo="",
        base_commit=candidate.parent,
        problem_statement=candidate.statement,
        patch=candidate.patch,
        test_patch=candidate.test_patch,
        fail_to_pass=files,
        pass_to_pass=(),
    )
    _, restored = grading_targets(draft)
    where = f"commit {candidate.commit.sha[:_KEY]}"
    done = await run_grade_program(
        sandbox, where=where, patch=patch, test_patch=candidate.test_patch, test_paths=restored
    )
    if done.applied is None:
        raise DatasetError("the fix does not apply", where=where)
    return await sandbox.run_tests(
        [*PYTEST_OPTIONS, *files],
        timeout_s=request.timeout_s,
        canary=True,
        test_timeout_s=request.test_timeout_s,
        cwd=sandbox.workdir,
    )


def _row(space: Workspace, request: MineRequest, candidate: Candidate, result: Validated) -> tuple[dict[str, Any], str]:
    """(the row, the commit that holds its tree and has no parents)."""
    sha, parent = candidate.commit.sha, candidate.parent
    name = space.output.instance_id(sha[:_KEY])
    tree = space.repository.tree(parent)
    row = {
        "instance_id": name,
        "repo": space.name,
        "base_commit": parent,
        "patch": candidate.patch,
        "test_patch": candidate.test_patch,
        "problem_statement": candidate.statement,
        "hints_text": "",
        "created_at": candidate.date,
        "version": result.says.version,
        "FAIL_TO_PASS": list(result.outcome.fail_to_pass),
        "PASS_TO_PASS": list(result.outcome.pass_to_pass),
        "environment_setup_commit": parent,
        "image_name": result.says.image,
        "x_source": "mined",
        "x_kind": result.kind(request.test_timeout_s),
        "x_license": result.says.licence,
        "x_fix_commit": sha,
        "x_test_files": list(result.files),
        "x_src_changed_lines": candidate.source_lines,
        "x_mutation": "",
        "x_unstable": list(result.outcome.unstable),
        "x_validated": {
            "runs": RUNS,
            # such a run says how long somebody waited: grading takes its allowance from the other one
            "before": {"s": round(result.before_s, 2), "timeout": result.hangs_before(request.test_timeout_s)},
            "after": {"s": round(result.after_s, 2)},
        },
        "x_tree": {"bundle": space.output.bundle.name, "ref": name, "tree_sha": tree},
    }
    return row, space.repository.commit_alone(tree)

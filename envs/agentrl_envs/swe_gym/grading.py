"""Grading of real rows: the program that prepares a tree for its tests, the run of the named tests, the
verdict."""

from __future__ import annotations

import functools
import importlib.resources
import json
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from agentrl.errors import DatasetError, GradingTimeoutError, SetupFailedError
from agentrl.wire import Grade, Sandbox, TestReport
from agentrl_envs.swe_gym.junit import parse_junit
from agentrl_envs.swe_gym.must_fail import MustFail, Twin
from agentrl_envs.swe_gym.plans import Command, Plan, plan_of
from agentrl_envs.swe_gym.plans import grading_targets as grading_targets
from agentrl_envs.swe_gym.rows import Row
from agentrl_envs.swe_gym.verdict import BAD, Verdict, judge, judge_log, judge_results

_PROGRAM_TIMEOUT_S = 120.0
_OUTPUT_TAIL_CHARS = 3000
_OUTPUT_LIMIT_BYTES = 2_000_000  # the most that a sandbox's server keeps of a command's output
_KEPT_OUTPUT_CHARS = 200_000
_JUNIT_LIMIT_BYTES = 8_000_000
# The later of two equal options counts: a configuration that stops at the first failure would stop at a test that must
# fail.
PYTEST_OPTIONS = ("-q", "--tb=short", "--color=no", "-p", "no:cacheprovider", "--maxfail=0")
_NO_USER_SITE = {"PYTHONNOUSERSITE": "1"}
_BOOT = (
    "import json, sys; d = json.load(sys.stdin); n = {'__name__': 'grade_program'}; exec(d['program'], n); "
    "print(); print(json.dumps(n['main'](d['payload'])))"
)


@dataclass(frozen=True, slots=True)
class TestLimits:
    """Seconds: `session_s` bounds the run of a row's tests, `test_s` a single test, which then fails."""

    session_s: float
    test_s: float


class Preparation(msgspec.Struct, frozen=True, kw_only=True):
    """What `grade_program.main` answers. `applied` is None where the candidate's patch fits in no way."""

    applied: str | None
    attempts: list[str]
    undone: list[str]
    test_error: str
    appended: list[str]
    twins: list[str]
    present: list[str]


@functools.cache
def _program() -> str:
    return importlib.resources.files("agentrl_envs.swe_gym").joinpath("grade_program.py").read_text(encoding="utf-8")


async def run_grade_program(
    sandbox: Sandbox,
    *,
    where: str,
    patch: str,
    test_patch: str = "",
    test_paths: Sequence[str] = (),
    test_files: Mapping[str, str] | None = None,
    files: Sequence[str] = (),
    appended: Sequence[MustFail] = (),
    twins: Sequence[Twin] = (),
) -> Preparation:
    """Apply `patch` and put tests and configuration in order, in the work tree of a fresh, prepared sandbox.

    `files` are those that the tests are in; `appended` and `twins` go to the end of some. Raises `SetupFailedError`
    where the program itself fails, `DatasetError` where the row's test patch does not apply.
    """
    payload = {
        "patch": patch,
        "test_patch": test_patch,
        "test_paths": list(test_paths),
        "test_files": test_files or {},
        "files": list(files),
        "appended": [msgspec.to_builtins(each) for each in appended],
        "twins": [msgspec.to_builtins(each) for each in twins],
    }
    request = json.dumps({"program": _program(), "payload": payload}).encode()
    command = f"exec python3 -I -c {shlex.quote(_BOOT)}"
    result = await sandbox.run(command, timeout_s=_PROGRAM_TIMEOUT_S, cwd=sandbox.workdir, stdin=request)
    place = f"{where}, sandbox {sandbox.id}"
    if result.timed_out:
        raise GradingTimeoutError(f"applying the patch took over {_PROGRAM_TIMEOUT_S:.0f} s", where=place)
    if result.exit_code != 0:
        raise SetupFailedError(f"the tree could not be prepared for grading: {result.output[-800:]}", where=place)
    try:
        done = msgspec.json.decode(result.output.strip().rsplit("\n", 1)[-1], type=Preparation)
    except msgspec.DecodeError as error:
        raise SetupFailedError(f"the grading program gave no report: {result.output[-800:]}", where=place) from error
    if done.test_error:
        raise DatasetError(
            f"the test patch does not apply: {done.test_error.strip()}",
            where=f"{where}, field test_patch",
            remedy="check that base_commit, tree and test_patch belong together, or leave the row out",
        )
    return done


async def grade_row(
    row: Row, sandbox: Sandbox, patch: str, *, limits: TestLimits, renew: Callable[[], Awaitable[None]]
) -> Grade:
    """Grade `patch` in a fresh sandbox that holds the row's tree; `renew` puts that tree there again.

    A skip or an expected failure of a named test, the absence of a test that must fail, and a copy of a test that did
    not fail, count only where the row's own fix gives the same in the same sandbox: else any package could skip its
    tests. So does the failure of another
    test of the same files where the run was so long that a test may have hung: in the harness, which has no limit for a
    single test, nothing of such a run counts.
    """
    plan = plan_of(row)
    session = await _session(row, sandbox, patch, plan, limits)
    if session.verdict is None:
        return Grade(reward=0.0, resolved=False, log="\n".join(session.log))
    verdict, log = session.verdict, list(session.verdict.log)
    resolved = verdict.resolved
    if resolved and (verdict.unproved or session.hung) and patch != row.patch:
        await renew()
        proof = await _session(row, sandbox, row.patch, plan, limits)
        differing = _differing(verdict, proof.verdict)
        differing += [(test, "failed") for test in session.hung if test not in proof.failed]
        if differing:
            resolved = False
            log[0] = f"not {log[0]}"
        log += [f"rejected: {test} {said}, and otherwise under the reference patch" for test, said in differing]
    log = [*session.log, *log]
    if not resolved:
        log += ["output of the tests, its end:", session.output[-_OUTPUT_TAIL_CHARS:]]
    return Grade(
        reward=float(resolved), resolved=resolved, log="\n".join(log), tests=verdict.tests, output=session.output
    )


def _differing(verdict: Verdict, proof: Verdict | None) -> list[tuple[str, str]]:
    """(test, what it did) of those unproved that the reference patch ends otherwise."""
    said = {test: verdict.tests.get(test, "did not fail") for test in verdict.unproved}
    if proof is None:
        return list(said.items())
    not_failed = {test for test in proof.unproved if test not in proof.tests}
    return [
        (test, status)
        for test, status in said.items()
        if (test not in not_failed if test not in verdict.tests else status != proof.tests[test])
    ]


@dataclass(frozen=True, slots=True)
class _Session:
    """One run of a row's tests. `verdict` is None where the patch did not go on. `failed`: tests that nobody named;
    `hung`: the same where one of them may have been stopped by its limit."""

    verdict: Verdict | None
    log: list[str]
    output: str = ""
    failed: tuple[str, ...] = ()
    hung: tuple[str, ...] = ()


async def _session(row: Row, sandbox: Sandbox, patch: str, plan: Plan, limits: TestLimits) -> _Session:
    where = f"row {row.instance_id}"
    done = await run_grade_program(
        sandbox,
        where=where,
        patch=patch,
        test_patch=row.test_patch,
        test_paths=plan.restored,
        test_files=plan.added,
        files=plan.files,
        appended=plan.appended,
        twins=plan.twins,
    )
    if done.applied is None:
        return _Session(None, ["the patch does not apply", *done.attempts])
    log = [f"patch applied by: {done.applied}"]
    log += [f"put back before the tests: {path}" for path in done.undone]
    must_fail = [*plan.must_fail, *done.appended]
    log += [f"added, must fail: {test}" for test in [*must_fail, *done.twins]]
    if plan.command is not None:
        verdict, output = await _run_command(row, sandbox, plan.command, must_fail, limits, where=where)
        return _Session(verdict, log, output)
    return await _run_pytest(row, sandbox, plan, done, must_fail, limits, where=where, log=log)


async def _run_pytest(
    row: Row,
    sandbox: Sandbox,
    plan: Plan,
    done: Preparation,
    must_fail: list[str],
    limits: TestLimits,
    *,
    where: str,
    log: list[str],
) -> _Session:
    """pytest with the runner's own report of each test."""
    if not done.present:
        empty = judge_results({}, fail_to_pass=row.fail_to_pass, pass_to_pass=row.pass_to_pass)
        return _Session(empty, [*log, "none of the files of the named tests is there"])
    report = await sandbox.run_tests(
        [*plan.options, *PYTEST_OPTIONS, *done.present],
        timeout_s=limits.session_s,
        test_timeout_s=limits.test_s,
        canary=True,
        cwd=sandbox.workdir,
        env=_NO_USER_SITE,
    )
    if report.timed_out and not _failed_before_the_end(report, row):
        raise _late(limits.session_s, f"{where}, sandbox {sandbox.id}")
    named = {"fail_to_pass": row.fail_to_pass, "pass_to_pass": row.pass_to_pass, "must_fail": must_fail}
    verdict = judge(report, **named, twins=done.twins)
    expected = {*row.fail_to_pass, *row.pass_to_pass, *must_fail, *done.twins}
    failed = tuple(
        test
        for test, status in report.results.items()
        if status in BAD and test not in expected and test.partition("[")[0] not in done.twins
    )
    return _Session(verdict, log, report.output, failed, failed if report.duration_s >= limits.test_s else ())


def _failed_before_the_end(report: TestReport, row: Row) -> bool:
    """Whether a named test had failed when time ran out: more time would not have changed the verdict."""
    named = (*row.fail_to_pass, *row.pass_to_pass)
    return any(report.results.get(test) in BAD for test in named)


async def _run_command(
    row: Row, sandbox: Sandbox, command: Command, must_fail: list[str], limits: TestLimits, *, where: str
) -> tuple[Verdict, str]:
    """The row's own command; its JUnit file, where it writes one, or else its output is read."""
    result = await sandbox.run(
        command.line,
        timeout_s=limits.session_s,
        cwd=sandbox.workdir,
        env=_NO_USER_SITE,
        output_limit=_OUTPUT_LIMIT_BYTES,
    )
    if result.timed_out:
        raise _late(limits.session_s, f"{where}, sandbox {sandbox.id}")
    named = {"fail_to_pass": row.fail_to_pass, "pass_to_pass": row.pass_to_pass, "must_fail": must_fail}
    output = result.output[-_KEPT_OUTPUT_CHARS:]
    if command.junit is not None:
        data = await sandbox.read_file(command.junit, limit_bytes=_JUNIT_LIMIT_BYTES)
        found = parse_junit(data or b"", named=[*row.fail_to_pass, *row.pass_to_pass, *must_fail]) or {}
        return judge_results(found, exit_code=result.exit_code, **named), output
    return judge_log(result.output, parser=command.parser, exit_code=result.exit_code, **named), output


def _late(allowance_s: float, where: str) -> GradingTimeoutError:
    return GradingTimeoutError(
        f"the tests did not end within {allowance_s:.0f} s",
        where=where,
        remedy="raise environment.test_timeout_s, or leave the row out",
    )

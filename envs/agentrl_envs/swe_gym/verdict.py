"""From test results to a verdict: pure, so that every rule is a unit test.

Resolved = every FAIL_TO_PASS test ran and passed, each PASS_TO_PASS test passed (a skip is kept), and nothing
says that the session lied: the tests that must fail did fail, and the exit code agrees with the results. Missing is
failed. What is judged is a report that the runner wrote, or, where there is none, a log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agentrl.wire import TestReport
from agentrl_envs.swe_gym.log_parsers import PARSERS

PASSED = frozenset({"passed", "xfailed"})
BAD = frozenset({"failed", "error"})
_SHOWN = 20
_START, _END = ">>>>> Start Test Output", ">>>>> End Test Output"
_FAILED_RUNS = {
    ">>>>> Patch Apply Failed": "the patch did not apply",
    ">>>>> Reset Failed": "the tree was not reset",
    ">>>>> Tests Errored": "the tests could not be run",
    ">>>>> Tests Timed Out": "the tests timed out",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`tests` maps each named test to its status (`missing` where it did not run); `log` is for people. `unproved`:
    tests whose status counts only if the reference patch gives it too."""

    resolved: bool
    tests: dict[str, str]
    log: tuple[str, ...]
    unproved: tuple[str, ...] = ()


def judge(
    report: TestReport,
    *,
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    must_fail: Sequence[str] = (),
    twins: Sequence[str] = (),
) -> Verdict:
    """The verdict over the named tests. The report must come from a session with the runner's must-fail test in it;
    `must_fail` are ids of further ones, `twins` of copies of named tests, which may be cut off before their end."""
    doubts = _session_doubts(report)
    verdict = _weigh(report.results, doubts, fail_to_pass, pass_to_pass, must_fail)
    return replace(verdict, unproved=(*verdict.unproved, *_not_failed(twins, report.results)))


def _not_failed(twins: Sequence[str], results: Mapping[str, str]) -> list[str]:
    """Those that did not run, or ended well; each of a copy's parameters counts."""
    ended: dict[str, list[str]] = {test: [] for test in twins}
    for test, status in results.items():
        ended.get(test.partition("[")[0], []).append(status)
    return [test for test, statuses in ended.items() if not statuses or set(statuses) - BAD]


def judge_log(
    log: str,
    *,
    parser: str,
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    must_fail: Sequence[str] = (),
    exit_code: int | None = None,
) -> Verdict:
    """The verdict over the named tests by what a test command printed.

    `parser` is a name in `PARSERS`. Between the markers of SWE-bench's evaluation scripts, where they are, only what
    lies between them counts. `exit_code`: of the test command, where it is known.
    """
    section, doubts = _section(log)
    results = PARSERS[parser](section)
    return judge_results(
        results,
        doubts=doubts,
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        must_fail=must_fail,
        exit_code=exit_code,
    )


def judge_results(
    results: Mapping[str, str],
    *,
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    must_fail: Sequence[str] = (),
    exit_code: int | None = None,
    doubts: Sequence[str] = (),
) -> Verdict:
    """The verdict over the named tests by results that were read from a log or a JUnit file."""
    doubts = [*doubts]
    if not results:
        doubts.append("no result of any test was found")
    if exit_code not in (None, 0, 1):
        doubts.append(f"the test command ended with exit code {exit_code}")
    elif exit_code == 1 and not any(status in BAD for status in results.values()):
        doubts.append("the test command failed, and no test did")
    elif exit_code == 0 and any(results.get(test) in BAD for test in must_fail):
        doubts.append("the test command succeeded, and a test that must fail did")
    return _weigh(results, doubts, fail_to_pass, pass_to_pass, must_fail)


def _section(log: str) -> tuple[str, list[str]]:
    """(the part of a log that counts, what is wrong with the run)."""
    doubts = [said for mark, said in _FAILED_RUNS.items() if mark in log]
    if _START not in log:
        return log, doubts
    _, _, rest = log.partition(_START)
    section, end, _ = rest.rpartition(_END)
    if not end:
        return rest, [*doubts, "the log ends before the tests do"]
    return section, doubts


def _weigh(
    results: Mapping[str, str],
    doubts: Sequence[str],
    fail_to_pass: Sequence[str],
    pass_to_pass: Sequence[str],
    must_fail: Sequence[str],
) -> Verdict:
    excused: list[str] = []
    failing = {test: _status(test, results, excused) for test in fail_to_pass}
    passing = {test: _status(test, results, excused) for test in pass_to_pass}
    wrong = [f"FAIL_TO_PASS {test}: {status}" for test, status in failing.items() if status not in PASSED]
    wrong += [
        f"PASS_TO_PASS {test}: {status}" for test, status in passing.items() if status not in PASSED | {"skipped"}
    ]
    doubts = [*doubts]
    if not fail_to_pass:
        doubts.append("no FAIL_TO_PASS test is named, so that nothing is proved")
    faked = [test for test in must_fail if results.get(test, "failed") not in BAD]
    doubts += [
        f"a test that must fail ended as {results[test]}: something in the session fakes results" for test in faked
    ]
    resolved = not wrong and not doubts
    log = [
        f"{'resolved' if resolved else 'not resolved'}: "
        f"{_count(failing, 'FAIL_TO_PASS')}, {_count(passing, 'PASS_TO_PASS')}"
    ]
    log += [f"rejected: {doubt}" for doubt in doubts]
    log += wrong[:_SHOWN] + ([f"… and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else [])
    log += [f"id cut at a blank in the data set, judged by its beginning: {test}" for test in excused]
    statuses = {**passing, **failing}
    unproved = [test for test, status in statuses.items() if status in ("skipped", "xfailed")]
    unproved += [test for test in must_fail if test not in results]
    return Verdict(resolved, statuses, tuple(log), tuple(unproved))


def _status(test: str, results: Mapping[str, str], excused: list[str]) -> str:
    """`test`'s status. An id that a data set cut at a blank (an unclosed `[`) is judged by all ids that it begins:
    each of them must have passed."""
    if test in results:
        return results[test]
    if "[" not in test or (test.endswith("]") and test.count("[") <= test.count("]")):
        return "missing"
    statuses = [status for node, status in results.items() if node.startswith(test + " ")]
    if not statuses:
        return "missing"
    excused.append(test)
    if "passed" in statuses and not set(statuses) - PASSED - {"skipped"}:
        return "passed"
    return next((status for status in statuses if status not in PASSED), statuses[0])


def _session_doubts(report: TestReport) -> list[str]:
    """What says that the session's results cannot be believed."""
    doubts = []
    if report.canary_failed is None:
        doubts.append("the test that must fail did not run: the session ended early")
    elif not report.canary_failed:
        doubts.append("the test that must fail did not fail: something in the session fakes results")
    if report.exit_code not in (0, 1):
        doubts.append(f"the test run ended with exit code {report.exit_code}")
    elif (report.exit_code == 1) != any(status in BAD for status in report.results.values()):
        doubts.append(f"exit code {report.exit_code} does not agree with the tests' own results")
    return doubts


def _count(statuses: Mapping[str, str], name: str) -> str:
    return f"{sum(status in PASSED for status in statuses.values())} of {len(statuses)} {name} passed"

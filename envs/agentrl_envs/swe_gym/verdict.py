"""From a test report to a verdict: pure, so that every rule is a unit test.

Resolved = every FAIL_TO_PASS test ran and passed, each PASS_TO_PASS test passed (a skip is kept), and nothing
says that the session lied: the test that must fail did fail, and the exit code, which leaves that test out,
agrees with the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl.wire import TestReport

_PASSED = frozenset({"passed", "xfailed"})
_BAD = frozenset({"failed", "error"})
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """`tests` maps each named test to its status (`missing` where it did not run); `log` is for people."""

    resolved: bool
    tests: dict[str, str]
    log: tuple[str, ...]


def judge(report: TestReport, *, fail_to_pass: Sequence[str], pass_to_pass: Sequence[str]) -> Verdict:
    """The verdict over the named tests. The report must come from a session with the must-fail test in it."""
    excused: list[str] = []
    failing = {test: _status(test, report.results, excused, every=True) for test in fail_to_pass}
    passing = {test: _status(test, report.results, excused, every=False) for test in pass_to_pass}
    wrong = [f"FAIL_TO_PASS {test}: {status}" for test, status in failing.items() if status not in _PASSED]
    wrong += [
        f"PASS_TO_PASS {test}: {status}" for test, status in passing.items() if status not in _PASSED | {"skipped"}
    ]
    doubts = _doubts(report, named=bool(fail_to_pass))
    resolved = not wrong and not doubts
    log = [
        f"{'resolved' if resolved else 'not resolved'}: "
        f"{_count(failing, 'FAIL_TO_PASS')}, {_count(passing, 'PASS_TO_PASS')}"
    ]
    log += [f"rejected: {doubt}" for doubt in doubts]
    log += wrong[:_SHOWN] + ([f"… and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else [])
    log += [f"id cut at a blank in the data set, judged by its beginning: {test}" for test in excused]
    return Verdict(resolved, {**passing, **failing}, tuple(log))


def _status(test: str, results: Mapping[str, str], excused: list[str], *, every: bool) -> str:
    """`test`'s status. An id that a data set cut at a blank (an unclosed `[`) is judged by the ids it begins:
    `every` of them must have passed, or any."""
    if test in results:
        return results[test]
    if "[" not in test or test.endswith("]"):
        return "missing"
    statuses = [status for node, status in results.items() if node.startswith(test + " ")]
    if not statuses:
        return "missing"
    excused.append(test)
    passed = [status in _PASSED for status in statuses]
    if all(passed) if every else any(passed):
        return "passed"
    return next(status for status in statuses if status not in _PASSED)


def _doubts(report: TestReport, *, named: bool) -> list[str]:
    """What says that the session's results cannot be believed."""
    doubts = []
    if not named:
        doubts.append("no FAIL_TO_PASS test is named, so that nothing is proved")
    if report.canary_failed is None:
        doubts.append("the test that must fail did not run: the session ended early")
    elif not report.canary_failed:
        doubts.append("the test that must fail did not fail: something in the session fakes results")
    if report.exit_code not in (0, 1):
        doubts.append(f"the test run ended with exit code {report.exit_code}")
    elif (report.exit_code == 1) != any(status in _BAD for status in report.results.values()):
        doubts.append(f"exit code {report.exit_code} does not agree with the tests' own results")
    return doubts


def _count(statuses: Mapping[str, str], name: str) -> str:
    return f"{sum(status in _PASSED for status in statuses.values())} of {len(statuses)} {name} passed"

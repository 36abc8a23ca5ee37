"""Test sessions of trees in fresh sandboxes, and what several sessions of the same tests say together."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from agentrl.errors import AgentRLError, SandboxError, handling
from agentrl.wire import Sandbox, SandboxPool, TestReport
from agentrl_envs.swe_gym.factory.commits import LeftOut
from agentrl_envs.swe_gym.verdict import BAD, PASSED

SANDBOX_FAILED = "sandbox failed"
"""The reason that says nothing about a commit or a mutation: it is tried again by the next run."""
RECIPE_REMEDY = (
    "write a recipe for the repository and its version (sandbox_images/README.md) and name its folder with "
    "--sandbox.recipes, or give --image"
)
_LEASE_TIMEOUT_S = 900.0
_MOST_IN_A_ROW = 4
_NO_TESTS = 5  # pytest's exit code
_ATTEMPTS = 3
_MISSING = re.compile(r"No module named '([\w.]{1,80})'")
_IMPORT = re.compile(r"^E\s+((?:ModuleNotFound|Import)Error: .{1,160})", re.MULTILINE)
_FIXTURE = re.compile(r"fixture '(\w{1,60})' not found")

Result = TypeVar("Result")


class Bench:
    """Leases sandboxes and tries again where one fails."""

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool
        self._failed_in_a_row = 0

    async def use(self, work: Callable[[Sandbox], Awaitable[Result]], *, image: str, label: str) -> Result:
        """`work` in a fresh sandbox of `image`. Raises the last error of three tries, at once where trying again is
        idle."""
        attempt = 1
        while True:
            try:
                async with self._pool.lease(image, timeout_s=_LEASE_TIMEOUT_S, label=label, grading=True) as sandbox:
                    result = await work(sandbox)
                self._failed_in_a_row = 0
                return result
            except AgentRLError as error:
                meaning = handling(error)
                if meaning is None or not meaning.retry or attempt == _ATTEMPTS:
                    raise
                attempt += 1

    def excuse(self, error: SandboxError) -> LeftOut:
        """`error`, the last of several tries, as a reason. Raises it where the next sandboxes would fail as well."""
        meaning = handling(error)
        self._failed_in_a_row += 1
        if meaning is None or not meaning.retry or self._failed_in_a_row > _MOST_IN_A_ROW:
            raise error
        return LeftOut(SANDBOX_FAILED, error.what)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What runs before and after a fix say together. `unstable`: tests whose runs of one side differ."""

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    unstable: tuple[str, ...]


def compare(before: Sequence[Mapping[str, str]], after: Sequence[Mapping[str, str]]) -> Outcome:
    """Statuses by test id, one mapping a run. FAIL_TO_PASS: failed or missing in every run before, passed in every run
    after. PASS_TO_PASS: passed, or failed as expected, in every run, as grading counts it. A test that is skipped
    before is neither."""
    tests = sorted({test for run in (*before, *after) for test in run if "::" in test})
    failing, passing, unstable = [], [], []
    for test in tests:
        was, now = ({run.get(test, "missing") for run in side} for side in (before, after))
        if len(was) > 1 or len(now) > 1:
            unstable.append(test)
        elif now | was <= PASSED:
            passing.append(test)
        elif now == {"passed"} and was <= BAD | {"missing"}:
            failing.append(test)
    return Outcome(tuple(failing), tuple(passing), tuple(unstable))


def distrust(report: TestReport) -> str:
    """Why a session's results cannot be used; empty where they can."""
    if report.timed_out:
        return "tests do not end"
    if report.exit_code == _NO_TESTS:
        return "no tests found"
    if report.canary_failed is not True:
        return "session ended early or fakes results"
    if report.exit_code not in (0, 1):
        return f"pytest ended with exit code {report.exit_code}"
    return ""


def missing_requirement(report: TestReport, own: Iterable[str]) -> str:
    """What the tests lack, from what they printed: a module, a fixture; empty where nothing is known to lack.

    `own`: top-level names of modules that the tree itself holds somewhere.
    """
    if found := _MISSING.search(report.output):
        module = found[1].split(".")[0]
        return f"module {module}" + (" of the repository itself" if module in set(own) else "")
    if found := _FIXTURE.search(report.output):
        return f"fixture {found[1]}"
    if found := _IMPORT.search(report.output):
        return " ".join(found[1].split())[:120]
    return ""


def passed(report: TestReport) -> frozenset[str]:
    """The tests that passed."""
    return frozenset(test for test, status in report.results.items() if status == "passed" and "::" in test)


def failed(report: TestReport) -> frozenset[str]:
    """The tests that failed or could not be set up."""
    return frozenset(test for test, status in report.results.items() if status in BAD and "::" in test)


def file_of(test: str) -> str:
    """The file in a test's id."""
    return test.split("::", 1)[0]

"""One task's verdict: no change must fail, the reference patch must pass, and both always alike."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from agentrl.errors import (
    AgentRLError,
    CommandTimeoutError,
    DaemonUnreachableError,
    DiskFullError,
    GradingTimeoutError,
    MissingRequirementError,
    NoSandboxBackendError,
)
from agentrl.run.grading import Grader
from agentrl.wire import Grade, Task

# These say something about the machine and nothing about a task.
ENDS_VERIFICATION = (NoSandboxBackendError, DaemonUnreachableError, DiskFullError, MissingRequirementError)
FEWEST_RUNS, MOST_RUNS = 2, 6
"""Of the reference patch. A test that passes every other time shows itself in two runs every other time, in six (and
they take seconds) nearly always."""
_PATIENCE_S = 15.0
_SHOWN = 5
_ABSENT = "missing"
# How an environment's log says that no test is to blame.
_REFUSALS = ("rejected", "the patch does not apply")


class Verdict(StrEnum):
    """What a task is. Only `valid` ones can be trained on."""

    VALID = "valid"
    PASSES_UNCHANGED = "passes unchanged"
    REFERENCE_FAILS = "reference fails"
    FLAKY = "flaky"
    ERROR = "error"
    TIMEOUT = "timeout"


class TaskVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the verdicts' file. `differ`: tests whose status was not the same in two runs of one patch."""

    task: str
    verdict: Verdict
    reason: str = ""
    seconds: float = 0.0
    differ: list[str] = []
    grades: int = 0


@dataclass(frozen=True, slots=True)
class _Found:
    verdict: Verdict
    reason: str = ""
    differ: tuple[str, ...] = ()


async def verify_task(grader: Grader, task: Task, *, runs: int = MOST_RUNS) -> TaskVerdict:
    """The verdict. The reference is graded `runs` times, but no more than twice once the task has taken 15 s. Raises
    `ENDS_VERIFICATION` and faults of the program only."""
    began = time.monotonic()
    grades: list[Grade] = []
    try:
        found = await _judge(grader, task, grades, runs=runs)
    except ENDS_VERIFICATION:
        raise
    except (GradingTimeoutError, CommandTimeoutError) as error:
        found = _Found(Verdict.TIMEOUT, f"{_which(grades)}: {error.what}")
    except AgentRLError as error:
        where = f" ({error.where})" if error.where and error.where not in error.what else ""
        remedy = f"; remedy: {error.remedy}" if error.remedy else ""
        found = _Found(Verdict.ERROR, f"{type(error).__name__}: {error.what}{where}{remedy}")
    return TaskVerdict(
        task=task.id,
        verdict=found.verdict,
        reason=" ".join(_text(found.reason).split())[:500],
        seconds=round(time.monotonic() - began, 2),
        differ=[_text(name) for name in found.differ],
        grades=len(grades),
    )


def _text(text: str) -> str:
    """`text` as the verdicts' file can hold it: UTF-8."""
    return text.encode("utf-8", "replace").decode()


async def _judge(grader: Grader, task: Task, grades: list[Grade], *, runs: int) -> _Found:
    """No change once, and again only where it passes; then the reference. `grades` grows on the way."""
    began = time.monotonic()

    async def grade(patch: str) -> Grade:
        # Tests that hang would hang again: one time limit is enough to know it.
        found = await grader.grade(task, patch, final=(GradingTimeoutError,))
        grades.append(found)
        return found

    unchanged = await grade("")
    if unchanged.resolved:
        again = await grade("")
        differ = _differing(unchanged.tests, again.tests)
        if differ or not again.resolved:
            return _Found(Verdict.FLAKY, f"no change: {_naming(differ) or 'resolved once of twice'}", differ)
        return _Found(Verdict.PASSES_UNCHANGED, "every named test passes before the fix")
    reference = grader.environment.reference_patch(task)
    first = await grade(reference)
    for run in range(1, runs):
        if run >= FEWEST_RUNS and time.monotonic() - began > _PATIENCE_S:
            break
        other = await grade(reference)
        differ = _differing(first.tests, other.tests)
        if differ or first.resolved != other.resolved:
            return _Found(Verdict.FLAKY, f"reference: {_naming(differ) or 'resolved in one run of two'}", differ)
    if not first.resolved:
        return _Found(Verdict.REFERENCE_FAILS, _why(first))
    return _Found(Verdict.VALID)


def _differing(first: Mapping[str, str], second: Mapping[str, str]) -> tuple[str, ...]:
    names = [*first, *(name for name in second if name not in first)]
    return tuple(name for name in names if first.get(name, _ABSENT) != second.get(name, _ABSENT))


def _naming(tests: tuple[str, ...]) -> str:
    more = f" and {len(tests) - _SHOWN} more" if len(tests) > _SHOWN else ""
    return f"{', '.join(tests[:_SHOWN])}{more} differ between two runs" if tests else ""


def _why(grade: Grade) -> str:
    """Why a grade is not resolved, in one line."""
    wrong = [f"{name} {status}" for name, status in grade.tests.items() if status in ("failed", "error", _ABSENT)]
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    said = grade.log.strip().splitlines()
    refused = [line for line in said if line.startswith(_REFUSALS)]
    named = [f"{', '.join(wrong[:_SHOWN])}{more}"] if wrong else []
    return "; ".join([*refused, *named] or said[:_SHOWN]) or "not resolved"


def _which(grades: list[Grade]) -> str:
    return "no change" if not grades or grades[-1].resolved else "reference"

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
    GradingTimeoutError,
    NoSandboxBackendError,
)
from agentrl.run.grading import Grader
from agentrl.wire import Grade, Task

# These say something about the machine and nothing about a task.
ENDS_VERIFICATION = (NoSandboxBackendError, DaemonUnreachableError)
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


async def verify_task(grader: Grader, task: Task) -> TaskVerdict:
    """The verdict. Raises `ENDS_VERIFICATION` and faults of the program only."""
    began = time.monotonic()
    grades: list[Grade] = []
    try:
        found = await _judge(grader, task, grades)
    except ENDS_VERIFICATION:
        raise
    except (GradingTimeoutError, CommandTimeoutError) as error:
        found = _Found(Verdict.TIMEOUT, f"{_which(grades)}: {error.what}")
    except AgentRLError as error:
        where = f" ({error.where})" if error.where else ""
        found = _Found(Verdict.ERROR, f"{type(error).__name__}: {error.what}{where}")
    return TaskVerdict(
        task=task.id,
        verdict=found.verdict,
        reason=" ".join(found.reason.split())[:500],
        seconds=round(time.monotonic() - began, 2),
        differ=list(found.differ),
        grades=len(grades),
    )


async def _judge(grader: Grader, task: Task, grades: list[Grade]) -> _Found:
    """No change once, and again only where it passes; then the reference twice. `grades` grows on the way."""

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
    first, second = await grade(reference), await grade(reference)
    differ = _differing(first.tests, second.tests)
    if differ or first.resolved != second.resolved:
        return _Found(Verdict.FLAKY, f"reference: {_naming(differ) or 'resolved once of twice'}", differ)
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

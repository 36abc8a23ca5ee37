"""What the debugging commands print, and the log of a grade."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from pathlib import Path

from agentrl.errors import UsageError, disk_full_is_typed
from agentrl.run.debug import SCRATCH
from agentrl.run.signals import INTERRUPTED
from agentrl.wire import CommandResult, Grade, Task

TIMED_OUT = 124
PATCH_BYTES = 40 * 1024 * 1024  # a sandbox takes no larger one, in base 64
_SHOWN_TESTS = 40
_SHOWN_LOG_LINES = 12
# Colours may pass; what moves the cursor, asks the terminal for something or sets its title may not.
_CONTROL = re.compile(r"\x1b(?!\[[0-9;]{0,32}m)|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Text out of a sandbox, fit for a terminal: control characters but colours, tabs and line ends are spelled out."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def show(text: str) -> None:
    """Print text out of a sandbox: as it is into a pipe, `printable` on a terminal."""
    if not text:
        return
    if sys.stdout.isatty():
        sys.stdout.write(printable(text) + ("" if text.endswith("\n") else "\n"))
    else:
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
    sys.stdout.flush()


def note(text: str) -> None:
    """A line for whoever watches, beside the output."""
    print(f"agentrl: {printable(text)}", file=sys.stderr, flush=True)


def exit_code_of(result: CommandResult, *, timeout_s: float, interrupted: bool) -> int:
    """A command's exit code as a shell would give it; what was unusual about its end is noted."""
    if interrupted:
        note("interrupted")
        return INTERRUPTED
    if result.out_of_memory:
        note("the command ran out of memory (sandbox.memory_mb) and was killed")
    if result.timed_out or result.exit_code is None:
        note(f"the command was stopped after {timeout_s:g} s")
        return TIMED_OUT
    return result.exit_code


def grade_lines(grade: Grade) -> list[str]:
    """Verdict, counts, and what is wrong."""
    verdict = "resolved" if grade.resolved else "not resolved"
    counts = Counter(grade.tests.values())
    lines = [f"{verdict} (reward {grade.reward:g})"]
    if counts:
        lines.append("tests: " + ", ".join(f"{count} {status}" for status, count in counts.most_common()))
    wrong = [(status, name) for name, status in grade.tests.items() if status != "passed"]
    lines += [f"  {status:8} {name}" for status, name in wrong[:_SHOWN_TESTS]]
    if len(wrong) > _SHOWN_TESTS:
        lines.append(f"  … {len(wrong) - _SHOWN_TESTS} more, see the log")
    if not grade.resolved:
        said = grade.log.strip().splitlines()
        lines += [f"  {line}" for line in said[:_SHOWN_LOG_LINES]]
        if len(said) > _SHOWN_LOG_LINES:
            lines.append(f"  … {len(said) - _SHOWN_LOG_LINES} more lines, see the log")
    return [printable(line) for line in lines]


def check_log(path: Path) -> None:
    """Raise UsageError, before the work, where no log can be written to `path`; what is there stays."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"the log cannot be written: {error.strerror}", where=str(path), remedy="name another file (--log)"
    )


def write_grade_log(path: Path | None, task: Task, image: str, patch: str, grade: Grade) -> Path:
    """The whole grade in a file: how the patch went on, each test's status, all that the tests printed.

    None chooses `runs/sandbox/grade-<id>-<time>.log`. Raises DiskFullError, UsageError where it cannot be written.
    """
    moment = time.time()
    if path is None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(moment)) + f"-{int(moment * 1000) % 1000:03d}"
        path = SCRATCH / f"grade-{file_name(task.id)}-{stamp}.log"
    parts = [
        f"task: {task.id}\nimage: {image}\npatch: {len(patch.encode('utf-8', 'surrogateescape'))} bytes",
        f"resolved: {grade.resolved}\nreward: {grade.reward:g}",
        f"--- log\n{grade.log}",
        "--- tests\n" + "\n".join(f"{status:8} {name}" for name, status in grade.tests.items()),
        f"--- output of the tests\n{grade.output}",
    ]
    try:
        with disk_full_is_typed(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes("\n\n".join(parts).encode("utf-8", "surrogateescape") + b"\n")
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def file_name(name: str) -> str:
    """`name` as part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", name)[:120].strip(".-") or "task"

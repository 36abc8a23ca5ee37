"""The `tests` operation: pytest in a warm fork, or in the image's own Python; results from our own plugin."""

import json
import secrets
from typing import NamedTuple

from . import image_python
from .memory import OomCounter
from .processes import Processes
from .resident import Resident
from .settings import Settings
from .supervise import Bounded, Capture, supervise

_OUTPUT_LIMIT = 200_000
_REPORT_LIMIT = 8_000_000
_CRASHED = 3
"""pytest's own code for an internal error: what a session that ended with 0 but without a report gets."""
_WORSE = {"failed": 1, "error": 2}
_MOST, _HIGHEST_STATUS = 1 << 31, 255
"""Tests that are believed to be collected, and exit status."""


class Report(NamedTuple):
    """What the session told. `status` is None where it ended without saying so."""

    results: dict[str, str]
    collected: int
    canary_failed: bool | None
    status: int | None


def run_tests(
    processes: Processes,
    settings: Settings,
    resident: Resident,
    oom: OomCounter,
    *,
    arguments: list[str],
    timeout_s: float,
    canary: bool,
    test_timeout_s: float | None,
    cwd: str,
    env: dict[str, str],
) -> dict[str, object]:
    """Run pytest with `arguments` as `python -m pytest` would; what was known of a session that died is
    returned. A test of which a phase takes longer than `test_timeout_s` fails (`time_limit`).

    `canary_failed` is None where it was not asked for, or where it did not run and no test passed either; any
    other way of not failing is False.
    """
    key = secrets.token_hex(16)
    if settings.resident:
        resident.load_pytest()

    def work(fd: int) -> int:
        asked = {"key": key, "canary": canary, "test_timeout_s": test_timeout_s}
        if not settings.resident:
            return image_python.start(settings.tools, settings.work, {"arguments": arguments, **asked}, fd)
        resident.become_pytest(arguments, module=True, cwd=cwd)
        from .reporting import run_session

        return run_session(arguments, fd=fd, key=key, canary=canary, test_timeout_s=test_timeout_s)

    capture, lines = Capture(_OUTPUT_LIMIT), Bounded(_REPORT_LIMIT)
    oom_before = oom.read()
    before = processes.below()
    environment = {**settings.environment, **env, "PWD": cwd}
    child = processes.fork(work, environment=environment, cwd=cwd, side=True)
    ended = supervise(processes, child, before=before, timeout_s=timeout_s, capture=capture, side=lines)
    report = read_report(bytes(lines.data), key)
    canary_failed = report.canary_failed
    if canary and canary_failed is None and "passed" in report.results.values():
        canary_failed = False
    return {
        "exit_code": _exit_code(ended.exit_code, report),
        "results": report.results,
        "collected": report.collected,
        "output": capture.text(),
        "timed_out": ended.timed_out,
        "out_of_memory": oom.happened(oom_before, ended.exit_code),
        "canary_failed": canary_failed,
        "duration_s": ended.duration_s,
    }


def read_report(data: bytes, key: str) -> Report:
    """Parse the session's lines. The worst that was said of a test stands; lines without the key are not ours, nor are
    those that make no sense: tests that found the key must not turn a report into a fault of the sandbox."""
    results: dict[str, str] = {}
    collected, canary_failed, status = 0, None, None
    for line in data.split(b"\n")[:-1]:
        if not line.startswith(key.encode()):
            continue
        try:
            said = json.loads(line[len(key) :])
        except (ValueError, RecursionError):
            continue
        match said:
            case ["test", str(node), str(outcome)]:
                if _WORSE.get(outcome, 0) >= _WORSE.get(results.get(node, ""), 0):
                    results[node] = outcome
            case ["collected", int(count)] if 0 <= count <= _MOST:
                collected = int(count)
            case ["canary", bool(failed)]:
                canary_failed = failed
            case ["done", int(code)] if 0 <= code <= _HIGHEST_STATUS:
                status = int(code)
    return Report(results=results, collected=collected, canary_failed=canary_failed, status=status)


def _exit_code(ended: int | None, report: Report) -> int | None:
    """pytest's exit status as the results bear it out. A session that ended early never counts as a
    success."""
    if ended is None:
        return None
    if report.status is None:
        return ended or _CRASHED
    if report.status == 0 and any(outcome in _WORSE for outcome in report.results.values()):
        return 1
    return report.status

"""What holds for every test: a skip that must not happen is a failure."""

from __future__ import annotations

import os
import signal

import pytest

# Set where a daemon, a browser or bubblewrap is known to be there: a test that skips for want of it has a fault.
REQUIRED = tuple(filter(None, os.environ.get("AGENTRL_REQUIRE", "").split(",")))
_skipped: list[str] = []

collect_ignore = ["data"]  # whose logs pytest would read as doctests

# A shell that runs the tests in the background has these ignored, and every child would inherit that; tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and any(name in report.keywords for name in REQUIRED):
        _skipped.append(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if _skipped:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for nodeid in _skipped:
        terminalreporter.write_line(f"skipped, though AGENTRL_REQUIRE={','.join(REQUIRED)}: {nodeid}", red=True)

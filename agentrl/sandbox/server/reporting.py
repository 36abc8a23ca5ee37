"""What happened in a pytest session, told by a plugin of ours through a pipe, never through the output.

Every test, and the canary, goes through the same noting: code under test that fakes outcomes fakes the
canary's too. The canary lies among the tests under an ordinary name, so that it cannot be spared; and what pytest
runs tests with is compared with what it was before any code under test was imported. Lines carry a key that is made
for the session, so that writing to every descriptor found does not forge a report.
"""

import contextlib
import json
import os
import secrets
import sys
import unittest
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest import python, reports, runner
from _pytest import unittest as cases

Send = Callable[..., None]

_RUN_BY: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (python, ("pytest_pyfunc_call",)),
    (python.Function, ("runtest", "setup", "_getobj")),
    (python.PyobjMixin, ("obj",)),
    (runner, ("call_and_report", "runtestprotocol", "pytest_runtest_call", "pytest_runtest_makereport")),
    (runner.CallInfo, ("from_call",)),
    (reports.TestReport, ("__init__", "from_item_and_call")),
    (cases.TestCaseFunction, ("runtest", "setup", "addError", "addFailure")),
    (unittest.TestCase, ("run", "__call__", "_callTestMethod")),
)
_ORDINARY = (
    "basic border bytes cache chain clock common copies default empty entry errors fields filter format groups "
    "header index inner items keys limits lines lookup merge names nested order output pages parse paths plain "
    "prefix quotes ranges reader round rules scope simple slices sorted spaces stages steps strings suffix table "
    "tokens totals types units update values widths window words writer"
)
_WORDS = _ORDINARY.split()


def _identity() -> list[object]:
    """What runs a test and judges it, with the code inside, which can be exchanged in place."""
    found: list[object] = []
    for owner, names in _RUN_BY:
        for name in names:
            value = vars(owner).get(name)
            found += [value, getattr(getattr(value, "__func__", value), "__code__", None)]
    return found


# Taken when the server imports this module: nothing of the code under test has run in this process yet.
_ORIGINAL = _identity()


def _tampered() -> bool:
    return any(now is not then for now, then in zip(_identity(), _ORIGINAL, strict=True))


def sender(fd: int, key: str) -> Send:
    """`send(kind, *values)` writes one line. A descriptor that the tests closed means no report, not a
    crash."""

    def send(*values: object) -> None:
        data = memoryview(f"{key}{json.dumps(values)}\n".encode())
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(fd, data) :]

    return send


class Recorder:
    """The plugin. Sends ("collected", n), ("test", node id, outcome) per phase that says something new, and
    ("canary", failed) after the last test."""

    def __init__(self, send: Send, *, canary: bool, arguments: Sequence[str]) -> None:
        self._send = send
        self._wants_canary = canary
        self._arguments = arguments
        self._canary: pytest.Item | None = None
        self._canary_failed = False
        self._raised = False
        self._tampered = False

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, None]:
        self._raised = False
        outcome = yield
        self._raised = outcome.excinfo is not None

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Generator[None, Any, None]:
        outcome = yield
        self._tampered = self._tampered or _tampered()
        if outcome.excinfo is None:
            self._note(item, str(call.when), outcome.get_result())

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self._send("test", report.nodeid, "error")

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, Any, None]:
        self._send("collected", len(session.items))
        yield
        if self._wants_canary:
            # Not among the collected: nothing can deselect or count it. After the last: it sees what tests
            # did.
            with contextlib.suppress(Exception):
                self._run_canary(session)
            self._send("canary", self._canary_failed and not self._tampered and not _tampered())

    def _note(self, item: pytest.Item, when: str, report: Any) -> None:
        if item is self._canary:
            if when == "call":
                self._canary_failed = report.outcome == "failed" and self._raised
            return
        expected = hasattr(report, "wasxfail")
        if report.outcome == "failed":
            self._send("test", item.nodeid, "failed" if when == "call" else "error")
        elif report.outcome == "skipped":
            self._send("test", item.nodeid, "xfailed" if expected else "skipped")
        elif when == "call" and expected:
            self._send("test", item.nodeid, "xpassed")
        elif when == "call":
            # A test that raised cannot have passed, whatever the report says.
            self._send("test", item.nodeid, "failed" if self._raised else "passed")

    def _run_canary(self, session: pytest.Session) -> None:
        """A real test function, in a real file among the others, which cannot pass."""
        folder, parent = self._among(session)
        session._setupstate.teardown_exact(None)  # an interrupted run leaves its fixtures up
        file, name = _new_file(folder), f"test_{_two_words()}"
        path_before = list(sys.path)
        try:
            file.write_text(_failing_test(name))
            module = pytest.Module.from_parent(parent, path=file)
            self._canary = pytest.Function.from_parent(module, name=name)
            session.items.append(self._canary)
            runner.runtestprotocol(self._canary, log=False, nextitem=None)
        finally:
            session.items[:] = [item for item in session.items if item is not self._canary]
            sys.path[:] = path_before
            for made in (file, *folder.glob(f"__pycache__/{file.stem}.*")):
                made.unlink(missing_ok=True)

    def _among(self, session: pytest.Session) -> tuple[Path, pytest.Collector]:
        """The folder of the first test file that was asked for, else of the first test; and the collector there."""
        base = session.config.invocation_params.dir
        given = [base / each.partition("::")[0] for each in self._arguments if not each.startswith("-")]
        files = [path for path in given if path.is_file()] or [item.path for item in session.items[:1]]
        folder = files[0].parent if files else base
        for item in session.items:
            module = item.getparent(pytest.Module)
            if module is not None and module.path.parent == folder and isinstance(module.parent, pytest.Collector):
                return folder, module.parent
        return folder, session


def _two_words() -> str:
    return f"{secrets.choice(_WORDS)}_{secrets.choice(_WORDS)}"


def _new_file(folder: Path) -> Path:
    """A test file of an ordinary name that is neither there nor imported."""
    while True:
        file = folder / f"test_{_two_words()}.py"
        if not file.exists() and file.stem not in sys.modules:
            return file


def _failing_test(name: str) -> str:
    values = [secrets.randbelow(1000) for _ in range(4)]
    return f"def {name}():\n    values = {values}\n    assert sum(values) == {sum(values) + 1 + secrets.randbelow(9)}\n"


def run_session(arguments: list[str], *, fd: int, key: str, canary: bool) -> int:
    """In a fork: run pytest with the recorder; the last line sent is ("done", exit status)."""
    send = sender(fd, key)
    status = int(pytest.main(arguments, plugins=[Recorder(send, canary=canary, arguments=tuple(arguments))]))
    send("done", status)
    return status

"""What happened in a pytest session, told by a plugin of ours through a pipe, never through the output.

Every test, and the canary, goes through the same noting: code under test that fakes outcomes fakes the
canary's too. Lines carry a key that is made for the session, so that writing to every descriptor found does
not forge a report.
"""

import contextlib
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from _pytest import runner

Send = Callable[..., None]


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

    def __init__(self, send: Send, *, canary: bool, scratch: str) -> None:
        self._send = send
        self._wants_canary = canary
        self._scratch = scratch
        self._canary: pytest.Item | None = None
        self._canary_failed = False
        self._raised = False

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, None]:
        self._raised = False
        outcome = yield
        self._raised = outcome.excinfo is not None

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Generator[None, Any, None]:
        outcome = yield
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
            self._send("canary", self._canary_failed)

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
        """A real test function from a real file of unpredictable name, which cannot pass."""
        session._setupstate.teardown_exact(None)  # an interrupted run leaves its fixtures up
        name, value = f"test_{secrets.token_hex(8)}", secrets.randbelow(1 << 30)
        path_before = list(sys.path)
        os.makedirs(self._scratch, exist_ok=True)
        folder = tempfile.mkdtemp(dir=self._scratch)
        try:
            file = Path(folder) / f"{name}.py"
            file.write_text(f"def {name}():\n    assert int('{value}') == {value + 1}\n")
            module = pytest.Module.from_parent(session, path=file)
            self._canary = pytest.Function.from_parent(module, name=name)
            runner.runtestprotocol(self._canary, log=False, nextitem=None)
        finally:
            sys.path[:] = path_before
            shutil.rmtree(folder, ignore_errors=True)


def run_session(arguments: list[str], *, fd: int, key: str, canary: bool, scratch: str) -> int:
    """In a fork: run pytest with the recorder; the last line sent is ("done", exit status)."""
    send = sender(fd, key)
    status = int(pytest.main(arguments, plugins=[Recorder(send, canary=canary, scratch=scratch)]))
    send("done", status)
    return status

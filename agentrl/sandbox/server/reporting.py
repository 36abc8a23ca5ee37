"""What happened in a pytest session, told by a plugin of ours through a pipe, never through the output.

Every test, and the canary, goes through the same noting: code under test that fakes outcomes fakes the
canary's too. The canary lies among the tests under an ordinary name, so that it cannot be spared; and what pytest
runs tests with is compared with what it was before any code under test was imported. Lines carry a key that is made
for the session, so that writing to every descriptor found does not forge a report.

Python 3.6 and pytest 3 or later: this also runs in an image's own Python.
"""

import contextlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any, Callable, Generator, List, Optional, Sequence

import pytest

from .canary import run_canary
from .integrity import has_other_builtins, is_tampered
from .time_limit import TimeLimit

Send = Callable[..., None]
Hook = Generator[None, Any, None]


def sender(fd: int, key: str) -> Send:
    """`send(kind, *values)` writes one line. A descriptor that the tests closed means no report, not a
    crash."""

    def send(*values: object) -> None:
        data = memoryview((key + json.dumps(values) + "\n").encode())
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(fd, data) :]

    return send


class Recorder:
    """The plugin. Sends ("collected", n), ("test", node id, outcome) per phase that says something new, and
    ("canary", failed) after the last test."""

    def __init__(
        self, send: Send, *, canary: bool, arguments: Sequence[str], test_timeout_s: Optional[float] = None
    ) -> None:
        self._send = send
        self._wants_canary = canary
        self._arguments = arguments
        self._base = Path.cwd()
        self._root = "."
        self._limit = TimeLimit(test_timeout_s, self._is_late)
        self._manager: Any = None
        self._call_hooks: object = None
        self._canary: Any = None
        self._canary_failed = False
        self._raised = False
        self._tampered = False

    def pytest_plugin_registered(self, manager: Any) -> None:
        """Called for this plugin first, before any conftest is looked for."""
        if self._manager is None:
            self._manager, self._call_hooks = manager, getattr(manager, "_inner_hookexec", None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: Any) -> None:
        """Tests run in this process: what runs elsewhere could not be noted here. A project whose configuration lies
        in a folder of its tests has ids from there on."""
        root = getattr(config, "rootpath", None) or config.rootdir
        self._root = os.path.relpath(str(root), str(self._base))
        if hasattr(config.option, "numprocesses"):
            config.option.numprocesses, config.option.dist, config.option.tx = None, "no", []

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> Hook:
        self._tampered = self._tampered or has_other_builtins()
        with self._limit.watch(item):
            yield

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: Any) -> Hook:
        self._raised = False
        with self._limit.watch(item):
            outcome = yield
        self._raised = outcome.excinfo is not None

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: Any) -> Hook:
        with self._limit.watch(item):
            yield

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Hook:
        outcome = yield
        self._tampered = self._tampered or self._is_tampered()
        if outcome.excinfo is None:
            self._note(item, str(call.when), outcome.get_result())

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self._send("test", self._id(report), "error")

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtestloop(self, session: Any) -> Hook:
        self._send("collected", len(session.items))
        yield
        if self._wants_canary:
            # Not among the collected: nothing can deselect or count it. After the last: it sees what tests
            # did.
            with contextlib.suppress(Exception):
                run_canary(session, self._base, self._arguments, self._announce)
            tampered = self._tampered or self._is_tampered() or has_other_builtins()
            self._send("canary", self._canary_failed and not tampered)

    def _is_tampered(self) -> bool:
        return is_tampered() or getattr(self._manager, "_inner_hookexec", None) is not self._call_hooks

    def _announce(self, canary: Any) -> None:
        self._canary = canary

    def _is_late(self, item: Any) -> None:
        """Told at once: whatever the test makes of its failure, it has failed."""
        if item is not self._canary:
            self._send("test", self._id(item), "failed")

    def _id(self, node: Any) -> str:
        """The node id from the folder that pytest was started in, as pytest prints it."""
        if self._root == "." or not node.nodeid:
            return str(node.nodeid)
        path, parts, rest = node.nodeid.partition("::")
        return os.path.normpath(os.path.join(self._root, path)) + parts + str(rest)

    def _note(self, item: Any, when: str, report: Any) -> None:
        if item is self._canary:
            if when == "call":
                self._canary_failed = report.outcome == "failed" and self._raised
            return
        expected = hasattr(report, "wasxfail")
        if report.outcome == "failed":
            self._send("test", self._id(item), "failed" if when == "call" else "error")
        elif report.outcome == "skipped":
            self._send("test", self._id(item), "xfailed" if expected else "skipped")
        elif when == "call" and expected:
            self._send("test", self._id(item), "xpassed")
        elif when == "call":
            # A test that raised cannot have passed, whatever the report says.
            self._send("test", self._id(item), "failed" if self._raised else "passed")


def look_started(script: str, first: str, arguments: List[str]) -> None:
    """Make this interpreter look like one that has just started on pytest: `script` is the file that was started,
    `first` the folder that this puts first on the path."""
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, first)
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main


def run_session(
    arguments: List[str], *, fd: int, key: str, canary: bool, test_timeout_s: Optional[float] = None
) -> int:
    """In a process of its own: run pytest with the recorder; the last line sent is ("done", exit status)."""
    send = sender(fd, key)
    recorder = Recorder(send, canary=canary, arguments=tuple(arguments), test_timeout_s=test_timeout_s)
    status = int(pytest.main(arguments, plugins=[recorder]))
    send("done", status)
    return status

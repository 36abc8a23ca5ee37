"""Runs inside a sandbox, as a pytest plugin: which test calls which function of the product, and which lines run.

Never imported by agentrl itself; for any Python from 3.6. `COVER_FOLDER` holds `watch.json`, {"paths": files to watch,
relative to the working folder; "import", "many": numbers below 0}, and takes `map.json`: {"tests": [id], "functions":
{path: {first line: [test]}}, "lines": {path: [line]}}. A test is its number, "import" stands for what runs before any
test, "many" for more tests than are kept. Lines are watched at the beginning of a function's first calls in
each test alone: a call costs little, a line much.
"""

import json
import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple  # noqa: UP035

import pytest

_TESTS_KEPT = 400
_CALLS_WATCHED = 3
_LINES_WATCHED = 300
Tracer = Callable[..., Any]


class Watch:
    """What was seen so far."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.root = os.getcwd() + os.sep
        with open(os.path.join(folder, "watch.json")) as file:
            told = json.load(file)
        self.paths = frozenset(told["paths"])
        self.many = int(told["many"])
        self.test = int(told["import"])
        self.tests: List[str] = []  # noqa: UP006
        self.functions: Dict[Tuple[str, int], Set[int]] = {}  # noqa: UP006
        self.lines: Dict[str, Set[int]] = {}  # noqa: UP006
        self.calls: Dict[int, int] = {}  # noqa: UP006
        self.others: Dict[int, CodeType] = {}  # noqa: UP006
        self.done: Dict[int, CodeType] = {}  # noqa: UP006
        """Codes that this test needs no more of, by their addresses, which are theirs while they are kept here."""
        self.on_call = self._tracer()

    def path_of(self, filename: str) -> "Optional[str]":  # noqa: UP045
        """The watched file's relative path; None for others."""
        name = os.path.realpath(filename)
        path = name[len(self.root) :] if name.startswith(self.root) else None
        return path if path in self.paths else None

    def _tracer(self) -> "Tracer":
        """What is called at each call, and at each step of a generator: most must end at its first line."""
        done = self.done

        def on_call(frame: FrameType, event: str, argument: Any) -> "Optional[Tracer]":  # noqa: UP045
            if id(frame.f_code) in done:
                return None
            return self.note(frame.f_code)

        return on_call

    def note(self, code: CodeType) -> "Optional[Tracer]":  # noqa: UP045
        """Note a call, and watch the lines of the first few."""
        path = self.path_of(code.co_filename)
        if path is None:
            self.others[id(code)] = self.done[id(code)] = code
            return None
        tests = self.functions.setdefault((path, code.co_firstlineno), set())
        tests.add(self.test if len(tests) < _TESTS_KEPT else self.many)
        count = self.calls.get(id(code), 0) + 1
        self.calls[id(code)] = count
        if count == _CALLS_WATCHED:
            self.done[id(code)] = code
        return self._line_tracer(self.lines.setdefault(path, set()))

    def _line_tracer(self, lines: "Set[int]") -> "Tracer":  # noqa: UP006
        left = _LINES_WATCHED

        def on_line(frame: FrameType, event: str, argument: Any) -> "Optional[Tracer]":  # noqa: UP045
            nonlocal left
            lines.add(frame.f_lineno)
            left -= 1
            if left == 0:
                frame.f_trace = None  # what is returned would not end it
                return None
            return on_line

        return on_line

    def start(self) -> None:
        """Watch this thread and those to come."""
        threading.settrace(self.on_call)
        sys.settrace(self.on_call)

    def begin(self, test: str) -> None:
        """What follows belongs to this test. (One before it may have ended the tracing.)"""
        self.test = len(self.tests)
        self.tests.append(test)
        self.calls.clear()
        self.done.clear()
        self.done.update(self.others)
        self.start()

    def write(self) -> None:
        """End the tracing and write the map."""
        sys.settrace(None)
        threading.settrace(None)
        functions: Dict[str, Dict[int, List[int]]] = {}  # noqa: UP006
        for (path, line), tests in self.functions.items():
            functions.setdefault(path, {})[line] = sorted(tests)
        lines = {path: sorted(found) for path, found in self.lines.items()}
        with open(os.path.join(self.folder, "map.json"), "w") as file:
            json.dump({"tests": self.tests, "functions": functions, "lines": lines}, file)


class Plugin:
    """The hooks around one `Watch`."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> "Iterator[None]":
        self._watch.begin(item.nodeid)
        yield

    def pytest_sessionfinish(self) -> None:
        self._watch.write()


def pytest_configure(config: Any) -> None:
    """Called by pytest, which imports this module by name."""
    watch = Watch(os.environ["COVER_FOLDER"])
    config.pluginmanager.register(Plugin(watch))
    watch.start()

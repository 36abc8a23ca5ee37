"""One test's time limit: a phase of a test (setup, call, teardown) that takes longer fails, the session goes on.

An alarm of the process raises the failure in the test's own code. Code that never comes back to the interpreter
cannot be interrupted: at twice the limit the whole session ends, and what was told of the tests before it stays.
A test that exchanges the alarm only loses its own limit; the session's deadline holds.

Python 3.6 and pytest 3 or later: this also runs in an image's own Python.
"""

import contextlib
import faulthandler
import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Callable, Iterator, Optional

import pytest

_AGAIN_S = 1.0
"""A test that swallows the failure gets it again, this often, and more often where the limit is short."""


class TimeLimit:
    """`limit_s` for each phase of each test; None: no limit. `on_over(item)` is called where a phase takes longer."""

    def __init__(self, limit_s: Optional[float], on_over: Callable[[Any], None]) -> None:
        self._limit_s = limit_s
        self._on_over = on_over
        self._item: Any = None
        # pytest exchanges the standard streams: what is said at the very end goes to the ones of the start.
        self._errors = 2 if limit_s is None else os.dup(2)

    @contextlib.contextmanager
    def watch(self, item: Any) -> Iterator[None]:
        """One phase of `item`."""
        limit_s = self._limit_s
        theirs_s = signal.getitimer(signal.ITIMER_REAL)[0]
        sooner = limit_s is not None and 0 < theirs_s <= limit_s  # the project's own limit comes first
        if limit_s is None or sooner or threading.current_thread() is not threading.main_thread():
            yield
            return
        began = time.monotonic()
        handler = signal.signal(signal.SIGALRM, self._over)
        self._item = item
        signal.setitimer(signal.ITIMER_REAL, limit_s, min(_AGAIN_S, limit_s / 4))
        faulthandler.dump_traceback_later(2 * limit_s, file=self._errors, exit=True)
        try:
            yield
        finally:
            self._item = None  # first: an alarm that is under way already finds nobody
            signal.setitimer(signal.ITIMER_REAL, 0)
            faulthandler.cancel_dump_traceback_later()
            signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
            if theirs_s > 0:
                signal.setitimer(signal.ITIMER_REAL, max(theirs_s - (time.monotonic() - began), 0.001))

    def _over(self, number: int, frame: Optional[FrameType]) -> None:
        item = self._item
        if item is None:
            return
        self._on_over(item)
        raise pytest.fail.Exception(f"took longer than {self._limit_s:g} s")

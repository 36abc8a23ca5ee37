"""A single test's time limit in the server's resident pytest (K40): it fails, and the session goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    ServerClient = Any

_SLOW = """
import time, pytest
@pytest.fixture
def slow():
    time.sleep(60)
@pytest.fixture
def slow_end():
    yield
    time.sleep(60)
def test_slow(): time.sleep(60)
def test_next(): pass
@pytest.mark.xfail
def test_expected(): time.sleep(60)
def test_setup(slow): pass
def test_teardown(slow_end): pass
def test_swallows():
    try: time.sleep(60)
    except BaseException: pass
def test_loops():
    for _ in range(2):
        try: time.sleep(60)
        except BaseException: pass
def test_last(): pass
"""


def test_k40_a_test_that_takes_too_long_fails_and_the_next_runs(server: ServerClient) -> None:
    server.write({"test_a.py": _SLOW})
    answer = server.tests("-q", canary=True, test_timeout_s=0.5, timeout_s=30)
    assert {name.partition("::")[2]: outcome for name, outcome in answer["results"].items()} == {
        "test_slow": "failed",
        "test_next": "passed",
        "test_expected": "failed",  # not what was expected of it
        "test_setup": "error",
        "test_teardown": "error",
        "test_swallows": "failed",
        "test_loops": "failed",
        "test_last": "passed",
    }
    assert answer["exit_code"] == 1
    assert answer["canary_failed"] is True
    assert answer["timed_out"] is False
    assert "took longer than 0.5 s" in answer["output"]


def test_k40_a_test_that_cannot_be_interrupted_ends_the_session(server: ServerClient) -> None:
    """The results so far are kept; what comes after is missing."""
    body = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})\n    time.sleep(60)"
    hard = f"import time\ndef test_a(): pass\ndef test_b():\n    {body}\ndef test_c(): pass\n"
    server.write({"test_a.py": hard.replace("\nsignal.", "\n    signal.")})
    answer = server.tests("-q", canary=True, test_timeout_s=0.5, timeout_s=20)
    assert answer["results"] == {"test_a.py::test_a": "passed"}
    assert answer["collected"] == 3
    assert answer["exit_code"] == 1
    assert answer["timed_out"] is False
    assert answer["canary_failed"] is False
    assert answer["duration_s"] < 10
    assert "test_b" in answer["output"]


def test_k40_a_test_that_takes_the_limit_away_meets_the_sessions(server: ServerClient) -> None:
    reset = "import faulthandler, signal, time\ndef test_a():\n    signal.setitimer(signal.ITIMER_REAL, 0)\n"
    reset += "    faulthandler.cancel_dump_traceback_later()\n    time.sleep(60)\n"
    server.write({"test_a.py": reset})
    answer = server.tests("-q", canary=True, test_timeout_s=0.3, timeout_s=2)
    assert answer["timed_out"] is True
    assert answer["results"] == {}


def test_a_limit_leaves_alarms_of_the_tests_alone(server: ServerClient) -> None:
    alarm = """
import signal, time, pytest
rung = []
def test_own():
    signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(0.3)
    assert rung
def test_after(): time.sleep(60)
"""
    server.write({"test_a.py": alarm})
    answer = server.tests("-q", test_timeout_s=1)
    assert answer["results"] == {"test_a.py::test_own": "passed", "test_a.py::test_after": "failed"}


@pytest.mark.parametrize("limit", [0, -1, "1", True])
def test_a_limit_is_a_positive_number(server: ServerClient, limit: object) -> None:
    answer = server.ask("tests", arguments=[], timeout_s=5, test_timeout_s=limit)
    assert answer["error"]["kind"] == "bad_request"

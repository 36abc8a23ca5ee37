"""The resident pytest's report: ids as pytest prints them, and builtins that code under test exchanged (K45)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from judged_tests import ONE_BAD

if TYPE_CHECKING:
    ServerClient = Any

GOOD = {"pkg/__init__.py": "", "pkg/a.py": "def f(x):\n    return x + 1\n"}


def test_ids_start_where_pytest_was_started(server: ServerClient) -> None:
    """A project may have its configuration in a folder of its tests; pytest itself prints ids so."""
    server.write(
        {**GOOD, "tests/pytest.ini": "[pytest]\n", "tests/test_a.py": ONE_BAD, "tests/test_b.py": "import no\n"}
    )
    answer = server.tests("-q", "tests", canary=True)
    assert answer["results"] == {"tests/test_b.py": "error"}
    answer = server.tests("-q", "-rA", "tests/test_a.py", canary=True)
    assert answer["results"] == {"tests/test_a.py::test_good": "passed", "tests/test_a.py::test_bad": "failed"}
    assert "PASSED tests/test_a.py::test_good" in answer["output"]
    assert "rootdir: " not in answer["output"]


def test_k45_exchanged_builtins_are_seen_but_not_those_of_a_fixture(server: ServerClient) -> None:
    spoilt = "import builtins\nold = sorted\nbuiltins.sorted = lambda *a: old(*a)\n"
    tests = (
        "def test_a(monkeypatch):\n    monkeypatch.setattr('builtins.sorted', list)\n"
        "    assert sorted('ba') == ['b', 'a']\n"
        "def test_b(monkeypatch):\n    import builtins\n    builtins.print = lambda *a: None\n"
    )
    server.write({"tests/test_a.py": tests})
    answer = server.tests("-q", canary=True)
    assert set(answer["results"].values()) == {"passed"}
    assert answer["canary_failed"] is True
    server.write({"tests/test_a.py": spoilt + tests})
    assert server.tests("-q", canary=True)["canary_failed"] is False

"""Test files for the runner of a sandbox's server, and code under test that fakes their results."""

from __future__ import annotations

# One test per outcome that pytest knows, and odd ids.
EVERY_OUTCOME = """
import pytest

@pytest.fixture
def broken():
    raise RuntimeError("setup")

@pytest.fixture
def leaky():
    yield
    raise RuntimeError("teardown")

def test_passes(): pass
def test_fails(): assert 1 == 2
def test_setup(broken): pass
def test_teardown(leaky): pass
@pytest.mark.skip
def test_skipped(): pass
def test_skips_itself(): pytest.skip("no")
@pytest.mark.xfail
def test_xfails(): assert False
@pytest.mark.xfail
def test_xpasses(): pass
@pytest.mark.xfail(strict=True)
def test_strict(): pass
@pytest.mark.parametrize("value", ["a b", "[x]", "é::y"])
def test_ids(value): pass
"""
ONE_BAD = "from pkg.a import f\n\ndef test_good(): assert f(1) == 2\n\ndef test_bad(): assert f(1) == 3\n"
PATCH_REPORT = """
import _pytest.reports as r
_real = r.TestReport.from_item_and_call.__func__
def fake(cls, item, call):
    report = _real(cls, item, call)
    report.outcome, report.longrepr = "passed", None
    return report
r.TestReport.from_item_and_call = classmethod(fake)
"""
CHANGE_IN_PLACE = "import pytest\npytest.Function.runtest.__code__ = (lambda self: None).__code__\n"
CONFTEST = """
import pytest
@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""
FORGE = """
import os
for fd in range(3, 64):
    try:
        os.write(fd, b'["test", "test_a.py::test_bad", "passed"]\\n')
    except OSError:
        pass
"""

"""JUnit files by node id: both families of pytest's writer, and files that are none."""

import subprocess
import sys
from pathlib import Path

import pytest

from agentrl_envs.swe_gym.junit import parse_junit

TESTS = """
import unittest
import pytest

def test_good(): pass
@pytest.mark.parametrize("x", ["a b", "c.d", "e::f"])
def test_each(x): assert x != "c.d"
def test_bad(): assert False
@pytest.fixture
def broken(): raise ValueError
def test_error(broken): pass
@pytest.fixture
def ends_badly():
    yield
    raise ValueError
def test_teardown(ends_badly): pass
def test_skipped(): pytest.skip("no")
@pytest.mark.xfail
def test_later(): assert False

class TestA:
    class TestB:
        def test_in(self): pass

class Old(unittest.TestCase):
    def test_method(self): pass
"""
EXPECTED = {
    "test_good": "passed",
    "test_each[a b]": "passed",
    "test_each[c.d]": "failed",
    "test_each[e::f]": "passed",
    "test_bad": "failed",
    "test_error": "error",
    "test_teardown": "error",
    "test_skipped": "skipped",
    "test_later": "xfailed",
    "TestA::TestB::test_in": "passed",
    "Old::test_method": "passed",
}


@pytest.fixture(scope="module", params=["xunit1", "xunit2"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What pytest writes of `TESTS`, in each of its families."""
    folder = tmp_path_factory.mktemp("junit")
    (folder / "pkg" / "tests").mkdir(parents=True)
    (folder / "pkg" / "tests" / "test_all.py").write_text(TESTS)
    options = ["-q", "-p", "no:cacheprovider", "-o", f"junit_family={request.param}", "--junitxml=out.xml"]
    command = [sys.executable, "-m", "pytest", *options, "pkg"]
    subprocess.run(command, cwd=folder, capture_output=True, check=False, timeout=120)
    return (folder / "out.xml").read_bytes()


@pytest.mark.parametrize("named", [True, False])
def test_both_families_of_pytest(written: bytes, named: bool) -> None:
    """K45, and ids with blanks, dots and colons, nested classes, a failed teardown."""
    expected = {f"pkg/tests/test_all.py::{name}": status for name, status in EXPECTED.items()}
    assert parse_junit(written, named=expected if named else ()) == expected


def test_a_file_that_could_not_be_collected(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name\n")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=out.xml"]
    subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, check=False)
    found = parse_junit((tmp_path / "out.xml").read_bytes())
    assert found is not None
    assert set(found.values()) == {"error"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<testsuite",
        b"<html></html>",
        b'<!DOCTYPE x [<!ENTITY a "b">]><testsuite>&a;</testsuite>',
    ],
)
def test_what_is_no_junit_file(data: bytes) -> None:
    assert parse_junit(data) is None


def test_an_empty_suite_has_no_results() -> None:
    assert parse_junit(b"<testsuites><testsuite/></testsuites>") == {}

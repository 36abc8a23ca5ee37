"""Logs of test commands: every way of printing a result, the harness's own verdicts on real logs, and noise."""

import json
import os
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_envs.swe_gym.log_parsers import PARSERS, parser_name
from agentrl_envs.swe_gym.verdict import judge_log

PYTEST = {
    "PASSED tests/test_a.py::test_one": ("tests/test_a.py::test_one", "passed"),
    "PASSED tests/test_a.py::test_one[a b]": ("tests/test_a.py::test_one[a b]", "passed"),
    "PASSED tests/test_a.py::test_one[a - b]": ("tests/test_a.py::test_one[a - b]", "passed"),
    "FAILED tests/test_a.py::test_one - assert 1 == 2": ("tests/test_a.py::test_one", "failed"),
    "FAILED tests/test_a.py::test_one[a - b] - assert [1] - 2": ("tests/test_a.py::test_one[a - b]", "failed"),
    "FAILED tests/test_a.py::test_one[[ - x] - no": ("tests/test_a.py::test_one[[ - x]", "failed"),
    "FAILED tests/test_a.py::test_one": ("tests/test_a.py::test_one", "failed"),
    "ERROR tests/test_a.py - ImportError: x": ("tests/test_a.py", "error"),
    "XFAIL tests/test_a.py::test_one - later": ("tests/test_a.py::test_one", "xfailed"),
    "XPASS tests/test_a.py::test_one": ("tests/test_a.py::test_one", "xpassed"),
    "tests/test_a.py::test_one PASSED                    [ 10%]": ("tests/test_a.py::test_one", "passed"),
    "tests/test_a.py::TestA::test_one[a b] FAILED [100%]": ("tests/test_a.py::TestA::test_one[a b]", "failed"),
    "tests/test_a.py::test_one SKIPPED (no network)      [ 10%]": ("tests/test_a.py::test_one", "skipped"),
    "test_one.py PASSED": ("test_one.py", "passed"),
    "[gw1] [ 10%] PASSED tests/test_a.py::test_one": ("tests/test_a.py::test_one", "passed"),
    "\x1b[32mPASSED\x1b[0m tests/test_a.py::\x1b[1mtest_one\x1b[0m": ("tests/test_a.py::test_one", "passed"),
    "PASSED tests/test_a.py::test_one\r": ("tests/test_a.py::test_one", "passed"),
}


@pytest.mark.parametrize("line", PYTEST)
def test_lines_of_pytest(line: str) -> None:
    assert PARSERS["parse_log_pytest"](f"noise\n{line}\nmore") == dict([PYTEST[line]])


@pytest.mark.parametrize(
    "line",
    [
        "SKIPPED [3] tests/test_a.py:7: no network",
        "===== 3 passed in 0.1s =====",
        "PASSED",
        "the test PASSED well, they say",
        "assert 'FAILED' in text",
    ],
)
def test_what_names_no_test_is_no_result(line: str) -> None:
    assert PARSERS["parse_log_pytest"](line) == {}


def test_what_is_said_last_stands() -> None:
    log = "PASSED t.py::a\nPASSED t.py::b\nERROR t.py::a - teardown\n"
    assert PARSERS["parse_log_pytest"](log) == {"t.py::b": "passed", "t.py::a": "error"}


def test_variants_of_pytest() -> None:
    assert PARSERS["parse_log_requests"]("PASSED t.py::f[/home/me/x.cfg]") == {
        "t.py::f[/home/me/x.cfg]": "passed",
        "t.py::f[/x.cfg]": "passed",
    }
    assert PARSERS["parse_log_pylint"]("PASSED t.py::f[//host/x]") == {"t.py::f[//host/x]": "passed"}
    assert PARSERS["parse_log_astropy"]("[32mPASSED[0m t.py::f\x01") == {"t.py::f": "passed"}
    assert PARSERS["parse_log_matplotlib"]("PASSED t.py::f[MouseButton.LEFT]") == {"t.py::f[1]": "passed"}
    assert PARSERS["parse_log_seaborn"]("t.py::f PASSED [ 1%]\nFAILED t.py::g") == {
        "t.py::f": "passed",
        "t.py::g": "failed",
    }


DJANGO = """\
test_a (x.tests.A) ... ok
test_b (x.tests.A)
What b does. ... ok
test_c (x.tests.A) ... FAIL
test_d (x.tests.A) ... ERROR
test_e (x.tests.A) ... skipped 'no database'
test_f (x.tests.A) ... System check identified no issues (0 silenced).
ok
test_g (x.tests.A) ... Internal Server Error: /here/
Traceback:
  more
ok
test_h (x.tests.A) ... expected failure
test_i (x.tests.A) ...
printed
ok
test_j (x.tests.A) ... test_k (x.tests.A) ... ok
  Applying sites.0002_alter_domain_unique...test_l (x.tests.A) ... ok
--version is equivalent to version ... 3.1
test_m (x.tests.A) ... printed and never ended

======================================================================
FAIL: test_c (x.tests.A)
----------------------------------------------------------------------
FAIL: test_j (x.tests.A) (i=1)
ok, that is prose
"""


def test_lines_of_django() -> None:
    found = PARSERS["parse_log_django"](DJANGO)
    names = {name[:6]: status for name, status in found.items() if name.endswith("(x.tests.A)")}
    assert names["test_a"] == names["test_f"] == names["test_g"] == names["test_i"] == names["test_l"] == "passed"
    assert (names["test_c"], names["test_d"], names["test_e"]) == ("failed", "error", "skipped")
    assert (names["test_h"], names["test_j"]) == ("xfailed", "failed")
    assert found["What b does."] == "passed"
    assert found["--version is equivalent to version"] == "passed"
    assert "test_k (x.tests.A)" not in found, "who failed of two on one line is not known"


SYMPY = """\
sympy/core/tests/test_basic.py[6]
test_structure ok
test_equality F
test_later f
test_error E
test_slow s - slow
test_last ok                                                         [FAIL]
________________________________________________________________________________
________________ sympy/core/tests/test_basic.py:test_equality __________________
"""


def test_lines_of_sympy() -> None:
    assert PARSERS["parse_log_sympy"](SYMPY) == {
        "test_structure": "passed",
        "test_equality": "failed",
        "test_later": "xfailed",
        "test_error": "error",
        "test_slow": "skipped",
        "test_last": "passed",
        "sympy/core/tests/test_basic.py:test_equality": "failed",
    }


def test_parsers_by_repository() -> None:
    assert parser_name("django/django") == "parse_log_django"
    assert parser_name("sympy/sympy") == "parse_log_sympy"
    assert parser_name("getmoto/moto") == "parse_log_pytest"


@given(st.text(), st.sampled_from(sorted(PARSERS)))
def test_any_text_is_read(text: str, name: str) -> None:
    """A log is hostile: no parser ever fails, and every status is one of ours."""
    known = {"passed", "failed", "error", "skipped", "xfailed", "xpassed"}
    assert set(PARSERS[name](text).values()) <= known


@pytest.mark.parametrize("piece", ["[", " - ", "_ ", "a::b ", " ... ", "FAILED a[ - "])
def test_a_long_line_is_read_in_time(piece: str) -> None:
    """A log is hostile: a line of 1 MB takes no longer than a few of 100 kB."""
    for parser in dict.fromkeys(PARSERS.values()):
        began = time.process_time()
        parser("FAILED " + piece * (1_000_000 // len(piece)))
        assert time.process_time() - began < 2, parser.__name__


def _log_folders() -> list[Path]:
    """The logs that come with the tests, and those of the folder that AGENTRL_EVAL_LOGS names."""
    folders = [Path(__file__).parents[2] / "data" / "eval_logs"]
    more = os.environ.get("AGENTRL_EVAL_LOGS")
    folders += [Path(more)] if more else []
    return sorted(path.parent for folder in folders for path in folder.glob("*/expected.json"))


@pytest.mark.parametrize("folder", _log_folders(), ids=lambda folder: folder.name)
def test_real_logs_get_the_harness_verdict(folder: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text())
    verdict = judge_log(
        (folder / "test_output.txt").read_text(),
        parser=expected["log_parser"],
        fail_to_pass=json.loads(expected["FAIL_TO_PASS"]),
        pass_to_pass=json.loads(expected["PASS_TO_PASS"]),
    )
    assert verdict.resolved is expected["report"]["resolved"], verdict.log
    for group in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        for outcome, tests in expected["report"]["tests_status"][group].items():
            for test in tests:
                passed = verdict.tests[test] in ("passed", "xfailed")
                assert passed is (outcome == "success"), (test, verdict.tests[test])


def test_there_are_twelve_real_logs() -> None:
    assert len(_log_folders()) >= 12


MARKED = "+ : '>>>>> Start Test Output'\n{}\n+ : '>>>>> End Test Output'\n"


def resolved(log: str, exit_code: int | None = None, test: str = "t.py::f") -> bool:
    return judge_log(log, parser="parse_log_pytest", fail_to_pass=[test], pass_to_pass=[], exit_code=exit_code).resolved


def test_only_what_lies_between_the_markers_counts() -> None:
    good, bad = "PASSED t.py::f", "FAILED t.py::f - x"
    assert resolved(MARKED.format(good))
    assert resolved(f"{bad}\n{MARKED.format(good)}{bad}\n")
    assert not resolved(f"{good}\n{MARKED.format('nothing')}{good}\n")
    assert not resolved(f"+ : '>>>>> Start Test Output'\n{good}\n"), "cut before its end"
    assert not resolved(MARKED.format(f"{good}\n>>>>> End Test Output\n{bad}")), "an end that the tests printed"


@pytest.mark.parametrize(
    "said", [">>>>> Patch Apply Failed", ">>>>> Reset Failed", ">>>>> Tests Errored", ">>>>> Tests Timed Out"]
)
def test_a_run_that_failed_resolves_nothing(said: str) -> None:
    assert not resolved(MARKED.format("PASSED t.py::f") + said)


def test_exit_codes_must_agree() -> None:
    assert resolved("PASSED t.py::f", 0)
    assert not resolved("PASSED t.py::f", 1), "the command failed, and no test did"
    assert resolved("PASSED t.py::f\nFAILED t.py::g", 1)
    assert not resolved("PASSED t.py::f\nFAILED t.py::g", 2)
    assert not resolved("", 0)


def test_an_id_cut_at_a_blank_in_a_log() -> None:
    assert resolved("PASSED t.py::f[a b]\nPASSED t.py::f[a c]", test="t.py::f[a")
    assert not resolved("PASSED t.py::f[a b]\nFAILED t.py::f[a c] - x", test="t.py::f[a")
    assert not resolved("PASSED t.py::f b", test="t.py::f")


def test_every_parser_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
    table = text[text.index("<!-- parsers:") : text.index("<!-- /parsers -->")]
    for row in table.splitlines()[3:]:
        names = re.findall(r"`(parse_log_\w+)`", row.split(" | ")[0])
        assert len({PARSERS[name] for name in names}) == 1, row
    assert set(re.findall(r"`(parse_log_\w+)`", table)) == set(PARSERS)


def test_progress_and_colours_hide_no_result() -> None:
    said = "10%\r100%\rPASSED t.py::a\r\nt.py::b[x   y] \x1b[32mPASSED\x1b[0m (0.1s)\x1b[32m [ 50%]\x1b[0m\n"
    assert PARSERS["parse_log_pytest"](said) == {"t.py::a": "passed", "t.py::b[x   y]": "passed"}
    assert PARSERS["parse_log_django"]("a (x.T) ... \x1b[32mok\x1b[0m\n") == {"a (x.T)": "passed"}


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_no_line_costs_the_square_of_its_length(parser: str) -> None:
    """Each line has the size that a sandbox's server keeps; the square of it would take hours."""
    size = 2_000_000
    for start, more, end in (
        ("t.py::t", " ", "PASSEDx"),
        ("t.py::t ", "PASSED (", ""),
        ("FAILED t.py::t[", " - ", ""),
        ("_ ", "x.py:", " _ x"),
        ("test_a ok - ", " ", "x"),
        ("FAIL: x", " (", ""),
        ("", " ... ", "x"),
        ("\x1b[", "1;", "x"),
    ):
        line = start + more * (size // len(more)) + end
        began = time.process_time()
        PARSERS[parser](line)
        assert time.process_time() - began < 5, (start, more)

"""How a row's tests are run, and the tests that cannot pass beside them."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl_envs.swe_gym.must_fail import django_test, must_fail_beside, sympy_test
from agentrl_envs.swe_gym.plans import Plan, plan_of
from agentrl_envs.swe_gym.rows import load_rows, parse_row

GOOD: dict[str, Any] = {
    "instance_id": "o__r-1",
    "repo": "o/r",
    "base_commit": "abc",
    "patch": "--- a/r/a.py\n+++ b/r/a.py\n",
    "test_patch": "--- a/tests/test_a.py\n+++ b/tests/test_a.py\n",
    "problem_statement": "a is wrong",
    "FAIL_TO_PASS": ["tests/test_a.py::TestA::test_one[x y]"],
    "PASS_TO_PASS": ["tests/test_b.py::test_two", "noise"],
}


def plan(**changes: Any) -> Plan:
    return plan_of(parse_row(GOOD | changes, place="here"))


def script(command: str) -> str:
    return f"#!/bin/bash\nset -x\n: '>>>>> Start Test Output'\n{command}\n: '>>>>> End Test Output'\ngit checkout x\n"


def test_the_rule_is_pytest_on_the_files_of_the_named_tests() -> None:
    found = plan()
    assert found.command is None
    assert found.files == ("tests/test_a.py", "tests/test_b.py")
    assert found.restored == ("tests",)
    assert [each.path for each in found.appended] == ["tests/test_a.py"] * 2
    assert found.appended[0].test.startswith("tests/test_a.py::test_one_")
    assert found.appended[1].test.startswith("tests/test_a.py::TestA")


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("pytest -rA tests/test_a.py", ()),
        ("python -m pytest -rA --tb=no -q -p no:cacheprovider tests/test_a.py", ("-p", "no:cacheprovider")),
        ("pytest -n0 -rA -k 'one or two' tests", ("-k", "one or two")),
        ("pytest -rA -W ignore::DeprecationWarning -n 4 --color no tests", ("-W", "ignore::DeprecationWarning")),
        ("/opt/bin/pytest --doctest-modules -o console_output_style=classic a.py",
         ("--doctest-modules", "-o", "console_output_style=classic")),
        ("tox --current-env -epy39 -v -- tests/test_a.py", ()),
    ],
)  # fmt: skip
def test_of_a_pytest_command_only_options_are_kept(command: str, options: tuple[str, ...]) -> None:
    for found in (plan(eval_script=script(command)), plan(x_test_cmd=command)):
        assert found.command is None
        assert found.options == options
        assert found.files == ("tests/test_a.py", "tests/test_b.py")


@pytest.mark.parametrize(
    "command",
    [
        "make test",
        "tox -e py39",
        "cd sub && pytest tests",
        "pytest a.py\npytest b.py",
        "python run.py --junitxml=out/x.xml",
    ],
)
def test_any_other_command_is_run_as_it_stands(command: str) -> None:
    found = plan(eval_script=script(command))
    assert found.command is not None
    assert found.command.line == command
    assert found.command.parser == "parse_log_pytest"
    assert found.command.junit == ("out/x.xml" if "junit" in command else None)
    steering = {"make": "Makefile", "tox": "tox.ini"}.get(command.split()[0])
    assert found.restored == tuple(sorted({"tests", steering or "tests"}))


def test_django_and_sympy_have_their_own_runners() -> None:
    names = {"FAIL_TO_PASS": ["test_a (x.tests.A)"], "PASS_TO_PASS": ["What it does."]}
    patch = "--- a/tests/x/tests.py\n+++ b/tests/x/tests.py\n--- a/tests/y/test_b.py\n+++ b/tests/y/test_b.py\n"
    django = plan(repo="django/django", test_patch=patch, **names)
    assert django.command is not None
    runner = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
    assert django.command.line.startswith(f"{runner} x.tests y.test_b ")
    assert django.command.parser == "parse_log_django"
    assert "django/test/runner.py" in django.restored
    (path,) = django.added
    label = path.removeprefix("tests/").removesuffix(".py").replace("/", ".")
    assert django.command.line.endswith(f" {label}")
    assert django.must_fail[0].endswith(f"({label}.{django.must_fail[0].split('.')[-1]}")

    patch = "--- a/sympy/core/tests/test_a.py\n+++ b/sympy/core/tests/test_a.py\n"
    sympy = plan(repo="sympy/sympy", test_patch=patch, **names)
    assert sympy.command is not None
    assert "bin/test -C --verbose sympy/core/tests/test_a.py sympy/core/tests/test_" in sympy.command.line
    fix = "--- a/sympy/testing/x.py\n+++ b/sympy/testing/x.py\n"
    own = plan(repo="sympy/sympy", test_patch=patch, patch=fix, **names)
    assert "sympy/testing" in sympy.restored
    assert "sympy/testing" not in own.restored, "what the fix changes is judged"


def test_tests_in_data_files_are_chosen_by_name() -> None:
    names = {"FAIL_TO_PASS": ["mypy/test/testcheck.py::S::check.test::testB"], "PASS_TO_PASS": []}
    assert plan(repo="python/mypy", **names).options == ("-k", "testB")


def test_pytest_itself_is_run_as_a_command(data_folder: Path) -> None:
    rows = load_rows(str(data_folder / "swe_bench/rows_v5.parquet"), hub_split="train")
    (row,) = (row for row in rows if row.repo == "pytest-dev/pytest")
    found = plan_of(row)
    assert found.command is not None
    assert "testing/test_pastebin.py" in found.command.line


def test_what_cannot_pass_does_not_pass(tmp_path: Path) -> None:
    """K45: every check of every kind refutes what is false, in the runner that it is for."""
    made = must_fail_beside(["test_a.py::TestA::test_one[x]", "test_b.py::test_two", "a.test::x"], ())
    assert [each.path for each in made] == ["test_a.py"] * 2 + ["test_b.py"] * 2
    for each in made:
        with (tmp_path / each.path).open("a") as file:
            file.write(each.text)
    _, django, _, _ = django_test("tests/x", ())
    _, sympy, _, name = sympy_test("sympy/x/tests")
    (tmp_path / "test_django.py").write_text(django)
    (tmp_path / "test_sympy.py").write_text(sympy)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    for each in made:
        assert f"FAILED {each.test} - " in done.stdout
    assert f"FAILED test_sympy.py::{name}" in done.stdout
    assert "6 failed" in done.stdout
    assert "assert 15 != 15" in done.stdout
    assert done.stdout.count("assert 27 != 27") >= 3


def test_ids_of_djangos_tests_are_as_the_row_s() -> None:
    """Since Python 3.11 they end with the method's name."""
    _, _, label, old = django_test("tests/x/y", ["test_a (x.y.TestA)", "a description"])
    assert re.fullmatch(rf"(\w+) \({re.escape(label)}\.\w+\)", old)
    _, _, label, new = django_test("tests/x/y", ["test_a (x.y.TestA.test_a)"])
    assert re.fullmatch(rf"(\w+) \({re.escape(label)}\.\w+\.\1\)", new)

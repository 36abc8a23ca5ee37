"""How a row's tests are run: by pytest with a plug-in that reports each test, which is the rule, or by the row's own
command, whose output is read.

The row's evaluation decides where it names a command; rows of the repositories whose tests are not pytest's have theirs
from here. A pytest command is never run as it stands: what matters of it are its options.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl_envs.swe_gym.log_parsers import parser_name
from agentrl_envs.swe_gym.must_fail import MustFail, Twin, django_test, must_fail_beside, sympy_test, twins_of
from agentrl_envs.swe_gym.rows import Row, patch_paths

_TEST_FOLDERS = frozenset({"test", "tests", "testing"})
_KEPT_OPTIONS = ("-W", "-o", "-k", "-m", "-c", "-p", "--doctest", "--import-mode", "--pyargs", "--override-ini")
_WITH_VALUE = frozenset({"-W", "-o", "-k", "-m", "-c", "-p", "--import-mode", "--override-ini"})
_DROPPED_WITH_VALUE = frozenset({"-n", "-r", "--tb", "--color", "--maxfail", "--junitxml", "--junit-xml", "--timeout"})
_ITSELF = "pytest-dev/pytest"  # the pytest that runs its tests is the one that is mended
_BY_NAME = frozenset({"python/mypy"})  # one file runs thousands of tests that no file of the repository names
_MYPY_PART = re.compile(r"\w+")
_JUNIT = re.compile(r"--junit-?xml[= ]['\"]?([\w./-]+)")
_DJANGO = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1 {}"
_SYMPY = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose {}"
_PYTEST_ITSELF = "PYTHONPATH=src python -m pytest -rA -p no:cacheprovider --color=no {}"
# What runs and judges tests there, though it lies among the product.
_RUNNERS = {
    "django/django": ("tests/runtests.py", "django/test/runner.py", "django/test/testcases.py", "django/test/utils.py"),
    "sympy/sympy": ("bin/test", "sympy/testing", "sympy/utilities/runtests.py", "sympy/utilities/pytest.py"),
}
_OF_COMMAND = {"tox": ("tox.ini",), "nox": ("noxfile.py",), "make": ("Makefile",)}


@dataclass(frozen=True, slots=True)
class Command:
    """A row's own test command, how its output is read, and where it writes a JUnit file (None: nowhere)."""

    line: str
    parser: str
    junit: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """How a row's tests are run.

    `restored`: paths put back before the test patch. `files`: what pytest is asked to run, with `options`; `command`
    where another runner is. `appended`: tests that must fail, put at the end of test files; `twins`: copies of named
    tests that must fail, put there too; `added`: files (path → text) and `must_fail`: ids, of such tests in files of
    their own.
    """

    restored: tuple[str, ...]
    files: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    command: Command | None = None
    appended: tuple[MustFail, ...] = ()
    twins: tuple[Twin, ...] = ()
    added: dict[str, str] = field(default_factory=dict)
    must_fail: tuple[str, ...] = ()


def plan_of(row: Row) -> Plan:
    """The plan of a row. Ids of tests that must fail are drawn anew in each call."""
    parser = row.log_parser or parser_name(row.repo)
    files = _named_files(row)
    if parser == "parse_log_django":
        return _django(row)
    if parser == "parse_log_sympy":
        return _sympy(row)
    appended = tuple(must_fail_beside(row.fail_to_pass, row.pass_to_pass))
    if row.repo == _ITSELF:
        line = _PYTEST_ITSELF.format(" ".join(map(shlex.quote, _test_files(row) or files)))
        return Plan(restored_paths(row, files), command=Command(line, parser), appended=appended)
    words = _words(row.test_command)
    options = None if words is None else _pytest_options(words)
    if row.test_command is not None and options is None:
        found = _JUNIT.search(row.test_command)
        command = Command(row.test_command, parser, None if found is None else found[1])
        steering = [path for word in words or () for path in _OF_COMMAND.get(word.rsplit("/", 1)[-1], ())]
        return Plan(restored_paths(row, files, steering), command=command, appended=appended)
    if row.repo in _BY_NAME:
        options = _by_name(row)
    return Plan(
        restored_paths(row, files),
        files=files,
        options=tuple(options or ()),
        appended=appended,
        twins=tuple(twins_of(row.fail_to_pass)),
    )


def grading_targets(row: Row) -> tuple[list[str], list[str]]:
    """(files of the named tests, paths restored before the test patch) of a row whose tests are pytest's."""
    files = _named_files(row)
    return list(files), list(restored_paths(row, files))


def _named_files(row: Row) -> tuple[str, ...]:
    """The files in the node ids of the named tests."""
    return tuple(sorted({test.split("::")[0] for test in (*row.fail_to_pass, *row.pass_to_pass) if "::" in test}))


def _test_files(row: Row) -> tuple[str, ...]:
    """The Python files of the test patch that hold tests."""
    names = sorted(path for path in patch_paths(row.test_patch) if path.endswith(".py"))
    return tuple(path for path in names if "test" in path.rsplit("/", 1)[-1])


def restored_paths(row: Row, files: Sequence[str], more: Sequence[str] = ()) -> tuple[str, ...]:
    """Paths restored before the test patch: the files of the named tests and of the test patch, and the folders that
    hold nothing but tests: helpers there belong to what judges, not to what is judged. A folder in which the row's
    own fix changes anything else holds more than tests (`pkg/testing` may be a product) and is left alone. So is what
    the fix changes of `more`, the files of a test runner."""
    touched = sorted({*files, *patch_paths(row.test_patch)})
    mended = patch_paths(row.patch) - set(touched)
    folders = {folder for path in touched if (folder := _test_folder(path))}
    folders -= {folder for folder in folders if any(path.startswith(f"{folder}/") for path in mended)}
    kept = {path for path in touched if _test_folder(path) not in folders}
    runner = {path for path in more if path not in mended and not any(each.startswith(f"{path}/") for each in mended)}
    return tuple(sorted(folders | kept | runner))


def _test_folder(path: str) -> str | None:
    """The innermost folder of tests that holds `path`; None where there is none."""
    parts = path.split("/")[:-1]
    for depth in range(len(parts), 0, -1):
        if parts[depth - 1] in _TEST_FOLDERS:
            return "/".join(parts[:depth])
    return None


# --- pytest commands ----------------------------------------------------------------------------------------


def _words(command: str | None) -> list[str] | None:
    """The words of a plain command; None for one that only a shell understands."""
    if command is None or "\n" in command or re.search(r"[;&|<>`$(){}]", re.sub(r"'[^']*'|\"[^\"]*\"", "", command)):
        return None
    try:
        return shlex.split(command)
    except ValueError:
        return None


def _pytest_options(words: Sequence[str]) -> list[str] | None:
    """The options of a pytest command that decide which tests run and how, but for how they are shown; None for
    another command."""
    rest = list(words)
    if rest[:1] == ["tox"] and "--current-env" in rest and "--" in rest:
        return []  # pytest in the image's own environment, on the files behind `--`
    if [word.rsplit("/", 1)[-1] for word in rest[:1]] in (["python"], ["python3"]) and rest[1:2] == ["-m"]:
        rest = rest[2:]
    if [word.rsplit("/", 1)[-1] for word in rest[:1]] not in (["pytest"], ["py.test"]):
        return None
    options: list[str] = []
    left = iter(rest[1:])
    for word in left:
        name = word.split("=", 1)[0]
        short = word[:2] if not word.startswith("--") else name
        separate = word in _WITH_VALUE | _DROPPED_WITH_VALUE
        value = [next(left, "")] if separate else []
        if word.startswith("-") and short.startswith(_KEPT_OPTIONS):
            options += [word, *value]
    return options


def _by_name(row: Row) -> list[str]:
    """mypy's tests lie in data files: they are chosen by the last part of their ids."""
    names = sorted({test.rsplit("::", 1)[-1] for test in (*row.fail_to_pass, *row.pass_to_pass)})
    return ["-k", " or ".join(name for name in names if _MYPY_PART.fullmatch(name))]


# --- other runners ------------------------------------------------------------------------------------------


def _django(row: Row) -> Plan:
    """Django's own runner takes dotted labels below `tests`."""
    files = [path for path in patch_paths(row.test_patch) if path.startswith("tests/") and path.endswith(".py")]
    labels = [path.removeprefix("tests/").removesuffix(".py").replace("/", ".") for path in sorted(files)]
    line = row.test_command or _DJANGO.format(" ".join(labels))
    added, must_fail = {}, []
    if files:
        folder = min(files).rpartition("/")[0]
        path, text, label, test = django_test(folder, (*row.fail_to_pass, *row.pass_to_pass))
        added, must_fail, line = {path: text}, [test], f"{line} {label}"
    return Plan(
        restored_paths(row, (), _RUNNERS["django/django"]),
        command=Command(line, "parse_log_django"),
        added=added,
        must_fail=tuple(must_fail),
    )


def _sympy(row: Row) -> Plan:
    files = _test_files(row)
    line = row.test_command or _SYMPY.format(" ".join(files))
    added, must_fail = {}, []
    if files:
        path, text, argument, test = sympy_test(files[0].rpartition("/")[0])
        added, must_fail, line = {path: text}, [test], f"{line} {argument}"
    return Plan(
        restored_paths(row, files, _RUNNERS["sympy/sympy"]),
        command=Command(line, "parse_log_sympy"),
        added=added,
        must_fail=tuple(must_fail),
    )

"""What a test command printed, as statuses of tests: one parser for each way of printing that SWE-Gym's and
SWE-bench's repositories have.

A log is hostile text and the weakest witness there is: where pytest can be run with a plug-in of ours, its report
counts and no log is read. A parser never fails; it gives what it finds, id → passed | failed | error | skipped |
xfailed | xpassed. What is said last of a test stands, as in SWE-bench's own harness: its summary comes last.

Ids keep their blanks (`t.py::f[a b]`), which that harness cuts off; `verdict` knows ids that were cut.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping

Statuses = dict[str, str]
Parser = Callable[[str], Statuses]

_WORDS = {
    "PASSED": "passed",
    "FAILED": "failed",
    "ERROR": "error",
    "SKIPPED": "skipped",
    "XFAIL": "xfailed",
    "XPASS": "xpassed",
}
_WORD = "|".join(_WORDS)
_WORD_FIRST = re.compile(rf"({_WORD})\s+(\S.*)")
_FOLDED_SKIPS = re.compile(r"\[\d+\]")  # `SKIPPED [3] tests/test_a.py:7: why` names no test
_WORD_WITHIN = re.compile(rf"\s({_WORD})(?!\S)")
_AFTER_WORD = re.compile(r"(?:\s+\(.*\))?(?:\s+\[\s*\d+%\])?\s*")
_ID = re.compile(r"\S+::\S")
_MOST_WORDS, _LONGEST_LINE = 20, 500  # a hostile line must not cost the square of its length
_WORD_SECOND = re.compile(rf"(\S+)\s+({_WORD})(?:\s.*)?")
_WORKER = re.compile(r"\[gw\d+\]\s+(?:\[\s*\d+%\]\s+)?")  # of pytest-xdist, before the word
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


# --- pytest -------------------------------------------------------------------------------------------------


def parse_pytest(log: str) -> Statuses:
    """`PASSED id`, `FAILED id - why`, `id PASSED [ 10%]`, `[gw0] [ 10%] PASSED id`."""
    statuses: Statuses = {}
    for line in log.split("\n"):
        shown = line.rstrip("\r").rpartition("\r")[2]  # what a bar of progress leaves in a terminal
        found = _pytest_line(_COLOURS.sub("", shown))
        if found is not None:
            _set(statuses, *found)
    return statuses


def _set(statuses: Statuses, test: str, status: str) -> None:
    """The last word stands, and stands last."""
    statuses.pop(test, None)
    statuses[test] = status


def _pytest_line(line: str) -> tuple[str, str] | None:
    line = _WORKER.sub("", line, count=1) if line.startswith("[gw") else line
    first = _WORD_FIRST.fullmatch(line)
    if first is not None:
        word, rest = first.groups()
        if word == "SKIPPED" and _FOLDED_SKIPS.match(rest):
            return None
        return (rest.strip() if word == "PASSED" else _without_reason(rest)), _WORDS[word]
    if _ID.match(line):
        for word in itertools.islice(_WORD_WITHIN.finditer(line), _MOST_WORDS):
            if _AFTER_WORD.fullmatch(line, word.end()):
                return line[: word.start()].rstrip(), _WORDS[word[1]]
    second = _WORD_SECOND.fullmatch(line)
    return None if second is None else (second[1], _WORDS[second[2]])


def _without_reason(text: str) -> str:
    """`id - why` without why. An id's parameters may hold ` - ` too: they end with a bracket."""
    bracket, at = text.find("["), text.find(" - ")
    while at >= 0:
        if not 0 <= bracket < at or text[at - 1] == "]":
            return text[:at].strip()
        at = text.find(" - ", at + 3)
    return text.strip()


def parse_pytest_options(log: str) -> Statuses:
    """As `parse_pytest`; of a parameter that is a path, which differs from machine to machine, the last part
    counts too."""
    statuses: Statuses = {}
    for test, status in parse_pytest(log).items():
        _set(statuses, test, status)
        head, bracket, option = test.partition("[")
        option = option.removesuffix("]")
        if bracket and option.startswith("/") and not option.startswith("//") and "*" not in option:
            _set(statuses, f"{head}[/{option.rsplit('/', 1)[-1]}]", status)
    return statuses


_BARE_COLOUR = re.compile(r"\[\d+m")
_CONTROLS = dict.fromkeys(range(1, 32))


def parse_pytest_v2(log: str) -> Statuses:
    """As `parse_pytest`, for output in which colours have lost their escape character."""
    lines = (_BARE_COLOUR.sub("", line).translate(_CONTROLS) for line in log.split("\n"))
    return parse_pytest("\n".join(lines))


def parse_matplotlib(log: str) -> Statuses:
    """As `parse_pytest`; newer Pythons print a parameter by the name of its enumeration."""
    return parse_pytest(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


# --- unittest, as Django runs it ----------------------------------------------------------------------------

_OUTCOMES = {
    " ... ok": "passed",
    " ... OK": "passed",
    " ...  OK": "passed",
    " ... FAIL": "failed",
    " ... ERROR": "error",
    " ... expected failure": "xfailed",
    " ... unexpected success": "xpassed",
}
_FAILED_TITLE = re.compile(r"(FAIL|ERROR): (\S+(?: \([^()]*\))?)")
_VERSION_TEST = "--version is equivalent to version"  # prints the version where its result should be
_OK = re.compile(r"ok\b")


def parse_django(log: str) -> Statuses:
    """`name (module.Class) ... ok`, or the test's description in place of its name. A test that prints has its
    `ok` on a later line."""
    statuses: Statuses = {}
    waiting: str | None = None
    for raw in log.split("\n"):
        line = _COLOURS.sub("", raw).strip()
        if _VERSION_TEST in line and not line.endswith(("FAIL", "ERROR")):
            _set(statuses, _VERSION_TEST, "passed")
        if " ... " in line or line.endswith(" ..."):
            waiting = re.split(r" \.\.\.(?: |$)", line, maxsplit=1)[0]
        found = _django_line(line)
        if found is not None:
            waiting = None
            _set(statuses, *found)
        elif waiting is not None and _OK.match(line):
            _set(statuses, waiting, "passed")
            waiting = None
        title = _FAILED_TITLE.match(line)
        if title is not None:
            _set(statuses, title[2], "failed" if title[1] == "FAIL" else "error")
    return statuses


def _django_line(line: str) -> tuple[str, str] | None:
    if " ... skipped" in line:
        return line.split(" ... skipped", 1)[0], "skipped"
    for ending, status in _OUTCOMES.items():
        if line.endswith(ending):
            name = line.removesuffix(ending)
            if name.startswith("Applying ") and "..." in name:  # a migration's line, not ended
                name = name.rpartition("...")[2].strip()
            return name, status
    return None


# --- sympy --------------------------------------------------------------------------------------------------

_SYMPY_FAILED = re.compile(r"_+ (\S.*?\.py:\S+) _+")
_SYMPY_LINE = re.compile(r"(test_\w+)\s+(ok|F|E|f|X|s|w|T)(?:\s+- .*)?(?:\s+\[(?:OK|FAIL)\])?")
_SYMPY_MARKS = {
    "ok": "passed",
    "F": "failed",
    "E": "error",
    "f": "xfailed",
    "X": "xpassed",
    "s": "skipped",
    "w": "skipped",
    "T": "failed",
}


def parse_sympy(log: str) -> Statuses:
    """`test_name ok`, and `____ file.py:test_name ____` above a traceback."""
    statuses: Statuses = {}
    for raw in log.split("\n"):
        line = _COLOURS.sub("", raw).strip()
        if len(line) > _LONGEST_LINE:
            continue
        title = _SYMPY_FAILED.fullmatch(line)
        if title is not None:
            _set(statuses, title[1], "failed")
        found = _SYMPY_LINE.fullmatch(line)
        if found is not None:
            _set(statuses, found[1], _SYMPY_MARKS[found[2]])
    return statuses


# --- by name ------------------------------------------------------------------------------------------------

_BY_REPO: Mapping[str, tuple[str, Parser]] = {
    "astropy/astropy": ("parse_log_astropy", parse_pytest_v2),
    "django/django": ("parse_log_django", parse_django),
    "marshmallow-code/marshmallow": ("parse_log_marshmallow", parse_pytest),
    "matplotlib/matplotlib": ("parse_log_matplotlib", parse_matplotlib),
    "mwaskom/seaborn": ("parse_log_seaborn", parse_pytest),
    "pallets/flask": ("parse_log_flask", parse_pytest),
    "psf/requests": ("parse_log_requests", parse_pytest_options),
    "pvlib/pvlib-python": ("parse_log_pvlib", parse_pytest),
    "pydata/xarray": ("parse_log_xarray", parse_pytest),
    "pydicom/pydicom": ("parse_log_pydicom", parse_pytest_options),
    "pylint-dev/astroid": ("parse_log_astroid", parse_pytest),
    "pylint-dev/pylint": ("parse_log_pylint", parse_pytest_options),
    "pytest-dev/pytest": ("parse_log_pytest", parse_pytest),
    "pyvista/pyvista": ("parse_log_pyvista", parse_pytest),
    "scikit-learn/scikit-learn": ("parse_log_scikit", parse_pytest_v2),
    "sphinx-doc/sphinx": ("parse_log_sphinx", parse_pytest_v2),
    "sqlfluff/sqlfluff": ("parse_log_sqlfluff", parse_pytest),
    "sympy/sympy": ("parse_log_sympy", parse_sympy),
}
PARSERS: Mapping[str, Parser] = {
    "parse_log_pytest": parse_pytest,
    "parse_log_pytest_options": parse_pytest_options,
    "parse_log_pytest_v2": parse_pytest_v2,
    **dict(_BY_REPO.values()),
}
"""By the name that a row's `log_parser` gives."""


def parser_name(repo: str) -> str:
    """The parser's name for a repository whose rows name none."""
    return _BY_REPO.get(repo, ("parse_log_pytest", parse_pytest))[0]

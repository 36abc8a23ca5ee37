"""Tests that cannot pass, put among those that judge: what fakes the results of tests fakes theirs too.

The runner has one of its own, in a file of its own. These stand in the very files of the tests that must be mended,
under names like theirs, and use what those use: plain assertions, `pytest.raises`, the methods of `TestCase`. Each
checks that a row of false statements is refuted and then fails; if one of them no longer is, it passes.

A `Twin` is the copy of a test that must be mended, false at its end: it does with the code under test what that test
does, so that whatever spares tests in which its code is called, or leads them past their assertions, spares the copy.
"""

# ruff: noqa: SIM905 - words on a line read better than a list of literals

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

_WORDS = (
    "basic border bytes cache chain clock common copies default empty entry errors fields filter format groups "
    "header index inner items keys limits lines lookup merge names nested order output pages parse paths plain "
    "prefix quotes ranges reader round rules scope simple slices sorted spaces stages steps strings suffix table"
).split()
_ENOUGH = 12  # words, for names that nobody foresees
_TWINS_OFFERED = 8  # per file; not each test can be copied

_FUNCTION = """

def {name}():
    from unittest import mock

    import pytest

    values = [{a}, {b}, {c}]
    refuted = 0
    for statement in (
        lambda: values == [{a}, {b}, {d}],
        lambda: isinstance(values, dict),
        lambda: len(values) == {d},
        lambda: {d} in values,
        lambda: all(value == {a} for value in values) or any(value == {d} for value in values),
        lambda: sorted(values) == values[::-1] == sorted(values),
        lambda: str(values) == repr(tuple(values)),
        lambda: sum(values) == {d},
        lambda: values[0] == pytest.approx({d}),
        lambda: mock.Mock().assert_called_with({a}) is None,
        lambda: mock.Mock().assert_called_once() is None,
        lambda: mock.Mock().assert_has_calls([mock.call({a})]) is None,
    ):
        try:
            assert statement()
        except AssertionError:
            refuted += 1
    for expectation in (lambda: pytest.raises(ValueError), lambda: pytest.warns(UserWarning)):
        try:
            with expectation():
                refuted += 0
        except BaseException:
            refuted += 1
    try:
        with pytest.raises(ValueError, match="{a}"):
            raise ValueError("none")
    except (AssertionError, pytest.fail.Exception):
        refuted += 1
    assert refuted != 15
"""

_CLASS = """

class {owner}(__import__("unittest").TestCase):
    def {name}(self):
        refuted = 0
        for statement in (
            lambda: self.assertEqual({a}, {d}),
            lambda: self.assertNotEqual({a}, {a}),
            lambda: self.assertTrue({a} == {d}),
            lambda: self.assertFalse({a} == {a}),
            lambda: self.assertIs({a}, None),
            lambda: self.assertIsNot(None, None),
            lambda: self.assertIsNone({a}),
            lambda: self.assertIsNotNone(None),
            lambda: self.assertIn({a}, [{d}]),
            lambda: self.assertNotIn({a}, [{a}]),
            lambda: self.assertIsInstance({a}, str),
            lambda: self.assertAlmostEqual({a}, {d}),
            lambda: self.assertGreater({a}, {d}),
            lambda: self.assertGreaterEqual({a}, {d}),
            lambda: self.assertLess({d}, {a}),
            lambda: self.assertLessEqual({d}, {a}),
            lambda: self.assertRegex("{a}", "x"),
            lambda: self.assertCountEqual([{a}], [{d}]),
            lambda: self.assertListEqual([{a}], [{d}]),
            lambda: self.assertTupleEqual(({a},), ({d},)),
            lambda: self.assertSetEqual({{{a}}}, {{{d}}}),
            lambda: self.assertDictEqual({{1: {a}}}, {{1: {d}}}),
            lambda: self.assertSequenceEqual([{a}], [{d}]),
            lambda: self.assertMultiLineEqual("{a}", "{d}"),
            lambda: self.assertRaises(ValueError, lambda: None),
            lambda: self.assertRaisesRegex(ValueError, "x", lambda: None),
            lambda: self.fail("{a}"),
        ):
            try:
                statement()
            except AssertionError:
                refuted += 1
        assert refuted != 27
"""


@dataclass(frozen=True, slots=True)
class MustFail:
    """A test to be appended to the file at `path`: its node id and its text. `parameters` says whether it would break
    where the module gives parameters to all its tests."""

    path: str
    test: str
    text: str
    parameters: bool


def must_fail_beside(fail_to_pass: Sequence[str], others: Sequence[str]) -> list[MustFail]:
    """Two for each Python file of FAIL_TO_PASS: a function and a method, called like tests that are there: in words
    of their names and of `others`."""
    first: dict[str, str] = {}
    for test in fail_to_pass:
        path, _, rest = test.partition("::")
        if path.endswith(".py") and rest:
            first.setdefault(path, rest)
    names = " ".join(test.partition("[")[0].rpartition("::")[2] for test in (*fail_to_pass, *others))
    words = sorted(set(re.findall(r"[a-z]{3,}", names)) - {"test", "tests"})
    words = words if len(words) >= _ENOUGH else [*words, *_WORDS]
    return [made for path, rest in first.items() for made in _pair(path, rest, words)]


@dataclass(frozen=True, slots=True)
class Twin:
    """A copy of the test `name` (a method of `owner`, or a function where that is empty) of the file at `path`, to be
    called `new_name` (in a class `new_owner`), with `statement`, which is false, at its end."""

    path: str
    owner: str
    name: str
    new_owner: str
    new_name: str
    statement: str


def twins_of(fail_to_pass: Sequence[str]) -> list[Twin]:
    """Copies to choose from, in random order: of functions, and of methods of classes at a file's top."""
    offered: dict[str, set[tuple[str, str]]] = {}
    for test in fail_to_pass:
        path, *owners, name = test.partition("[")[0].split("::")
        owner = owners[0] if owners else ""
        if path.endswith(".py") and len(owners) <= 1 and name.isidentifier() and (not owner or owner.isidentifier()):
            offered.setdefault(path, set()).add((owner, name))
    made = []
    for path, tests in offered.items():
        for owner, name in secrets.SystemRandom().sample(sorted(tests), min(len(tests), _TWINS_OFFERED)):
            new_owner = owner and owner + "".join(word.capitalize() for word in _two().split("_"))
            statement = "assert sum([{a}, {b}, {c}]) == {d}".format(**_numbers())
            made.append(Twin(path, owner, name, new_owner, f"{name}_{_two()}", statement))
    return made


def _pair(path: str, rest: str, words: Sequence[str]) -> list[MustFail]:
    *owners, name = rest.partition("[")[0].split("::")
    name = name if name.isidentifier() else "test"
    owner = owners[0] if owners and owners[0].isidentifier() else "Test"
    function, method = f"{name}_{_two(words)}", f"test_{_two(words)}"
    owner += "".join(word.capitalize() for word in _two(words).split("_"))
    return [
        MustFail(path, f"{path}::{function}", _FUNCTION.format(name=function, **_numbers()), True),
        MustFail(path, f"{path}::{owner}::{method}", _CLASS.format(owner=owner, name=method, **_numbers()), False),
    ]


def _two(words: Sequence[str] = _WORDS) -> str:
    return f"{secrets.choice(words)}_{secrets.choice(words)}"


def _numbers() -> dict[str, int]:
    """a < b < c < d, so that no statement is true by chance."""
    a = 10 + secrets.randbelow(80)
    return {"a": a, "b": a + 100, "c": a + 200, "d": a + 1000}


# --- tests of other runners ---------------------------------------------------------------------------------

_DJANGO = "import unittest\n" + _CLASS
_WITH_METHOD = re.compile(r"(\w+) \([\w.]+\.\1\)")
_SYMPY = """

def {name}():
    values = [{a}, {b}, {c}]
    assert sum(values) == {d}
"""


def django_test(folder: str, like: Sequence[str]) -> tuple[str, str, str, str]:
    """(path, text, label, id in the log) of a module for Django's runner beside the tests in `folder`. Ids are as those
    of `like`: since Python 3.11 they end with the method's name."""
    module, method = f"test_{_two()}", f"test_{_two()}"
    owner = "".join(word.capitalize() for word in module.split("_"))
    label = ".".join([*folder.split("/")[1:], module])
    text = _DJANGO.format(owner=owner, name=method, **_numbers())
    name = f".{method}" if any(_WITH_METHOD.fullmatch(test) for test in like) else ""
    return f"{folder}/{module}.py", text, label, f"{method} ({label}.{owner}{name})"


def sympy_test(folder: str) -> tuple[str, str, str, str]:
    """(path, text, argument, id in the log) of a file for sympy's runner beside the tests in `folder`."""
    name = f"test_{_two()}"
    path = f"{folder}/{name}.py"
    return path, _SYMPY.format(name=name, **_numbers()).lstrip(), path, name

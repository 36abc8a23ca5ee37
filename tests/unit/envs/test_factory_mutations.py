"""Injected bugs: one edit of one place each, whatever the file looks like, the same ones every time."""

from __future__ import annotations

import ast
import bisect
import fnmatch
import inspect
import netrc
import random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl_envs.swe_gym.factory.inject import Bug, Taken, ordered, secret_lines
from agentrl_envs.swe_gym.factory.mutations import KINDS, Mutation, mutations
from agentrl_envs.swe_gym.factory.source import Source, UnreadableSource, functions

EXAMPLES: dict[str, tuple[str, set[str]]] = {
    "comparison": ("def f(a, b):\n    return a < b\n", {"return a <= b"}),
    "boundary": ("def f(a):\n    return a + 3\n", {"return a + 4", "return a + 2"}),
    "boolean operator": ("def f(a, b):\n    return a and b\n", {"return a or b"}),
    "dropped operand": ("def f(a, b):\n    return a and b\n", {"return a", "return b"}),
    "dropped not": ("def f(a):\n    return not (a or 1)\n", {"return (a or 1)"}),
    "arithmetic": ("def f(a, b):\n    return a // b\n", {"return a % b"}),
    "negated condition": ("def f(a):\n    if a > 1:\n        a = 2\n", {"if not (a > 1):"}),
    "swapped arguments": ("def f(a, b):\n    return g(a, b + 1)\n", {"return g(b + 1, a)"}),
    "dropped keyword": ("def f(a):\n    return g(a, key=1)\n", {"return g(a)"}),
    "swapped call": ("def f(a):\n    return min(a)\n", {"return max(a)"}),
    "removed statement": ("def f(a):\n    a.go()\n", {"pass"}),
    "removed guard": ("def f(a):\n    if a is None:\n        return 0\n    return a\n", {"pass"}),
    "returned nothing": ("def f(a):\n    return a.go()\n", {"a.go()"}),
    "slice bound": ("def f(a, n):\n    return a[:n]\n", {"return a[:n + 1]", "return a[:n - 1]"}),
    "range bound": (
        "def f(n):\n    return list(range(n))\n",
        {"return list(range(n + 1))", "return list(range(n - 1))"},
    ),
    "index": ("def f(a):\n    return a[0]\n", {"return a[-1]"}),
    "wrong default": ("def f(a, b=True):\n    return b\n", {"def f(a, b=False):"}),
    "flipped flag": ("def f(a):\n    return g(a, True)\n", {"return g(a, False)"}),
    "wrong name": ("def f(a, b):\n    return a\n", {"return b"}),
    "wrong attribute": (
        "class C:\n    def f(self):\n        return self.a\n    def g(self):\n        return self.b\n",
        {"return self.b", "return self.a"},
    ),
    "loop exit": ("def f(a):\n    for x in a:\n        break\n", {"continue"}),
    "narrowed except": (
        "def f(a):\n    try:\n        g()\n    except (KeyError, ValueError):\n        h()\n",
        {"except KeyError:", "except ValueError:"},
    ),
}
MODULES = (bisect, fnmatch, netrc)


def of(text: str | bytes) -> list[Mutation]:
    return list(mutations(Source(text.encode() if isinstance(text, str) else text)))


def assert_is_one_edit(data: bytes, mutation: Mutation) -> None:
    """It parses, means something else, and all bytes but those of the span are as they were."""
    broken = mutation.apply(data)
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(data))
    assert broken[: mutation.start] == data[: mutation.start]
    assert broken[mutation.start + len(mutation.replacement) :] == data[mutation.end :]
    assert broken[mutation.start : mutation.start + len(mutation.replacement)] == mutation.replacement


def test_every_kind_has_an_example() -> None:
    assert set(EXAMPLES) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_makes_what_it_says_and_nothing_else(kind: str) -> None:
    text, lines = EXAMPLES[kind]
    found = [mutation for mutation in of(text) if mutation.kind == kind]
    made = set()
    for mutation in found:
        assert_is_one_edit(text.encode(), mutation)
        broken = mutation.apply(text.encode()).decode()
        made |= {line.strip() for line in broken.splitlines()} - {line.strip() for line in text.splitlines()}
    assert len(found) == len(lines)
    if kind == "wrong attribute":  # each of the two lines turns into the other
        assert {m.apply(text.encode()).count(b"self.a") for m in found} == {0, 2}
    else:
        assert made == lines


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    module=st.sampled_from(MODULES),
    seed=st.integers(0, 10**6),
    newline=st.sampled_from(["\n", "\r\n"]),
    comment=st.text(st.characters(codec="utf-8", categories=["L", "S", "N"]), max_size=20),
)
def test_mutations_of_real_files_change_one_place(module: ModuleType, seed: int, newline: str, comment: str) -> None:
    """Letters of several bytes before a node, and both ends of lines, do not shift it."""
    raw = f"# {comment}\n{inspect.getsource(module)}".replace("\n", newline).encode()
    found = of(raw)
    assert found
    for mutation in random.Random(seed).sample(found, 3):
        assert_is_one_edit(raw, mutation)


def test_the_same_file_gives_the_same_mutations() -> None:
    text = inspect.getsource(netrc)
    assert of(text) == of(text)


def test_what_is_no_code_of_the_function_is_left_alone() -> None:
    text = (
        "@cache(1)\ndef f(a: int = 5, *, b: 'x' = 7) -> g(1, 2):\n"
        '    """1 < 2"""\n    c: h(3) = f"{a + 1}"\n    return c\n'
    )
    for mutation in of(text):
        assert mutation.kind in ("wrong default", "wrong name", "returned nothing"), mutation


def test_nothing_decides_a_while_loop_s_end() -> None:
    text = "def f(a, n):\n    while a < n:\n        a += 1\n        g(a)\n"
    assert of(text) == []


@pytest.mark.parametrize(
    "data", [b"def f(:\n", b"# -*- coding: latin-1 -*-\nx = '\xe9'\n", b"\xef\xbb\xbfx = 1\n", b"\xff"]
)
def test_a_file_that_cannot_be_read_says_so(data: bytes) -> None:
    with pytest.raises(UnreadableSource):
        Source(data)


def test_only_lines_that_run_are_changed() -> None:
    source = Source(b"def f(a):\n    if a:\n        return a + 1\n    return a - 1\n")
    assert {m.replacement for m in mutations(source, lines=frozenset({4})) if m.kind == "arithmetic"} == {b"+"}


def test_functions_carry_their_first_line_as_code_objects_do() -> None:
    source = Source(b"class C:\n    @x\n    @y\n    def f(self):\n        return 1\n")
    namespace: dict[str, Any] = {"x": lambda f: f, "y": lambda f: f}
    exec(source.data, namespace)  # noqa: S102
    (function,) = functions(source.tree)
    assert function.name == "C.f"
    assert function.first_line == namespace["C"].f.__code__.co_firstlineno == 2


def suite(**sources: str) -> Any:
    """As much of a suite as the order needs."""
    files = {name.replace("__", "/") + ".py": text.encode() for name, text in sources.items()}
    return SimpleNamespace(sources=files, coverage=None, commit="c" * 40)


def test_the_order_is_the_seed_s_and_kinds_take_turns() -> None:
    texts = {f"m{n}": text for n, (text, _) in enumerate(EXAMPLES.values())}
    bugs = list(ordered(suite(**texts), 3))
    assert [bug.key for bug in bugs] == [bug.key for bug in ordered(suite(**texts), 3)]
    assert [bug.key for bug in bugs] != [bug.key for bug in ordered(suite(**texts), 4)]
    assert {bug.key for bug in bugs} == {bug.key for bug in ordered(suite(**texts), 4)}
    assert {bug.mutation.kind for bug in bugs[: len(KINDS)]} == set(KINDS)
    assert len({bug.key for bug in bugs}) == len(bugs)


def test_a_kind_takes_each_function_once_before_one_twice() -> None:
    text = "".join(f"def f{n}(a, b):\n    return a < b, a > b, a == b\n" for n in range(4))
    names = [bug.mutation.function for bug in ordered(suite(m=text), 0) if bug.mutation.kind == "comparison"]
    assert len(names) == 12
    for turn in range(3):
        assert set(names[4 * turn : 4 * turn + 4]) == {"f0", "f1", "f2", "f3"}


def test_functions_and_files_have_their_share() -> None:
    from agentrl.wire import InjectRequest

    request = InjectRequest(repository="r", count=3, per_function=1, per_file=2)
    text = b"def f(a, b):\n    return a < b\n"
    (mutation,) = (m for m in of(text) if m.kind == "comparison")
    bug = Bug("0123456789", "p/m.py", mutation, 2)
    taken = Taken(request, [{"x_mutation": str(bug)}])
    assert not taken.has_room(bug.place)
    assert taken.has_room(("p/m.py", "g"))
    taken.add(("p/m.py", "g"))
    assert not taken.has_room(("p/m.py", "h"))
    assert not taken.is_full
    taken.add(("p/n.py", "h"))
    assert taken.is_full


def test_secret_lines_are_those_before_and_after() -> None:
    text = b"def f(a):\n    if a is None:\n        return 0\n    return a\n"
    (mutation,) = (m for m in of(text) if m.kind == "removed guard")
    assert secret_lines(text, mutation) == ["if a is None:", "return 0", "pass"]

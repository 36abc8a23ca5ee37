"""The kinds of small bugs: from a place in the source to the edits of one kind that it allows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentrl_envs.swe_gym.factory.source import Function, FunctionNode, Source, Spot

_MOST_INTEGER = 10_000
_COMPARISONS: dict[type[ast.cmpop], tuple[bytes, bytes]] = {
    ast.Lt: (b"<", b"<="),
    ast.LtE: (b"<=", b"<"),
    ast.Gt: (b">", b">="),
    ast.GtE: (b">=", b">"),
    ast.Eq: (b"==", b"!="),
    ast.NotEq: (b"!=", b"=="),
    ast.Is: (b"is", b"is not"),
    ast.IsNot: (rb"is\s+not", b"is"),
    ast.In: (b"in", b"not in"),
    ast.NotIn: (rb"not\s+in", b"in"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[bytes, bytes]] = {
    ast.Add: (rb"\+", b"-"),
    ast.Sub: (b"-", b"+"),
    ast.Mult: (rb"\*", b"+"),
    ast.FloorDiv: (b"//", b"%"),
    ast.Mod: (b"%", b"//"),
    ast.BitAnd: (b"&", b"|"),
    ast.BitOr: (rb"\|", b"&"),
    ast.LShift: (b"<<", b">>"),
    ast.RShift: (b">>", b"<<"),
}
_CALLS = {
    "min": "max",
    "any": "all",
    "startswith": "endswith",
    "lstrip": "rstrip",
    "upper": "lower",
    "append": "extend",
    "find": "rfind",
    "split": "rsplit",
    "partition": "rpartition",
    "appendleft": "append",
    "popleft": "pop",
    "keys": "values",
    "isdigit": "isalpha",
    "add": "discard",
    "union": "intersection",
    "floor": "ceil",
}
_SWAPPED_CALLS = {**_CALLS, **{new: old for old, new in _CALLS.items() if new not in _CALLS}}


class Edit(NamedTuple):
    """Replace bytes [start, end) by `replacement`."""

    start: int
    end: int
    replacement: bytes


@dataclass(frozen=True, slots=True)
class Place:
    """One spot of one function, with the names that the function binds."""

    source: Source
    spot: Spot
    function: Function
    names: tuple[str, ...]

    def between(self, left: ast.AST, right: ast.AST, pattern: bytes, replacement: bytes) -> Iterator[Edit]:
        """The edit of the one operator between two nodes; none where a comment or a continuation lies between."""
        start, end = self.source.span(left)[1], self.source.span(right)[0]
        gap = self.source.data[start:end]
        found = list(re.finditer(pattern, gap))
        if len(found) == 1 and b"#" not in gap and b"\\" not in gap:
            yield Edit(start + found[0].start(), start + found[0].end(), replacement)

    def instead(self, node: ast.AST, replacement: bytes) -> Edit:
        """The edit that puts `replacement` in the place of `node`."""
        return Edit(*self.source.span(node), replacement)


def local_names(function: FunctionNode) -> tuple[str, ...]:
    """Names that a function binds: its arguments and what it assigns to; not `self`, `cls` and throwaways."""
    arguments = function.args
    names = {each.arg for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}
    names |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return tuple(sorted(name for name in names - {"self", "cls"} if not name.startswith("_")))


def _other(names: Sequence[str], but: str, at: int) -> str | None:
    """One of the other names, the same one for the same place."""
    others = [name for name in names if name != but]
    return others[at % len(others)] if others else None


def _integer(node: ast.AST) -> int | None:
    """The small whole number that a node is."""
    value = node.value if isinstance(node, ast.Constant) else None
    return value if type(value) is int and value <= _MOST_INTEGER else None


def _is_text(node: ast.AST) -> bool:
    return (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)) or isinstance(node, ast.JoinedStr)


def comparison(place: Place) -> Iterator[Edit]:
    """`<` for `<=`, `==` for `!=`, `in` for `not in` …"""
    node = place.spot.node
    if isinstance(node, ast.Compare) and not place.spot.in_loop:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            pattern, replacement = _COMPARISONS[type(operator)]
            yield from place.between(left, right, pattern, replacement)


def boundary(place: Place) -> Iterator[Edit]:
    """A whole number one higher or lower."""
    value = _integer(place.spot.node)
    if value is not None and not place.spot.in_loop and not isinstance(place.spot.statement, FunctionNode):
        yield place.instead(place.spot.node, str(value + 1).encode())
        if value > 0:
            yield place.instead(place.spot.node, str(value - 1).encode())


def boolean_operator(place: Place) -> Iterator[Edit]:
    """`and` for `or`."""
    node = place.spot.node
    if isinstance(node, ast.BoolOp) and not place.spot.in_loop:
        old, new = (b"and", b"or") if isinstance(node.op, ast.And) else (b"or", b"and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from place.between(left, right, rb"\b" + old + rb"\b", new)


def dropped_operand(place: Place) -> Iterator[Edit]:
    """One condition of several is gone."""
    node = place.spot.node
    if isinstance(node, ast.BoolOp) and not place.spot.in_loop:
        for left, right in zip(node.values, node.values[1:], strict=False):
            (start, end), (next_start, next_end) = place.source.span(left), place.source.span(right)
            yield Edit(end, next_end, b"")
            yield Edit(start, next_start, b"")


def dropped_not(place: Place) -> Iterator[Edit]:
    """A `not` or a minus is gone."""
    node = place.spot.node
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub) and not place.spot.in_loop:
        start = place.source.span(node)[0]
        match = re.compile(rb"not\b[ \t]*|-[ \t]*").match(place.source.data, start)
        if match:
            yield Edit(start, match.end(), b"")


def arithmetic(place: Place) -> Iterator[Edit]:
    """Plus for minus, and the like; not between texts, which would fail at once."""
    node = place.spot.node
    if place.spot.in_loop:
        return
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        if not any(map(_is_text, (node.left, node.right))):
            pattern, replacement = _ARITHMETIC[type(node.op)]
            yield from place.between(node.left, node.right, pattern, replacement)
    elif isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC and not _is_text(node.value):
        pattern, replacement = _ARITHMETIC[type(node.op)]
        yield from place.between(node.target, node.value, pattern + b"=", replacement + b"=")


def negated_condition(place: Place) -> Iterator[Edit]:
    """The condition of an `if` (a statement, an expression, in a comprehension) turned round."""
    node = place.spot.node
    tests: list[ast.expr] = []
    if isinstance(node, ast.If | ast.IfExp):
        tests = [node.test]
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        tests = [test for generator in node.generators for test in generator.ifs]
    for test in tests:
        if not isinstance(test, ast.NamedExpr) and not place.spot.in_loop:
            text = place.source.text(test)
            simple = isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant)
            yield place.instead(test, b"not " + text if simple else b"not (" + text + b")")


def swapped_arguments(place: Place) -> Iterator[Edit]:
    """Two neighbouring arguments of a call change places."""
    node = place.spot.node
    if isinstance(node, ast.Call) and not any(isinstance(each, ast.Starred) for each in node.args):
        for first, second in zip(node.args, node.args[1:], strict=False):
            (start, end), (next_start, next_end) = place.source.span(first), place.source.span(second)
            data = place.source.data
            middle = data[end:next_start]
            if middle.strip() == b",":
                yield Edit(start, next_end, data[next_start:next_end] + middle + data[start:end])


def dropped_keyword(place: Place) -> Iterator[Edit]:
    """A keyword argument is gone, so that the default counts."""
    node = place.spot.node
    if isinstance(node, ast.Call):
        before: list[ast.expr] = list(node.args)
        for keyword in node.keywords:
            if keyword.arg is not None and before:
                yield Edit(place.source.span(before[-1])[1], place.source.span(keyword.value)[1], b"")
            before.append(keyword.value)


def swapped_call(place: Place) -> Iterator[Edit]:
    """`max` for `min`, `rstrip` for `lstrip` …"""
    node = place.spot.node
    if isinstance(node, ast.Call) and not place.spot.in_loop:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", None)
        if name in _SWAPPED_CALLS:
            end = place.source.span(node.func)[1]
            yield Edit(end - len(name), end, _SWAPPED_CALLS[name].encode())


def removed_statement(place: Place) -> Iterator[Edit]:
    """A call or an assignment to a part of something is gone."""
    node = place.spot.node
    effect = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    part = isinstance(node, ast.Assign) and all(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets)
    if (effect or part or isinstance(node, ast.AugAssign)) and not place.spot.in_loop:
        yield place.instead(node, b"pass")


def removed_guard(place: Place) -> Iterator[Edit]:
    """An `if` that returns, raises or goes on is gone."""
    node = place.spot.node
    if isinstance(node, ast.If) and not node.orelse and len(node.body) == 1 and not place.spot.in_loop:
        start = place.source.span(node)[0]
        is_elif = not place.source.data.startswith(b"if", start)
        if isinstance(node.body[0], ast.Return | ast.Raise | ast.Continue) and not is_elif:
            yield place.instead(node, b"pass")


def returned_nothing(place: Place) -> Iterator[Edit]:
    """A value is computed and not returned."""
    node = place.spot.node
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        start, value = place.source.span(node)[0], place.source.span(node.value)[0]
        if place.source.data[start:value] == b"return ":
            yield Edit(start, value, b"")


def slice_bound(place: Place) -> Iterator[Edit]:
    """A slice begins or ends one off."""
    node = place.spot.node
    if isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper):
            if bound is None or not isinstance(bound, ast.Name | ast.Call | ast.Attribute | ast.BinOp):
                continue
            if isinstance(bound, ast.BinOp) and not isinstance(bound.op, ast.Add | ast.Sub):
                continue
            for more in (b" + 1", b" - 1"):
                yield place.instead(bound, place.source.text(bound) + more)


def range_bound(place: Place) -> Iterator[Edit]:
    """A range begins or ends one off."""
    node = place.spot.node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        for bound in node.args[:2]:
            if isinstance(bound, ast.Name | ast.Call | ast.Attribute):
                for more in (b" + 1", b" - 1"):
                    yield place.instead(bound, place.source.text(bound) + more)


def index(place: Place) -> Iterator[Edit]:
    """The last for the first, the second for the first."""
    node = place.spot.node
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        text = place.source.text(node.slice)
        replacement = {b"0": b"-1", b"-1": b"0", b"1": b"0"}.get(text)
        if replacement is not None:
            yield place.instead(node.slice, replacement)


def wrong_default(place: Place) -> Iterator[Edit]:
    """An argument's default is another."""
    node = place.spot.node
    if isinstance(place.spot.statement, FunctionNode) and isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield place.instead(node, str(not node.value).encode())
        elif (value := _integer(node)) is not None:
            yield place.instead(node, str(value + 1).encode())
        elif isinstance(node.value, str) and node.value:
            yield place.instead(node, b"''")


def flipped_flag(place: Place) -> Iterator[Edit]:
    """True for False."""
    node = place.spot.node
    if place.spot.in_loop or isinstance(place.spot.statement, FunctionNode):
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield place.instead(node, str(not node.value).encode())


def wrong_name(place: Place) -> Iterator[Edit]:
    """Another variable of the same function."""
    node = place.spot.node
    if place.spot.in_loop or not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
        return
    if node.id in place.names and (name := _other(place.names, node.id, place.source.span(node)[0])):
        yield place.instead(node, name.encode())


def wrong_attribute(place: Place) -> Iterator[Edit]:
    """Another attribute of the same object."""
    node = place.spot.node
    if place.spot.in_loop or not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
        return
    if isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in place.function.siblings:
        end = place.source.span(node)[1]
        if name := _other(place.function.siblings, node.attr, end):
            yield Edit(end - len(node.attr.encode()), end, name.encode())


def loop_exit(place: Place) -> Iterator[Edit]:
    """`break` for `continue` in a `for`."""
    node = place.spot.node
    if isinstance(node, ast.Break | ast.Continue) and not place.spot.in_loop:
        yield place.instead(node, b"continue" if isinstance(node, ast.Break) else b"break")


def narrowed_except(place: Place) -> Iterator[Edit]:
    """One kind of error of several is no longer caught."""
    node = place.spot.node
    if isinstance(node, ast.Try):
        for handler in node.handlers:
            if isinstance(handler.type, ast.Tuple) and len(handler.type.elts) == 2:
                for kept in handler.type.elts:
                    yield place.instead(handler.type, place.source.text(kept))

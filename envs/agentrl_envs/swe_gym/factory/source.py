"""A Python file as bytes and syntax tree together: what text a node has, and what runs where."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n|$)")
_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)", re.MULTILINE)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class UnreadableSource(ValueError):
    """The file is no Python of the host's version, or not in UTF-8."""


class Source:
    """A parsed file. Offsets are bytes from its beginning."""

    def __init__(self, data: bytes) -> None:
        """Raises `UnreadableSource`."""
        cookie = _COOKIE.search(b"\n".join(data.splitlines()[:2]))
        if data.startswith(b"\xef\xbb\xbf") or (cookie and cookie[1].lower() not in (b"utf-8", b"utf8", b"ascii")):
            raise UnreadableSource("another encoding than UTF-8")
        try:
            data.decode()
            self.tree = ast.parse(data)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UnreadableSource(str(error)) from error
        self.data = data
        self._starts: list[int] = [match.start() for match in _LINE.finditer(data)]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """(start, end) of a node that has a place in the text. Brackets around it are not part of it."""
        place: ast.expr | ast.stmt = node  # type: ignore[assignment]
        last, column = place.end_lineno or place.lineno, place.end_col_offset or 0
        return self._starts[place.lineno - 1] + place.col_offset, self._starts[last - 1] + column

    def text(self, node: ast.AST) -> bytes:
        """A node's text."""
        start, end = self.span(node)
        return self.data[start:end]

    def line_start(self, line: int) -> int:
        """Where line `line` (from 1) begins; the end of the file for a line beyond it."""
        return self._starts[line - 1] if line <= len(self._starts) else len(self.data)

    def line(self, number: int) -> str:
        """The text of line `number` (from 1), without blanks around it."""
        return self.data[self.line_start(number) : self.line_start(number + 1)].decode().strip()


@dataclass(frozen=True, slots=True)
class Function:
    """A function that is not inside another. `first_line` counts its decorators, as code objects do."""

    node: FunctionNode
    name: str
    first_line: int
    siblings: tuple[str, ...] = field(default=())
    """Attributes of `self` that its class reads, for a method."""


def functions(tree: ast.Module) -> Iterator[Function]:
    """Functions of a module and methods of its classes."""
    yield from _functions(tree.body, prefix="", siblings=())


def _functions(body: list[ast.stmt], *, prefix: str, siblings: tuple[str, ...]) -> Iterator[Function]:
    for node in body:
        if isinstance(node, FunctionNode):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            yield Function(node, prefix + node.name, first, siblings)
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, prefix=f"{prefix}{node.name}.", siblings=_attributes(node))
        elif isinstance(node, ast.If | ast.Try):
            inner = [*node.body, *node.orelse]
            yield from _functions(inner, prefix=prefix, siblings=siblings)


def _attributes(node: ast.ClassDef) -> tuple[str, ...]:
    called = {id(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)}
    return tuple(
        sorted(
            {
                each.attr
                for each in ast.walk(node)
                if isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Load)
                and isinstance(each.value, ast.Name)
                and each.value.id == "self"
                and id(each) not in called
            }
        )
    )


@dataclass(frozen=True, slots=True)
class Spot:
    """A node inside a function. `lines`: those that run when it does; `in_loop`: within a `while`, whose end it may
    decide."""

    node: ast.AST
    statement: ast.stmt
    lines: tuple[int, int]
    in_loop: bool


def spots(function: FunctionNode) -> Iterator[Spot]:
    """Statements and expressions of a function in the text's order, and its defaults; no decorator, annotation,
    documentation or formatted string."""
    whole = (function.body[0].lineno, function.end_lineno or function.lineno)
    arguments = function.args
    for default in [*arguments.defaults, *(each for each in arguments.kw_defaults if each is not None)]:
        yield Spot(default, function, whole, False)
    body = function.body
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        body = body[1:]
    yield from _block(body, in_loop=False)


def _block(body: list[ast.stmt], *, in_loop: bool) -> Iterator[Spot]:
    for statement in body:
        blocks = [
            block
            for name in ("body", "orelse", "finalbody")
            if isinstance(block := getattr(statement, name, None), list)
        ]
        inner = [block for block in blocks if block]
        inner += [handler.body for handler in getattr(statement, "handlers", [])]
        inner += [case.body for case in getattr(statement, "cases", [])]
        last = statement.end_lineno or statement.lineno
        if inner:
            last = max(statement.lineno, min(block[0].lineno for block in inner) - 1)
        lines = (statement.lineno, last)
        loops = in_loop or isinstance(statement, ast.While)
        if not isinstance(statement, FunctionNode | ast.ClassDef):
            yield Spot(statement, statement, lines, in_loop)
            for node in _expressions(statement):
                yield Spot(node, statement, lines, loops)
        for block in inner:
            yield from _block(block, in_loop=loops)


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Expressions below `node`, none below a statement inside it."""
    for name, value in ast.iter_fields(node):
        if name == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.JoinedStr) or not isinstance(child, ast.AST) or isinstance(child, ast.stmt):
                continue
            if isinstance(child, ast.expr):
                yield child
            if not isinstance(child, ast.ExceptHandler | ast.match_case | ast.expr_context):
                yield from _expressions(child)

"""Small bugs in Python source: each is one edit of one span of the text, everything else to the byte as it was.

`KINDS` names them; `mutations` lists all that a file allows, in the text's order, always the same. A mutation whose
file does not parse is not listed.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from agentrl_envs.swe_gym.factory import mutators
from agentrl_envs.swe_gym.factory.mutators import Edit, Place
from agentrl_envs.swe_gym.factory.source import Function, Source, functions, spots

KINDS: Mapping[str, Callable[[Place], Iterator[Edit]]] = {
    "comparison": mutators.comparison,
    "boundary": mutators.boundary,
    "boolean operator": mutators.boolean_operator,
    "dropped operand": mutators.dropped_operand,
    "dropped not": mutators.dropped_not,
    "arithmetic": mutators.arithmetic,
    "negated condition": mutators.negated_condition,
    "swapped arguments": mutators.swapped_arguments,
    "dropped keyword": mutators.dropped_keyword,
    "swapped call": mutators.swapped_call,
    "removed statement": mutators.removed_statement,
    "removed guard": mutators.removed_guard,
    "returned nothing": mutators.returned_nothing,
    "slice bound": mutators.slice_bound,
    "range bound": mutators.range_bound,
    "index": mutators.index,
    "wrong default": mutators.wrong_default,
    "flipped flag": mutators.flipped_flag,
    "wrong name": mutators.wrong_name,
    "wrong attribute": mutators.wrong_attribute,
    "loop exit": mutators.loop_exit,
    "narrowed except": mutators.narrowed_except,
}


@dataclass(frozen=True, slots=True)
class Mutation:
    """Replace bytes [start, end) of a file by `replacement`.

    `lines`: those of which one runs if the edit matters; `function_line` and `function_end`: the lines of its
    function, decorators counted.
    """

    kind: str
    function: str
    function_line: int
    function_end: int
    lines: tuple[int, int]
    start: int
    end: int
    replacement: bytes

    def apply(self, data: bytes) -> bytes:
        """The broken file."""
        return data[: self.start] + self.replacement + data[self.end :]

    def key(self, *, commit: str, path: str) -> str:
        """Ten hex digits that name this mutation of this file of this commit."""
        parts = (commit, path, str(self.start), str(self.end), self.replacement.decode())
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:10]


def mutations(source: Source, *, lines: frozenset[int] | None = None) -> Iterator[Mutation]:
    """Every mutation of a file's functions; with `lines` those alone of which one of these lines runs."""
    for function in functions(source.tree):
        body = _Body(source, function)
        names = mutators.local_names(function.node)
        seen: set[tuple[int, int, bytes]] = set()
        for spot in spots(function.node):
            if lines is not None and not any(line in lines for line in range(spot.lines[0], spot.lines[1] + 1)):
                continue
            place = Place(source, spot, function, names)
            for kind, mutator in KINDS.items():
                for edit in mutator(place):
                    if edit not in seen and body.changes_with(edit):
                        seen.add(edit)
                        yield Mutation(kind, function.name, function.first_line, body.last_line, spot.lines, *edit)


class _Body:
    """One function's text, which is parsed alone: a file's would take a thousand times as long."""

    def __init__(self, source: Source, function: Function) -> None:
        self._start = source.line_start(function.first_line)
        self.last_line = function.node.end_lineno or function.node.lineno
        self._text = source.data[self._start : source.line_start(self.last_line + 1)]
        self._head = b"if 1:\n" if function.node.col_offset else b""

    def changes_with(self, edit: Edit) -> bool:
        """True where the edited function parses and more than blanks differ."""
        start, end = edit.start - self._start, edit.end - self._start
        if self._text[start:end].split() == edit.replacement.split():
            return False
        try:
            ast.parse(self._head + self._text[:start] + edit.replacement + self._text[end:])
        except (SyntaxError, ValueError, RecursionError):
            return False
        return True

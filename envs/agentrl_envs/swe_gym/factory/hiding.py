"""Test functions by their ids: where they stand in a file, and the file without them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from agentrl_envs.swe_gym.factory.sessions import file_of
from agentrl_envs.swe_gym.factory.source import FunctionNode, Source, UnreadableSource


def name_parts(test: str) -> list[str]:
    """Classes and function in a test's id, parameters left out."""
    return test[len(file_of(test)) + 2 :].split("[", 1)[0].split("::")


def parameters(test: str) -> str:
    """What stands in brackets at the end of a test's id; empty where nothing does."""
    _, bracket, rest = test.partition("[")
    return rest.removesuffix("]") if bracket else ""


def find_test(tree: ast.Module, test: str) -> list[FunctionNode]:
    """The definitions of a test's function: in its class, else in a class of the same file that it is derived from."""
    *classes, name = name_parts(test)
    bodies = [tree.body]
    for part in classes:
        inner = [node for body in bodies for node in body if isinstance(node, ast.ClassDef) and node.name == part]
        bodies = [node.body for node in inner]
        if part is classes[-1]:
            return _in_classes(tree, inner, name)
    return _named(tree.body, name)


def _in_classes(tree: ast.Module, classes: list[ast.ClassDef], name: str) -> list[FunctionNode]:
    known = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    queue, seen = list(classes), set()
    while queue:
        node = queue.pop(0)
        if found := _named(node.body, name):
            return found
        seen.add(node.name)
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        queue += [known[base] for base in bases if base in known and base not in seen]
    return []


def _named(body: list[ast.stmt], name: str) -> list[FunctionNode]:
    return [node for node in body if isinstance(node, FunctionNode) and node.name == name]


def without_tests(files: Mapping[str, bytes], tests: Iterable[str]) -> dict[str, bytes] | None:
    """The files that change when the functions of `tests` are taken out; None where one of them is not found, or
    where the rest would not parse. Everything else stays as it was, to the byte."""
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(file_of(test), []).append(test)
    changed = {}
    for path, ids in by_file.items():
        rest = _without(files[path], ids) if path in files else None
        if rest is None:
            return None
        changed[path] = rest
    return changed


def _without(data: bytes, tests: list[str]) -> bytes | None:
    try:
        source = Source(data)
        gone: dict[tuple[int, int], FunctionNode] = {}
        for test in tests:
            found = find_test(source.tree, test)
            if not found:
                return None
            gone |= {_extent(node): node for node in found}
        # bottom up, so that the lines above keep their numbers
        for (start, end), node in sorted(gone.items(), reverse=True):
            rest = b"" if _has_siblings(source.tree, node, gone) else b" " * node.col_offset + b"pass\n"
            data = data[: source.line_start(start)] + rest + data[source.line_start(end + 1) :]
        return Source(data).data
    except UnreadableSource:
        return None


def _extent(node: FunctionNode) -> tuple[int, int]:
    """(first line, decorators counted; last line)."""
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return first, node.end_lineno or node.lineno


def _has_siblings(tree: ast.Module, node: FunctionNode, gone: Mapping[tuple[int, int], FunctionNode]) -> bool:
    """False for a function whose class would be left without a statement."""
    removed = {id(each) for each in gone.values()}
    for parent in ast.walk(tree):
        if isinstance(parent, ast.ClassDef) and node in parent.body:
            return any(id(each) not in removed for each in parent.body)
    return True

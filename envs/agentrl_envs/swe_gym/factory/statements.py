"""Problem statements of injected bugs: what a user would see, told from a failing test; never the bug or the fix."""

from __future__ import annotations

import ast
import builtins
import random
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentrl_envs.swe_gym.factory.hiding import find_test, parameters
from agentrl_envs.swe_gym.factory.mutators import local_names
from agentrl_envs.swe_gym.factory.sessions import file_of
from agentrl_envs.swe_gym.factory.source import FunctionNode, Source

_CODE_LINES, _ERROR_LINES, _LINE_CHARS = 14, 8, 160
_SECRET_CHARS = 6
_HEADER = re.compile(r"^_{2,} (.+?) _{2,}$", re.MULTILINE)
_END = re.compile(r"^(?:=|-){5,}", re.MULTILINE)
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")
_NO_SUBJECT = frozenset({"self", "cls", "pytest", "mock", "os", "sys", "re", "json", *dir(builtins)})

_INTRODUCTIONS = (
    "The following used to work:",
    "This stopped working:",
    "Steps to reproduce:",
    "Here is what I run:",
    "A small example:",
)
_FOLLOWS = (
    "Now it fails with:",
    "What happens:",
    "It ends with:",
    "The result:",
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A failing test as pytest shows it: the line in the test's own function, and the error."""

    test: str
    line: int
    error: str


def failures(output: str, tests: Iterable[str]) -> list[Failure]:
    """The failures of `tests` found in what a session with `--tb=short` printed, in the order of the tests."""
    blocks: dict[str, str] = {}
    headers = list(_HEADER.finditer(output))
    for header, after in zip(headers, [*headers[1:], None], strict=True):
        block = output[header.end() : after.start() if after else len(output)].lstrip("\n")
        end = _END.search(block)
        blocks.setdefault(header[1], block[: end.start()] if end else block)
    found = []
    for test in tests:
        path = file_of(test)
        block = blocks.get(test[len(path) + 2 :].replace("::", "."), "")
        line = re.search(rf"^{re.escape(path)}:(\d+): in ", block, re.MULTILINE)
        error = _error(block)
        if line and error:
            found.append(Failure(test, int(line[1]), error))
    return found


def _error(block: str) -> str:
    """The lines that pytest marks with E, the first run of them after the last place."""
    lines = [line[1:] for line in block.splitlines() if re.match(r"E(?:\s|$)", line)]
    text = textwrap.dedent("\n".join(lines)).strip()
    return _clean(text, _ERROR_LINES)


def _clean(text: str, most_lines: int) -> str:
    text = _ADDRESS.sub("0x…", text.replace("/testbed/", ""))
    lines = ["".join(char for char in line if char.isprintable()).rstrip() for line in text.split("\n")]
    short = [line if len(line) <= _LINE_CHARS else line[:_LINE_CHARS] + "…" for line in lines]
    return "\n".join(short if len(short) <= most_lines else [*short[:most_lines], "…"])


def write_statement(
    failing: Sequence[Failure], tests: Sequence[str], files: dict[str, bytes], *, secrets: Sequence[str], key: str
) -> str:
    """A statement for a bug that makes `tests` fail. `secrets`: lines of source before and after the bug, which must
    not be told. The same arguments give the same text."""
    rng = random.Random(key)
    hidden = [secret for secret in secrets if len(secret) >= _SECRET_CHARS]
    shown = sorted(failing, key=lambda each: (len(each.error), each.test))[:4]
    for failure in rng.sample(shown, len(shown)):
        text = _from_failure(failure, files[file_of(failure.test)], rng)
        if text is not None and not any(secret in text for secret in hidden):
            return text
    return _from_name(tests[0])


def _from_failure(failure: Failure, data: bytes, rng: random.Random) -> str | None:
    source = Source(data)
    function = next(
        (f for f in find_test(source.tree, failure.test) if f.lineno <= failure.line <= (f.end_lineno or 0)), None
    )
    if function is None:
        return None
    code, statement = _code(source, function, failure.line)
    case = parameters(failure.test)
    introduction = rng.choice(_INTRODUCTIONS)
    where = f"\n\n(with the arguments `{_clean(case, 1)}`)" if case and "\n" not in case else ""
    title = _title(failure.error, _subject(statement, function))
    return (
        f"{title}\n\n{introduction}\n\n```python\n{code}\n```{where}\n\n"
        f"{rng.choice(_FOLLOWS)}\n\n```\n{failure.error}\n```\n"
    )


def _code(source: Source, function: FunctionNode, line: int) -> tuple[str, ast.stmt]:
    """The test's lines up to the end of the statement at `line`, and that statement."""
    at: ast.stmt = function
    while True:
        inner = [
            node
            for node in ast.iter_child_nodes(at)
            if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
        ]
        if not inner:
            break
        at = inner[0]
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and len(body) > 1:
        body = body[1:]
    last = line if at is function else (at.end_lineno or line)
    text = source.data[source.line_start(body[0].lineno) : source.line_start(last + 1)].decode()
    lines = textwrap.dedent(text.rstrip()).split("\n")
    kept = lines if len(lines) <= _CODE_LINES else ["…", *textwrap.dedent("\n".join(lines[-_CODE_LINES:])).split("\n")]
    return _clean("\n".join(kept), _CODE_LINES + 1), at


def _subject(statement: ast.stmt, function: FunctionNode) -> str:
    """The call that the statement is about, else the first of the test's; empty where there is none. A method of one
    of the test's own variables is called by its own name."""
    local = set(local_names(function))
    for node in (statement, function):
        for call in ast.walk(node):
            name = _dotted(call.func) if isinstance(call, ast.Call) else ""
            root, *rest = name.split(".")
            if root in local:
                name = rest[-1] if rest else ""
            if name and root not in _NO_SUBJECT and not name.split(".")[-1].startswith("assert"):
                return name
    return ""


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _title(error: str, subject: str) -> str:
    first = error.split("\n")[0]
    kind = re.match(r"(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Warning|Interrupt|Exit|Iteration))\b", first)
    what = f"`{subject}`" if subject else "The library"
    if "DID NOT RAISE" in first:
        return f"{what} accepts what it should refuse"
    if kind and kind[1] != "AssertionError":
        return f"{what} raises {kind[1]}"
    return f"Wrong result from {what}" if subject else "Wrong result"


def _from_name(test: str) -> str:
    """What the name of a test says, where its failure cannot be shown."""
    name = test[len(file_of(test)) + 2 :].split("[", 1)[0].split("::")[-1]
    words = re.sub(r"_+", " ", re.sub(r"^test_?|(?<=[a-z])(?=[A-Z])", " ", name)).strip().lower()
    return f"Wrong behaviour: {words or 'see the tests'}\n\nThis used to work and does not any more.\n"

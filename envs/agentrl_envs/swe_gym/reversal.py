"""A git patch the other way round: what it added goes, what it removed comes back."""

from __future__ import annotations

import re

_HUNK = re.compile(r"@@ -(\d+(?:,\d+)?) \+(\d+(?:,\d+)?) @@(.*)", re.DOTALL)
_INDEX = re.compile(r"index ([0-9a-f]+)\.\.([0-9a-f]+)( \d+)?\n?")
_HEADER = re.compile(r"diff --git (\S+) (\S+)\n?")
_SIDES = {"+": "-", "-": "+"}
_OPPOSITE = {
    "new file mode ": "deleted file mode ",
    "deleted file mode ": "new file mode ",
    "old mode ": "new mode ",
    "new mode ": "old mode ",
    "rename from ": "rename to ",
    "rename to ": "rename from ",
}


class UnreversiblePatchError(ValueError):
    """The patch holds what this module cannot turn round; the text says what."""


def reverse_patch(patch: str) -> str:
    """A patch that undoes `patch`. Raises `UnreversiblePatchError` for binary hunks and copies."""
    turned: list[str] = []
    left = [0, 0]  # lines of the running hunk that are still to come, old and new
    lines = re.findall(r"[^\n]*\n|[^\n]+", patch)
    for line in lines:
        hunk = _HUNK.match(line) if not any(left) else None
        if hunk is not None:
            left = [_count(hunk[1]), _count(hunk[2])]
            turned.append(f"@@ -{hunk[2]} +{hunk[1]} @@{hunk[3]}")
        elif any(left) or line.startswith("\\"):
            turned.append(_turned_line(line, left))
        else:
            turned.append(_turned_header(line))
    return "".join(_in_order(turned))


def _count(span: str) -> int:
    _, comma, count = span.partition(",")
    return int(count) if comma else 1


def _turned_line(line: str, left: list[int]) -> str:
    mark = line[:1]
    if mark == "\\":
        return line
    left[0] -= mark != "+"
    left[1] -= mark != "-"
    if mark not in (" ", "\n", "+", "-") or min(left) < 0:
        raise UnreversiblePatchError(f"a hunk's lines do not fit its header: {line[:60]!r}")
    return _SIDES.get(mark, mark) + line[1:]


def _turned_header(line: str) -> str:
    if line.startswith(("GIT binary patch", "Binary files ", "copy from ")):
        raise UnreversiblePatchError(line.strip())
    for start, opposite in _OPPOSITE.items():
        if line.startswith(start):
            return opposite + line.removeprefix(start)
    if line.startswith("--- "):
        return "+++ " + _side(line[4:], "a/", "b/")
    if line.startswith("+++ "):
        return "--- " + _side(line[4:], "b/", "a/")
    index = _INDEX.fullmatch(line)
    if index is not None:
        return f"index {index[2]}..{index[1]}{index[3] or ''}\n"
    header = _HEADER.fullmatch(line)
    if header is not None:
        return f"diff --git {_side(header[2], 'b/', 'a/')} {_side(header[1], 'a/', 'b/')}\n"
    return line


def _side(name: str, old: str, new: str) -> str:
    for quote in ("", '"'):
        if name.startswith(quote + old):
            return quote + new + name[len(quote + old) :]
    return name


def _in_order(lines: list[str]) -> list[str]:
    """`lines` with each pair that git wants in one order (old before new) in that order."""
    ordered = list(lines)
    pairs = (("+++ ", "--- "), ("new mode ", "old mode "), ("rename to ", "rename from "))
    for at in range(len(ordered) - 1):
        for first, second in pairs:
            if ordered[at].startswith(first) and ordered[at + 1].startswith(second):
                ordered[at], ordered[at + 1] = ordered[at + 1], ordered[at]
    return ordered

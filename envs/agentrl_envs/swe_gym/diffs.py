"""Unified diffs of text files in memory: made where there is no git repository, and applied where they fit
exactly.

`apply_exact` is the fast road of a patch that `make_patch` wrote (no process is started); whatever it does
not understand or cannot place to the letter is answered with None and goes the general road, git inside the
sandbox. Lines end at "\\n" alone: a form feed or a carriage return is text like any other.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = "\\ No newline at end of file\n"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.+@=,~-][A-Za-z0-9_.+@=,~/ -]*")


def make_patch(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """A `git apply`-able patch that turns the files `before` into the files `after` (relative path → text)."""
    return "".join(
        _file_patch(path, before.get(path), after.get(path))
        for path in sorted({*before, *after})
        if before.get(path) != after.get(path)
    )


def _file_patch(path: str, old: str | None, new: str | None) -> str:
    head = f"diff --git {_quoted('a/' + path)} {_quoted('b/' + path)}\n"
    if old is None:
        head += "new file mode 100644\n"
    if new is None:
        head += "deleted file mode 100644\n"
    hunks = list(difflib.unified_diff(_lines(old or ""), _lines(new or "")))[2:]
    if not hunks:  # an empty file appears or goes: git wants the blob's name in place of a hunk
        return head + ("index 0000000..e69de29\n" if old is None else "index e69de29..0000000\n")
    old_name = "/dev/null" if old is None else _quoted("a/" + path)
    new_name = "/dev/null" if new is None else _quoted("b/" + path)
    body = "".join(line if line.endswith("\n") else line + "\n" + _NO_NEWLINE for line in hunks)
    return f"{head}--- {old_name}{_tab(path)}\n+++ {new_name}{_tab(path)}\n{body}"


def _tab(path: str) -> str:
    """A name with a blank ends with a tab in a header, as git writes it."""
    return "\t" if " " in path else ""


def _quoted(name: str) -> str:
    """`name` as git writes it: in quotes with octal escapes where it holds anything unusual."""
    if all(" " <= char <= "~" and char not in '"\\' for char in name):
        return name
    raw = name.encode("utf-8", "surrogateescape")  # a file's name is any bytes
    escaped = "".join(chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in raw)
    return f'"{escaped}"'


def _lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)


class _Misfit(Exception):
    """The patch does not fit to the letter, or says something this module does not know."""


def apply_exact(files: Mapping[str, str], patch: str) -> dict[str, str] | None:
    """`files` (path → text) with `patch` applied; None where it does not fit exactly, line by line and at its
    place.

    None too for renames, modes, binary hunks and unusual names: the caller then applies the patch with git.
    """
    result = dict(files)
    try:
        blocks = list(_blocks(patch))
        for block in blocks:
            _apply_block(result, block)
    except _Misfit:
        return None
    return result if blocks else None


def _blocks(patch: str) -> Iterator[list[str]]:
    """The lines of each file's part. Text before the first header is no part of a patch."""
    block: list[str] | None = None
    for line in _lines(patch):
        if line.startswith("diff --git "):
            if block:
                yield block
            block = []
        if block is not None:
            block.append(line)
        elif line.startswith(("--- ", "@@ ")):
            raise _Misfit  # a patch without git headers
    if block:
        yield block


def _apply_block(files: dict[str, str], block: list[str]) -> None:
    path = _path(block[0])
    at, creates, deletes = 1, False, False
    while at < len(block) and not block[at].startswith("--- "):
        if block[at] == "new file mode 100644\n":
            creates = True
        elif block[at].startswith("deleted file mode "):
            deletes = True
        elif not block[at].startswith("index "):
            raise _Misfit
        at += 1
    if creates == (path in files) or (creates and deletes):
        raise _Misfit
    if at == len(block):
        if not creates and (not deletes or files[path]):
            raise _Misfit
        text = ""
    else:
        text = _apply_hunks(_lines("" if creates else files[path]), block[at + 2 :])
    if deletes:
        if text:
            raise _Misfit
        del files[path]
    else:
        files[path] = text


def _path(header: str) -> str:
    """The one path of a `diff --git a/P b/P` line; a misfit where the two differ or P is unusual or leads
    outside."""
    names = header[len("diff --git ") :].rstrip("\n")
    half = (len(names) - 1) // 2
    old, new = names[:half], names[half + 1 :]
    if old[:2] != "a/" or new[:2] != "b/" or old[2:] != new[2:] or not _PLAIN_NAME.fullmatch(new[2:]):
        raise _Misfit
    if any(part in ("", ".", "..") or part.lower() == ".git" for part in new[2:].split("/")):
        raise _Misfit
    return new[2:]


def _apply_hunks(old: list[str], lines: list[str]) -> str:
    """Text of `old` with the hunks in `lines` applied."""
    new: list[str] = []
    taken = at = 0
    while at < len(lines):
        match = _HUNK.match(lines[at])
        if not match:
            raise _Misfit
        start, old_count, _, new_count = (int(group) if group else 1 for group in match.groups())
        start -= 1 if old_count else 0
        if start < taken:
            raise _Misfit
        before, after, at = _hunk(lines, at + 1, old_count, new_count)
        if old[start : start + old_count] != before:
            raise _Misfit
        new += [*old[taken:start], *after]
        taken = start + old_count
    return "".join([*new, *old[taken:]])


def _hunk(lines: list[str], at: int, old_count: int, new_count: int) -> tuple[list[str], list[str], int]:
    """(lines before, lines after, where the next hunk begins) of the hunk whose first line is `lines[at]`."""
    before: list[str] = []
    after: list[str] = []
    while len(before) < old_count or len(after) < new_count or (at < len(lines) and lines[at] == _NO_NEWLINE):
        if at == len(lines):
            raise _Misfit
        mark, text = lines[at][:1], lines[at][1:]
        sides = {" ": (before, after), "-": (before,), "+": (after,)}.get(mark, ())
        if not sides or not text.endswith("\n"):
            raise _Misfit
        at += 1
        if at < len(lines) and lines[at] == _NO_NEWLINE:
            text, at = text[:-1], at + 1
        for side in sides:
            side.append(text)
    if len(before) != old_count or len(after) != new_count:
        raise _Misfit
    return before, after, at

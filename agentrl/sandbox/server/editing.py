"""The `edit` operation: openhands-aci's editor, with its known faults guarded, in a fork per call.

The guards: no shell for folder listings (upstream passes the path unquoted); CRLF, mode and symlinks survive
an edit; every text file can be read back byte for byte (UTF-8, else what is detected, else latin-1); no
second try with the whitespace stripped off; `create` makes folders; text is told from binary by NUL bytes;
devices and pipes are refused; the root logger keeps its level; replies carry no whole files beyond
`CONTENT_LIMIT`.
"""

import json
import logging
import os
import shutil
import stat
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

from .settings import Settings

CONTENT_LIMIT = 200_000
_TEXT_LIMIT = 200_000
_QUOTE_LIMIT = 2000
_LISTING_LIMIT = 1000


def _import_editor() -> None:
    """Import openhands_aci with stand-ins for what drags in 590 MB, and undo what the import does to the
    process."""

    def module(name: str, **members: object) -> None:
        stand_in = types.ModuleType(name)
        stand_in.__dict__.update(members)
        sys.modules[name] = stand_in

    module("binaryornot")
    module("binaryornot.check", is_binary=lambda _: False)  # `load` decides
    module("openhands_aci.linter", DefaultLinter=object)
    module("openhands_aci.editor.md_converter", MarkdownConverter=object)
    root, quiet = logging.getLogger(), logging.NullHandler()
    root.addHandler(quiet)  # with a handler in place upstream's basicConfig(DEBUG) changes nothing
    import openhands_aci.editor as upstream

    root.removeHandler(quiet)
    for name in list(logging.Logger.manager.loggerDict):
        if name.partition(".")[0] == "openhands_aci":
            logging.getLogger(name).setLevel(logging.CRITICAL)
    shutil.rmtree(upstream._GLOBAL_EDITOR._history_manager.cache.directory, ignore_errors=True)


_import_editor()

import charset_normalizer  # noqa: E402
from openhands_aci.editor.config import SNIPPET_CONTEXT_WINDOW  # noqa: E402
from openhands_aci.editor.editor import OHEditor  # noqa: E402
from openhands_aci.editor.exceptions import (  # noqa: E402
    EditorToolParameterInvalidError,
    FileValidationError,
    ToolError,
)
from openhands_aci.editor.history import FileHistoryManager  # noqa: E402
from openhands_aci.editor.prompts import DIRECTORY_CONTENT_TRUNCATED_NOTICE  # noqa: E402
from openhands_aci.editor.results import CLIResult  # noqa: E402


class ReasonedError(ToolError):
    """An error of the editor that says in one word what it is, and how often `old_str` was found."""

    def __init__(self, message: str, reason: str, occurrences: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.occurrences = occurrences


class Text(NamedTuple):
    """A file as text. With `crlf` every line of the file ends in CR LF, and `text` has plain newlines."""

    text: str
    encoding: str
    crlf: bool

    def encode(self, text: str) -> bytes:
        if self.crlf:
            text = text.replace("\r\n", "\n").replace("\n", "\r\n")
        return text.encode(self.encoding)


def decode(data: bytes) -> Text:
    """Text that encodes back to exactly `data`."""
    for encoding in _encodings(data):
        try:
            text = data.decode(encoding)
        except (UnicodeDecodeError, LookupError):
            continue
        if text.encode(encoding) == data:
            crlf = "\r\n" in text and text.count("\r\n") == text.count("\n") == text.count("\r")
            return Text(text.replace("\r\n", "\n") if crlf else text, encoding, crlf)
    return Text(data.decode("latin-1"), "latin-1", False)


def _encodings(data: bytes) -> list[str]:
    found = ["utf-8"]
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return [*found, "utf-16"]
    if not data.isascii():
        guess = charset_normalizer.detect(data[: 1 << 20])
        if guess["encoding"] and (guess["confidence"] or 0) > 0.9:
            found.append(guess["encoding"])
    return [*found, "latin-1"]


class GuardedEditor(OHEditor):
    """OHEditor with its file access and the faulty commands replaced; messages stay upstream's."""

    SUPPORTED_BINARY_EXTENSIONS = ()  # no document converter here

    def __init__(self, history: str) -> None:
        os.makedirs(history, mode=0o700, exist_ok=True)
        self._max_file_size = self.MAX_FILE_SIZE_MB * 1024 * 1024
        self._history_manager = FileHistoryManager(max_history_per_file=10, history_dir=Path(history))
        self._cwd = None

    # --- file access ----------------------------------------------------------------------------------------

    def load(self, path: Path) -> Text:
        self.validate_file(path)
        data = path.read_bytes()
        if b"\0" in data[:8192] and data[:2] not in (b"\xff\xfe", b"\xfe\xff"):
            raise FileValidationError(
                path=str(path),
                reason="File appears to be binary and this file type cannot be read or edited by this tool.",
            )
        return decode(data)

    def validate_file(self, path: Path) -> None:
        if path.exists() and not path.is_dir() and not stat.S_ISREG(path.stat().st_mode):
            raise FileValidationError(path=str(path), reason="It is not a regular file.")
        super().validate_file(path)

    def read_file(self, path: Path, start_line: int | None = None, end_line: int | None = None) -> str:
        text = self.load(path).text
        if start_line is None or end_line is None:
            return text
        return _slice(text, start_line, end_line)

    def _count_lines(self, path: Path) -> int:
        return len(_lines(self.load(path).text))

    def write_file(self, path: Path, file_text: str) -> None:
        """Write in place, which keeps mode and symlink; a failed write puts the old bytes back."""
        old = path.read_bytes() if path.exists() else None
        try:
            data = file_text.encode() if old is None else self.load(path).encode(file_text)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.write_bytes(data)
            except OSError:
                if old is not None:
                    path.write_bytes(old)
                raise
        except (OSError, UnicodeError) as error:
            raise ToolError(f"Ran into {error} while trying to write to {path}") from None

    # --- commands -------------------------------------------------------------------------------------------

    def view(self, path: Path, view_range: list[int] | None = None) -> CLIResult:
        if not path.is_dir():
            return super().view(path, view_range)
        if view_range:
            raise EditorToolParameterInvalidError(
                "view_range",
                view_range,
                "The `view_range` parameter is not allowed when `path` points to a directory.",
            )
        shown, hidden, cut = list_folder(str(path))
        output = f"Here's the files and directories up to 2 levels deep in {path}, excluding hidden items:\n"
        output += "\n".join(shown) + (DIRECTORY_CONTENT_TRUNCATED_NOTICE if cut else "")
        if hidden:
            output += (
                f"\n\n{hidden} hidden files/directories in this directory are excluded. "
                f"You can use 'ls -la {path}' to see them."
            )
        return CLIResult(output=output, path=str(path), prev_exist=True)

    def str_replace(self, path: Path, old_str: str, new_str: str | None, enable_linting: bool) -> CLIResult:
        text = self.load(path).text
        count = text.count(old_str) if old_str else 0
        quoted = old_str if len(old_str) <= _QUOTE_LIMIT else old_str[:_QUOTE_LIMIT] + "…"
        if count == 0:
            raise ReasonedError(
                f"No replacement was performed, old_str `{quoted}` did not appear verbatim in {path}.",
                "not_found",
            )
        if count > 1:
            raise ReasonedError(
                f"No replacement was performed. Multiple occurrences of old_str `{quoted}` "
                f"in lines {_line_numbers(text, old_str)}. Please ensure it is unique.",
                "multiple",
                count,
            )
        at = text.index(old_str)
        first = text.count("\n", 0, at) + 1
        added = (new_str or "").count("\n")
        return self._edited(
            path,
            text,
            text[:at] + (new_str or "") + text[at + len(old_str) :],
            start_line=max(0, first - SNIPPET_CONTEXT_WINDOW) + 1,
            end_line=first + SNIPPET_CONTEXT_WINDOW + added,
            description=f"a snippet of {path}",
            advice="Review the changes and make sure they are as expected. Edit the file again if necessary.",
        )

    def insert(self, path: Path, insert_line: int, new_str: str, enable_linting: bool) -> CLIResult:
        text = self.load(path).text
        lines = _lines(text)
        if not 0 <= insert_line <= len(lines):
            raise EditorToolParameterInvalidError(
                "insert_line",
                insert_line,
                f"It should be within the range of allowed values: {[0, len(lines)]}",
            )
        before = "".join(lines[:insert_line])
        if before and not before.endswith("\n"):
            before += "\n"  # else the new text would continue the file's last, unended line
        return self._edited(
            path,
            text,
            before + new_str + "\n" + "".join(lines[insert_line:]),
            start_line=max(0, insert_line - SNIPPET_CONTEXT_WINDOW) + 1,
            end_line=insert_line + SNIPPET_CONTEXT_WINDOW + new_str.count("\n") + 1,
            description="a snippet of the edited file",
            advice="Review the changes and make sure they are as expected (correct indentation, no duplicate "
            "lines, etc). Edit the file again if necessary.",
        )

    def _edited(
        self, path: Path, old: str, new: str, *, start_line: int, end_line: int, description: str, advice: str
    ) -> CLIResult:
        self.write_file(path, new)
        self._history_manager.add_history(path, old)
        snippet = self._make_output(_slice(new, start_line, end_line), description, start_line)
        return CLIResult(
            output=f"The file {path} has been edited. {snippet}{advice}",
            prev_exist=True,
            path=str(path),
            new_content=new,
        )


def _lines(text: str) -> list[str]:
    """The lines with their newlines; only a newline ends a line (str.splitlines knows eight more ends)."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _slice(text: str, start_line: int, end_line: int) -> str:
    return "".join(_lines(text)[start_line - 1 : end_line])


def _line_numbers(text: str, part: str) -> list[int]:
    found: list[int] = []
    at = text.find(part)
    while at >= 0 and len(found) < 100:
        found.append(text.count("\n", 0, at) + 1)
        at = text.find(part, at + len(part))
    return sorted(set(found))


def list_folder(path: str) -> tuple[list[str], int, bool]:
    """Paths up to 2 levels deep as `find -L` gives them, sorted, folders with a slash, hidden ones left out;
    the number of hidden ones in `path` itself; and whether the list was cut."""

    def entries(folder: str) -> list[str]:
        try:
            return sorted(os.listdir(folder))
        except OSError:
            return []

    top = entries(path)
    found = [path]
    for name in top:
        if not name.startswith("."):
            child = os.path.join(path, name)
            found.append(child)
            if os.path.isdir(child):
                found += [os.path.join(child, below) for below in entries(child) if not below.startswith(".")]
        if len(found) > _LISTING_LIMIT:
            break
    shown = [f"{each.rstrip('/')}/" if os.path.isdir(each) else each for each in sorted(found)[:_LISTING_LIMIT]]
    return shown, sum(name.startswith(".") for name in top), len(found) > _LISTING_LIMIT


def edit(settings: Settings, request: dict[str, Any]) -> dict[str, Any]:
    """In a fork: one call of the editor. Whatever goes wrong is an answer for the agent."""
    path = Path(os.path.join(settings.work, str(request.get("path", ""))))
    command = str(request.get("command", ""))
    names = ("file_text", "view_range", "old_str", "new_str", "insert_line")
    arguments = {name: request[name] for name in names if request.get(name) is not None}
    try:
        _check_types(arguments)
        editor = GuardedEditor(os.path.join(settings.scratch, "history"))
        result = editor(command=command, path=str(path), **arguments)
        content = _content(editor, command, path, arguments, result)
    except ToolError as error:
        reason = getattr(error, "reason", None)
        if reason is None or isinstance(error, FileValidationError):
            reason = _reason(error, command, path)
        text = f"ERROR:\n{error.message}"
        return _answer(False, text, None, reason=reason, occurrences=getattr(error, "occurrences", 0))
    except (OSError, ValueError, MemoryError) as error:
        return _answer(False, f"ERROR:\n{type(error).__name__}: {error}", None, reason="failed", occurrences=0)
    return _answer(True, result.output or "", content, reason=None, occurrences=0)


def _check_types(arguments: dict[str, Any]) -> None:
    """Raises ToolError where a value cannot be used; upstream would end in a TypeError."""
    for name, value in arguments.items():
        wanted: type = {"view_range": list, "insert_line": int}.get(name, str)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise EditorToolParameterInvalidError(name, value, f"It should be of type {wanted.__name__}.")


def _content(
    editor: GuardedEditor, command: str, path: Path, arguments: dict[str, Any], result: CLIResult
) -> str | None:
    """The file's text after the call; of a view with a range, the lines shown."""
    if path.is_dir():
        return None
    if command != "view":
        return str(result.new_content)
    text = editor.load(path).text
    if "view_range" in arguments:
        first, last = arguments["view_range"]
        text = _slice(text, first, len(text) if last == -1 else last)
    return text


def _answer(ok: bool, text: str, content: str | None, **more: object) -> dict[str, Any]:
    cut = content is not None and len(content.encode("utf-8", "replace")) > CONTENT_LIMIT
    if cut and content is not None:
        content = content.encode("utf-8", "replace")[:CONTENT_LIMIT].decode("utf-8", "ignore")
    if len(text) > _TEXT_LIMIT:
        text = text[:_TEXT_LIMIT] + "\n[... cut ...]"
    return {"edit_ok": ok, "text": text, "content": content, "content_cut": cut, **more}


def _reason(error: ToolError, command: str, path: Path) -> str:
    """One word for an error of upstream's."""
    if isinstance(error, FileValidationError):
        return "too_large" if "too large" in error.reason else "not_text"
    if getattr(error, "parameter", None) == "path":
        if command == "create":
            return "exists"
        return "is_directory" if path.is_dir() else "missing"
    if hasattr(error, "parameter"):
        return "bad_argument"
    return "no_history" if "No edit history" in error.message else "failed"


def edit_into(fd: int, settings: Settings, request: dict[str, Any]) -> int:
    """In a fork: answer through `fd`."""
    with open(fd, "w", encoding="utf-8", closefd=False) as file:
        json.dump(edit(settings, request), file)
    return 0

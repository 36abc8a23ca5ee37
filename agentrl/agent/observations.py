"""What the agent reads back: command ends and editor answers, full or compact, cut to head and tail."""

from __future__ import annotations

import re

from agentrl.wire import CommandResult, EditCommand, EditResult

_EDITS: tuple[EditCommand, ...] = ("create", "str_replace", "insert", "undo_edit")


def cut_text(text: str, limit_chars: int, *, total_bytes: int | None = None) -> str:
    """The text, or its head and tail (`limit_chars` in all) around a line that says how much is left out."""
    if len(text) <= limit_chars:
        return text
    head = text[: limit_chars // 2]
    tail = text[len(text) - (limit_chars - len(head)) :]
    total = len(text.encode("utf-8", "replace")) if total_bytes is None else total_bytes
    left_out = max(1, total - len((head + tail).encode("utf-8", "replace")))
    return f"{head}\n[… {left_out} bytes left out …]\n{tail}"


def command_text(result: CommandResult, *, limit_chars: int, timeout_s: float, compact: bool, is_test: bool) -> str:
    """A command's output, and how it ended where that was not well."""
    output = result.output
    if compact and is_test and not result.timed_out:
        output = compact_tests(output)
    lines = []
    if output.strip("\n"):
        total = result.output_bytes if output is result.output else None
        lines.append(cut_text(output, limit_chars, total_bytes=total).strip("\n"))
    if result.timed_out:
        lines.append(f"Error: the command was stopped after {timeout_s:g} s.")
    elif result.out_of_memory:
        lines.append("Error: the command ran out of memory and was killed.")
    elif result.exit_code and not compact:
        lines.append(f"[exit code {result.exit_code}]")
    return "\n".join(lines) or "(no output)"


_SUMMARY = re.compile(r"^=*\s*((?:no tests ran|\d+ [a-z]+)(?:, \d+ [a-z]+)*) in [\d.]+s.*$")


def compact_tests(output: str) -> str:
    """pytest's output as its `E` lines and its counts, without times; other output unchanged."""
    lines = output.splitlines()
    counts = [found[1] for line in lines if (found := _SUMMARY.match(line))]
    if not counts:
        return output
    errors = [" ".join(line.split()) for line in lines if re.match(r"E\s", line)]
    return "\n".join([*errors, counts[-1]])


def edit_text(command: EditCommand, result: EditResult, *, limit_chars: int, compact: bool) -> str:
    """The editor's answer."""
    if not compact:
        return cut_text(result.text, limit_chars)
    if not result.ok:
        return compact_error(result.text)
    if command in _EDITS:
        return "Edited."
    shown = result.text if result.content is None else result.content
    return cut_text(shown.removesuffix("\n"), limit_chars) or "(empty)"


def compact_error(text: str) -> str:
    """The editor's complaint as one short line."""
    if "did not appear verbatim" in text:
        return "Error: old_str found 0 times."
    if "Multiple occurrences of old_str" in text:
        lines = re.findall(r"in lines \[([^\]]*)\]", text)
        # Two in one line are listed once; it is never fewer than two.
        return f"Error: old_str found {max(2, len(lines[-1].split(','))) if lines else 2} times."
    if "does not exist" in text:
        return "Error: no such file."
    first = text.removeprefix("ERROR:").strip().split("\n")[0][:160]
    return f"Error: {first or 'the editor refused.'}"

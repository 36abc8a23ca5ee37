"""The shell's own commands: the agent's tools as the agent has them, and what can be asked of the task.

:view src/pkg/core.py 10 40          :str_replace src/pkg/core.py 'old text' 'new text'
:diff                                :grade
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.agent import TOOLS, ToolRunner
from agentrl.run.debug_text import grade_lines, note, show, write_grade_log
from agentrl.wire import ToolCall

if TYPE_CHECKING:
    from agentrl.run.debug_shell import Shell

# A generated task's work tree is no repository, and git takes patches only whole.
_APPLY = (
    "d=$(mktemp) && cat > $d && { git apply --whitespace=nowarn $d || patch -p1 --batch --forward < $d; }; "
    "code=$?; rm -f $d; exit $code"
)
_APPLY_S = 60.0
MOST_S = 86_400  # as `--timeout-s`
_FILE_LIMIT = 11 * 1024 * 1024  # the most that a sandbox's server reads at once


class ShellError(Exception):
    """A line of the shell's own that cannot mean anything; the text says why."""


@dataclass(frozen=True, slots=True)
class Colon:
    """One command: its words, what it does, and the function that does it and gives an exit code."""

    usage: str
    meaning: str
    run: Callable[[Shell, list[str]], int]


def run_colon(shell: Shell, line: str) -> int:
    """Run a line (without its colon). Raises ShellError, SandboxError."""
    name, _, rest = line.partition(" ")
    command = COMMANDS.get("help" if name == "?" else name)
    if command is None:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        raise ShellError(f"no command :{name}; {f'did you mean :{close[0]}?' if close else '`:help` lists them'}")
    if name == "call":  # JSON, whose quotes are not a shell's
        return command.run(shell, rest.strip().split(" ", 1))
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise ShellError(f":{name}: {error} (words are quoted as in a shell)") from error
    return command.run(shell, words)


def is_whole(line: str) -> bool:
    """False where a quote of the line is still open: the next line belongs to it."""
    try:
        return bool(shlex.split(line)) or line.startswith(":call")
    except ValueError:
        return line.startswith(":call")


def _words(name: str, words: Sequence[str], least: int, most: int) -> None:
    if not least <= len(words) <= most:
        raise ShellError(f"usage: :{name} {COMMANDS[name].usage}".rstrip())


def _number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ShellError(f"{word!r} is no number") from None


# --- the agent's tools --------------------------------------------------------------------------------------------


def _tool(shell: Shell, name: str, arguments: dict[str, Any]) -> int:
    """Call a tool as the agent does; what is printed is what the agent reads."""
    config = shell.bench.config.agent
    runner = ToolRunner(names=tuple(TOOLS), sandbox=shell.bench.sandbox, config=config.tools)
    call = ToolCall(name=name, arguments=arguments)
    result = shell.bench.work_inside(runner.execute(call, time_left_s=config.episode_timeout_s))
    if result.submitted:
        return _grade(shell, [])
    show(result.text + "\n")
    return int(result.bad)


def _path(shell: Shell, word: str) -> str:
    """A path as typed, taken from the shell's folder (the agent's own are taken from the work tree)."""
    return word if word.startswith("/") else f"{shell.session.cwd}/{word}"


def _view(shell: Shell, words: list[str]) -> int:
    _words("view", words, 1, 3)
    lines = {"view_range": [_number(words[1]), _number(words[2]) if len(words) == 3 else -1]} if words[1:] else {}
    return _tool(shell, "view", {"path": _path(shell, words[0]), **lines})


def _create(shell: Shell, words: list[str]) -> int:
    _words("create", words, 2, 2)
    return _tool(shell, "create", {"path": _path(shell, words[0]), "file_text": words[1]})


def _str_replace(shell: Shell, words: list[str]) -> int:
    _words("str_replace", words, 3, 3)
    return _tool(shell, "str_replace", {"path": _path(shell, words[0]), "old_str": words[1], "new_str": words[2]})


def _insert(shell: Shell, words: list[str]) -> int:
    _words("insert", words, 3, 3)
    arguments = {"path": _path(shell, words[0]), "insert_line": _number(words[1]), "new_str": words[2]}
    return _tool(shell, "insert", arguments)


def _undo_edit(shell: Shell, words: list[str]) -> int:
    _words("undo_edit", words, 1, 1)
    return _tool(shell, "undo_edit", {"path": _path(shell, words[0])})


def _call(shell: Shell, words: list[str]) -> int:
    if not words[0]:
        _words("call", [], 1, 2)
    try:
        arguments = json.loads(words[1]) if len(words) == 2 else {}
    except ValueError as error:
        raise ShellError(f":call: not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise ShellError(":call: the arguments are a JSON object")
    return _tool(shell, words[0], arguments)


# --- the task -----------------------------------------------------------------------------------------------------


def _help(shell: Shell, words: list[str]) -> int:
    width = max(len(f":{name} {command.usage}") for name, command in COMMANDS.items())
    for name, command in COMMANDS.items():
        print(f"{f':{name} {command.usage}':{width}}  {command.meaning}")
    print("anything else is a line for bash; `exit [CODE]` or Ctrl-D leaves")
    return 0


def _task(shell: Shell, words: list[str]) -> int:
    for message in shell.bench.environment.prompt(shell.bench.task):
        show(f"--- {message.role}\n{message.content.rstrip()}\n")
    return 0


def _tests(shell: Shell, words: list[str]) -> int:
    """The hidden tests, by name and text, as far as the task's data has them under the names that SWE-Gym uses."""
    data = shell.bench.task.data
    found = {key: data[key] for key in data if key in _HIDDEN and data[key]}
    if not found:
        raise ShellError("this task names no tests that could be shown")
    for key, value in found.items():
        lines = value if isinstance(value, str) else "\n".join(map(str, value))
        show(f"--- {key}\n{lines.rstrip()}\n")
    return 0


_HIDDEN = frozenset({"fail_to_pass", "FAIL_TO_PASS", "pass_to_pass", "PASS_TO_PASS", "test_patch", "hidden_test"})


def _collect(shell: Shell) -> str:
    return shell.bench.call(shell.bench.environment.collect(shell.bench.task, shell.bench.sandbox))


def _diff(shell: Shell, words: list[str]) -> int:
    _words("diff", words, 0, 1)
    patch = _collect(shell)
    if not words:
        show(patch or "(no change)\n")
        return 0
    _write(Path(words[0]), patch.encode("utf-8", "surrogateescape"))
    return 0


def _grade(shell: Shell, words: list[str]) -> int:
    patch = _collect(shell)
    bench = shell.bench
    grade = bench.grade(patch)
    kept = write_grade_log(None, bench.task, bench.environment.image(bench.task), patch, grade)
    print("\n".join(grade_lines(grade)), flush=True)
    print(f"log: {kept}", flush=True)
    return 0 if grade.resolved else 1


def _reference(shell: Shell, words: list[str]) -> int:
    """Apply the patch that solves the task to the work tree as it stands."""
    bench = shell.bench
    patch = bench.environment.reference_patch(bench.task).encode("utf-8", "surrogateescape")
    result = bench.run(_APPLY, timeout_s=_APPLY_S, cwd=bench.sandbox.workdir, stdin=patch)
    show(result.output if result.exit_code else "the reference patch is applied\n")
    return int(result.exit_code != 0)


def _reset(shell: Shell, words: list[str]) -> int:
    shell.renew()
    note("a fresh sandbox: the work tree is as at the start")
    return 0


def _timeout(shell: Shell, words: list[str]) -> int:
    _words("timeout", words, 0, 1)
    if words:
        seconds = _number(words[0])
        if not 0 < seconds <= MOST_S:
            raise ShellError(f"a time limit is a number of seconds from 1 to {MOST_S}")
        shell.timeout_s = float(seconds)
    print(f"a line is stopped after {shell.timeout_s:g} s")
    return 0


def _put(shell: Shell, words: list[str]) -> int:
    _words("put", words, 1, 2)
    source = Path(words[0]).expanduser()
    try:
        data = source.read_bytes()
    except OSError as error:
        raise ShellError(f":put: {source}: {error.strerror}") from error
    target = _path(shell, words[1] if len(words) == 2 else source.name)
    shell.bench.call(shell.bench.sandbox.write_files({target: data}))
    print(f"{len(data)} bytes to {target}")
    return 0


def _get(shell: Shell, words: list[str]) -> int:
    _words("get", words, 2, 2)
    data = shell.bench.call(shell.bench.sandbox.read_file(_path(shell, words[0]), limit_bytes=_FILE_LIMIT))
    if data is None:
        raise ShellError(f":get: no file {words[0]}")
    if len(data) >= _FILE_LIMIT:
        raise ShellError(f":get: {words[0]} has {_FILE_LIMIT} bytes or more")
    _write(Path(words[1]), data)
    return 0


def _write(path: Path, data: bytes) -> None:
    try:
        path.expanduser().write_bytes(data)
    except OSError as error:
        raise ShellError(f"{path}: {error.strerror}") from error
    print(f"{len(data)} bytes to {path}")


COMMANDS = {
    "help": Colon("", "this list", _help),
    "task": Colon("", "all that the agent is told", _task),
    "tests": Colon("", "the hidden tests: the agent never sees them", _tests),
    "view": Colon("FILE [FIRST [LAST]]", "the agent's view tool", _view),
    "create": Colon("FILE TEXT", "the agent's create tool", _create),
    "str_replace": Colon("FILE OLD NEW", "the agent's str_replace tool", _str_replace),
    "insert": Colon("FILE LINE TEXT", "the agent's insert tool", _insert),
    "undo_edit": Colon("FILE", "the agent's undo_edit tool", _undo_edit),
    "call": Colon("TOOL JSON", "any tool call, word for word", _call),
    "submit": Colon("", "what the agent's submit leads to: `:grade`", _grade),
    "diff": Colon("[FILE]", "the change as it would be graded, printed or written to a file here", _diff),
    "grade": Colon("", "grade the change in a fresh sandbox", _grade),
    "reference": Colon("", "apply the patch that solves the task", _reference),
    "reset": Colon("", "a fresh sandbox with the task as at the start", _reset),
    "put": Colon("FILE [TARGET]", "copy a file from here into the sandbox", _put),
    "get": Colon("FILE TARGET", "copy a file of the sandbox to here", _get),
    "timeout": Colon("[SECONDS]", "show or change how long a line may take", _timeout),
}

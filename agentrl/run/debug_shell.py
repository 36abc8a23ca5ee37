"""`agentrl sandbox shell`: lines for bash, and words that begin with a colon for the agent's tools and the task."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from agentrl.errors import AgentRLError, SandboxError
from agentrl.run.debug import AGENT_SETTINGS, Choice, hint, no_verdict_by_accident, open_task
from agentrl.run.debug_bench import Bench, open_bench
from agentrl.run.debug_colon import COMMANDS, ShellError, is_whole, run_colon
from agentrl.run.debug_session import ShellSession
from agentrl.run.debug_text import exit_code_of, note, printable, show
from agentrl.run.signals import INTERRUPTED

COMMAND_TIMEOUT_S = 600.0
_HISTORY_LINES = 2000


def shell_command(choice: Choice, task_id: str, *, timeout_s: float) -> int:
    """A shell in a fresh, prepared sandbox of a task; the exit code of its last line.

    Raises UsageError, InfrastructureError.
    """
    config, environment, task = open_task(choice, task_id, reads=AGENT_SETTINGS)
    with no_verdict_by_accident(), open_bench(config, environment, task, note=note, spare=1) as bench:
        return Shell(bench, timeout_s=timeout_s).loop()


class Shell:
    """The loop over lines. `timeout_s` bounds each; `code` is the last line's exit code."""

    def __init__(self, bench: Bench, *, timeout_s: float) -> None:
        self.bench = bench
        self.timeout_s = timeout_s
        self.session = ShellSession(bench)
        self.code = 0
        self.is_over = False

    def loop(self) -> int:
        """Read and run lines until `exit`, Ctrl-D or the end of stdin. Raises what no fresh sandbox mends."""
        self.session.begin()
        self._greet()
        with _line_editor(_is_terminal()):
            while not self.is_over:
                try:
                    line = self._read()
                except KeyboardInterrupt:
                    print(file=sys.stderr)
                    self.code = INTERRUPTED
                    continue
                except EOFError:
                    if _is_terminal():
                        print(file=sys.stderr)
                    break
                self._run(line)
        return self.code

    def _greet(self) -> None:
        """The task, in a few lines on stderr: output of lines alone goes to stdout."""
        bench = self.bench
        lines = [
            f"task {bench.task.id} · image {bench.environment.image(bench.task)} · {bench.sandbox.id}",
            hint(bench.environment, bench.task),
            "Each line runs in a bash of its own; folder and exported variables stay.",
            "Ctrl-C ends a command, Ctrl-D leaves, `:help` lists what else there is.",
        ]
        print(printable("\n".join(lines)), file=sys.stderr, flush=True)

    def _read(self) -> str:
        """One command, over several lines where bash would ask for more. Raises EOFError, KeyboardInterrupt."""
        line = _next_line(f"{self.bench.task.id}:{self.session.cwd}$ ")
        while line.strip() and "\0" not in line and not self._is_complete(line):
            try:
                line += "\n" + _next_line("> ")
            except EOFError:
                break
        return line

    def _is_complete(self, line: str) -> bool:
        if self._is_colon(line.split()[0]):
            return is_whole(line)
        with self._mended():
            return self.session.is_complete(line)
        return True

    def _run(self, line: str) -> None:
        words = line.split()
        if not words:
            return
        if words[0] in ("exit", "logout") and len(words) <= 2 and all(word.isdigit() for word in words[1:]):
            self.code, self.is_over = int(words[1]) if len(words) == 2 else self.code, True
            return
        try:
            if "\0" in line:
                raise ShellError("a line holds no NUL")
            with self._mended():
                if self._is_colon(words[0]):
                    self.code = run_colon(self, line.strip()[1:])
                else:
                    result = self.session.run(line, timeout_s=self.timeout_s)
                    show(result.output)
                    self.code = exit_code_of(result, timeout_s=self.timeout_s, interrupted=self.bench.was_interrupted)
        except ShellError as error:
            print(printable(str(error)), file=sys.stderr, flush=True)
            self.code = 2
        except KeyboardInterrupt:
            note("interrupted")
            self.code = INTERRUPTED

    def _is_colon(self, word: str) -> bool:
        """`:` alone is bash's own command."""
        return word.startswith(":") and len(word) > 1 and (word[1:].isidentifier() or word == ":?")

    @contextlib.contextmanager
    def _mended(self) -> Iterator[None]:
        """A sandbox that failed is replaced by a fresh one, and what happened is told."""
        try:
            yield
        except SandboxError as error:
            if "the sandbox refused" in error.what:
                note(error.what)
                self.code = 1
                return
            note(f"{error}\nagentrl: taking a fresh sandbox: the work tree is as at the start")
            self.code = error.exit_code
            self.renew()
        except AgentRLError as error:
            note(str(error))
            self.code = error.exit_code

    def renew(self) -> None:
        """A fresh, prepared sandbox. Raises InfrastructureError: then the shell is over."""
        self.bench.renew()
        self.session.begin()


def _is_terminal() -> bool:
    """False also where stdin is closed: Python has none then."""
    return sys.stdin is not None and sys.stdin.isatty()


def _next_line(prompt: str) -> str:
    """A line without its end; bytes that are no UTF-8 as surrogates. Raises EOFError."""
    if _is_terminal():
        return input(prompt)
    line = b"" if sys.stdin is None else sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return line.decode("utf-8", "surrogateescape").removesuffix("\n").removesuffix("\r")


@contextlib.contextmanager
def _line_editor(wanted: bool) -> Iterator[None]:
    """Editing, history and completion of colon commands on a terminal."""
    if not wanted:
        yield
        return
    import readline

    history = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "agentrl" / "shell_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(_HISTORY_LINES)
    names = [f":{name} " for name in COMMANDS]

    def complete(text: str, state: int) -> str | None:
        found = [name for name in names if name.startswith(text)] if text.startswith(":") else []
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n")
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(history)

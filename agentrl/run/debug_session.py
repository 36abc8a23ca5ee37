"""A shell session over a server that keeps none: each line is a fresh bash, and what a bash would remember (its folder,
its exported variables) is read back after the line and given to the next.

What is read back comes out of the sandbox: it is bounded, and used inside it alone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.errors import SandboxError
from agentrl.run.debug_bench import Bench
from agentrl.run.debug_text import note
from agentrl.wire import CommandResult

OUTPUT_LIMIT = 2_000_000  # bytes; the most that the server keeps of one command
_STATE = "/tmp/.agentrl-shell"
_STATE_LIMIT = 256 * 1024
_STATE_S = 30.0
# Of one bash and not of the session.
_OWN = frozenset({"_", "SHLVL", "PWD", "BASH_EXECUTION_STRING"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The trap runs however the line ends, `exit 3` included; `exec` alone escapes it. Entries end with NUL: the folder, the
# variables, and an empty one where all of them are there (a variable of 128 KiB is more than `env` can be given).
_LINE = (
    "{{ : > {state}; }} 2>/dev/null; trap '__code=$?; "
    '{{ pwd -P; printf "\\0"; /usr/bin/env -0 && printf "\\0"; }} > {state} 2>/dev/null; '
    "exit $__code' EXIT; {unset}eval {line}"
)
# A plain pytest call changes nothing that is kept, and as it stands the server runs it as it does for the agent.
_PLAIN = re.compile(r"\s*(?:python3? -m )?pytest(?:[ \t]+[A-Za-z0-9_./:=,@%+-]+)*\s*")
_INCOMPLETE = re.compile(r"unexpected end of file|unexpected EOF while looking for|delimited by end-of-file")


@dataclass(slots=True)
class ShellSession:
    """`cwd` and `changed` (exported variables that differ from a fresh bash's; None: unset) of a bench's shell."""

    bench: Bench
    cwd: str = ""
    changed: dict[str, str | None] = field(default_factory=dict)
    _fresh: dict[str, str] = field(default_factory=dict)

    def begin(self) -> None:
        """Start over in the work tree of the bench's sandbox. Raises SandboxError."""
        self.cwd, self.changed, self._fresh = self.bench.sandbox.workdir, {}, {}
        self._execute("true", timeout_s=_STATE_S)
        self._fresh = self._read_back() or {}
        self.changed = {}

    def run(self, line: str, *, timeout_s: float) -> CommandResult:
        """Run `line` as a bash in this session would. Ctrl-C ends the line and not the session.

        Raises SandboxError where the sandbox failed.
        """
        if _PLAIN.fullmatch(line):
            environment = {name: value for name, value in self.changed.items() if value is not None}
            return self.bench.run(line, timeout_s=timeout_s, cwd=self.cwd, env=environment, output_limit=OUTPUT_LIMIT)
        result = self._execute(line, timeout_s=timeout_s)
        environment_now = self._read_back()
        if environment_now is not None:
            self.changed = _difference(self._fresh, environment_now)
        return result

    def is_complete(self, line: str) -> bool:
        """False where bash would ask for more: an open quote, a loop without its end, a here-document."""
        if line.endswith("\\") and not line.endswith("\\\\"):
            return False
        if "\n" not in line and not re.search(r"['\"`({<\\]|\b(?:do|then|else|in|case|while|for|if|until)\b", line):
            return True
        checked = self.bench.run("bash -n", timeout_s=_STATE_S, stdin=f"{line}\n".encode("utf-8", "surrogateescape"))
        return not _INCOMPLETE.search(checked.output)

    def _execute(self, line: str, *, timeout_s: float) -> CommandResult:
        unset = [name for name, value in self.changed.items() if value is None]
        script = _LINE.format(state=_STATE, line=bash_word(line), unset=f"unset {' '.join(unset)}; " if unset else "")
        environment = {name: value for name, value in self.changed.items() if value is not None}
        try:
            return self.bench.run(script, timeout_s=timeout_s, cwd=self.cwd, env=environment, output_limit=OUTPUT_LIMIT)
        except SandboxError as error:
            if "there is no folder" not in error.what:
                raise
        self.cwd = self.bench.sandbox.workdir  # the line before removed the folder it stood in
        return self.bench.run(script, timeout_s=timeout_s, cwd=self.cwd, env=environment, output_limit=OUTPUT_LIMIT)

    def _read_back(self) -> dict[str, str] | None:
        """Take the folder over and give the exported variables; None where the line left none that can be kept."""
        sandbox = self.bench.sandbox
        data = self.bench.call(sandbox.read_file(_STATE, limit_bytes=_STATE_LIMIT, timeout_s=_STATE_S))
        if not data:
            return None
        cwd, _, rest = data.partition(b"\0")
        if cwd.startswith(b"/"):  # else the line removed the folder it stood in
            self.cwd = cwd.removesuffix(b"\n").decode("utf-8", "replace")
        if len(data) >= _STATE_LIMIT or not rest.endswith(b"\0\0"):
            note("the exported variables are too large to be kept; they are as before this line")
            return None
        return _parse(rest)


def bash_word(text: str) -> str:
    """`text` as one word of bash; bytes that are no UTF-8 (surrogates in `text`) are spelled out."""
    quoted = shlex.quote(text)
    try:
        quoted.encode()
    except UnicodeEncodeError:
        octal = "".join(f"\\{byte:03o}" for byte in text.encode("utf-8", "surrogateescape"))
        return f"$'{octal}'"
    return quoted


def bash_line(text: str) -> str:
    """`text` as a line for bash; as `bash_word` where it holds bytes that are no UTF-8."""
    word = bash_word(text)
    return f"eval {word}" if word.startswith("$") else text


def _parse(data: bytes) -> dict[str, str]:
    """`env -0`'s output; names that are none, and values that are no UTF-8, are left out."""
    found = {}
    for entry in data.split(b"\0"):
        name, equals, value = entry.partition(b"=")
        try:
            if equals and _NAME.fullmatch(name.decode()) and name.decode() not in _OWN:
                found[name.decode()] = value.decode()
        except UnicodeDecodeError:
            continue
    return found


def _difference(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    """What to set (a value) or unset (None) to come from `before` to `after`."""
    set_ = {name: value for name, value in after.items() if before.get(name) != value}
    return {**set_, **{name: None for name in before if name not in after}}

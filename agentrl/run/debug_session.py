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
from agentrl.wire import CommandResult

OUTPUT_LIMIT = 2_000_000  # bytes; the most that the server keeps of one command
_STATE = "/tmp/.agentrl-shell"
_STATE_LIMIT = 256 * 1024
_STATE_S = 30.0
# Of one bash and not of the session.
_OWN = frozenset({"_", "SHLVL", "PWD", "BASH_EXECUTION_STRING"})
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The trap runs however the line ends, `exit 3` included; `exec` alone escapes it.
_LINE = (
    "{{ : > {state}; }} 2>/dev/null; "
    "trap '__code=$?; {{ pwd -P; /usr/bin/env -0; }} > {state} 2>/dev/null; exit $__code' EXIT; {unset}eval {line}"
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
        script = _LINE.format(state=_STATE, line=shlex.quote(line), unset=f"unset {' '.join(unset)}; " if unset else "")
        environment = {name: value for name, value in self.changed.items() if value is not None}
        try:
            return self.bench.run(script, timeout_s=timeout_s, cwd=self.cwd, env=environment, output_limit=OUTPUT_LIMIT)
        except SandboxError as error:
            if "there is no folder" not in error.what:
                raise
        self.cwd = self.bench.sandbox.workdir  # the line before removed the folder it stood in
        return self.bench.run(script, timeout_s=timeout_s, cwd=self.cwd, env=environment, output_limit=OUTPUT_LIMIT)

    def _read_back(self) -> dict[str, str] | None:
        """Take the folder over and give the exported variables; None where the line left no state."""
        sandbox = self.bench.sandbox
        data = self.bench.call(sandbox.read_file(_STATE, limit_bytes=_STATE_LIMIT, timeout_s=_STATE_S))
        if not data or len(data) >= _STATE_LIMIT:
            return None
        cwd, _, rest = data.partition(b"\n")
        if cwd.startswith(b"/"):
            self.cwd = cwd.decode("utf-8", "replace")
        return _parse(rest)


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

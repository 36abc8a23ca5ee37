"""The `run` operation: one command line in a fresh bash, or a plain pytest command in a warm fork."""

import os
import re
import shlex
import signal
import sys
from typing import NamedTuple

from .memory import OomCounter
from .processes import Child, Processes, put_behind
from .resident import LOADED_WITH_PYTEST, Resident
from .settings import Settings
from .supervise import Capture, supervise

DEFAULT_OUTPUT_LIMIT = 100_000
MAX_OUTPUT_LIMIT = 2_000_000
"""Bytes of output kept. One byte takes up to 6 in the answer's JSON, and an answer has at most 16 MiB."""
_ARGUMENT_LIMIT = 120_000
"""Linux takes no single argument of 128 KiB or more."""

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)

_WORDS = re.compile(r"""[A-Za-z0-9_./:=,@%+-]+|'[^'\n]*'|"[^"$`\\!\n]*"|[ \t]+""")
_CHANGE_FOLDER = re.compile(r"""\s*cd +([A-Za-z0-9_./-]+) *&& *""")
_JOIN_STREAMS = re.compile(r"""\s2>&1\s*$""")


class PytestCommand(NamedTuple):
    """`python -m pytest ARGUMENTS` (`module`) or `pytest ARGUMENTS`, run in `cwd`."""

    module: bool
    arguments: list[str]
    cwd: str


def run_command(
    processes: Processes,
    settings: Settings,
    resident: Resident,
    oom: OomCounter,
    *,
    command: str,
    timeout_s: float,
    cwd: str,
    env: dict[str, str],
    stdin: bytes,
    output_limit: int,
) -> dict[str, object]:
    """Run `command`; nothing of it is left running afterwards."""
    environment = {**settings.environment, **env}
    capture = Capture(min(output_limit, MAX_OUTPUT_LIMIT))
    oom_before = oom.read()
    before = processes.below()
    plain = parse_pytest(command, cwd) if _may_be_resident(settings, env) else None
    if plain is not None and not _shadows(plain.cwd):
        child = resident.start_pytest(plain.arguments, plain.module, environment, plain.cwd, feed=bool(stdin))
    else:
        child = _start_bash(command, environment, cwd, feed=bool(stdin))
    ended = supervise(processes, child, before=before, timeout_s=timeout_s, capture=capture, stdin=stdin)
    return {
        "exit_code": ended.exit_code,
        "output": capture.text(),
        "output_bytes": capture.total,
        "timed_out": ended.timed_out,
        "out_of_memory": oom.happened(oom_before, ended.exit_code),
        "duration_s": ended.duration_s,
    }


def could_not_enter(cwd: str) -> dict[str, object]:
    """The result of a command whose folder may not be entered: what a shell says that is to change there."""
    output = f"bash: cd: {cwd}: Permission denied\n"
    return {
        "exit_code": 1,
        "output": output,
        "output_bytes": len(output.encode("utf-8", "replace")),
        "timed_out": False,
        "out_of_memory": False,
        "duration_s": 0.0,
    }


def _start_bash(command: str, environment: dict[str, str], cwd: str, *, feed: bool) -> Child:
    """bash -c, leading a session of its own; a command too long for an argument comes from an anonymous file."""
    script: int | None = None
    arguments = ["/bin/bash", "-c", command]
    if len(command.encode("utf-8", "surrogateescape")) > _ARGUMENT_LIMIT:
        script = os.memfd_create("command", 0)
        with open(script, "wb", closefd=False) as file:
            file.write(command.encode("utf-8", "surrogateescape"))
        os.lseek(script, 0, os.SEEK_SET)
        arguments = ["/bin/bash", f"/dev/fd/{script}"]
    output_read, output_write = os.pipe()
    stdin_read, stdin_write = os.pipe() if feed else (os.open(os.devnull, os.O_RDONLY), None)
    try:
        # There is no choosing the child's folder, so ours is lent to it. Never stay there: a reset removes it.
        os.chdir(cwd)
        pid = os.posix_spawn(
            arguments[0],
            arguments,
            environment,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, stdin_read, 0),
                (os.POSIX_SPAWN_DUP2, output_write, 1),
                (os.POSIX_SPAWN_DUP2, output_write, 2),
            ],
            setsid=True,
            setsigdef=_IGNORED_BY_PYTHON,
        )
    except BaseException:
        for fd in (output_read, stdin_write):
            if fd is not None:
                os.close(fd)
        raise
    finally:
        os.chdir("/")
        for fd in (output_write, stdin_read, script):
            if fd is not None:
                os.close(fd)
    put_behind(pid)
    return Child(pid=pid, output=output_read, stdin=stdin_write, side=None)


def parse_pytest(command: str, cwd: str) -> PytestCommand | None:
    """The pytest command that `command` plainly is: words without anything that a shell would expand.

    Understood around it: `cd FOLDER &&` before and `2>&1` after (both streams are one pipe anyway).
    """
    if "pytest" not in command:
        return None
    folder = _CHANGE_FOLDER.match(command)
    if folder is not None:
        cwd = os.path.normpath(os.path.join(cwd, folder.group(1)))
        if not os.path.isdir(cwd):
            return None
        command = command[folder.end() :]
    command = _JOIN_STREAMS.sub("", command).strip()
    position = 0
    while position < len(command):
        word = _WORDS.match(command, position)
        if word is None:
            return None
        position = word.end()
    words = shlex.split(command)
    if words[:1] == ["pytest"]:
        return PytestCommand(module=False, arguments=words[1:], cwd=cwd)
    if words[:3] in (["python", "-m", "pytest"], ["python3", "-m", "pytest"]):
        return PytestCommand(module=True, arguments=words[3:], cwd=cwd)
    return None


def _may_be_resident(settings: Settings, env: dict[str, str]) -> bool:
    """Whether a new interpreter would start like this one: nothing asks for another program or Python
    setup."""
    if not settings.resident or "PATH" in env or any(key.startswith("PYTHON") for key in env):
        return False
    home = env.get("HOME", settings.environment["HOME"])
    return not os.path.isdir(os.path.join(home, ".local", "lib"))  # the user's own packages


def _shadows(cwd: str) -> bool:
    """Whether a file in `cwd` has the name of a module that is loaded here already: a new interpreter would
    take the file. That costs one listing of the folder."""
    try:
        names = {name.removesuffix(".py") for name in os.listdir(cwd)}
    except OSError:
        return True
    return any(name in LOADED_WITH_PYTEST or (name in sys.modules and name != "__main__") for name in names)

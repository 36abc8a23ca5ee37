"""The server's loop: one JSON line in, one JSON line out, until the requests end.

Life: started → `{"ready": true, "protocol": 1}` → (request → answer)* → the requests end → everything below is
killed, exit. Invariant: each request line gets exactly one answer line, with the request's id, and none ends
the server: what a command does wrong is its result, what a request does wrong is an error answer.

    request  {"id": n, "op": "run", …}
    answer   {"id": n, "ok": true, …} or {"id": n, "ok": false, "error": {"kind": "…", "message": "…"}}

Protocol and commands never share descriptors: stdin and stdout are moved away before anything is started.
"""

import base64
import binascii
import contextlib
import json
import os
import select
import socket
import sys
from collections.abc import Callable
from typing import Any

from .commands import DEFAULT_OUTPUT_LIMIT, could_not_enter, run_command
from .files import FileError, Trees, read_file, unpack, write_files
from .memory import OomCounter
from .processes import Processes
from .resident import Resident
from .seed import plant
from .settings import CHANNEL, CHANNEL_REFUSED, Settings, parse
from .supervise import Bounded, Capture, supervise
from .testing import run_tests

PROTOCOL = 1
REQUEST_LIMIT = 64 * 1024 * 1024
ANSWER_LIMIT = 16 * 1024 * 1024
_DEFAULT_TIMEOUT_S = 60.0
_EDIT_ANSWER_LIMIT = 4_000_000
_INTERRUPT = b'{"op":"interrupt"'
"""How such a request begins, so that it is known before it is read."""


class RequestError(Exception):
    """A request that cannot mean anything."""


class Server:
    """The operations, by name."""

    def __init__(self, settings: Settings, processes: Processes) -> None:
        self._settings = settings
        self._processes = processes
        self._trees = Trees((settings.work, *settings.writable))
        self._oom = OomCounter()
        self.resident = Resident(processes, settings)
        self._operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "run": self.run,
            "edit": self.edit,
            "tests": self.tests,
            "write": self.write,
            "read": self.read,
            "unpack": self.unpack,
            "reset": self.reset,
            "ping": self.ping,
            "interrupt": self.interrupt,
        }

    def answer(self, line: bytes) -> bytes:
        """The answer line to a request line. Never raises."""
        number: object = None
        try:
            request = json.loads(line)
            if not isinstance(request, dict):
                raise RequestError("a request is a JSON object")
            number = request.get("id")
            operation = self._operations.get(str(request.get("op")))
            if operation is None:
                raise RequestError(f"unknown op {request.get('op')!r}; known: {', '.join(self._operations)}")
            data = _encode({"id": number, "ok": True, **operation(request)})
            if len(data) >= ANSWER_LIMIT:
                raise FileError("the answer is larger than 16 MiB")
        except Exception as error:
            data = _encode({"id": number, "ok": False, "error": {"kind": _kind(error), "message": _say(error)}})
        return data + b"\n"

    # --- operations -----------------------------------------------------------------------------------------

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        cwd = self._cwd(request)
        if not os.access(cwd, os.X_OK):  # `chmod 0 .` was the agent's own doing: its result, not our failure
            return could_not_enter(cwd)
        return run_command(
            self._processes,
            self._settings,
            self.resident,
            self._oom,
            command=_take(request, "command", str),
            timeout_s=_timeout(request),
            cwd=cwd,
            env=_environment(request),
            stdin=_bytes(request.get("stdin") or ""),
            output_limit=max(2, _take(request, "output_limit", int, DEFAULT_OUTPUT_LIMIT)),
        )

    def tests(self, request: dict[str, Any]) -> dict[str, Any]:
        arguments = _take(request, "arguments", list)
        if not all(isinstance(each, str) for each in arguments):
            raise RequestError("arguments is a list of strings")
        return run_tests(
            self._processes,
            self._settings,
            self.resident,
            self._oom,
            arguments=arguments,
            timeout_s=_timeout(request),
            canary=_take(request, "canary", bool, False),
            test_timeout_s=_test_timeout(request),
            cwd=self._cwd(request),
            env=_environment(request),
        )

    def edit(self, request: dict[str, Any]) -> dict[str, Any]:
        _take(request, "command", str)
        _take(request, "path", str)
        timeout_s = _timeout(request)
        self.resident.load_editor()

        def work(fd: int) -> int:
            from .editing import edit_into

            return edit_into(fd, self._settings, request)

        said, lines = Bounded(_EDIT_ANSWER_LIMIT), Capture(4000)
        before = self._processes.others()
        child = self._processes.fork(work, environment=self._settings.environment, cwd=self._settings.work, side=True)
        ended = supervise(self._processes, child, before=before, timeout_s=timeout_s, capture=lines, side=said)
        if ended.exit_code == 0:
            answer = json.loads(said.data)
            if isinstance(answer, dict):
                return answer
        why = f"did not end within {timeout_s:g} s" if ended.timed_out else f"failed: {lines.text()[-1000:]}"
        return {"edit_ok": False, "text": f"ERROR:\nThe editor {why}", "content": None, "reason": "failed"}

    def write(self, request: dict[str, Any]) -> dict[str, Any]:
        files = _take(request, "files", dict)
        if not all(isinstance(data, str) for data in files.values()):
            raise RequestError("files maps paths to base64")
        write_files(self._settings.work, files)
        return {}

    def read(self, request: dict[str, Any]) -> dict[str, Any]:
        limit = _take(request, "limit_bytes", int, 1_000_000)
        data = read_file(self._settings.work, _take(request, "path", str), limit)
        return {"data": None if data is None else base64.b64encode(data).decode()}

    def unpack(self, request: dict[str, Any]) -> dict[str, Any]:
        unpack(self._settings.work, _bytes(_take(request, "tar", str)))
        return {}

    def reset(self, request: dict[str, Any]) -> dict[str, Any]:
        """As new: no other process, nothing in the writable trees but the seed, the server as it was started."""
        if not self._processes.kill_new(frozenset()):
            raise FileError("processes survive being killed")
        if (changed := self._processes.changed()) is not None:
            raise FileError(f"the server's {changed} was changed from outside")
        self._trees.empty()
        self.plant()
        return {}

    def plant(self) -> None:
        """Put what an image of someone else's has as its work tree into the empty one."""
        if self._settings.seed is not None:
            plant(self._settings.seed, self._settings.work)

    def ping(self, request: dict[str, Any]) -> dict[str, Any]:
        self._processes.reap()
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
        rss_mb = pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
        return {"processes": len(self._processes.others()), "rss_mb": round(rss_mb, 1)}

    def interrupt(self, request: dict[str, Any]) -> dict[str, Any]:
        """Nothing is in progress any more: what was has been ended while this waited (`Lines.is_interrupted`)."""
        return {}

    def _cwd(self, request: dict[str, Any]) -> str:
        cwd = os.path.join(self._settings.work, _take(request, "cwd", str, None) or "")
        cwd = os.path.normpath(cwd)
        if not os.path.isdir(cwd):
            raise FileError(f"there is no folder {cwd}")
        return cwd


# --- taking requests apart ----------------------------------------------------------------------------------

_REQUIRED = object()


def _take(request: dict[str, Any], name: str, kind: type, default: object = _REQUIRED) -> Any:
    """The field `name`, which must be of `kind`; null and absent give `default`."""
    value = request.get(name)
    if value is None:
        if default is _REQUIRED:
            raise RequestError(f"{name} is missing")
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RequestError(f"{name} is not of type {kind.__name__}")
    return value


def _timeout(request: dict[str, Any]) -> float:
    value = request.get("timeout_s", _DEFAULT_TIMEOUT_S)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise RequestError("timeout_s is a positive number of seconds")
    return float(value)


def _test_timeout(request: dict[str, Any]) -> float | None:
    value = request.get("test_timeout_s")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise RequestError("test_timeout_s is a positive number of seconds")
    return float(value)


def _environment(request: dict[str, Any]) -> dict[str, str]:
    env = _take(request, "env", dict, {})
    if not all(isinstance(value, str) for value in env.values()):
        raise RequestError("env maps names to strings")
    return dict(env)


def _bytes(encoded: str) -> bytes:
    return base64.b64decode(encoded, validate=True)


def _encode(answer: dict[str, Any]) -> bytes:
    """JSON in UTF-8. A file name that is no UTF-8 has surrogates in it, which no JSON may hold: each gives `?`."""
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace")


def _kind(error: Exception) -> str:
    if isinstance(error, RequestError | json.JSONDecodeError | binascii.Error | UnicodeError | RecursionError):
        return "bad_request"
    if isinstance(error, FileError | OSError):
        return "failed"
    return "internal" if not isinstance(error, ValueError) else "bad_request"


def _say(error: Exception) -> str:
    return f"{error}" if isinstance(error, RequestError | FileError) else f"{type(error).__name__}: {error}"


# --- the loop -----------------------------------------------------------------------------------------------


class Lines:
    """Request lines from a descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = bytearray()

    def waiting(self) -> bool:
        """Whether something has come in already."""
        return bool(self._buffer) or bool(select.select([self._fd], [], [], 0)[0])

    def is_interrupted(self) -> bool:
        """Whether the request that waits is `interrupt`, or nobody is there any more to wait for an answer. A request
        stays there and gets its answer in its turn."""
        if not self._buffer:
            with contextlib.suppress(ConnectionError):
                self._buffer += os.read(self._fd, 1 << 16)
        return not self._buffer or self._buffer.startswith(_INTERRUPT)

    def next(self) -> bytes | None:
        """The next line without its newline; None at the end. A line over the limit comes back cut."""
        searched = 0
        while True:
            at = self._buffer.find(b"\n", searched)
            if at >= 0:
                line = bytes(self._buffer[:at])
                del self._buffer[: at + 1]
                return line
            searched = len(self._buffer)
            if searched > REQUEST_LIMIT:
                del self._buffer[REQUEST_LIMIT:]  # its end is thrown away: no valid JSON is left
                searched = len(self._buffer)
            try:
                data = os.read(self._fd, 1 << 16)  # what is larger costs a mapping per request
            except ConnectionError:
                return None
            if not data:
                return None
            self._buffer += data


def _send(fd: int, line: bytes) -> bool:
    """Write all of `line`; False when nobody is left to read it."""
    data = memoryview(line)
    try:
        while data:
            data = data[os.write(fd, data) :]
    except ConnectionError:
        return False
    return True


def _open_channel() -> tuple[int, int]:
    """Descriptors for requests and answers: the socket that CHANNEL names, else stdin and stdout moved away.

    Who waits at a socket that cannot be reached learns it from the exit code."""
    address = os.environ.get(CHANNEL)
    if address is None:
        requests, answers = os.dup(0), os.dup(1)
    else:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
        except OSError as error:
            sys.stderr.write(f"the channel {address} cannot be reached: {error}\n")
            sys.exit(CHANNEL_REFUSED)
        requests = answers = connection.detach()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    return requests, answers


def main(arguments: list[str]) -> None:
    """Serve until the requests end."""
    settings = parse(arguments, dict(os.environ))
    requests, answers = _open_channel()
    processes = Processes()
    server = Server(settings, processes)
    server.plant()
    lines = Lines(requests)
    processes.requests, processes.is_interrupted = requests, lines.is_interrupted
    open_ = _send(answers, json.dumps({"ready": True, "protocol": PROTOCOL}).encode() + b"\n")
    while open_:
        # Nobody waits: import what forks will need.
        if not server.resident.warm and not lines.waiting():
            server.resident.warm_one()
            continue
        line = lines.next()
        if line is None:
            break
        open_ = _send(answers, server.answer(line))
        processes.reap()
    processes.kill_new(frozenset())

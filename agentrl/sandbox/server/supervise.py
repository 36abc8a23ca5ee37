"""Waiting for one child with a deadline, and keeping head and tail of what it writes in bounded memory."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from .processes import Child, Processes

_CHUNK = 1 << 16
_GRACE_S = 0.05
"""How long a pipe may stay open after its leader ended: `cmd > >(tee log)` is still writing, a daemon never
ends."""
_DRAIN_S = 1.0
_INTERRUPT_S = 2.0
"""How long an interrupted command may take to end by itself."""


class Ended(NamedTuple):
    """`exit_code` is None where the deadline ended it. `clean`: nothing of the command is left running."""

    exit_code: int | None
    clean: bool
    duration_s: float

    @property
    def timed_out(self) -> bool:
        return self.exit_code is None


class Capture:
    """The first and the last `limit // 2` bytes of a stream."""

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > 2 * self._half + _CHUNK:
                del self._tail[: -self._half]

    def text(self) -> str:
        """What was kept, decoded with replacement; a line in the middle says how many bytes were left out."""
        tail = bytes(self._tail[-self._half :])
        left_out = self.total - len(self._head) - len(tail)
        if left_out <= 0:
            return (bytes(self._head) + tail).decode("utf-8", "replace")
        head = bytes(self._head).decode("utf-8", "replace").rstrip("\ufffd")
        end = tail.lstrip(bytes(range(0x80, 0xC0))) if len(tail) > 3 else tail
        return f"{head}\n[... {left_out} bytes left out ...]\n{end.decode('utf-8', 'replace')}"


class Bounded:
    """The first `limit` bytes of a stream, whole lines to be read from it afterwards."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.data = bytearray()

    def add(self, data: bytes) -> None:
        self.data += data[: max(0, self._limit - len(self.data))]


def supervise(
    processes: Processes,
    child: Child,
    *,
    before: set[int],
    timeout_s: float,
    capture: Capture,
    side: Bounded | None = None,
    stdin: bytes = b"",
) -> Ended:
    """Wait until `child` has ended or `timeout_s` is over; then kill whatever the command started and is
    still there.

    The leader's exit is awaited even after its output ended, and a background child that holds the pipe open
    is not waited for. An interrupt among the requests, and their end, is SIGINT for the child's group. All
    descriptors of `child` are closed afterwards.
    """
    started = time.monotonic()
    end = started + timeout_s
    sinks: dict[int, Callable[[bytes], None]] = {child.output: capture.add}
    if child.side is not None and side is not None:
        sinks[child.side] = side.add
    feeding = _Feed(child.stdin, stdin)
    poller = select.poll()
    poller.register(processes.wake, select.POLLIN)
    for fd in sinks:
        os.set_blocking(fd, False)
        poller.register(fd, select.POLLIN)
    if feeding.fd is not None:
        poller.register(feeding.fd, select.POLLOUT)
    if processes.requests is not None:
        poller.register(processes.requests, select.POLLIN)

    exit_code: int | None = None
    while exit_code is None or sinks:
        left_s = end - time.monotonic()
        if left_s <= 0:
            break
        for fd, _ in poller.poll(left_s * 1000 + 1):
            if fd == processes.wake:
                processes.clear_wake()
                if exit_code is None:
                    exit_code = processes.reap(child.pid)
                    if exit_code is not None:
                        end = min(end, time.monotonic() + _GRACE_S)
                else:
                    processes.reap()
            elif fd == processes.requests:
                poller.unregister(fd)  # whatever waits there: it is read when this is over
                if processes.is_interrupted():
                    end = min(end, time.monotonic() + _INTERRUPT_S)
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(child.pid, signal.SIGINT)
            elif fd == feeding.fd:
                if not feeding.write():
                    poller.unregister(fd)
                    feeding.close()
            elif not _read(fd, sinks[fd]):
                poller.unregister(fd)
                os.close(fd)
                del sinks[fd]
    duration_s = time.monotonic() - started
    if exit_code is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    clean = processes.nothing_below() or processes.kill_new(before)
    feeding.close()
    _drain(sinks)
    return Ended(exit_code=exit_code, clean=clean, duration_s=duration_s)


def _read(fd: int, sink: Callable[[bytes], None]) -> bool:
    """Take one chunk; False at the end of the stream."""
    try:
        data = os.read(fd, _CHUNK)
    except BlockingIOError:
        return True
    sink(data)
    return bool(data)


def _drain(sinks: dict[int, Callable[[bytes], None]]) -> None:
    """Take what is still in the pipes. Their writers are dead, so this ends; the bound is for those that are
    not."""
    end = time.monotonic() + _DRAIN_S
    for fd, sink in sinks.items():
        while time.monotonic() < end:
            try:
                data = os.read(fd, _CHUNK)
            except BlockingIOError:
                break
            if not data:
                break
            sink(data)
        os.close(fd)


class _Feed:
    """Bytes for a child's stdin, written as far as the pipe takes them."""

    def __init__(self, fd: int | None, data: bytes) -> None:
        self.fd = fd
        self._left = memoryview(data)
        if fd is not None:
            os.set_blocking(fd, False)

    def write(self) -> bool:
        """False when all is written or nobody reads."""
        if self.fd is None:
            return False
        try:
            self._left = self._left[os.write(self.fd, self._left[:_CHUNK]) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return bool(self._left)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

"""The processes below the server: reaping, killing what a command leaves behind, and forking warm children.

As PID 1 everything else in the PID namespace is below us and `kill(-1, SIGKILL)` clears it, fork bombs and
daemons included. Elsewhere (tests, a container with an init of its own) the server is a child subreaper and
kills its descendants one by one: `kill(-1)` would there end every process of the user.
"""

import contextlib
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

_NICENESS = 5
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_KILL_TIMEOUT_S = 10.0
_HANDLED = (
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def prctl(option: int, value: int) -> None:
    """prctl(2); ignored where the C library has none."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing. Unlike SIG_IGN it is not inherited by the programs that children
    become."""


def _standing() -> dict[str, object]:
    """Limits, niceness and processors of this process."""
    standing: dict[str, object] = {
        name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")
    }
    standing["niceness"] = os.getpriority(os.PRIO_PROCESS, 0)
    standing["affinity"] = os.sched_getaffinity(0)
    standing["scheduling policy"] = os.sched_getscheduler(0)
    return standing


class Child(NamedTuple):
    """A started child: read its output from `output`, what it reports from `side`, feed it through
    `stdin`."""

    pid: int
    output: int
    stdin: int | None
    side: int | None


class Processes:
    """The table of processes below the server. One child is led at a time."""

    def __init__(self) -> None:
        """Makes this process unreadable to others of its user, deaf to their signals, and the reaper of
        orphans."""
        self.is_init = os.getpid() == 1
        # Where requests come in, and whether the one that waits there asks to end what is in progress.
        self.requests: int | None = None
        self.is_interrupted: Callable[[], bool] = lambda: False
        self._childless = False
        _keep_to_ourselves()
        prctl(_PR_SET_DUMPABLE, 0)
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.wake, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in _HANDLED:
            signal.signal(number, _ignore)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._standing = _standing()

    # --- ends -----------------------------------------------------------------------------------------------

    def clear_wake(self) -> None:
        """Forget the signals seen so far (4096 at most: more of them wake us again)."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 4096)

    def changed(self) -> str | None:
        """What another process of our user has changed of this one (it may: `prlimit --pid 1`, `renice`), None where
        all is as it was. Such a change would be inherited by everything that is started later."""
        now = _standing()
        return next((name for name, value in self._standing.items() if now[name] != value), None)

    def reap(self, leader: int = 0) -> int | None:
        """Collect every child that ended; the exit code of `leader` if it was among them (128 + n: by signal
        n)."""
        found = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._childless = True
                return found
            if pid == 0:
                self._childless = False
                return found
            if pid == leader:
                code = os.waitstatus_to_exitcode(status)
                found = code if code >= 0 else 128 - code

    def nothing_below(self) -> bool:
        """Whether no process is below us, by one system call instead of a walk through /proc.

        Exact, because every process below has a living chain of parents up to us: whoever loses his parent becomes
        our child. Who entered the name space from outside (`docker exec`) is not below us.
        """
        self.reap()
        return self._childless

    def below(self) -> set[int]:
        """Process ids below us that a command to come is not to blame for."""
        return set() if self.nothing_below() else self.others()

    def others(self) -> set[int]:
        """Process ids below us: as PID 1 all there are, else our descendants. Zombies of others count too."""
        me = os.getpid()
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        if self.is_init:
            return {pid for pid in pids if pid != me}
        below: dict[int, list[int]] = {}
        for pid in pids:
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{pid}/stat", "rb") as file:
                    parent = int(file.read().rsplit(b")", 1)[1].split()[1])
                below.setdefault(parent, []).append(pid)
        found: set[int] = set()
        queue = [me]
        while queue:
            for pid in below.get(queue.pop(), []):
                found.add(pid)
                queue.append(pid)
        return found

    def kill_new(self, before: set[int] | frozenset[int]) -> bool:
        """Kill every process below us that is not in `before`, until none is left. False if some survive."""
        end = time.monotonic() + _KILL_TIMEOUT_S
        while True:
            self.reap()
            left = self.others() - before
            if not left:
                return True
            if time.monotonic() > end:
                return False
            if self.is_init and not before:
                # One call reaches all: nothing can fork its way past it.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(-1, signal.SIGKILL)
            else:
                for pid in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            self.clear_wake()
            self.reap()
            select.select([self.wake], [], [], 0.002)

    # --- starts ---------------------------------------------------------------------------------------------

    def fork(
        self,
        work: Callable[[int], int | None],
        *,
        environment: dict[str, str],
        cwd: str,
        feed: bool = False,
        side: bool = False,
    ) -> Child:
        """Fork a child that runs `work(side_fd)` in its own session and ends with what it returns.

        Its stdin is /dev/null, or a pipe with `feed`; stdout and stderr are one pipe; `side` opens a further
        pipe to us that programs it starts do not inherit. It has none of the server's descriptors.
        """
        stdin_read, stdin_write = os.pipe() if feed else (os.open(os.devnull, os.O_RDONLY), None)
        output_read, output_write = os.pipe()
        side_read, side_write = os.pipe() if side else (None, None)
        pid = os.fork()
        if pid == 0:
            _become(work, stdin_read, output_write, side_write, environment, cwd)
        for fd in (stdin_read, output_write, side_write):
            if fd is not None:
                os.close(fd)
        return Child(pid=pid, output=output_read, stdin=stdin_write, side=side_read)


def put_behind(pid: int) -> None:
    """Let the server come before `pid` and what it starts: when processors are short (a fork bomb may not keep it from
    ending the bomb), and when memory runs out."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, _NICENESS)
    with contextlib.suppress(OSError):
        fd = os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"500")
        finally:
            os.close(fd)


def _keep_to_ourselves() -> None:
    """No descriptor but 0-2 passes to a program that is started, whatever we were started with."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.set_inheritable(int(name), False)


def _become(
    work: Callable[[int], int | None],
    stdin: int,
    output: int,
    side: int | None,
    environment: dict[str, str],
    cwd: str,
) -> None:
    """Turn the fresh fork into an ordinary process, run `work`, and end. Never returns."""
    code: object = 70
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in _HANDLED:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        prctl(_PR_SET_DUMPABLE, 1)
        put_behind(os.getpid())
        os.dup2(stdin, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        kept = 3
        if side is not None and side != kept:
            os.dup2(side, kept, inheritable=False)
        os.closerange(kept + (side is not None), 256)
        _fresh_standard_streams()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        code = work(kept)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        _finish(code)


def _fresh_standard_streams() -> None:
    """New objects over descriptors 0-2, with the modes Python gives to pipes."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]


def _finish(code: object) -> None:
    """End the fork as the interpreter would: threads joined, exit functions run, streams flushed."""
    import atexit
    import threading

    if code is None:
        code = 0
    elif not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code & 0xFF)

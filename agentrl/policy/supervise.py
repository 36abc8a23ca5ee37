"""Keeps the processes of one policy server together: none outlives another, nor the orchestrator.

Runs as a script on the standard library alone (`python -I supervise.py GRACE_S CORE SCRATCH COMMAND…`), as leader
of an own session. CORE binds all of them to one core of the processor (`any`: unbound), before anything is started.
SCRATCH is the folder of the server's sockets, which is removed with the group:

    orchestrator ──stdin (held open)──▶ supervisor ──▶ API server ──▶ engine (──▶ workers)

* stdin closes, or the parent changes: the orchestrator is gone, however it died → the whole group is killed;
* the API server ends, however it died: its exit code is reported → the whole group is killed (engine and
  workers would go on for minutes, holding their memory);
* SIGTERM: passed on to the API server; what still lives after GRACE_S seconds is killed with the group.

Python's resource tracker is killed last: it removes the shared memory that the others held.

A status line of JSON goes to stdout for each of two events: `{"pid": N}` and `{"exit": CODE}` (negative: a
signal). The command's own output goes to stderr, which the caller points at its log file.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_POLL_MS = 1000
_TRACKER_GRACE_S = 2.0


def _die_with_supervisor() -> None:
    """In the child, before exec: SIGKILL when the supervisor (which has one thread) dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _report(**event: int) -> None:
    try:
        os.write(sys.stdout.fileno(), json.dumps(event).encode() + b"\n")
    except BrokenPipeError:
        return  # the orchestrator is gone: nobody to tell


def _others() -> dict[int, bool]:
    """The group's other living processes → whether it is Python's resource tracker."""
    found: dict[int, bool] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(group) == os.getpgrp() and state != "Z":
                found[int(entry.name)] = b"resource_tracker" in (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
    return found


def _kill_group(scratch: str) -> None:
    """Kill every process of our group, ourselves last and included, and remove `scratch`. Never returns."""
    deadline = time.monotonic() + _TRACKER_GRACE_S
    while (others := _others()) and time.monotonic() < deadline:
        for pid, is_tracker in others.items():
            if not is_tracker:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Start the command and stay until it, or the orchestrator, is gone. Never returns."""
    grace_s, core, scratch, command = float(arguments[0]), arguments[1], arguments[2], arguments[3:]
    if core != "any":
        os.sched_setaffinity(0, {int(core)})
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    parent = os.getppid()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=sys.stderr,
        preexec_fn=_die_with_supervisor,
    )

    def stop(*_: object) -> None:
        child.send_signal(signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, grace_s)

    signal.signal(signal.SIGALRM, lambda *_: _kill_group(scratch))
    signal.signal(signal.SIGTERM, stop)
    _report(pid=child.pid)

    poller = select.poll()
    child_fd = os.pidfd_open(child.pid)
    poller.register(child_fd, select.POLLIN)
    poller.register(sys.stdin.fileno(), 0)  # POLLHUP is always reported
    while True:
        ready = {fd for fd, _ in poller.poll(_POLL_MS)}
        if child_fd in ready:
            _report(exit=child.wait())
            _kill_group(scratch)
        if ready or os.getppid() != parent:
            _kill_group(scratch)


if __name__ == "__main__":
    main(sys.argv[1:])

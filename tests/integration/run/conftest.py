"""A real run as a user starts it, and what it has running: struck from outside, then looked for."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from agentrl.sandbox.backend import bubblewrap_fault
from agentrl.sandbox.owner import start_ticks

AGENTRL = [sys.executable, "-m", "agentrl.cli.main"]
SMALL = {
    "steps": "4",
    "rollout.groups": "2",
    "rollout.group-size": "2",
    "rollout.concurrency": "4",
    "sandbox.size": "6",
    "train.updates-per-step": "1",
    "eval.fresh-tasks": "0",
    "eval.unseen-tasks": "0",
    "checkpoint.every-steps": "1",
}


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`, whichever of its threads spawned them."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return found


def command_line(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    return []


@dataclass(frozen=True)
class Process:
    """A process that cannot be mistaken for a later one of the same pid."""

    pid: int
    started: int | None
    command: tuple[str, ...]

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, start_ticks(pid), tuple(command_line(pid)))

    @property
    def alive(self) -> bool:
        return self.started is not None and start_ticks(self.pid) == self.started

    @property
    def name(self) -> str:
        return " ".join(self.command)[:200]


def family(pid: int) -> list[Process]:
    """All descendants of `pid`."""
    found, ahead = [], [pid]
    while ahead:
        below = children(ahead.pop())
        ahead += below
        found += [Process.of(child) for child in below]
    return found


def run_mounts() -> set[str]:
    return {line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "agentrl" in line}


@dataclass
class Sitting:
    """`agentrl train …` as a child. Its lines are read as they come; end it with `wait`, or leave the block."""

    words: list[str]
    env: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seen: set[Process] = field(default_factory=set)

    def __enter__(self) -> Self:
        self.mounts = run_mounts()
        self.process = subprocess.Popen(
            [*AGENTRL, *self.words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **self.env},
        )
        pipes = ((self.process.stdout, self.lines), (self.process.stderr, self.errors))
        self.readers = [threading.Thread(target=self._read, args=pipe, daemon=True) for pipe in pipes]
        for reader in self.readers:
            reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
            self.process.kill()
        self.process.wait(10)

    @staticmethod
    def _read(pipe: Any, into: list[str]) -> None:
        for line in pipe:
            into.append(line.rstrip("\n"))

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stderr(self) -> str:
        return "\n".join(self.errors)

    def until(self, pattern: str, *, timeout_s: float = 240.0) -> str:
        """The first line that matches, as soon as it is there. What runs then is remembered."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            for line in list(self.lines):
                if re.search(pattern, line):
                    self.look()
                    return line
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(
            f"{pattern!r} was not said (exit code {self.process.poll()}):\n" + "\n".join([*self.lines, self.stderr])
        )

    def look(self) -> list[Process]:
        """The descendants now; all ever seen are kept for `leftovers`."""
        found = family(self.pid)
        self.seen.update(found)
        return found

    def module(self, name: str) -> Process:
        """The one descendant that runs `python … -m name` (a supervisor names it as well, further on)."""
        (found,) = [p for p in self.look() if name in p.command[:4]]
        return found

    def sandbox_servers(self) -> list[int]:
        """The processes that are PID 1 of a sandbox."""
        boxes = [p.pid for p in self.look() if p.command and p.command[0] == "bwrap"]
        return [pid for box in boxes for pid in children(box)]

    def wait(self, timeout_s: float = 240.0) -> int:
        """The exit code."""
        code = self.process.wait(timeout_s)
        for reader in self.readers:
            reader.join(10)
        return code

    def leftovers(self, *, within_s: float = 0.0) -> list[str]:
        """Processes, cgroups, mounts and shared-memory folders of this sitting that are still there."""
        end = time.monotonic() + within_s
        while (found := self._leftovers()) and time.monotonic() < end:
            time.sleep(0.05)
        return found

    def _leftovers(self) -> list[str]:
        alive = [f"process {p.pid} {p.name}" for p in self.seen if p.alive]
        walked = os.walk("/sys/fs/cgroup")  # which bears that others' go meanwhile
        groups = [
            os.path.join(parent, name)
            for parent, folders, _ in walked
            for name in fnmatch.filter(folders, f"agentrl-*-{self.pid}-*")
        ]
        sockets = [word for p in self.seen for word in p.command if word.startswith("ipc://")]
        folders = {str(Path(word.removeprefix("ipc://")).parent) for word in sockets}
        mounts = sorted(run_mounts() - self.mounts)
        return [*alive, *groups, *mounts, *(folder for folder in folders if Path(folder).exists())]


@dataclass
class Run:
    """A run folder and its sittings. `first` are words of its first one alone."""

    path: Path
    command: str = "train"
    first: tuple[str, ...] = ()

    def sit(self, *words: str, **env: str) -> Sitting:
        """Start the run, or go on with it."""
        if (self.path / "config.toml").exists():
            words = ("--resume", *words)
        else:
            settings = [word for key, value in SMALL.items() for word in (f"--{key}", value)]
            words = ("--preset", "demo", *settings, *self.first, *words)
        return Sitting([self.command, "swe-gym", "--run-dir", str(self.path), "--plain", *words], dict(env))


@pytest.fixture(scope="session")
def bubblewrap() -> None:
    """Skips, with the reason, where it cannot be used."""
    if (fault := bubblewrap_fault()) is not None:
        pytest.skip(fault)


@pytest.fixture(scope="module")
def run(bubblewrap: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run for the tests of a file: every one goes on with what the one before has left."""
    return Run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def taught(bubblewrap: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One distillation for the tests of a file; its teacher is the student's start, in a process of its own."""
    return Run(tmp_path_factory.mktemp("taught") / "run", "distill", ("--teacher", "transformers:tiny"))


@pytest.fixture
def distilling(bubblewrap: None, tmp_path: Path) -> Callable[..., Run]:
    """A distillation whose first words are given."""
    return lambda *words: Run(tmp_path / "run", "distill", words)


@pytest.fixture(scope="session")
def strike() -> Any:
    """Ways to strike, as tests cannot import a conftest."""

    def one_screen(text: str) -> bool:
        lines = text.splitlines()
        return "Traceback" not in text and sum(1 + len(line) // 120 for line in lines) <= 30

    class Strikes:
        kill = staticmethod(lambda pid: os.kill(pid, signal.SIGKILL))
        busy = staticmethod(lambda pid: bool(children(pid)))
        fits = staticmethod(one_screen)
        agentrl = staticmethod(
            lambda *words: subprocess.run([*AGENTRL, *words], capture_output=True, text=True, timeout=120)
        )

    return Strikes

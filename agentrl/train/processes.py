"""The processes of the trainer's ranks: how they start, how their end is noticed and told, how they go. No torch.

A rank's end is seen at once by its pidfd. The end of one rank ends the others, whose next meeting fails: they leave
with `PEER_LOST`, and so are told apart from what ended the first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from agentrl import errors
from agentrl.config import RunConfig
from agentrl.errors import AgentRLError, ConfigError, TrainerError
from agentrl.wire import TrainerFailed
from agentrl.wire.codec import WireError, decode_from_trainer

PARENT_GONE = 70
"""Exit code of a rank whose orchestrator ended."""
PEER_LOST = 71
"""Exit code of a rank that ended because another one did."""
REMEDY = "read the log, then continue the run with --resume"

_LOG_TAIL_LINES = 8
_LOG_LINE_CHARS = 160
_KILLED_WITHIN_S = 10.0


class RankProcess:
    """One rank's process. Life: `spawn_ranks` → `ended` is set at its end → `kill`, which also forgets it."""

    def __init__(
        self,
        *,
        rank: int,
        ranks: int,
        process: subprocess.Popen[bytes],
        log_path: Path,
        failure_path: Path,
        on_end: Callable[[RankProcess], None],
    ) -> None:
        self.rank = rank
        self.pid = process.pid
        self.log_path = log_path
        self.ended = asyncio.Event()
        self._name = "the trainer's process" if ranks == 1 else f"the trainer's process of rank {rank}"
        self._failure_path = failure_path
        self._process = process
        self._on_end = on_end
        self._pidfd: int | None = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._note_end)

    @property
    def code(self) -> int:
        """How it ended: the exit code, or minus the signal. Only once it `ended`."""
        return self._process.wait(timeout=_KILLED_WITHIN_S)

    def kill(self) -> None:
        """End it with whatever it started, and wait for its end."""
        if self._process.returncode is None:  # else its number may be another's by now
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(timeout=_KILLED_WITHIN_S)
        self._forget()

    def failure(self, doing: str) -> AgentRLError:
        """Why it ended, once it did: the error it left behind, else its exit code and the end of its log."""
        try:
            found = decode_from_trainer([self._failure_path.read_bytes()])
        except (FileNotFoundError, WireError):
            found = None
        if isinstance(found, TrainerFailed):
            return typed_failure(found, doing=doing, log_path=self.log_path)
        how = f"was killed by signal {-self.code}" if self.code < 0 else f"ended with exit code {self.code}"
        return self.error(f"{self._name} {how}", doing=doing)

    def error(self, what: str, *, doing: str) -> TrainerError:
        """`what`, with the end of this rank's log."""
        tail = log_tail(self.log_path)
        return TrainerError(
            what + (f"; the end of its log:\n{tail}" if tail else ""),
            where=f"{doing} (pid {self.pid}, log {self.log_path})",
            remedy=REMEDY,
        )

    def _note_end(self) -> None:
        self._forget()
        self.ended.set()
        self._on_end(self)

    def _forget(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


def spawn_ranks(
    *,
    config: RunConfig,
    model_dir: Path,
    checkpoint_dir: Path,
    log_path: Path,
    resume: Path | None,
    scratch: Path,
    endpoint: str,
    devices: Sequence[int | None],
    on_end: Callable[[RankProcess], None],
) -> list[RankProcess]:
    """Start one rank per entry of `devices` (None: bound to none). Where one cannot be started none is left."""
    settings = scratch / "config.json"
    # Only what was set: a dump with every default would read back as options set without effect.
    settings.write_text(config.model_dump_json(exclude_unset=True))
    common = [sys.executable, "-m", "agentrl.train.worker", "--config", str(settings), "--model", str(model_dir)]
    common += ["--publish-dir", str(scratch / "weights"), "--checkpoint-dir", str(checkpoint_dir)]
    common += ["--parent", str(os.getpid()), "--scratch", str(scratch), "--ranks", str(len(devices))]
    common += ["--resume", str(resume)] if resume is not None else []
    started: list[RankProcess] = []
    try:
        for rank, device in enumerate(devices):
            failure_path = scratch / f"failure-{rank}.bin"
            command = [*common, "--rank", str(rank), "--failure", str(failure_path)]
            command += ["--connect", endpoint] if rank == 0 else []
            command += ["--device", str(device)] if device is not None else []
            log = rank_log(log_path, rank=rank, ranks=len(devices))
            started.append(
                RankProcess(
                    rank=rank,
                    ranks=len(devices),
                    process=_spawn(command, log_path=log, threads=config.train.threads),
                    log_path=log,
                    failure_path=failure_path,
                    on_end=on_end,
                )
            )
    except BaseException:
        for process in started:
            process.kill()
        raise
    return started


def check_devices(devices: Sequence[int | None], *, ranks: int) -> list[int | None]:
    """One device per rank; all None where none are given. Raises `ConfigError` unless there are as many as ranks."""
    if ranks < 1 or (set(devices) - {None} and len(devices) != ranks):
        raise ConfigError(
            f"{ranks} ranks do not fit the devices {list(devices)}",
            where="the trainer",
            remedy="give each rank one device, or none to any (placement.ranks, placement.devices)",
        )
    return list(devices) if set(devices) - {None} else [None] * ranks


def rank_log(log_path: Path, *, rank: int, ranks: int) -> Path:
    """A rank's log: `log_path` itself where there is one rank, else `trainer-0.log`, `trainer-1.log`, …"""
    return log_path if ranks == 1 else log_path.with_name(f"{log_path.stem}-{rank}{log_path.suffix}")


def log_tail(path: Path) -> str:
    """The last lines of a log, shortened; "" where there is none."""
    with suppress(OSError):
        lines = path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join(line[:_LOG_LINE_CHARS] for line in lines)
    return ""


def typed_failure(failure: TrainerFailed, *, doing: str, log_path: Path) -> AgentRLError:
    """The error as itself where it is one of ours (a full disk, a malformed batch), else a `TrainerError`."""
    found = getattr(errors, failure.kind, None)
    if isinstance(found, type) and issubclass(found, AgentRLError):
        return found(failure.what, where=failure.where, remedy=failure.remedy)
    return TrainerError(
        f"the trainer failed: {failure.what}\n{failure.traceback}",
        where=f"{doing} (log {log_path})",
        remedy=failure.remedy or REMEDY,
    )


def _spawn(command: list[str], *, log_path: Path, threads: int) -> subprocess.Popen[bytes]:
    """The child, in its own session (Ctrl-C is the orchestrator's to handle), its output appended to the log."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(threads),
            start_new_session=True,
        )


def _environment(threads: int) -> dict[str, str]:
    """The child's environment: ours, with as many threads as configured, no reach to a model hub, and the loopback
    interface for what ranks of one machine tell each other."""
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }

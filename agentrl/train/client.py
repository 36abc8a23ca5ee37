"""The orchestrator's end of the trainer: a child process, one request at a time. No torch.

Life: `start` (spawn in its own session, wait for TrainerReady) → train / publish / save → `close`. ZeroMQ is
silent when a peer dies, so the child's pidfd is watched beside the socket: a dead trainer fails the pending
call at once, with the end of its log. After a failed call the trainer is broken and each further call says
so; `close` leaves no process, socket or folder behind.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import zmq
import zmq.asyncio

from agentrl import errors
from agentrl.config import RunConfig
from agentrl.errors import AgentRLError, TrainerError
from agentrl.wire import (
    Batch,
    FromTrainer,
    Publish,
    Save,
    Saved,
    Shutdown,
    StepResult,
    ToTrainer,
    TrainerFailed,
    TrainerReady,
    WeightManifest,
)
from agentrl.wire.codec import decode_from_trainer, encode

Answer = TypeVar("Answer", TrainerReady, StepResult, WeightManifest, Saved)

_LAST_WORDS_S = 0.5
_LOG_TAIL_LINES = 8
_LOG_LINE_CHARS = 160


class TrainerProcess:
    """A running trainer; implements `agentrl.wire.Trainer`. Made by `start`, ended by `close`."""

    def __init__(self, *, process: subprocess.Popen[bytes], log_path: Path, scratch: Path, endpoint: str) -> None:
        self.ready = TrainerReady(step=0, updates=0, parameters=0, state=b"")
        self.log_path = log_path
        self._process = process
        self._scratch = scratch
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.bind(endpoint)
        self._one_at_a_time = asyncio.Lock()
        self._broken = ""
        self._pidfd = os.pidfd_open(process.pid)
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._note_end)

    @classmethod
    async def start(
        cls,
        *,
        config: RunConfig,
        model_dir: Path,
        checkpoint_dir: Path,
        log_path: Path,
        resume: Path | None = None,
        timeout_s: float = 180.0,
    ) -> TrainerProcess:
        """Spawn a trainer and wait until it is ready. Raises `TrainerError`, or the typed error it failed
        with."""
        scratch = Path(tempfile.mkdtemp(prefix="agentrl-trainer-", dir=_memory_folder()))
        endpoint = f"ipc://{scratch}/socket"
        settings = scratch / "config.json"
        # Only what was set: a dump with every default would read back as options set without effect.
        settings.write_text(config.model_dump_json(exclude_unset=True))
        command = [
            sys.executable,
            "-m",
            "agentrl.train.worker",
            "--connect",
            endpoint,
            "--config",
            str(settings),
        ]
        command += ["--model", str(model_dir), "--publish-dir", str(scratch / "weights")]
        command += ["--checkpoint-dir", str(checkpoint_dir), "--parent", str(os.getpid())]
        command += ["--scratch", str(scratch)]
        command += ["--resume", str(resume)] if resume is not None else []
        process = _spawn(command, log_path=log_path, threads=config.train.threads)
        trainer = cls(process=process, log_path=log_path, scratch=scratch, endpoint=endpoint)
        try:
            trainer.ready = await trainer._receive(TrainerReady, doing="starting", timeout_s=timeout_s)
        except BaseException:
            await trainer.close(timeout_s=0)
            raise
        return trainer

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def publish_dir(self) -> Path:
        """Where published weights lie; gone after `close`."""
        return self._scratch / "weights"

    async def train(self, batch: Batch, *, timeout_s: float) -> StepResult:
        """Train `batch`. Raises `TrainerError`."""
        return await self._call(batch, StepResult, doing=f"training step {batch.step}", timeout_s=timeout_s)

    async def publish(self, version: int, *, timeout_s: float) -> WeightManifest:
        """Publish the weights as `version`. Raises `TrainerError`."""
        request = Publish(version=version)
        return await self._call(request, WeightManifest, doing=f"publishing version {version}", timeout_s=timeout_s)

    async def save(self, step: int, state: bytes, *, score: float | None, timeout_s: float) -> Saved:
        """Write a checkpoint. Raises `TrainerError`, `DiskFullError`."""
        request = Save(step=step, state=state, score=score)
        return await self._call(request, Saved, doing=f"saving step {step}", timeout_s=timeout_s)

    async def close(self, *, timeout_s: float = 10.0) -> None:
        """End the trainer: asked first, killed with its whole group after `timeout_s`. May be called
        again."""
        if self._socket.closed:
            return
        if timeout_s > 0 and not self._broken and not self._ended.is_set():
            with suppress(zmq.ZMQError, TimeoutError):
                await asyncio.wait_for(self._socket.send_multipart(encode(Shutdown())), timeout_s)
                await asyncio.wait_for(self._ended.wait(), timeout_s)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=10)
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._scratch, ignore_errors=True)

    # --- one call
    # -------------------------------------------------------------------------------------------------

    async def _call(self, request: ToTrainer, kind: type[Answer], *, doing: str, timeout_s: float) -> Answer:
        async with self._one_at_a_time:
            if self._broken:
                raise TrainerError(f"the trainer failed before: {self._broken}", where=doing, remedy="resume the run")
            return await self._receive(kind, request, doing=doing, timeout_s=timeout_s)

    async def _exchange(self, request: ToTrainer | None) -> list[bytes]:
        """Send and receive. A send to a peer that is gone waits for ever, so it stands under the same deadline."""
        if request is not None and not self._ended.is_set():
            await self._socket.send_multipart(encode(request))
        return await self._socket.recv_multipart()

    async def _receive(
        self, kind: type[Answer], request: ToTrainer | None = None, *, doing: str, timeout_s: float
    ) -> Answer:
        """The answer to what is `doing`, the process's end, or the deadline, whichever comes first."""
        receiving = asyncio.ensure_future(self._exchange(request))
        ending = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({receiving, ending}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if ending.done() and not receiving.done():  # a failing trainer's last words may still be on their way
                await asyncio.wait({receiving}, timeout=_LAST_WORDS_S)
            if not receiving.done():
                raise self._fail(doing, timeout_s)
            answer = decode_from_trainer(receiving.result())
        except BaseException as error:
            self._broken = self._broken or str(getattr(error, "what", "")) or f"{doing} was interrupted"
            raise
        finally:
            receiving.cancel()
            ending.cancel()
        return self._checked(answer, kind, doing)

    def _checked(self, answer: FromTrainer, kind: type[Answer], doing: str) -> Answer:
        if isinstance(answer, TrainerFailed):
            self._broken = answer.what
            raise _typed(answer, doing, self.log_path)
        if not isinstance(answer, kind):
            self._broken = f"answered {type(answer).__name__}"
            raise TrainerError(f"the trainer answered {type(answer).__name__}, not {kind.__name__}", where=doing)
        return answer

    def _fail(self, doing: str, timeout_s: float) -> TrainerError:
        if self._ended.is_set():
            code = self._process.wait(timeout=10)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            what = f"the trainer's process {how}"
        else:
            what = f"the trainer gave no answer within {timeout_s:g} s"
        tail = _tail(self.log_path)
        return TrainerError(
            what + (f"; the end of its log:\n{tail}" if tail else ""),
            where=f"{doing} (pid {self.pid}, log {self.log_path})",
            remedy="read the log, then continue the run with --resume",
        )

    def _note_end(self) -> None:
        self._ended.set()
        asyncio.get_running_loop().remove_reader(self._pidfd)


def _memory_folder() -> str | None:
    """Published weights belong in memory; the system's temporary folder where there is no shared memory."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _spawn(command: list[str], *, log_path: Path, threads: int) -> subprocess.Popen[bytes]:
    """The child, in its own session (Ctrl-C is the orchestrator's to handle), its output appended to the
    log."""
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
    """The child's environment: ours, with as many threads as configured and no reach to a model hub."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _tail(path: Path) -> str:
    with suppress(OSError):
        lines = path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join(line[:_LOG_LINE_CHARS] for line in lines)
    return ""


def _typed(failure: TrainerFailed, doing: str, log_path: Path) -> AgentRLError:
    """The error as itself where it is one of ours (a full disk, a malformed batch), else a `TrainerError`."""
    found = getattr(errors, failure.kind, None)
    if isinstance(found, type) and issubclass(found, AgentRLError):
        return found(failure.what, where=failure.where, remedy=failure.remedy)
    return TrainerError(
        f"the trainer failed: {failure.what}\n{failure.traceback}",
        where=f"{doing} (log {log_path})",
        remedy=failure.remedy or "read the log, then continue the run with --resume",
    )

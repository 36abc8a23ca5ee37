"""The owner's end of a scoring process: it is spawned, spoken to by many at once, watched and ended. No torch.

    start ──▶ serving ──▶ ended            (close, its own death, or ours: the socket between us is then closed)

Invariant: a request that waits is answered, or fails, as soon as the process ends; afterwards every request fails.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from agentrl.errors import DeadlineError, TeacherDeadError, TeacherRefusedError, TeacherStartError
from agentrl.policy.server import log_tail
from agentrl_teachers.worker_messages import (
    HEADER_BYTES,
    Drop,
    Failed,
    FromWorker,
    Ready,
    Refused,
    Score,
    Scored,
    frame,
    frame_length,
    from_worker,
)

log = logging.getLogger("agentrl.teachers")

_ENDS_WITHIN_S = 5.0
_READ_LIMIT = 1 << 20
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


class WorkerProcess:
    """A running scoring process. Made by `start`, ended by `close`; both in one event loop."""

    def __init__(
        self, process: subprocess.Popen[bytes], *, name: str, log_path: Path, streams: _Streams, ready: Ready
    ) -> None:
        self.ready = ready
        self.pid = process.pid
        self.log_path = log_path
        self._process = process
        self._name = name
        self._reader, self._writer = streams
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Scored | Refused]] = {}
        self._dead: TeacherDeadError | None = None
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        *,
        name: str,
        model: Path,
        dtype: str,
        threads: int,
        log_path: Path,
        timeout_s: float,
        device: int | None = None,
    ) -> WorkerProcess:
        """Spawn one for a model folder and wait until it is loaded; `device` binds it to that CUDA device, or to that
        core where there is none. Raises `TeacherStartError`."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = _spawn(theirs, model=model, dtype=dtype, threads=threads, log_path=log_path, device=device)
        streams = await asyncio.open_connection(sock=ours, limit=_READ_LIMIT)
        try:
            first = await _first_words(streams[0], name=name, log_path=log_path, timeout_s=timeout_s)
        except BaseException:
            streams[1].close()
            _end(process)
            raise
        log.info("teacher %s: pid %d, %s, log %s", name, process.pid, first.device, log_path)
        return cls(process, name=name, log_path=log_path, streams=streams, ready=first)

    async def score(
        self,
        token_ids: np.ndarray,
        *,
        positions: np.ndarray,
        top_k: int = 0,
        candidates: np.ndarray | None = None,
        vocabulary: bool = False,
        timeout_s: float,
    ) -> Scored:
        """See `worker_messages.Score`. Raises `TeacherDeadError`, `TeacherRefusedError`, or `DeadlineError`."""
        if self._dead is not None:
            raise self._dead
        number = next(self._numbers)
        request = Score(
            number=number,
            token_ids=token_ids,
            positions=positions,
            top_k=top_k,
            candidates=candidates,
            vocabulary=vocabulary,
        )
        answer: asyncio.Future[Scored | Refused] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(request)
                scored = await answer
        except TimeoutError as error:
            raise DeadlineError(
                f"teacher {self._name!r} gave no scores within {timeout_s:g} s",
                where=f"{len(token_ids)} tokens, {len(self._waiting)} requests waiting (log {self.log_path})",
                remedy="raise distill.timeout_s, or lower distill.concurrency",
            ) from error
        finally:
            # Given up on: a time-out or a cancel of this call has cancelled the answer that it awaits.
            if self._waiting.pop(number, None) is not None and (answer.cancelled() or not answer.done()):
                self._drop(number)
        if isinstance(scored, Refused):
            raise TeacherRefusedError(
                f"teacher {self._name!r} refuses a segment: {scored.what}",
                where=f"log {self.log_path}",
                remedy=scored.remedy or "see what it says",
            )
        return scored

    async def close(self) -> None:
        """End the process. May be called again."""
        self._reading.cancel()
        with suppress(asyncio.CancelledError):
            await self._reading
        self._writer.close()
        await asyncio.to_thread(_end, self._process, wait_s=_ENDS_WITHIN_S)
        self._fail_all(TeacherDeadError(f"teacher {self._name!r} is closed", where=self._name))

    # --- the stream of answers ------------------------------------------------------------------------------

    async def _send(self, message: Score | Drop) -> None:
        with suppress(ConnectionError):  # the process is gone: `_read` sees it and says so to all that wait
            self._writer.write(frame(message))
            await self._writer.drain()

    def _drop(self, number: int) -> None:
        if self._dead is None and not self._writer.is_closing():
            self._writer.write(frame(Drop(number=number)))

    async def _read(self) -> None:
        """Hand out answers until the process ends."""
        while (message := await _receive(self._reader)) is not None:
            if not isinstance(message, Scored | Refused):
                break
            answer = self._waiting.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message)
        self._fail_all(await asyncio.to_thread(self._death))

    def _fail_all(self, error: TeacherDeadError) -> None:
        self._dead = self._dead or error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._dead)

    def _death(self) -> TeacherDeadError:
        """Why the process ended, once it closed its socket."""
        _end(self._process, wait_s=_ENDS_WITHIN_S)
        code = self._process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return TeacherDeadError(
            f"teacher {self._name!r} {how}",
            where=_where(self.log_path, pid=self.pid),
            remedy="read the log, then go on with --resume",
        )


_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def _spawn(
    theirs: socket.socket, *, model: Path, dtype: str, threads: int, log_path: Path, device: int | None
) -> subprocess.Popen[bytes]:
    """The process, in its own session (Ctrl-C is the owner's to handle), its output in its log."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "agentrl_teachers.worker", "--socket", str(theirs.fileno())]
    command += ["--owner", str(os.getpid()), "--model", str(model), "--dtype", dtype, "--threads", str(threads)]
    bound = {} if device is None else {"CUDA_VISIBLE_DEVICES": str(device)}
    if device is not None:
        command += ["--core", str(device)]
    with log_path.open("ab") as log_file:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            env={
                **{name: value for name, value in os.environ.items() if not _is_secret(name)},
                "OMP_NUM_THREADS": str(threads),
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
                **bound,
            },
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )


def _is_secret(name: str) -> bool:
    """Whether an environment variable of that name is likely to hold one: the process needs no key and no token."""
    return any(word in name.upper() for word in _SECRETS)


async def _receive(reader: asyncio.StreamReader) -> FromWorker | None:
    """The next message; None where the process is gone, or says what is none."""
    try:
        header = await reader.readexactly(HEADER_BYTES)
        return from_worker(await reader.readexactly(frame_length(header)))
    except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
        return None


def _end(process: subprocess.Popen[bytes], *, wait_s: float = 0.0) -> None:
    """Its end, by SIGKILL to its whole session where it has not come after `wait_s`."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=wait_s)
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=_ENDS_WITHIN_S)


async def _first_words(reader: asyncio.StreamReader, *, name: str, log_path: Path, timeout_s: float) -> Ready:
    """Wait until the process is loaded. Raises `TeacherStartError`."""
    try:
        async with asyncio.timeout(timeout_s):
            first = await _receive(reader)
    except TimeoutError as error:
        raise TeacherStartError(
            f"teacher {name!r} was not loaded within {timeout_s:g} s",
            where=_where(log_path),
            remedy="raise policy.start_timeout_s, or read the log",
        ) from error
    if isinstance(first, Ready):
        return first
    what = first.what if isinstance(first, Failed) else "its process ended"
    remedy = first.remedy if isinstance(first, Failed) else ""
    raise TeacherStartError(
        f"teacher {name!r} did not start: {what}", where=_where(log_path), remedy=remedy or "read the log"
    )


def _where(log_path: Path, *, pid: int | None = None) -> str:
    """The process's log and its last lines."""
    return "\n".join([f"log {log_path}" if pid is None else f"pid {pid}, log {log_path}", log_tail(log_path)]).strip()

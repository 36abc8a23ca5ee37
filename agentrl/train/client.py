"""The orchestrator's end of the trainer: one child process per rank, one request at a time. No torch.

Life: `start` (spawn each rank in its own session, wait for TrainerReady) → train / publish / save → `close`. Rank 0
alone is spoken to. ZeroMQ is silent when a peer dies, so every rank's pidfd is watched beside the socket: the death of
any rank fails the pending call at once, with the end of its log, and ends `wait_ended`. After a failed call the
trainer is broken and each further call says so; `close` leaves no process, socket or folder behind.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import zmq
import zmq.asyncio

from agentrl.config import RunConfig
from agentrl.errors import AgentRLError, TrainerError
from agentrl.train.processes import PEER_LOST, REMEDY, RankProcess, check_devices, spawn_ranks, typed_failure
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
_FIRST_CAUSE_S = 5.0


class TrainerProcess:
    """A running trainer; implements `agentrl.wire.Trainer`. Made by `start`, ended by `close`."""

    def __init__(self, *, scratch: Path, endpoint: str) -> None:
        self.ready = TrainerReady(step=0, updates=0, parameters=0, state=b"")
        self._scratch = scratch
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.bind(endpoint)
        self._one_at_a_time = asyncio.Lock()
        self._broken = ""
        self._failure: AgentRLError | None = None  # what broke it, where that was no interruption
        self._closing = False
        self._ranks: list[RankProcess] = []
        self._gone: list[RankProcess] = []  # in the order of their ends
        self._ended = asyncio.Event()  # any rank's end

    @classmethod
    async def start(
        cls,
        *,
        config: RunConfig,
        model_dir: Path,
        checkpoint_dir: Path,
        log_path: Path,
        resume: Path | None = None,
        ranks: int = 1,
        devices: Sequence[int | None] = (),
        timeout_s: float = 180.0,
    ) -> TrainerProcess:
        """Spawn a trainer of `ranks` processes and wait until all are ready. With several ranks the logs are
        `log_path` with `-0`, `-1`, … before its suffix.

        `devices[r]` is the core, or CUDA device, that rank r is bound to; empty or None binds none. Raises
        `TrainerError`, or the typed error it failed with; `ConfigError` where devices and ranks do not fit.
        """
        placed = check_devices(devices, ranks=ranks)
        scratch = Path(tempfile.mkdtemp(prefix="agentrl-trainer-", dir=_memory_folder()))
        endpoint = f"ipc://{scratch}/socket"
        trainer = cls(scratch=scratch, endpoint=endpoint)
        try:
            trainer._ranks = spawn_ranks(
                config=config,
                model_dir=model_dir,
                checkpoint_dir=checkpoint_dir,
                log_path=log_path,
                resume=resume,
                scratch=scratch,
                endpoint=endpoint,
                devices=placed,
                on_end=trainer._note_end,
            )
            trainer.ready = await trainer._receive(TrainerReady, doing="starting", timeout_s=timeout_s)
        except BaseException:
            await trainer.close(timeout_s=0)
            raise
        return trainer

    @property
    def pid(self) -> int:
        """Rank 0's."""
        return self._ranks[0].pid

    @property
    def pids(self) -> tuple[int, ...]:
        """Every rank's, in order."""
        return tuple(process.pid for process in self._ranks)

    @property
    def log_path(self) -> Path:
        """Rank 0's log."""
        return self._ranks[0].log_path

    @property
    def publish_dir(self) -> Path:
        """Where published weights lie; gone after `close`."""
        return self._scratch / "weights"

    async def train(self, batch: Batch, *, timeout_s: float) -> StepResult:
        """Train `batch` on all ranks. Raises `TrainerError`."""
        return await self._call(batch, StepResult, doing=f"training step {batch.step}", timeout_s=timeout_s)

    async def publish(self, version: int, *, timeout_s: float) -> WeightManifest:
        """Publish the weights as `version`. Raises `TrainerError`."""
        request = Publish(version=version)
        return await self._call(request, WeightManifest, doing=f"publishing version {version}", timeout_s=timeout_s)

    async def save(self, step: int, state: bytes, *, score: float | None, timeout_s: float) -> Saved:
        """Write a checkpoint. Raises `TrainerError`, `DiskFullError`."""
        request = Save(step=step, state=state, score=score)
        return await self._call(request, Saved, doing=f"saving step {step}", timeout_s=timeout_s)

    async def wait_ended(self) -> AgentRLError:
        """Wait until any rank's process ends, however long; why it did. A call in flight fails first, and this is
        its error.

        For a watch beside the calls, to be cancelled before `close`; otherwise that is what it tells of.
        """
        await self._ended.wait()
        async with self._one_at_a_time:
            if self._closing:
                return TrainerError("the trainer was closed while it was watched", where="wait_ended")
            if self._failure is not None:
                return self._failure
            if self._broken:
                return self._broken_before(self._broken, where="wait_ended")
            return await self._first_cause("between two calls")

    async def close(self, *, timeout_s: float = 10.0) -> None:
        """End the trainer: asked first, each rank killed with its whole group after `timeout_s`. May be called
        again."""
        if self._socket.closed:
            return
        self._closing = True
        if timeout_s > 0 and not self._broken and not self._ended.is_set():
            with suppress(zmq.ZMQError, TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._socket.send_multipart(encode(Shutdown()))
                    for process in self._ranks:
                        await process.ended.wait()
        for process in self._ranks:
            process.kill()
        self._ended.set()
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._scratch, ignore_errors=True)

    # --- one call ---------------------------------------------------------------------------------

    async def _call(self, request: ToTrainer, kind: type[Answer], *, doing: str, timeout_s: float) -> Answer:
        async with self._one_at_a_time:
            if self._broken:
                raise self._broken_before(self._broken, where=doing)
            return await self._receive(kind, request, doing=doing, timeout_s=timeout_s)

    async def _exchange(self, request: ToTrainer | None) -> list[bytes]:
        """Send and receive. A send to a peer that is gone waits for ever, so it stands under the same deadline."""
        if request is not None and not self._ended.is_set():
            await self._socket.send_multipart(encode(request))
        return await self._socket.recv_multipart()

    async def _receive(
        self, kind: type[Answer], request: ToTrainer | None = None, *, doing: str, timeout_s: float
    ) -> Answer:
        """The answer to what is `doing`, the end of any rank, or the deadline, whichever comes first."""
        receiving = asyncio.ensure_future(self._exchange(request))
        ending = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({receiving, ending}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if ending.done() and not receiving.done():  # a failing trainer's last words may still be on their way
                await asyncio.wait({receiving}, timeout=_LAST_WORDS_S)
            if receiving.done():
                answer = decode_from_trainer(receiving.result())
            elif ending.done():
                raise await self._first_cause(doing)
            else:
                raise self._ranks[0].error(f"the trainer gave no answer within {timeout_s:g} s", doing=doing)
        except BaseException as error:
            self._break(error, otherwise=f"{doing} was interrupted")
            raise
        finally:
            receiving.cancel()
            ending.cancel()
        return self._checked(answer, kind, doing)

    def _checked(self, answer: FromTrainer, kind: type[Answer], doing: str) -> Answer:
        if isinstance(answer, kind):
            return answer
        if isinstance(answer, TrainerFailed):
            error = typed_failure(answer, doing=doing, log_path=self.log_path)
            self._break(error, otherwise=answer.what)
        else:
            error = TrainerError(f"the trainer answered {type(answer).__name__}, not {kind.__name__}", where=doing)
            self._break(error, otherwise=error.what)
        raise error

    def _break(self, error: BaseException, *, otherwise: str) -> None:
        """Every further call fails, with what broke it first: `error` where it is ours, else in the words of
        `otherwise`."""
        if self._broken:
            return
        if isinstance(error, AgentRLError):
            self._failure = error
        self._broken = error.what if isinstance(error, AgentRLError) and error.what else otherwise

    # --- the end of a rank ------------------------------------------------------------------------

    def _note_end(self, process: RankProcess) -> None:
        self._gone.append(process)
        self._ended.set()

    async def _first_cause(self, doing: str) -> AgentRLError:
        """Why the trainer ended: the first rank's end that was not the consequence of another's. Such a one may be
        seen a moment before its cause, so the others are waited for, shortly."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_CAUSE_S):
                while all(process.code == PEER_LOST for process in self._gone):
                    left = [process for process in self._ranks if not process.ended.is_set()]
                    if not left:
                        break
                    await _any_end(left)
        causes = [process for process in self._gone if process.code != PEER_LOST]
        return (causes or self._gone)[0].failure(doing)

    @staticmethod
    def _broken_before(why: str, *, where: str) -> TrainerError:
        return TrainerError(f"the trainer failed before: {why}", where=where, remedy=REMEDY)


async def _any_end(processes: Sequence[RankProcess]) -> None:
    waits = [asyncio.ensure_future(process.ended.wait()) for process in processes]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _memory_folder() -> str | None:
    """Published weights belong in memory; the system's temporary folder where there is no shared memory."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

"""The owner's end of a scoring process: what it says, what it is told, and what the process may know."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.errors import DeadlineError, TeacherRefusedError
from agentrl_teachers import worker_process
from agentrl_teachers.worker import Waiting
from agentrl_teachers.worker_messages import (
    HEADER_BYTES,
    Drop,
    Ready,
    Refused,
    Score,
    Scored,
    ToWorker,
    frame,
    frame_length,
    to_worker,
)
from agentrl_teachers.worker_process import WorkerProcess

IDS = np.arange(5, dtype=np.int32)
POSITIONS = np.arange(1, 5, dtype=np.int32)


class Worker:
    """The other end of the sockets: what the owner says, and what is answered."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def told(self) -> ToWorker:
        async with asyncio.timeout(5):
            header = await self._reader.readexactly(HEADER_BYTES)
            return to_worker(await self._reader.readexactly(frame_length(header)))

    def answer(self, message: Scored | Refused) -> None:
        self._writer.write(frame(message))

    def close(self) -> None:
        self._writer.close()


def an_ended_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["true"])


@asynccontextmanager
async def owned(folder: Path) -> AsyncIterator[tuple[WorkerProcess, Worker]]:
    ours, theirs = socket.socketpair()
    streams = await asyncio.open_connection(sock=ours)
    worker = Worker(*await asyncio.open_connection(sock=theirs))
    process = WorkerProcess(
        an_ended_process(),
        name="t",
        log_path=folder / "t.log",
        streams=streams,
        ready=Ready(window=8, device="cpu"),
    )
    try:
        yield process, worker
    finally:
        await process.close()
        worker.close()


def scored(number: int) -> Scored:
    own, none = np.full(4, -1.0, np.float32), np.zeros((4, 0), np.float32)
    return Scored(number=number, logprobs=own, top1=own > 0, top_ids=none.astype(np.int32), top_logprobs=none)


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
def test_what_nobody_waits_for_is_dropped(how: str, tmp_path: Path) -> None:
    """Else an overloaded process computes what was given up on first, and never comes to what is waited for."""

    async def run() -> None:
        async with owned(tmp_path) as (process, worker):
            timeout_s = 0.05 if how == "timed out" else 60.0
            waiting = asyncio.create_task(process.score(IDS, positions=POSITIONS, timeout_s=timeout_s))
            asked = await worker.told()
            assert isinstance(asked, Score)
            if how == "cancelled":
                waiting.cancel()
            (error,) = await asyncio.gather(waiting, return_exceptions=True)
            assert isinstance(error, asyncio.CancelledError if how == "cancelled" else DeadlineError)
            dropped = await worker.told()
            assert isinstance(dropped, Drop)
            assert dropped.number == asked.number

    asyncio.run(run())


def test_what_is_answered_is_not_dropped(tmp_path: Path) -> None:
    async def run() -> None:
        async with owned(tmp_path) as (process, worker):
            for number in range(3):
                waiting = asyncio.create_task(process.score(IDS, positions=POSITIONS, timeout_s=60))
                asked = await worker.told()
                assert isinstance(asked, Score)
                assert asked.number == number
                worker.answer(scored(number))
                assert (await waiting).logprobs.tolist() == [-1.0] * 4

    asyncio.run(run())


def test_a_refusal_says_what_to_do(tmp_path: Path) -> None:
    async def run() -> None:
        async with owned(tmp_path) as (process, worker):
            waiting = asyncio.create_task(process.score(IDS, positions=POSITIONS, timeout_s=60))
            await worker.told()
            worker.answer(Refused(number=0, what="out of memory", remedy="less of it"))
            with pytest.raises(TeacherRefusedError, match="out of memory") as caught:
                await waiting
            assert caught.value.remedy == "less of it"

    asyncio.run(run())


def test_what_is_dropped_is_not_computed() -> None:
    waiting = Waiting()
    for number in range(3):
        waiting.put(Score(number=number, token_ids=IDS, positions=POSITIONS))
    waiting.drop(1)
    waiting.drop(7)
    assert [request.number for request in waiting.take(budget=1000)] == [0, 2]


def test_no_key_reaches_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    class Popen:
        def __init__(self, command: list[str], **how: Any) -> None:
            given.update(how)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    secret = ["AGENTRL_TEACHER_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "db_password"]
    for name in [*secret, "PLAIN"]:
        monkeypatch.setenv(name, "value")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker_process._spawn(
            theirs, model=tmp_path, dtype="float32", threads=2, log_path=tmp_path / "t.log", device=None
        )
    kept = given["env"]
    assert not kept.keys() & set(secret)
    assert kept.keys() >= {"PLAIN", "PATH"}
    assert (kept["OMP_NUM_THREADS"], kept["TOKENIZERS_PARALLELISM"]) == ("2", "false")

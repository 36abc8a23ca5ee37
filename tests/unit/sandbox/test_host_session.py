"""The host's end of the conversation, against a server whose answers the test writes. Untrusted means
untrusted."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentrl.errors import (
    DaemonUnreachableError,
    SandboxDeadError,
    SandboxError,
    SandboxOutOfMemoryError,
    SandboxStartError,
)
from agentrl.sandbox import channel as channel_module
from agentrl.sandbox.channel import Channel, docker_chunks
from agentrl.sandbox.session import ServedSandbox, Session

Answerer = Callable[[dict[str, Any]], bytes | None]
RESULT = {
    "exit_code": 0,
    "output": "hi\n",
    "output_bytes": 3,
    "timed_out": False,
    "out_of_memory": False,
    "duration_s": 0.1,
}


def _machine(session: Session) -> Any:
    """The session's machine, with what only the scripted one has."""
    return session.machine


def answer(question: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"id": question["id"], "ok": True, **fields}).encode() + b"\n"


class ScriptedMachine:
    """A machine whose server is a coroutine of the test."""

    def __init__(self, channel: Channel, server: asyncio.Task[None]) -> None:
        self.id = "box-1"
        self.image = "agentrl/base"
        self.channel = channel
        self.server = server
        self.killed = 0
        self.ooms: int | None = 0
        self.cause: SandboxError = SandboxDeadError("its process ended with code 9")

    def kill(self) -> None:
        self.killed += 1
        self.server.cancel()

    def oom_kills(self) -> int | None:
        return self.ooms

    async def cause_of_death(self) -> SandboxError:
        return self.cause

    async def close(self) -> None:
        self.kill()


@asynccontextmanager
async def conversation(answerer: Answerer, *, grace_s: float = 0.2) -> AsyncIterator[tuple[Session, Any]]:
    """A session with a server that answers by `answerer`; None ends the stream."""
    ours, theirs = socket.socketpair()
    questions: list[dict[str, Any]] = []

    async def serve() -> None:
        reader, writer = await asyncio.open_connection(sock=theirs, limit=channel_module.REQUEST_LIMIT_BYTES)
        while line := await reader.readline():
            questions.append(json.loads(line))
            reply = answerer(questions[-1])
            if reply is None:
                break
            writer.write(reply)
        writer.close()

    server = asyncio.create_task(serve())
    machine = ScriptedMachine(await Channel.over(ours), server)
    try:
        yield Session(machine, grace_s=grace_s), questions
    finally:
        machine.channel.close()
        server.cancel()


def talk(answerer: Answerer, body: Callable[[Session, Any], Awaitable[None]], *, grace_s: float = 0.2) -> None:
    async def main() -> None:
        async with asyncio.timeout(10), conversation(answerer, grace_s=grace_s) as (session, questions):
            await body(session, questions)

    asyncio.run(main())


def test_operations_carry_their_arguments_and_types() -> None:
    replies: dict[str, dict[str, Any]] = {
        "run": RESULT,
        "edit": {"edit_ok": False, "text": "no such file", "content": None},
        "read": {"data": "AAEC"},
        "write": {},
        "unpack": {},
        "ping": {"processes": 2, "rss_mb": 41.5},
        "tests": {
            "exit_code": 1,
            "results": {"t.py::a": "passed"},
            "collected": 1,
            "output": "",
            "timed_out": False,
            "canary_failed": True,
            "duration_s": 0.2,
        },
    }

    async def body(session: Session, questions: list[dict[str, Any]]) -> None:
        box = ServedSandbox(session)
        result = await box.run("echo hi", timeout_s=3, cwd="a", env={"K": "v"}, stdin=b"in", output_limit=99)
        assert (result.exit_code, result.output) == (0, "hi\n")
        edited = await box.edit("view", path="x", timeout_s=4, view_range=None, old_str="o")
        assert (edited.ok, edited.text, edited.content) == (False, "no such file", None)
        assert await box.read_file("f", limit_bytes=7) == b"\x00\x01\x02"
        await box.write_files({"a": b"\xff"})
        await box.unpack(b"tar")
        assert (await box.ping()).processes == 2
        report = await box.run_tests(["-q"], timeout_s=5, canary=True)
        assert report.results == {"t.py::a": "passed"}
        assert report.canary_failed is True
        asked = {q["op"]: {k: v for k, v in q.items() if k not in ("op", "id")} for q in questions}
        assert asked["run"] == {
            "command": "echo hi",
            "timeout_s": 3,
            "cwd": "a",
            "env": {"K": "v"},
            "stdin": "aW4=",
            "output_limit": 99,
        }
        assert asked["edit"] == {"command": "view", "path": "x", "timeout_s": 4, "old_str": "o"}
        assert asked["write"]["files"] == {"a": "/w=="}
        assert asked["tests"]["arguments"] == ["-q"]
        assert [q["id"] for q in questions] == list(range(1, len(questions) + 1))

    talk(lambda q: answer(q, **replies[q["op"]]), body)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (lambda q: b"not json\n", "broken answer"),
        (lambda q: answer(q), "broken answer"),  # fields missing
        (lambda q: answer(q, **{**RESULT, "exit_code": "0"}), "broken answer"),  # a type that is not it
        (lambda q: answer({"id": q["id"] + 1}, **RESULT), "answer 2 to question 1"),
        (lambda q: b"", "no answer within"),
        (lambda q: None, "ended with code 9"),
    ],
)
def test_bad_answers_kill_the_sandbox_and_name_it(reply: Answerer, said: str) -> None:
    async def body(session: Session, questions: Any) -> None:
        box = ServedSandbox(session)
        with pytest.raises(SandboxDeadError) as caught:
            await box.run("x", timeout_s=0.1)
        assert said in str(caught.value)
        assert "box-1" in str(caught.value)
        assert "run" in caught.value.where
        assert _machine(session).killed == 1
        assert not session.is_usable
        with pytest.raises(SandboxDeadError, match="dead since an earlier operation"):
            await box.run("x", timeout_s=0.1)
        assert len(questions) == 1

    talk(reply, body)


def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "ANSWER_LIMIT_BYTES", 200_000)

    async def body(session: Session, _: Any) -> None:
        with pytest.raises(SandboxDeadError, match="more than 200000 bytes"):
            await ServedSandbox(session).run("x", timeout_s=5)

    talk(lambda q: b"x" * 1_000_000, body)


def test_a_refused_operation_leaves_the_sandbox_alive() -> None:
    def reply(question: dict[str, Any]) -> bytes:
        if question["op"] == "unpack":
            fault = {"kind": "bad_request", "message": "no tar"}
            return json.dumps({"id": question["id"], "ok": False, "error": fault}).encode() + b"\n"
        return answer(question, **RESULT)

    async def body(session: Session, _: Any) -> None:
        box = ServedSandbox(session)
        with pytest.raises(SandboxError, match="refused unpack: bad_request: no tar") as caught:
            await box.unpack(b"")
        assert not isinstance(caught.value, SandboxDeadError)
        assert (await box.run("x", timeout_s=1)).exit_code == 0
        assert _machine(session).killed == 0

    talk(reply, body)


def test_a_cancelled_operation_kills_the_sandbox() -> None:
    """Else its late answer would be taken for the next question's."""

    async def body(session: Session, _: Any) -> None:
        task = asyncio.create_task(ServedSandbox(session).run("x", timeout_s=5))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert _machine(session).killed == 1
        assert not session.is_usable

    talk(lambda q: b"", body)


def test_calls_at_once_take_turns() -> None:
    async def body(session: Session, questions: Any) -> None:
        box = ServedSandbox(session)
        results = await asyncio.gather(*(box.run(str(i), timeout_s=1) for i in range(20)))
        assert [r.output for r in results] == [str(i) for i in range(20)]

    talk(lambda q: answer(q, **{**RESULT, "output": q["command"]}), body)


def test_out_of_memory_is_seen_from_outside_and_as_a_death() -> None:
    """K42: neither reads as a command that failed."""

    async def seen(session: Session, _: Any) -> None:
        box = ServedSandbox(session)
        first = await box.run("x", timeout_s=1)
        _machine(session).ooms = 1
        second = await box.run("x", timeout_s=1)
        third = await box.run("x", timeout_s=1)
        assert [r.out_of_memory for r in (first, second, third)] == [False, True, False]
        assert box.ran_out_of_memory

    async def dead(session: Session, _: Any) -> None:
        _machine(session).cause = SandboxOutOfMemoryError("the whole sandbox ran out of memory")
        with pytest.raises(SandboxOutOfMemoryError, match="box-1 died during run"):
            await ServedSandbox(session).run("x", timeout_s=1)

    async def guessed(session: Session, _: Any) -> None:
        box = ServedSandbox(session)
        assert not (await box.run("x", timeout_s=1)).out_of_memory  # the host counts none, whatever the server says
        assert not box.ran_out_of_memory
        _machine(session).ooms = None
        assert (await box.run("x", timeout_s=1)).out_of_memory
        assert box.ran_out_of_memory

    talk(lambda q: answer(q, **RESULT), seen)
    talk(lambda q: None, dead)
    talk(lambda q: answer(q, **{**RESULT, "out_of_memory": True}), guessed)


def test_a_lease_that_is_over_cannot_be_used() -> None:
    async def body(session: Session, questions: Any) -> None:
        box = ServedSandbox(session)
        box.end_lease()
        with pytest.raises(SandboxDeadError, match="lease of sandbox box-1 is over"):
            await box.run("x", timeout_s=1)
        assert questions == []
        assert session.is_usable

    talk(lambda q: answer(q, **RESULT), body)


def test_a_request_too_large_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.sandbox.session.REQUEST_LIMIT_BYTES", 1000)

    async def body(session: Session, questions: Any) -> None:
        with pytest.raises(SandboxError, match="exceeds 1000"):
            await ServedSandbox(session).unpack(b"x" * 2000)
        assert questions == []
        assert session.is_usable

    talk(lambda q: answer(q), body)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (b'{"ready": true, "protocol": 2}\n', "speaks protocol 2"),
        (b"Traceback\n", "ended before it was ready"),
        (b"", "not ready within 0.2 s"),
    ],
)
def test_a_server_that_does_not_come_up(words: bytes, said: str) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        theirs.sendall(words)
        machine = ScriptedMachine(await Channel.over(ours), asyncio.create_task(asyncio.sleep(0)))
        with pytest.raises(SandboxStartError, match=said):
            await Session(machine).wait_ready(timeout_s=0.2)
        theirs.close()

    asyncio.run(main())


def test_docker_frames_are_taken_apart_wherever_they_are_cut() -> None:
    """Frames split and joined at every byte; stderr kept apart, as a tail."""
    out = json.dumps({"a": "x" * 300}).encode() + b"\n"
    frames = b""
    for start in range(0, len(out), 7):
        part = out[start : start + 7]
        frames += bytes([1, 0, 0, 0]) + len(part).to_bytes(4, "big") + part
        frames += bytes([2, 0, 0, 0]) + (3).to_bytes(4, "big") + b"err"

    async def main() -> None:
        ours, theirs = socket.socketpair()
        link = await Channel.over(ours, docker_chunks)
        reading = asyncio.create_task(link.receive())
        for start in range(0, len(frames), 13):
            theirs.sendall(frames[start : start + 13])
            await asyncio.sleep(0)
        assert await asyncio.wait_for(reading, 5) == out.rstrip(b"\n")
        assert str(link.stderr).startswith("errerr")
        theirs.close()
        with pytest.raises(channel_module.ChannelClosedError):
            await link.receive()
        assert not link.is_open
        link.close()

    asyncio.run(main())


def test_a_request_that_is_no_text_is_refused_before_it_is_sent() -> None:
    async def body(session: Session, questions: Any) -> None:
        with pytest.raises(SandboxError, match="no UTF-8"):
            await ServedSandbox(session).run("echo \ud800", timeout_s=1)
        assert (await ServedSandbox(session).run("ls", timeout_s=1)).output == "hi\n"
        assert len(questions) == 1

    talk(lambda question: answer(question, **RESULT), body)


def test_k42_a_death_leaves_the_error_that_others_share_as_it_is() -> None:
    """That a daemon is away is one error object for all who ask."""
    shared = DaemonUnreachableError("the daemon is away", where="unix:///x", remedy="start it")

    async def body(session: Session, questions: Any) -> None:
        _machine(session).cause = shared
        with pytest.raises(DaemonUnreachableError, match="died during run") as caught:
            await ServedSandbox(session).run("ls", timeout_s=1)
        assert caught.value.remedy == "start it"
        assert (shared.what, shared.where) == ("the daemon is away", "unix:///x")

    talk(lambda question: None, body)


def test_who_waits_while_the_sandbox_is_closed_learns_that_and_nobody_asks_why() -> None:
    async def body(session: Session, questions: Any) -> None:
        _machine(session).cause = SandboxDeadError("asked")
        waits = asyncio.create_task(ServedSandbox(session).run("ls", timeout_s=5))
        await asyncio.sleep(0.05)
        assert session.is_busy
        session.condemn("it was closed")
        _machine(session).channel.close()
        with pytest.raises(SandboxDeadError, match="it was closed"):
            await waits
        assert not session.is_busy

    talk(lambda question: b"", body)

"""A sandbox as its lease-holder sees it, and the one conversation with its server behind it.

`Session` (one per machine, many leases) asks and answers in turn. Its invariant: after anything but a
complete, valid answer to the question just asked (late, broken, of another question, or the asker was
cancelled), the machine is killed and every further call raises: an answer can never be taken for that of
another question.

`ServedSandbox` (one per lease) gives the operations their types, and stops working when its lease ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from agentrl.errors import SandboxDeadError, SandboxError, SandboxStartError
from agentrl.sandbox.backend import Machine
from agentrl.sandbox.channel import REQUEST_LIMIT_BYTES, AnswerTooLargeError, ChannelClosedError
from agentrl.sandbox.limits import WORKDIR
from agentrl.wire.protocols import CommandResult, EditCommand, EditResult, TestReport

log = logging.getLogger("agentrl.sandbox")

PROTOCOL = 1
GRACE_S = 15.0  # a loaded machine's slack between the server's own deadline and the host's
RESET_TIMEOUT_S = 20.0
DEATH_GRACE_S = 5.0


class _Ready(msgspec.Struct, frozen=True):
    ready: bool
    protocol: int


class _Fault(msgspec.Struct, frozen=True):
    kind: str
    message: str


class _Envelope(msgspec.Struct, frozen=True):
    id: int
    ok: bool
    error: _Fault | None = None


class _Done(msgspec.Struct, frozen=True):
    """An answer that carries nothing."""


class _Edited(msgspec.Struct, frozen=True):
    edit_ok: bool
    text: str
    content: str | None = None


class _Data(msgspec.Struct, frozen=True):
    data: bytes | None


class Ping(msgspec.Struct, frozen=True, kw_only=True):
    """How a sandbox is: other processes alive in it, and the server's resident memory in MB."""

    processes: int
    rss_mb: float


Answer = TypeVar("Answer", bound=msgspec.Struct)


class Session:
    """The conversation with one machine's server."""

    def __init__(self, machine: Machine, *, grace_s: float = GRACE_S) -> None:
        self.machine = machine
        self.leases = 0
        self.has_graded = False
        self.started_at = time.monotonic()
        self._grace_s = grace_s
        self._number = 0
        self._turn = asyncio.Lock()
        self._broken: SandboxError | None = None
        self._is_waiting = False
        self._interrupts = 0

    @property
    def is_usable(self) -> bool:
        """False once anything went wrong, or the server is known to be gone or to have spoken unasked."""
        channel = self.machine.channel
        return self._broken is None and channel.is_open and not channel.has_unread

    @property
    def is_busy(self) -> bool:
        """Whether an operation is in progress, or waits for its turn."""
        return self._turn.locked()

    async def wait_ready(self, *, timeout_s: float) -> None:
        """Wait for the server's first words. Raises `SandboxStartError` (or why the machine died); the caller
        closes."""
        where = f"sandbox {self.machine.id}, start"
        try:
            async with asyncio.timeout(timeout_s):
                ready = msgspec.json.decode(await self.machine.channel.receive(), type=_Ready)
        except TimeoutError:
            said = str(self.machine.channel.stderr) or "nothing"
            raise SandboxStartError(
                f"the server was not ready within {timeout_s:g} s (it said: {said})",
                where=where,
                remedy="raise sandbox.start-timeout-s, or lower sandbox.starters on a loaded machine",
            ) from None
        except (ChannelClosedError, AnswerTooLargeError, msgspec.DecodeError) as error:
            cause = await self.machine.cause_of_death()
            raise SandboxStartError(
                f"the server ended before it was ready: {cause.what}", where=where, remedy=cause.remedy
            ) from error
        if not ready.ready or ready.protocol != PROTOCOL:
            raise SandboxStartError(
                f"the server speaks protocol {ready.protocol}, not {PROTOCOL}",
                where=where,
                remedy="build the image again: agentrl sandbox build",
            )

    async def ask(self, op: str, answer: type[Answer], *, timeout_s: float, **fields: Any) -> Answer:
        """Ask the server to do `op` and give its answer; `timeout_s` is the operation's own deadline.

        Raises `SandboxDeadError` or `SandboxOutOfMemoryError` (the machine is dead then), or `SandboxError`
        where the server refused the operation (it lives on).
        """
        async with self._turn:  # bounded: whoever holds the turn has a deadline
            if self._broken is not None:
                raise self._dead(op, self._broken)
            self._number += 1
            try:
                line = msgspec.json.encode({"id": self._number, "op": op, "timeout_s": timeout_s, **fields})
            except UnicodeEncodeError as error:
                raise SandboxError(
                    f"a request that is no UTF-8: {error}",
                    where=f"sandbox {self.machine.id}, {op}",
                    remedy="replace lone surrogates, or send bytes",
                ) from error
            if len(line) >= REQUEST_LIMIT_BYTES:
                raise SandboxError(
                    f"a request of {len(line)} bytes exceeds {REQUEST_LIMIT_BYTES}",
                    where=f"sandbox {self.machine.id}, {op}",
                    remedy="send less at once",
                )
            return await self._exchange(op, line, answer, timeout_s=timeout_s)

    async def _exchange(self, op: str, line: bytes, answer: type[Answer], *, timeout_s: float) -> Answer:
        began = time.monotonic()
        complete = False
        try:
            async with asyncio.timeout(timeout_s + self._grace_s):
                await self.machine.channel.send(line)
                self._is_waiting = True
                raw = await self.machine.channel.receive()
                self._is_waiting = False
                for _ in range(self._interrupts):
                    await self.machine.channel.receive()
                self._interrupts = 0
            envelope = msgspec.json.decode(raw, type=_Envelope)
            if envelope.id != self._number:
                raise msgspec.ValidationError(f"answer {envelope.id} to question {self._number}")
            value = msgspec.json.decode(raw, type=answer) if envelope.ok else None
            complete = True
        except TimeoutError:
            raise self._fail(op, f"no answer within {timeout_s:g} + {self._grace_s:g} s") from None
        except (AnswerTooLargeError, msgspec.DecodeError) as error:
            raise self._fail(op, f"a broken answer: {str(error)[:200]}") from error
        except ChannelClosedError as error:
            if self._broken is not None:  # it was we who ended it
                raise self._dead(op, self._broken) from None
            # Asked before the kill, which would cover the traces.
            raise await self._death(op, time.monotonic() - began) from error
        finally:
            self._is_waiting = False
            if not complete:
                self.condemn(f"{op} had no complete answer")
        if value is None:
            fault = envelope.error or _Fault(kind="unknown", message="no reason given")
            raise SandboxError(
                f"the sandbox refused {op}: {fault.kind}: {fault.message[:500]}",
                where=f"sandbox {self.machine.id}, {op}",
            )
        return value

    async def interrupt(self) -> None:
        """End the command in progress as Ctrl-C would; whoever asked gets its result, or learns of the death."""
        if self._is_waiting:
            self._interrupts += 1
            with contextlib.suppress(ChannelClosedError):
                await self.machine.channel.send(b'{"op":"interrupt","id":0}')

    def _dead(self, op: str, since: SandboxError) -> SandboxError:
        return SandboxDeadError(
            f"sandbox {self.machine.id} is dead since an earlier operation: {since.what}",
            where=f"sandbox {self.machine.id}, {op}",
            remedy="lease another sandbox",
        )

    async def _death(self, op: str, after_s: float) -> SandboxError:
        try:
            async with asyncio.timeout(DEATH_GRACE_S):
                cause = await self.machine.cause_of_death()
        except TimeoutError:
            cause = SandboxDeadError("it cannot be found out why")
        # A new error: the cause may be shared (that a daemon is away is told to everyone).
        return type(cause)(
            f"sandbox {self.machine.id} died during {op} after {after_s:.1f} s: {cause.what}",
            where=f"sandbox {self.machine.id}, {op}",
            remedy=cause.remedy,
        )

    def _fail(self, op: str, why: str) -> SandboxError:
        """No further operation; the error that says so."""
        self._broken = SandboxDeadError(
            f"sandbox {self.machine.id}, {op}: {why}",
            where=f"sandbox {self.machine.id}, {op}",
            remedy="lease another sandbox; if it happens often, lower sandbox.size or the load",
        )
        return self._broken

    def condemn(self, why: str) -> None:
        """No further operation, and kill the machine."""
        if self._broken is None:
            self._fail("condemned", why)
        self.machine.kill()

    async def reset(self, *, timeout_s: float = RESET_TIMEOUT_S) -> None:
        """Make it as new: no other process, no file but its image's. Raises as `ask`."""
        await self.ask("reset", _Done, timeout_s=timeout_s)


class ServedSandbox:
    """A leased sandbox (`agentrl.wire.protocols.Sandbox`)."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._oom_kills = session.machine.oom_kills()
        self._is_over = False
        self.ran_out_of_memory = False

    @property
    def id(self) -> str:
        return self._session.machine.id

    @property
    def image(self) -> str:
        return self._session.machine.image

    @property
    def workdir(self) -> str:
        return WORKDIR

    def end_lease(self) -> None:
        """No further call: the sandbox may be someone else's by then."""
        self._is_over = True

    async def _ask(self, op: str, answer: type[Answer], *, timeout_s: float, **fields: Any) -> Answer:
        if self._is_over:
            raise SandboxDeadError(
                f"the lease of sandbox {self.id} is over",
                where=f"sandbox {self.id}, {op}",
                remedy="use a sandbox only inside its `async with` block",
            )
        value = await self._session.ask(op, answer, timeout_s=timeout_s, **fields)
        kills = self._session.machine.oom_kills()
        if kills is not None and self._oom_kills is not None:
            self.ran_out_of_memory |= kills > self._oom_kills
        self._oom_kills = kills
        return value

    async def run(
        self,
        command: str,
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        output_limit: int | None = None,
    ) -> CommandResult:
        """As `Sandbox.run`. `out_of_memory` is what the host counts; where it cannot, what the server
        thinks."""
        fields: dict[str, Any] = {"command": command, "cwd": cwd, "env": dict(env or {}), "stdin": stdin}
        if output_limit is not None:
            fields["output_limit"] = output_limit
        kills = self._oom_kills
        result = await self._ask("run", CommandResult, timeout_s=timeout_s, **fields)
        if kills is not None and self._oom_kills is not None:
            result = msgspec.structs.replace(result, out_of_memory=self._oom_kills > kills)
        self.ran_out_of_memory |= result.out_of_memory
        return result

    async def edit(self, command: EditCommand, *, path: str, timeout_s: float, **arguments: Any) -> EditResult:
        """As `Sandbox.edit`; `arguments` are the editor's own (view_range, file_text, old_str, new_str,
        insert_line)."""
        given = {name: value for name, value in arguments.items() if value is not None}
        done = await self._ask("edit", _Edited, timeout_s=timeout_s, command=command, path=path, **given)
        return EditResult(ok=done.edit_ok, text=done.text, content=done.content)

    async def run_tests(
        self,
        arguments: Sequence[str],
        *,
        timeout_s: float,
        canary: bool = False,
        test_timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> TestReport:
        """As `Sandbox.run_tests`."""
        fields = {"arguments": list(arguments), "canary": canary, "cwd": cwd, "env": dict(env or {})}
        if test_timeout_s is not None:
            fields["test_timeout_s"] = test_timeout_s
        return await self._ask("tests", TestReport, timeout_s=timeout_s, **fields)

    async def write_files(self, files: Mapping[str, bytes], *, timeout_s: float = 30.0) -> None:
        """As `Sandbox.write_files`."""
        await self._ask("write", _Done, timeout_s=timeout_s, files=dict(files))

    async def read_file(self, path: str, *, limit_bytes: int = 1_000_000, timeout_s: float = 30.0) -> bytes | None:
        """As `Sandbox.read_file`."""
        return (await self._ask("read", _Data, timeout_s=timeout_s, path=path, limit_bytes=limit_bytes)).data

    async def unpack(self, archive: bytes, *, timeout_s: float = 60.0) -> None:
        """As `Sandbox.unpack`."""
        await self._ask("unpack", _Done, timeout_s=timeout_s, tar=archive)

    async def interrupt(self) -> None:
        """End the command in progress as Ctrl-C would: its `run` returns. For people at a terminal."""
        if not self._is_over:
            await self._session.interrupt()

    async def ping(self, *, timeout_s: float = 10.0) -> Ping:
        """How the sandbox is."""
        return await self._ask("ping", Ping, timeout_s=timeout_s)

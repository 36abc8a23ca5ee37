"""JSON lines to and from a sandbox's server over a socket.

What comes back is untrusted: a line is bounded in size before it is held, nothing is read ahead of need (the
socket's own flow control stops a sandbox that floods), and what the server says on stderr is kept as a short
tail only.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Protocol

REQUEST_LIMIT_BYTES = 64 * 1024 * 1024
ANSWER_LIMIT_BYTES = 16 * 1024 * 1024
_CHUNK_BYTES = 65536
_STDERR_TAIL_BYTES = 4096
_DOCKER_HEADER_BYTES = 8
_DOCKER_STDERR = 2


class ChannelClosedError(Exception):
    """The other end is gone. Internal: `Session` turns it into a `SandboxError` that names sandbox and
    operation."""


class AnswerTooLargeError(Exception):
    """A line exceeds the limit. Internal, like `ChannelClosedError`."""


class StderrTail:
    """The last few KiB of what the server wrote to stderr."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > _STDERR_TAIL_BYTES:
            del self._data[:-_STDERR_TAIL_BYTES]

    def __str__(self) -> str:
        return self._data.decode("utf-8", "replace").strip()


class ChunkReader(Protocol):
    """Where the server's stdout comes from, piece by piece; it ends with the stream."""

    def __call__(self, reader: asyncio.StreamReader, stderr: StderrTail) -> AsyncIterator[bytes]: ...


async def plain_chunks(reader: asyncio.StreamReader, stderr: StderrTail) -> AsyncIterator[bytes]:
    """The bytes as they come."""
    while chunk := await reader.read(_CHUNK_BYTES):
        yield chunk


async def docker_chunks(reader: asyncio.StreamReader, stderr: StderrTail) -> AsyncIterator[bytes]:
    """Docker's attach stream: frames of 8 bytes header (stream, 0, 0, 0, big-endian length) and payload."""
    try:
        while True:
            header = await reader.readexactly(_DOCKER_HEADER_BYTES)
            left = int.from_bytes(header[4:], "big")
            while left:
                chunk = await reader.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    return
                left -= len(chunk)
                if header[0] == _DOCKER_STDERR:
                    stderr.feed(chunk)
                else:
                    yield chunk
    except asyncio.IncompleteReadError:
        return


class DockerStderr(asyncio.Protocol):
    """Reads a container's attach stream aside of the conversation: stderr goes to `tail`, all else is dropped.

    `ended` is set at the stream's end: the container has, or the daemon has gone."""

    def __init__(self, tail: StderrTail) -> None:
        self.ended = asyncio.Event()
        self._tail = tail
        self._header = bytearray()
        self._left = 0

    def data_received(self, data: bytes) -> None:
        while data:
            if self._left == 0:
                missing = _DOCKER_HEADER_BYTES - len(self._header)
                self._header += data[:missing]
                data = data[missing:]
                if len(self._header) == _DOCKER_HEADER_BYTES:
                    self._left = int.from_bytes(self._header[4:], "big")
                    if self._left == 0:
                        self._header.clear()
                continue
            piece, data = data[: self._left], data[self._left :]
            if self._header[0] == _DOCKER_STDERR:
                self._tail.feed(piece)
            self._left -= len(piece)
            if self._left == 0:
                self._header.clear()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set()


class Channel:
    """One line out, one line in, over a connected socket. Owned by one `Session`; not for concurrent use."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        chunks: ChunkReader = plain_chunks,
        stderr: StderrTail | None = None,
    ) -> None:
        self.stderr = stderr if stderr is not None else StderrTail()
        self._reader = reader
        self._writer = writer
        self._chunks = chunks(reader, self.stderr)
        self._buffer = bytearray()

    @classmethod
    async def over(
        cls, sock: socket.socket, chunks: ChunkReader = plain_chunks, stderr: StderrTail | None = None
    ) -> Channel:
        """A channel over a connected stream socket, which it owns from here on. `stderr`: where what the server says
        there is kept, if not here."""
        reader, writer = await asyncio.open_connection(sock=sock, limit=2 * _CHUNK_BYTES)
        return cls(reader, writer, chunks, stderr)

    @property
    def is_open(self) -> bool:
        """False once the other end is known to be gone."""
        return not (self._reader.at_eof() or self._reader.exception() or self._writer.is_closing())

    @property
    def has_unread(self) -> bool:
        """True where bytes lie here that no request asked for."""
        return bool(self._buffer)

    async def send(self, line: bytes) -> None:
        """Write one line (without its newline). Raises `ChannelClosedError`."""
        try:
            self._writer.writelines((line, b"\n"))  # one system call: half a line would wake the server for nothing
            await self._writer.drain()
        except (ConnectionError, OSError) as error:
            raise ChannelClosedError(str(error)) from error

    async def receive(self) -> bytes:
        """The next line, without its newline. Raises `ChannelClosedError` or `AnswerTooLargeError`."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > ANSWER_LIMIT_BYTES:
                raise AnswerTooLargeError(f"an answer of more than {ANSWER_LIMIT_BYTES} bytes")
            try:
                self._buffer += await anext(self._chunks)
            except (StopAsyncIteration, ConnectionError, OSError) as error:
                raise ChannelClosedError("the stream ended") from error
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def close(self) -> None:
        """Close the socket at once, dropping what was not written: the server sees end of file."""
        self._writer.transport.abort()

"""What a scoring process and its owner say to each other: msgpack frames over a pair of sockets.

A frame is 8 bytes of length, little-endian, then the message; arrays travel as they lie in memory. Owner → process:
Score, Drop. Process → owner: Ready or Failed once, then for each Score that was not dropped exactly one Scored or
Refused, in any order.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec
import numpy as np

_LENGTH = struct.Struct("<Q")
HEADER_BYTES = _LENGTH.size


class _Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    pass


class Score(_Message, frozen=True, kw_only=True):
    """Score token_ids int32 [T] at `positions` int32 [N], each ≥ 1, with the `top_k` most likely tokens there.

    `candidates` int32 [N, K] (−1 where there are fewer): tokens whose log-probabilities there are asked for;
    `vocabulary`: those of all tokens are.
    """

    number: int
    token_ids: np.ndarray
    positions: np.ndarray
    top_k: int = 0
    candidates: np.ndarray | None = None
    vocabulary: bool = False


class Drop(_Message, frozen=True, kw_only=True):
    """Nobody waits for this one any more."""

    number: int


class Ready(_Message, frozen=True, kw_only=True):
    """The model is loaded: tokens of its window, where it computes."""

    window: int
    device: str


class Failed(_Message, frozen=True, kw_only=True):
    """The model cannot be loaded; the process ends. `remedy` is empty where none is known."""

    what: str
    remedy: str = ""


class Scored(_Message, frozen=True, kw_only=True):
    """At each of the N positions, in order: logprobs float32 [N], top1 bool [N], top_ids int32 [N, top_k] and
    top_logprobs float32 [N, top_k] (−1 and NaN beyond the vocabulary), candidate_logprobs float32 [N, K] where
    candidates, or the vocabulary, were asked for."""

    number: int
    logprobs: np.ndarray
    top1: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    candidate_logprobs: np.ndarray | None = None


class Refused(_Message, frozen=True, kw_only=True):
    """This one cannot be scored; others can. `remedy` is empty where none is known."""

    number: int
    what: str
    remedy: str = ""


ToWorker = Score | Drop
FromWorker = Ready | Failed | Scored | Refused


def _pack_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.name, list(value.shape), np.ascontiguousarray(value).data]
    raise TypeError(f"{type(value).__name__} cannot travel")


def _unpack_array(expected: type, value: Any) -> Any:
    if expected is not np.ndarray:
        raise TypeError(f"unexpected type {expected}")
    dtype, shape, data = value
    return np.frombuffer(data, dtype=np.dtype(dtype)).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack_array)
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker, dec_hook=_unpack_array)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker, dec_hook=_unpack_array)


def frame(message: ToWorker | FromWorker) -> bytes:
    """The message as it travels."""
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


def frame_length(header: bytes) -> int:
    """How many bytes follow the header."""
    return int(_LENGTH.unpack(header)[0])


def to_worker(data: bytes) -> ToWorker:
    """A frame's message to the process. Raises `msgspec.DecodeError`."""
    return _to_worker.decode(data)


def from_worker(data: bytes) -> FromWorker:
    """A frame's message from the process. Raises `msgspec.DecodeError`."""
    return _from_worker.decode(data)


def receive(connection: socket.socket) -> ToWorker | None:
    """The next message to the process, however long it takes; None where the owner is gone."""
    header = _exactly(connection, HEADER_BYTES)
    data = _exactly(connection, frame_length(header)) if header is not None else None
    return to_worker(data) if data is not None else None


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = connection.recv_into(view[got:])
        if count == 0:
            return None
        got += count
    return bytes(data)

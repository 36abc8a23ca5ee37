"""Messages as ZeroMQ frames: one msgpack header, then each array's bytes as they lie in memory.

Arrays leave the header as (dtype, shape, frame number) and come back as read-only views of the received frame: nothing
is copied or re-encoded. Only plain numeric dtypes travel; an object array is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from agentrl.errors import AgentRLError
from agentrl.wire.messages import FromTrainer, Message, ToTrainer

_DTYPES = frozenset({"bool", "int32", "int64", "float32", "float64"})


class WireError(AgentRLError):
    """Frames that do not make a message."""


def encode(message: Message) -> list[bytes | memoryview]:
    """Frames of `message`: the header first, then one frame per array, C-contiguous."""
    frames: list[bytes | memoryview] = []

    def hook(value: Any) -> Any:
        if not isinstance(value, np.ndarray) or value.dtype.name not in _DTYPES:
            raise WireError(f"{type(value).__name__} cannot travel", where="codec.encode", remedy="send numeric arrays")
        frames.append(np.ascontiguousarray(value).data)
        return [value.dtype.name, list(value.shape), len(frames)]

    header = msgspec.msgpack.encode(message, enc_hook=hook)
    return [header, *frames]


def _decode(frames: Sequence[bytes | memoryview], kind: Any) -> Any:
    def hook(expected: type, value: Any) -> Any:
        if expected is not np.ndarray:
            raise WireError(f"unexpected type {expected}", where="codec.decode")
        dtype, shape, frame = value
        if dtype not in _DTYPES or not 0 < frame < len(frames):
            raise WireError(f"array header {value!r} names no frame or dtype", where="codec.decode")
        return np.frombuffer(frames[frame], dtype=np.dtype(dtype)).reshape(shape)

    try:
        return msgspec.msgpack.decode(frames[0], type=kind, dec_hook=hook)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise WireError(f"frames do not make a message: {error}", where="codec.decode") from error


def decode_to_trainer(frames: Sequence[bytes | memoryview]) -> ToTrainer:
    """The request that `frames` hold. Raises `WireError`."""
    return _decode(frames, ToTrainer)


def decode_from_trainer(frames: Sequence[bytes | memoryview]) -> FromTrainer:
    """The answer that `frames` hold. Raises `WireError`."""
    return _decode(frames, FromTrainer)

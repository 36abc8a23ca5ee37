"""Messages survive the wire bit for bit, and frames that are no message are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.wire import (
    Batch,
    Publish,
    Save,
    Saved,
    Shutdown,
    StepResult,
    TrainedSequence,
    TrainerFailed,
    TrainerReady,
    TrainSequence,
    WeightManifest,
)
from agentrl.wire.codec import WireError, decode_from_trainer, decode_to_trainer, encode

lengths = st.integers(0, 5)
names = st.text(max_size=8)
numbers = st.floats(allow_nan=False)


def array(draw: st.DrawFn, dtype: type, length: int) -> np.ndarray:
    """Any bits of the dtype, NaN payloads and infinities included."""
    raw = draw(st.binary(min_size=length * np.dtype(dtype).itemsize, max_size=length * np.dtype(dtype).itemsize))
    if dtype is np.bool_:
        return np.frombuffer(raw, np.uint8) % 2 == 1
    return np.frombuffer(raw, dtype)


@st.composite
def train_sequences(draw: st.DrawFn) -> TrainSequence:
    n = draw(lengths)
    optional = {
        name: array(draw, np.float32, n) if draw(st.booleans()) else None
        for name in ("ce_weights", "teacher_logprobs", "teacher_weights")
    }
    return TrainSequence(
        trajectory_id=draw(names),
        group_id=draw(names),
        segment=draw(lengths),
        update=draw(lengths),
        token_ids=array(draw, np.int32, n),
        pg_mask=array(draw, np.bool_, n),
        advantages=array(draw, np.float32, n),
        behaviour_logprobs=array(draw, np.float32, n),
        versions=array(draw, np.int32, n),
        **optional,
    )


@st.composite
def to_trainer(draw: st.DrawFn) -> Any:
    batch = st.builds(
        Batch,
        step=lengths,
        version=lengths,
        updates=lengths,
        temperature=numbers,
        sequences=st.lists(train_sequences(), max_size=3).map(tuple),
    )
    save = st.builds(Save, step=lengths, state=st.binary(max_size=9), score=numbers | st.none())
    return draw(st.one_of(batch, st.builds(Publish, version=lengths), save, st.just(Shutdown())))


@st.composite
def from_trainer(draw: st.DrawFn) -> Any:
    n = draw(lengths)
    trained = TrainedSequence(
        trajectory_id=draw(names),
        segment=0,
        weights=array(draw, np.float32, n),
        mask=array(draw, np.bool_, n),
    )
    manifest = WeightManifest(
        version=n,
        path=draw(names),
        tensors=n,
        num_bytes=n,
        probe_token_ids=array(draw, np.int32, n),
        probe_logprobs=array(draw, np.float32, n),
    )
    metrics = draw(st.dictionaries(names, numbers, max_size=3))
    return draw(
        st.sampled_from(
            [
                StepResult(step=1, updates=n, metrics=metrics, sequences=(trained,) * n),
                manifest,
                Saved(step=n, path=draw(names), is_best=draw(st.booleans())),
                TrainerReady(step=n, updates=n, parameters=n, state=draw(st.binary(max_size=9))),
                TrainerFailed(what=draw(names), where="", remedy="", traceback=draw(names)),
            ]
        )
    )


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, msgspec.Struct):
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name)) for name in left.__struct_fields__
        )
    if isinstance(left, tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


def as_received(frames: list[Any]) -> list[bytes]:
    """What ZeroMQ hands over: each frame's bytes."""
    return [bytes(frame) for frame in frames]


@settings(deadline=None)
@given(to_trainer())
def test_requests_survive_the_wire(message: Any) -> None:
    assert same(message, decode_to_trainer(as_received(encode(message))))


@settings(deadline=None)
@given(from_trainer())
def test_answers_survive_the_wire(message: Any) -> None:
    assert same(message, decode_from_trainer(as_received(encode(message))))


def manifest(ids: np.ndarray) -> WeightManifest:
    return WeightManifest(
        version=1,
        path="p",
        tensors=1,
        num_bytes=1,
        probe_token_ids=ids,
        probe_logprobs=np.zeros(2, np.float32),
    )


def test_arrays_travel_once_uncopied_and_arrive_read_only() -> None:
    ids = np.arange(4, dtype=np.int32)
    frames = encode(manifest(ids))
    assert len(frames) == 3
    assert np.shares_memory(np.frombuffer(frames[1], np.int32), ids)
    found = decode_from_trainer(as_received(frames))
    assert isinstance(found, WeightManifest)
    assert not found.probe_token_ids.flags.writeable


def test_views_are_sent_as_they_read() -> None:
    found = decode_from_trainer(as_received(encode(manifest(np.arange(8, dtype=np.int32).reshape(2, 4).T))))
    assert isinstance(found, WeightManifest)
    assert found.probe_token_ids.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize("value", [np.array([object()]), np.array(["text"]), np.zeros(2, np.complex64), object()])
def test_only_plain_numbers_travel(value: Any) -> None:
    with pytest.raises(WireError, match="cannot travel"):
        encode(manifest(value))


def test_frames_that_make_no_message_are_refused() -> None:
    good = as_received(encode(manifest(np.arange(4, dtype=np.int32))))
    for frames in (
        [b"\x00", *good[1:]],
        good[:2],
        [good[0], good[1][:-1], good[2]],
        [good[0].replace(b"int32", b"int99"), *good[1:]],
        as_received(encode(Shutdown())),
    ):
        with pytest.raises(WireError):
            decode_from_trainer(frames)

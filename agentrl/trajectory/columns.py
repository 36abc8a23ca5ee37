"""Numpy streams as Arrow columns and back, joined and cut by offsets: no token passes through a Python object.

NaN and −1 are nulls of the files; `None` is a row that lacks the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.errors import RecordError
from agentrl.trajectory.record import Bool, Float32, Int32

if TYPE_CHECKING:
    import pyarrow as pa


def stream_column(values: Sequence[np.ndarray | None], kind: pa.DataType) -> pa.Array:
    """A list column from one array per row."""
    import pyarrow as pa

    items = pa.array(joined := _joined(values), type=kind.value_type, mask=_null_mask(joined))
    lengths = [0 if value is None else len(value) for value in values]
    absent = pa.array([value is None for value in values], pa.bool_())
    return pa.ListArray.from_arrays(_offsets(lengths), items, type=kind, mask=absent)


def read_streams(column: pa.Array) -> list[np.ndarray | None]:
    """`stream_column` back; the arrays own their memory."""
    import pyarrow as pa

    items = column.flatten()
    if pa.types.is_boolean(items.type):
        flat: np.ndarray = items.to_numpy(zero_copy_only=False).astype(np.bool_)
    elif pa.types.is_floating(items.type):
        flat = _floats(items)
    else:
        flat = _ints(items)
    lengths = column.value_lengths().to_pylist()
    ends = np.cumsum([length or 0 for length in lengths])
    return [
        None if length is None else flat[end - length : end].copy() for length, end in zip(lengths, ends, strict=True)
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Tokens that could have stood at N of a segment's T positions: mask bool [T], logprobs float32 [N, K] (NaN where
    there are fewer), ids int32 [N, K] (−1 there), or None: K is the vocabulary, in order."""

    mask: Bool
    logprobs: Float32
    ids: Int32 | None

    @property
    def values(self) -> int:
        """How many log-probabilities these are."""
        return int(self.logprobs.size)


def candidate_column(values: Sequence[Candidates | None], kind: pa.DataType) -> pa.Array:
    """A column of list<list<struct<token_id, logprob>>>: one inner list per token, null where the mask is False. Where
    K is the vocabulary `token_id` is null: a candidate's place in its list is its id."""
    import pyarrow as pa

    found = [value for value in values if value is not None]
    logprobs = _joined([value.logprobs.ravel() for value in found], np.float32)
    ids = _joined([_flat_ids(value) for value in found], np.int32)
    masks = _joined([value.mask for value in found], np.bool_)
    lengths = np.concatenate([np.where(v.mask, v.logprobs.shape[1], 0) for v in found] or [np.zeros(0, np.int64)])
    inner, candidate = kind.value_type, kind.value_type.value_type
    structs = pa.StructArray.from_arrays(
        [pa.array(ids, pa.int32(), mask=ids == -1), pa.array(logprobs, pa.float32(), mask=np.isnan(logprobs))],
        fields=list(candidate),
    )
    tokens = pa.ListArray.from_arrays(_offsets(lengths), structs, type=inner, mask=pa.array(~masks))
    rows = [0 if value is None else len(value.mask) for value in values]
    absent = pa.array([value is None for value in values], pa.bool_())
    return pa.ListArray.from_arrays(_offsets(rows), tokens, type=kind, mask=absent)


def read_candidates(column: pa.Array) -> list[Candidates | None]:
    """`candidate_column` back; where no token has candidates K is 0. Raises `RecordError` where K differs within a row.

    A row whose every id is null and some log-probability is not has the vocabulary in order.
    """
    tokens = column.flatten()
    masks = tokens.is_valid().to_numpy(zero_copy_only=False)
    widths = tokens.value_lengths().fill_null(0).to_numpy()
    ids_of, logprobs_of = tokens.flatten().flatten()
    ids, logprobs = _ints(ids_of), _floats(logprobs_of)
    found: list[Candidates | None] = []
    token = value = 0
    for length in column.value_lengths().to_pylist():
        if length is None:
            found.append(None)
            continue
        mask, width = masks[token : token + length].copy(), widths[token : token + length]
        count, scored = int(width.sum()), int(mask.sum())
        k = count // scored if scored else 0
        if (width[mask] != k).any():
            raise RecordError("a segment's tokens differ in their number of candidates", where="teacher_topk")
        cut, shape = slice(value, value + count), (scored, k)
        whole = bool((ids[cut] == -1).all() and np.isfinite(logprobs[cut]).any())
        own = None if whole else ids[cut].reshape(shape).copy()
        found.append(Candidates(mask, logprobs[cut].reshape(shape).copy(), own))
        token, value = token + length, value + count
    return found


def _flat_ids(value: Candidates) -> np.ndarray:
    return np.full(value.values, -1, np.int32) if value.ids is None else value.ids.ravel()


def _joined(values: Sequence[np.ndarray | None], kind: type[np.generic] | None = None) -> np.ndarray:
    present = [value for value in values if value is not None]
    return np.concatenate(present) if present else np.zeros(0, kind)


def _offsets(lengths: Sequence[int] | np.ndarray) -> pa.Array:
    """Where each list begins, and the end. A column's lists hold fewer than 2³¹ items: `parquet` cuts row groups."""
    import pyarrow as pa

    return pa.array(np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int32))


def _null_mask(flat: np.ndarray) -> np.ndarray | None:
    if flat.dtype == np.float32:
        return np.isnan(flat)
    return flat == -1 if flat.dtype == np.int32 else None


def _floats(items: Any) -> np.ndarray:
    values: np.ndarray = items.fill_null(float("nan")).to_numpy()
    return values.astype(np.float32, copy=False)


def _ints(items: Any) -> np.ndarray:
    values: np.ndarray = items.fill_null(-1).to_numpy()
    return values

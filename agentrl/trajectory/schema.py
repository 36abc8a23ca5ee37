"""The columns of trajectory files. A public interface: `docs/record.md` says what they mean.

pyarrow is imported at first use: the record is imported everywhere, its files are not.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1


@cache
def schema() -> pa.Schema:
    """The columns of a trajectory file, in order."""
    import pyarrow as pa

    spans = pa.struct(
        [
            ("kind", pa.string()),
            ("purpose", pa.string()),
            ("turn", pa.int32()),
            ("start", pa.int32()),
            ("stop", pa.int32()),
        ]
    )
    seconds = [(name, pa.float64()) for name in ("queue_s", "prefill_s", "decode_s", "tool_s")]
    candidate = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32())])
    text = ("run", "split", "source", "image", "trajectory_id", "group_id", "task_id", "environment")
    return pa.schema(
        [
            ("schema_version", pa.int32()),
            *((name, pa.string()) for name in text),
            ("temperature", pa.float64()),
            ("segment", pa.int32()),
            ("segments", pa.int32()),
            ("token_ids", pa.list_(pa.int32())),
            ("spans", pa.list_(spans)),
            ("logprobs", pa.list_(pa.float32())),
            ("versions", pa.list_(pa.int32())),
            ("reward", pa.float64()),
            ("outcome", pa.string()),
            ("outcome_cause", pa.string()),
            ("started_at", pa.float64()),
            ("ended_at", pa.float64()),
            ("turns", pa.list_(pa.struct([*seconds, ("finish_reason", pa.string())]))),
            ("info", pa.string()),
            ("events", pa.string()),
            ("patch", pa.binary()),
            ("trained_at_step", pa.int64()),
            ("advantages", pa.list_(pa.float32())),
            ("weights", pa.list_(pa.float32())),
            ("trained_mask", pa.list_(pa.bool_())),
            ("teacher", pa.string()),
            ("teacher_logprobs", pa.list_(pa.float32())),
            ("teacher_spans", pa.list_(pa.int32())),
            ("teacher_top1", pa.list_(pa.bool_())),
            ("teacher_topk", pa.list_(pa.list_(candidate))),
        ]
    )


# Numeric columns that never become Python objects; a field that a row lacks (training, teacher) is null.
STREAMS = (
    *("token_ids", "logprobs", "versions", "advantages", "weights", "trained_mask"),
    *("teacher_logprobs", "teacher_spans", "teacher_top1"),
)
CANDIDATES = "teacher_topk"
LATER = ("teacher_spans", "teacher_top1")
"""Columns that files of this schema version may lack: they are read as null."""

"""Two tokenizations of one text, brought together where their tokens end at the same byte.

    student   | ret|urn| x|        spans: [ret, urn] ↔ [return], [ x] ↔ [ , x]
    teacher   |return| |x|

Within a span the two say the same bytes, so by the chain rule the sum of one model's log-probabilities over its tokens
of the span speaks of the same event as the other's sum. Where the texts themselves differ (a student's half-sampled
character that no text can hold, a tokenizer that normalises what it reads) there is no span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.int64]
Block = tuple[int, int, int]
"""Bytes [a, a + n) of one text that equal bytes [b, b + n) of the other: a, b, n."""


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """S spans, in order: student int64 [S, 2] and teacher int64 [S, 2] are each span's tokens [start, stop)."""

    student: Offsets
    teacher: Offsets

    def __len__(self) -> int:
        return len(self.student)

    def shifted(self, *, student: int, teacher: int) -> Alignment:
        """The same spans where so many tokens stand before."""
        return Alignment(self.student + student, self.teacher + teacher)

    def where(self, kept: NDArray[np.bool_]) -> Alignment:
        """The spans for which `kept` [S] is true."""
        return Alignment(self.student[kept], self.teacher[kept])


def joined(parts: Sequence[Alignment]) -> Alignment:
    """The spans of all parts."""
    empty = np.zeros((0, 2), dtype=np.int64)
    return Alignment(
        np.concatenate([empty, *(part.student for part in parts)]),
        np.concatenate([empty, *(part.teacher for part in parts)]),
    )


def align(student: Sequence[bytes], teacher: Sequence[bytes]) -> Alignment:
    """The finest spans of two tokenizations, given as each token's bytes. Every token is in at most one span."""
    student_ends, teacher_ends = _offsets(student), _offsets(teacher)
    return joined(
        [
            _align_block(student_ends, teacher_ends, block)
            for block in equal_blocks(b"".join(student), b"".join(teacher))
        ]
    )


def _offsets(tokens: Sequence[bytes]) -> Offsets:
    """[n + 1]: at which byte each token begins, and where the last one ends."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum([len(token) for token in tokens], dtype=np.int64)])


def _align_block(student: Offsets, teacher: Offsets, block: Block) -> Alignment:
    first, second, size = block
    common = np.intersect1d(_bounds(student, first, size), _bounds(teacher, second, size))
    # A token of no bytes stands before the byte it begins at, so it belongs to the span that begins there.
    at_student = np.searchsorted(student, common + first, side="left")
    at_teacher = np.searchsorted(teacher, common + second, side="left")
    return Alignment(
        np.stack([at_student[:-1], at_student[1:]], axis=1), np.stack([at_teacher[:-1], at_teacher[1:]], axis=1)
    )


def _bounds(offsets: Offsets, start: int, size: int) -> Offsets:
    """Where tokens begin or end within bytes [start, start + size], counted from `start`."""
    return offsets[(offsets >= start) & (offsets <= start + size)] - start


def equal_blocks(first: bytes, second: bytes) -> list[Block]:
    """Where two texts that should be equal are so, in order. Linear in their length: equal lines are found where the
    part that differs has as many lines on both sides, which holds for what a tokenizer changes in a text."""
    size = _common_prefix(first, second)
    if size == len(first) == len(second):
        return [(0, 0, size)] if size else []
    end = _common_prefix(first[size:][::-1], second[size:][::-1])
    blocks = [(0, 0, size)]
    blocks += _equal_lines(first[size : len(first) - end], second[size : len(second) - end], at=size)
    blocks += [(len(first) - end, len(second) - end, end)]
    return _merged(blocks)


def _equal_lines(first: bytes, second: bytes, *, at: int) -> list[Block]:
    """Blocks of the lines' beginnings and ends, in two stretches that begin at byte `at`."""
    ours, theirs = first.split(b"\n"), second.split(b"\n")
    if len(ours) != len(theirs):
        return []
    blocks: list[Block] = []
    a = b = at
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        before = _common_prefix(one, other)
        after = _common_prefix(one[before:][::-1], other[before:][::-1])
        line_end = int(number + 1 < len(ours))
        blocks += [(a, b, before), (a + len(one) - after, b + len(other) - after, after + line_end)]
        a, b = a + len(one) + line_end, b + len(other) + line_end
    return blocks


def _common_prefix(first: bytes, second: bytes) -> int:
    size = min(len(first), len(second))
    differ = np.frombuffer(first, np.uint8, size) != np.frombuffer(second, np.uint8, size)
    return int(differ.argmax()) if differ.any() else size


def _merged(blocks: Sequence[Block]) -> list[Block]:
    """Blocks that touch on both sides are one; empty ones are none."""
    merged: list[Block] = []
    for a, b, size in blocks:
        if size and merged and (sum(merged[-1][::2]), sum(merged[-1][1:])) == (a, b):
            merged[-1] = (*merged[-1][:2], merged[-1][2] + size)
        elif size:
            merged.append((a, b, size))
    return merged

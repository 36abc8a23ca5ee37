"""A teacher with another tokenizer: it reads the same text in its own tokens, and is asked about spans.

    segment ──▶ pieces, cut where the agent begins and ends ──▶ the text of each ──▶ the teacher's own tokens
            ──▶ spans that begin and end at the same byte (`alignment`) ──▶ Σ log p over a span's teacher tokens

By the chain rule that sum is the log-probability of the whole span, however many tokens either side spends on it; it is
given to the span's student tokens in equal shares, under one number. Cutting at the agent's turns is how a teacher that
wrote the turn itself would have seen them: what stands before it is read, tokenised by itself, and never changes.

A control token is told by its name: the teacher reads it as its own where it has one so named, else as text. A span
that holds tokens not to be scored beside some that are stays unscored as a whole, and so does one whose bytes are no
text.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agentrl.chat import END_OF_TURN, START_OF_TURN
from agentrl.errors import DeadlineError, TeacherUnfitError, first_error
from agentrl.trajectory import Segment, TeacherScores
from agentrl.wire import ScoreRequest, TeacherSpec, TokenScores
from agentrl_teachers.alignment import Alignment, Offsets, align, joined
from agentrl_teachers.checked import CheckedSource
from agentrl_teachers.folder_text import FolderText
from agentrl_teachers.probe import probe_source
from agentrl_teachers.source import Source

_LEAST_ALIGNED = 0.9
"""Share of a conversation's tokens that must lie in spans: below it the two do not read the same text."""


class ByteTeacher:
    """A `Teacher` over a source of another tokenizer. It may score fewer tokens than it is asked for (see above)."""

    def __init__(self, source: Source, spec: TeacherSpec, *, identity: str) -> None:
        self._source = CheckedSource(source, spec, identity=identity)
        self._spec = spec
        self._student = FolderText(spec.student)

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def cache_hits(self) -> int:
        """Segments whose scores came from disk."""
        return self._source.cache_hits

    async def score(self, request: ScoreRequest, *, timeout_s: float) -> TeacherScores:
        """The scores of the tokens of `request.mask` that lie in spans of such tokens alone. Raises `TeacherError`, or
        `DeadlineError`."""
        deadline = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                ids, spans = await self._read(request.segment, deadline=deadline)
        except TimeoutError as error:
            raise DeadlineError(
                f"teacher {self.name!r} did not tokenise a segment within {timeout_s:g} s",
                where=request.where,
                remedy="raise distill.timeout_s, or lower distill.concurrency",
            ) from error
        spans = spans.where(scorable(spans, request.mask))
        positions = members(spans.teacher)
        if not positions.size:
            return span_scores(self.name, spans, None, length=len(request.segment))
        scores = await self._source.score(
            ids, top_k=0, timeout_s=deadline - time.monotonic(), positions=positions, where=request.where
        )
        return span_scores(self.name, spans, scores, length=len(request.segment))

    async def probe(self, token_ids: Sequence[int], *, timeout_s: float) -> list[str]:
        """See `Teacher.probe`: here the texts must be the same, not the tokens. Raises `TeacherUnfitError`."""
        deadline = time.monotonic() + timeout_s
        ids, spans = await self._align([self._student.token_bytes(token_ids)], deadline=deadline)
        aligned = int((spans.student[:, 1] - spans.student[:, 0]).sum()) / max(1, len(token_ids))
        if aligned < _LEAST_ALIGNED:
            raise TeacherUnfitError(
                f"teacher {self.name!r} does not read the student's text: {aligned:.0%} of a conversation's tokens "
                "begin and end where tokens of its own do",
                where=f"distill.teachers, {self.name}",
                remedy="choose a teacher whose tokenizer keeps the text as it is (byte-level BPE)",
            )
        self._check_window(len(ids) / max(1, len(token_ids)))
        wanted = replace(self._spec, top_k=0)
        probed = await probe_source(self._source, wanted, ids, timeout_s=deadline - time.monotonic())
        single = float((spans.student[:, 1] - spans.student[:, 0] == 1).sum()) / max(1, len(token_ids))
        note = (
            f"another tokenizer: {len(token_ids)} tokens of the student are {len(ids)} of its own; {aligned:.1%} of "
            f"them lie in {len(spans)} common spans, {single:.1%} each in its own"
        )
        return [note, *await self._control_tokens(deadline), *probed.notes]

    def _check_window(self, ratio: float) -> None:
        """`ratio`: the teacher's tokens for one of the student's."""
        needed = math.ceil(self._spec.longest * ratio) + 1
        if self._source.max_model_len < needed:
            raise TeacherUnfitError(
                f"teacher {self.name!r} has a window of {self._source.max_model_len} tokens, and the longest segment "
                f"({self._spec.longest} tokens) takes about {needed} of its own",
                where=f"distill.teachers, {self.name}",
                remedy="lower agent.max_tokens, or raise distill.max_model_len (or the server's window)",
            )

    async def _control_tokens(self, deadline: float) -> list[str]:
        unknown = []
        for name in (START_OF_TURN, END_OF_TURN):
            ids = await self._source.encode(name, timeout_s=deadline - time.monotonic())
            unknown += [name] if len(ids) > 1 else []
        return [f"it has no control token {', '.join(unknown)}, and reads the name as text"] if unknown else []

    # --- the same text in the teacher's tokens --------------------------------------------------------------

    async def _read(self, segment: Segment, *, deadline: float) -> tuple[list[int], Alignment]:
        """The segment in the teacher's ids, and all spans."""
        tokens = self._student.token_bytes(segment.token_ids.tolist())
        return await self._align([tokens[start:stop] for start, stop in pieces(segment)], deadline=deadline)

    async def _align(self, student: Sequence[Sequence[bytes]], *, deadline: float) -> tuple[list[int], Alignment]:
        """For pieces of student tokens, given as bytes: the teacher's ids of all, and the spans of all."""
        try:
            async with asyncio.TaskGroup() as tasks:
                readings = [tasks.create_task(self._encoded(tokens, deadline=deadline)) for tokens in student]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        encoded = [reading.result() for reading in readings]
        ids = [token for piece in encoded for token in piece]
        teacher = await self._source.token_bytes(ids, timeout_s=deadline - time.monotonic())
        parts, before, after = [], 0, 0
        for tokens, piece in zip(student, encoded, strict=True):
            part = align(tokens, teacher[after : after + len(piece)])
            parts.append(part.shifted(student=before, teacher=after))
            before, after = before + len(tokens), after + len(piece)
        return ids, joined(parts)

    async def _encoded(self, tokens: Sequence[bytes], *, deadline: float) -> list[int]:
        """The teacher's ids of what the student's tokens say."""
        text = b"".join(tokens).decode("utf-8", "replace")
        return await self._source.encode(text, timeout_s=deadline - time.monotonic())


def pieces(segment: Segment) -> list[tuple[int, int]]:
    """[start, stop) of each longest run of tokens that are all the agent's, or all not."""
    changes = np.flatnonzero(np.diff(segment.agent_mask)) + 1
    bounds = [0, *changes.tolist(), len(segment)]
    return list(itertools.pairwise(bounds))


def scorable(spans: Alignment, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """bool [S]: spans of both sides' tokens whose student tokens are all in `mask` [T]; nothing predicts token 0."""
    wanted = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(mask)])
    starts, stops = spans.student[:, 0], spans.student[:, 1]
    whole = (wanted[stops] - wanted[starts] == stops - starts) & (stops > starts) & (starts >= 1)
    return whole & (spans.teacher[:, 1] > spans.teacher[:, 0]) & (spans.teacher[:, 0] >= 1)


def members(ranges: Offsets) -> Offsets:
    """int64 [N]: the numbers of all ranges [start, stop) of [S, 2], in order."""
    sizes = ranges[:, 1] - ranges[:, 0]
    return np.arange(sizes.sum()) + np.repeat(ranges[:, 0] - (np.cumsum(sizes) - sizes), sizes)


def span_scores(teacher: str, spans: Alignment, scores: TokenScores | None, *, length: int) -> TeacherScores:
    """`scores` of the teacher's tokens as those of a segment of `length` tokens; None where there is no span.

    A span of n student and m teacher tokens: each of the n gets Σ_m log p / n; top1 where the teacher's own choice
    would have been each of the m.
    """
    logprobs = np.full(length, np.nan, dtype=np.float32)
    numbers = np.full(length, -1, dtype=np.int32)
    top1 = np.zeros(length, dtype=np.bool_)
    if scores is not None:
        sizes = spans.student[:, 1] - spans.student[:, 0]
        tokens = members(spans.student)
        widths = spans.teacher[:, 1] - spans.teacher[:, 0]
        said = members(spans.teacher) - 1
        firsts = np.cumsum(widths) - widths
        sums = np.add.reduceat(scores.logprobs[said].astype(np.float64), firsts)
        logprobs[tokens] = np.repeat(sums / sizes, sizes)
        top1[tokens] = np.repeat(np.logical_and.reduceat(scores.top1[said], firsts), sizes)
        numbers[tokens] = np.repeat(np.arange(len(spans), dtype=np.int32), sizes)
    return TeacherScores(teacher=teacher, logprobs=logprobs, spans=numbers, top1=top1)

"""Building a segment while its episode runs: ids, spans and streams grow together and never apart."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from agentrl.errors import RecordError
from agentrl.trajectory import Purpose, Segment, Source, Span, SpanKind
from agentrl.wire import Generation


class SegmentBuilder:
    """prompt ─▶ (agent ─▶ environment)* ─▶ seal. Whose tokens are whose is said when they are added.

    A token takes 12 bytes: there are thousands of open segments, and lists would take six times as much.
    """

    def __init__(self, prompt_ids: Sequence[int], *, turn: int, source: Source = Source.SAMPLED) -> None:
        self.ids = array("i")
        self._source = source
        self._spans: list[Span] = []
        self._logprobs = array("f")
        self._versions = array("i")
        self._add(prompt_ids, SpanKind.PROMPT, turn)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def has_agent_tokens(self) -> bool:
        return any(span.kind is SpanKind.AGENT for span in self._spans)

    def add_sampled(self, generation: Generation, *, turn: int, where: str) -> list[int]:
        """Add sampled tokens with their streams and return the ids. Raises `RecordError`: lengths differ."""
        ids: list[int] = generation.token_ids.tolist()
        if not len(ids) == len(generation.logprobs) == len(generation.versions):
            raise RecordError(
                f"{len(ids)} sampled tokens came with {len(generation.logprobs)} log-probabilities and "
                f"{len(generation.versions)} versions",
                where=where,
                remedy="never pad or truncate; the policy client must give one of each per token",
            )
        self._add(
            ids,
            SpanKind.AGENT,
            turn,
            logprobs=array("f", generation.logprobs.tolist()),
            versions=array("i", generation.versions.tolist()),
        )
        return ids

    def add_demonstrated(self, ids: Sequence[int], *, turn: int) -> None:
        """Add a scripted turn: the agent's tokens, sampled by nobody."""
        self._add(ids, SpanKind.AGENT, turn)

    def add_environment(self, ids: Sequence[int], *, turn: int) -> None:
        """Add what the environment says after `turn`."""
        self._add(ids, SpanKind.ENVIRONMENT, turn)

    def _add(
        self,
        ids: Sequence[int],
        kind: SpanKind,
        turn: int,
        *,
        logprobs: array[float] | None = None,
        versions: array[int] | None = None,
    ) -> None:
        if not ids:
            return
        start = len(self.ids)
        self.ids.extend(ids)
        self._logprobs += array("f", [float("nan")]) * len(ids) if logprobs is None else logprobs
        self._versions += array("i", [-1]) * len(ids) if versions is None else versions
        last = self._spans[-1] if self._spans else None
        if last and (last.kind, last.turn) == (kind, turn):
            start = self._spans.pop().start
        purpose = Purpose.ACT if kind is SpanKind.AGENT else None
        self._spans.append(Span(kind, start, len(self.ids), turn, purpose))

    def seal(self) -> Segment:
        """The finished segment; its own checks run here."""
        return Segment(
            token_ids=np.array(self.ids, dtype=np.int32),
            spans=tuple(self._spans),
            logprobs=np.array(self._logprobs, dtype=np.float32),
            versions=np.array(self._versions, dtype=np.int32),
            source=self._source,
        )

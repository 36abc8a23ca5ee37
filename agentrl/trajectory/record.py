"""What was sampled, exactly: Span, Segment, Trajectory.

A trajectory is born when its episode ends and never changes; what training adds lies beside it (`Trained`).
Every invariant is checked where the object is made and named in the error:

* a segment's `token_ids`, `logprobs` and `versions` have one length T;
* its spans cover [0, T) without gap or overlap, in order;
* a *sampled* segment has a finite log-probability and a version ≥ 0 exactly on agent tokens, NaN and −1 elsewhere;
* a *demonstration* has NaN and −1 everywhere, so that no stream but cross-entropy can be filled from it;
* an infrastructure failure has no reward and names its cause; nothing else may lack a reward but a demonstration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import RecordError

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


class SpanKind(StrEnum):
    """Whose tokens these are."""

    PROMPT = "prompt"
    AGENT = "agent"
    ENVIRONMENT = "environment"


class Purpose(StrEnum):
    """What an agent span is for."""

    ACT = "act"
    SUMMARISE = "summarise"


class Source(StrEnum):
    """Where a trajectory comes from."""

    SAMPLED = "sampled"
    DEMONSTRATION = "demonstration"


class Split(StrEnum):
    """Which tasks a trajectory belongs to. `fresh`: seeds never trained on; `unseen`: names never trained on."""

    TRAIN = "train"
    FRESH = "fresh"
    UNSEEN = "unseen"


class FinishReason(StrEnum):
    """Why the policy server stopped sampling."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class OutcomeKind(StrEnum):
    """How an episode ended. Truncated episodes are graded; infrastructure failures never are."""

    SOLVED = "solved"
    FAILED = "failed"
    TRUNCATED_TOKENS = "truncated_tokens"
    TRUNCATED_TURNS = "truncated_turns"
    TRUNCATED_TIME = "truncated_time"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended, and the cause where a machine and not the agent is to blame."""

    kind: OutcomeKind
    cause: str = ""

    def __post_init__(self) -> None:
        if (self.kind is OutcomeKind.INFRASTRUCTURE) != bool(self.cause):
            raise RecordError(
                f"outcome {self.kind.value!r} {'lacks its' if not self.cause else 'must not have a'} cause",
                where="Outcome",
                remedy="give `cause` for infrastructure failures and only for them",
            )

    @property
    def truncated(self) -> bool:
        """True where a limit and not the agent ended the episode."""
        return self.kind in (
            OutcomeKind.TRUNCATED_TOKENS,
            OutcomeKind.TRUNCATED_TURNS,
            OutcomeKind.TRUNCATED_TIME,
        )


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) of one kind. `purpose` is given for agent spans and only for them."""

    kind: SpanKind
    start: int
    stop: int
    turn: int
    purpose: Purpose | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise RecordError(f"span [{self.start}, {self.stop}) is empty or negative", where=f"turn {self.turn}")
        if (self.kind is SpanKind.AGENT) != (self.purpose is not None):
            raise RecordError("a purpose belongs to agent spans and only to them", where=f"turn {self.turn}")


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One context window as the model saw it.

    token_ids int32 [T]; spans cover [0, T); logprobs float32 [T] of the distribution sampled from (NaN off agent
    tokens); versions int32 [T], the policy version that sampled each token (−1 off agent tokens).
    """

    token_ids: Int32
    spans: tuple[Span, ...]
    logprobs: Float32
    versions: Int32
    source: Source = Source.SAMPLED

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", np.asarray(self.token_ids, dtype=np.int32))
        object.__setattr__(self, "logprobs", np.asarray(self.logprobs, dtype=np.float32))
        object.__setattr__(self, "versions", np.asarray(self.versions, dtype=np.int32))
        object.__setattr__(self, "spans", tuple(self.spans))
        self._check_lengths()
        self._check_cover()
        self._check_streams()

    def _check_lengths(self) -> None:
        shapes = {"token_ids": self.token_ids.shape, "logprobs": self.logprobs.shape, "versions": self.versions.shape}
        if len(set(shapes.values())) != 1 or self.token_ids.ndim != 1:
            raise RecordError(f"streams differ in length: {shapes}", where="Segment", remedy="never pad or truncate")
        if self.token_ids.size == 0:
            raise RecordError("a segment has at least one token", where="Segment")
        if int(self.token_ids.min()) < 0:
            raise RecordError("negative token id", where=f"Segment, position {int(self.token_ids.argmin())}")

    def _check_cover(self) -> None:
        at = 0
        for span in self.spans:
            if span.start != at:
                raise RecordError(
                    f"spans leave a gap or overlap at {at}: next span starts at {span.start}", where="Segment"
                )
            at = span.stop
        if at != len(self):
            raise RecordError(f"spans end at {at}, the segment at {len(self)}", where="Segment")

    def _check_streams(self) -> None:
        sampled = self.agent_mask if self.source is Source.SAMPLED else np.zeros(len(self), dtype=np.bool_)
        finite = np.isfinite(self.logprobs)
        if not np.array_equal(finite, sampled):
            at = int(np.flatnonzero(finite != sampled)[0])
            raise RecordError(
                f"log-probability {'missing on a sampled' if sampled[at] else 'present on an unsampled'} token",
                where=f"Segment, position {at}",
                remedy="log-probabilities are finite exactly on agent tokens of sampled segments",
            )
        if not np.isnan(self.logprobs[~sampled]).all():
            raise RecordError("an unsampled token carries an infinite log-probability", where="Segment")
        if not np.array_equal(self.versions >= 0, sampled) or (self.versions[~sampled] != -1).any():
            raise RecordError("versions are ≥ 0 exactly on sampled tokens and −1 elsewhere", where="Segment")

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def agent_mask(self) -> Bool:
        """bool [T]: True on the agent's tokens. Comes from the spans alone, never from token values."""
        mask = np.zeros(len(self), dtype=np.bool_)
        for span in self.spans:
            if span.kind is SpanKind.AGENT:
                mask[span.start : span.stop] = True
        return mask

    def same_as(self, other: Segment) -> bool:
        """True where every stream and span is equal (NaN equals NaN)."""
        return (
            np.array_equal(self.token_ids, other.token_ids)
            and self.spans == other.spans
            and np.array_equal(self.logprobs, other.logprobs, equal_nan=True)
            and np.array_equal(self.versions, other.versions)
            and self.source is other.source
        )


@dataclass(frozen=True, slots=True)
class TurnTiming:
    """Seconds one turn spent in the server's queue, in prefill, in decode and in its tools."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tool_s: float = 0.0
    finish_reason: FinishReason = FinishReason.STOP


@dataclass(frozen=True, slots=True, eq=False)
class TeacherScores:
    """What a teacher said of one segment of T tokens, N of them scored. Position t speaks of token t given those before
    it, at temperature 1.

    logprobs float32 [T]: of the segment's own tokens; finite exactly on scored ones (never token 0), NaN elsewhere.
    spans int32 [T] | None: tokens that were scored together, by a teacher with another tokenizer, carry the same number
    ≥ 0 (−1 off scored ones), and `logprobs` hold their sum in equal shares; None: each token by itself.
    candidate_ids int32 [N, K] and candidate_logprobs float32 [N, K] | None: per scored token, in order, K tokens that
    could have stood there (−1 and NaN where there are fewer). Ids None: K is the vocabulary, in order.
    top1 bool [T] | None: True where the segment's own token is the teacher's most likely one; None: not known.
    """

    teacher: str
    logprobs: Float32
    spans: Int32 | None = None
    candidate_ids: Int32 | None = None
    candidate_logprobs: Float32 | None = None
    top1: Bool | None = None

    @property
    def mask(self) -> Bool:
        """bool [T]: the scored tokens."""
        return np.isfinite(self.logprobs)

    def check(self, segment: Segment) -> None:
        """Raise `RecordError` unless every stream fits, and only tokens the agent sampled are scored, token 0 never."""
        where = f"teacher {self.teacher}"
        length, scored = (len(segment),), self.mask
        for name in ("logprobs", "spans", "top1"):
            stream = getattr(self, name)
            if stream is not None and stream.shape != length:
                raise RecordError(f"{name} has another length than its segment", where=where)
        if np.isinf(self.logprobs).any():
            raise RecordError("a log-probability is infinite", where=where)
        if scored[0] or (scored & ~segment.agent_mask).any():
            raise RecordError("a token is scored that the agent did not sample, or that nothing predicts", where=where)
        if self.spans is not None and not np.array_equal(self.spans >= 0, scored):
            raise RecordError("spans are not exactly the scored tokens", where=where)
        self._check_candidates(int(scored.sum()), where)

    def _check_candidates(self, scored: int, where: str) -> None:
        ids, logprobs = self.candidate_ids, self.candidate_logprobs
        if logprobs is None:
            if ids is not None:
                raise RecordError("candidates without log-probabilities", where=where)
            return
        if logprobs.ndim != 2 or logprobs.shape[0] != scored or (ids is not None and ids.shape != logprobs.shape):
            raise RecordError(f"candidates {list(logprobs.shape)} for {scored} scored tokens", where=where)
        if ids is not None and not np.array_equal(ids >= 0, np.isfinite(logprobs)):
            raise RecordError("a candidate lacks its log-probability", where=where)


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """What training did to one segment: written beside it once its batch is trained.

    advantages, weights float32 [T] (NaN and 0 off trained tokens), mask bool [T]: True where a token entered the
    loss's denominator.
    """

    step: int
    advantages: Float32
    weights: Float32
    mask: Bool

    def check(self, segment: Segment) -> None:
        """Raise `RecordError` unless every stream has the segment's length and only agent tokens are trained."""
        for name in ("advantages", "weights", "mask"):
            if getattr(self, name).shape != (len(segment),):
                raise RecordError(f"{name} has another length than its segment", where=f"step {self.step}")
        if (self.mask & ~segment.agent_mask).any():
            raise RecordError("a token that is not the agent's was trained", where=f"step {self.step}")


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One episode's record. `info` holds small per-episode counts (submitted, bad_calls, edits, tests …).

    `scores`: a teacher's, one per segment; empty where no teacher was asked.
    """

    trajectory_id: str
    group_id: str
    task_id: str
    environment: str
    split: Split
    segments: tuple[Segment, ...]
    outcome: Outcome
    reward: float | None
    temperature: float = 1.0
    image: str = ""
    source: Source = Source.SAMPLED
    turns: tuple[TurnTiming, ...] = ()
    started_at: float = 0.0
    ended_at: float = 0.0
    info: Mapping[str, float] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()
    patch: str = ""
    scores: tuple[TeacherScores, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(self.segments))
        object.__setattr__(self, "turns", tuple(self.turns))
        where = f"trajectory {self.trajectory_id}"
        failed = self.outcome.kind is OutcomeKind.INFRASTRUCTURE
        if failed and self.reward is not None:
            raise RecordError("an infrastructure failure carries a reward", where=where, remedy="it is never scored")
        if not failed and self.reward is None and self.source is Source.SAMPLED:
            raise RecordError("a reward is missing", where=where, remedy="grade it, or record the failure's cause")
        if self.reward is not None and not np.isfinite(self.reward):
            raise RecordError(f"reward {self.reward} is not finite", where=where)
        if not failed and not self.segments:
            raise RecordError("a trajectory has at least one segment", where=where)
        if any(segment.source is not self.source for segment in self.segments):
            raise RecordError("a segment's source differs from its trajectory's", where=where)
        self._check_scores(where)

    def _check_scores(self, where: str) -> None:
        """Every segment is scored, or none: of a compressed trajectory no part may be left out."""
        if self.scores and len(self.scores) != len(self.segments):
            raise RecordError(f"{len(self.scores)} scores for {len(self.segments)} segments", where=where)
        for scores, segment in zip(self.scores, self.segments, strict=False):
            scores.check(segment)

    @property
    def agent_tokens(self) -> int:
        """How many tokens the agent sampled."""
        return sum(int(segment.agent_mask.sum()) for segment in self.segments)

    @property
    def tokens(self) -> int:
        """How many tokens all segments hold."""
        return sum(len(segment) for segment in self.segments)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among sampled tokens; None where none was sampled."""
        found = [int(s.versions[s.versions >= 0].min()) for s in self.segments if (s.versions >= 0).any()]
        return min(found) if found else None

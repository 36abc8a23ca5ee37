"""The record's invariants: each is checked where the object is made, and named (K4, K5, K30)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import RecordError
from agentrl.trajectory import (
    Outcome,
    OutcomeKind,
    Purpose,
    Segment,
    Source,
    Span,
    SpanKind,
    Split,
    Trained,
    Trajectory,
)

nan = np.nan
P, A, E = SpanKind.PROMPT, SpanKind.AGENT, SpanKind.ENVIRONMENT


def spans_of(kinds: list[tuple[SpanKind, int]]) -> tuple[Span, ...]:
    spans, at = [], 0
    for turn, (kind, length) in enumerate(kinds):
        spans.append(Span(kind, at, at + length, turn, Purpose.ACT if kind is A else None))
        at += length
    return tuple(spans)


def sampled(kinds: list[tuple[SpanKind, int]], **changes: Any) -> Segment:
    """A segment whose streams fit its spans, but for `changes`."""
    spans = spans_of(kinds)
    mask = np.concatenate([np.full(s.stop - s.start, s.kind is A) for s in spans])
    fields = {
        "token_ids": np.arange(len(mask)),
        "spans": spans,
        "logprobs": np.where(mask, -1.0, nan),
        "versions": np.where(mask, 0, -1),
    }
    return Segment(**{**fields, **changes})


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = {
        "trajectory_id": "t",
        "group_id": "g",
        "task_id": "x",
        "environment": "e",
        "split": Split.TRAIN,
        "segments": (sampled([(P, 2), (A, 2)]),),
        "outcome": Outcome(OutcomeKind.FAILED),
        "reward": 0.0,
    }
    return Trajectory(**{**fields, **changes})


kinds = st.lists(st.tuples(st.sampled_from(SpanKind), st.integers(1, 4)), min_size=1, max_size=5)


@settings(deadline=None)
@given(kinds)
def test_k5_the_agents_mask_comes_from_spans_alone(found: list[tuple[SpanKind, int]]) -> None:
    length = sum(n for _, n in found)
    segment = sampled(found, token_ids=np.zeros(length))
    assert segment.agent_mask.tolist() == [kind is A for kind, n in found for _ in range(n)]
    assert (segment.token_ids.dtype, segment.logprobs.dtype, segment.versions.dtype) == (
        np.int32,
        np.float32,
        np.int32,
    )


@settings(deadline=None)
@given(kinds, st.sampled_from(["token_ids", "logprobs", "versions"]), st.sampled_from([-1, 1]))
def test_k4_streams_of_another_length_are_refused(found: list[tuple[SpanKind, int]], name: str, by: int) -> None:
    stream = getattr(sampled(found), name)
    other = stream[:-1] if by < 0 else np.append(stream, stream[-1])
    with pytest.raises(RecordError, match="differ in length"):
        sampled(found, **{name: other})


@settings(deadline=None)
@given(kinds, st.data())
def test_a_logprob_or_version_on_the_wrong_side_is_refused(
    found: list[tuple[SpanKind, int]], data: st.DataObject
) -> None:
    """One flipped position anywhere: missing on a sampled token, or present on another."""
    good = sampled(found)
    at = data.draw(st.integers(0, len(good) - 1))
    logprobs, versions = good.logprobs.copy(), good.versions.copy()
    logprobs[at] = nan if good.agent_mask[at] else -0.5
    versions[at] = -1 if good.agent_mask[at] else 2
    with pytest.raises(RecordError, match=r"missing on a sampled|present on an unsampled") as caught:
        sampled(found, logprobs=logprobs)
    assert f"position {at}" in caught.value.where
    with pytest.raises(RecordError, match="versions"):
        sampled(found, versions=versions)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinite_logprobs_are_refused_everywhere(value: float) -> None:
    with pytest.raises(RecordError, match="log-probability"):
        sampled([(P, 1), (A, 1)], logprobs=[nan, value])
    with pytest.raises(RecordError, match="log-probability"):
        sampled([(P, 1), (A, 1)], logprobs=[value, -1.0])


@pytest.mark.parametrize(
    "spans",
    [
        (Span(P, 0, 1, 0), Span(A, 2, 4, 0, Purpose.ACT)),
        (Span(P, 0, 3, 0), Span(A, 2, 4, 0, Purpose.ACT)),
        (Span(P, 1, 2, 0), Span(A, 2, 4, 0, Purpose.ACT)),
        (Span(P, 0, 2, 0), Span(A, 2, 3, 0, Purpose.ACT)),
        (),
    ],
)
def test_spans_cover_the_segment_without_gap_or_overlap(spans: tuple[Span, ...]) -> None:
    with pytest.raises(RecordError, match=r"gap or overlap|spans end at"):
        sampled([(P, 2), (A, 2)], spans=spans)


def test_spans_are_not_empty_and_only_the_agent_has_a_purpose() -> None:
    for start, stop in ((2, 2), (3, 2), (-1, 2)):
        with pytest.raises(RecordError, match="empty or negative"):
            Span(P, start, stop, 0)
    with pytest.raises(RecordError, match="purpose"):
        Span(P, 0, 1, 0, Purpose.ACT)
    with pytest.raises(RecordError, match="purpose"):
        Span(A, 0, 1, 0)


def test_negative_ids_and_empty_segments_are_refused() -> None:
    with pytest.raises(RecordError, match="negative token id"):
        sampled([(P, 2)], token_ids=[1, -1])
    with pytest.raises(RecordError, match="at least one token"):
        sampled([(P, 1)], token_ids=[], spans=(), logprobs=[], versions=[])


def test_a_demonstration_has_no_logprobs_even_on_agent_tokens() -> None:
    blank = {"logprobs": [nan] * 3, "versions": [-1] * 3, "source": Source.DEMONSTRATION}
    assert sampled([(P, 1), (A, 2)], **blank).agent_mask.tolist() == [False, True, True]
    with pytest.raises(RecordError, match="present on an unsampled"):
        sampled([(P, 1), (A, 2)], **{**blank, "logprobs": [nan, -1.0, -1.0]})


def test_rewards_and_causes_fit_the_outcome() -> None:
    lost = Outcome(OutcomeKind.INFRASTRUCTURE, "sandbox gone")
    assert trajectory(outcome=lost, reward=None, segments=()).tokens == 0
    with pytest.raises(RecordError, match="carries a reward"):
        trajectory(outcome=lost, reward=0.0)
    with pytest.raises(RecordError, match="reward is missing"):
        trajectory(reward=None)
    with pytest.raises(RecordError, match="not finite"):
        trajectory(reward=nan)
    with pytest.raises(RecordError, match="lacks its cause"):
        Outcome(OutcomeKind.INFRASTRUCTURE)
    with pytest.raises(RecordError, match="must not have a cause"):
        Outcome(OutcomeKind.FAILED, "why")


def test_a_trajectory_has_segments_of_its_own_source() -> None:
    with pytest.raises(RecordError, match="at least one segment"):
        trajectory(segments=())
    with pytest.raises(RecordError, match="source differs"):
        trajectory(source=Source.DEMONSTRATION)


def test_tokens_and_the_oldest_version_are_over_all_segments() -> None:
    t = trajectory(segments=(sampled([(P, 3), (A, 1)], versions=[-1, -1, -1, 4]), sampled([(A, 2), (E, 1)])))
    assert (t.tokens, t.agent_tokens, t.oldest_version) == (7, 3, 0)
    assert trajectory(segments=(sampled([(P, 3)]),)).oldest_version is None


def test_only_agent_tokens_are_trained() -> None:
    segment = sampled([(P, 1), (A, 1)])
    zeros = np.zeros(2, np.float32)
    Trained(0, zeros, zeros, np.array([False, True])).check(segment)
    with pytest.raises(RecordError, match="not the agent's"):
        Trained(0, zeros, zeros, np.array([True, False])).check(segment)
    with pytest.raises(RecordError, match="weights has another length"):
        Trained(0, zeros, np.zeros(3, np.float32), np.zeros(2, bool)).check(segment)

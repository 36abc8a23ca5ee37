"""The distance to the teachers, by its public names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentrl.rollout.groups import GroupResult
from agentrl.rollout.teaching import teaching_metrics
from agentrl.trajectory import Purpose, Segment, Source, Span, SpanKind, TeacherScores


def segment(*runs: tuple[int, Purpose, list[float]], prompt: int = 1) -> Segment:
    """`prompt` tokens read, then a run of agent tokens (turn, purpose, log-probabilities) and one token read, each."""
    spans = [Span(SpanKind.PROMPT, 0, prompt, 0)] if prompt else []
    logprobs = [np.nan] * prompt
    for turn, purpose, values in runs:
        at = len(logprobs)
        spans += [Span(SpanKind.AGENT, at, at + len(values), turn, purpose)]
        spans += [Span(SpanKind.ENVIRONMENT, at + len(values), at + len(values) + 1, turn)]
        logprobs += [*values, np.nan]
    stream = np.array(logprobs)
    return Segment(np.arange(stream.size), tuple(spans), stream, np.where(np.isfinite(stream), 0, -1))


def scores(one: Segment, gaps: list[float | None], teacher: str = "big", **streams: Any) -> TeacherScores:
    """A teacher that finds each sampled token `gap` nats less likely than the student; None: not scored."""
    logprobs = np.full(len(one), np.nan, np.float32)
    at = np.flatnonzero(one.agent_mask)
    for place, gap in zip(at, gaps, strict=True):
        if gap is not None:
            logprobs[place] = one.logprobs[place] - gap
    return TeacherScores(teacher, logprobs, **streams)


def group(toys: Any, *members: tuple[list[Segment], list[TeacherScores]]) -> GroupResult:
    made = [toys.trajectory(member=i, segments=s, scores=tuple(t)) for i, (s, t) in enumerate(members)]
    return GroupResult("g0", "task", 0, tuple(made))


def test_mean_by_token_and_its_parts(toys: Any) -> None:
    """Tokens weigh alike, not turns or segments; turns and purposes are the spans'; from the tenth on turns are one."""
    first = segment((0, Purpose.ACT, [-1.0, -1.0, -1.0]), (1, Purpose.SUMMARISE, [-0.5]))
    later = segment((10, Purpose.ACT, [-2.0]), (12, Purpose.ACT, [-2.0]))
    found = group(toys, ([first, later], [scores(first, [0.5, 0.5, 0.5, 2.0]), scores(later, [1.0, 4.0])]))
    assert teaching_metrics([found]) == {
        "teacher/scored_tokens": 6.0,
        "teacher/unscored_fraction": 0.0,
        "teacher/kl": pytest.approx(8.5 / 6),
        "teacher/kl_turn/0": pytest.approx(0.5),
        "teacher/kl_turn/1": pytest.approx(2.0),
        "teacher/kl_turn/10+": pytest.approx(2.5),
        "teacher/kl_purpose/act": pytest.approx(6.5 / 5),
        "teacher/kl_purpose/summarise": pytest.approx(2.0),
    }


def test_k38_unscored_tokens_are_counted_and_token_0_is_none_of_them(toys: Any) -> None:
    one = segment((0, Purpose.ACT, [-1.0, -1.0, -1.0, -1.0, -1.0]), prompt=0)
    found = teaching_metrics([group(toys, ([one], [scores(one, [None, 1.0, None, None, 1.0])]))])
    assert found["teacher/unscored_fraction"] == 0.5
    assert (found["teacher/scored_tokens"], found["teacher/kl"]) == (2.0, pytest.approx(1.0))


def test_each_of_several_teachers(toys: Any) -> None:
    one = segment((0, Purpose.ACT, [-1.0, -1.0]))
    alone = teaching_metrics([group(toys, ([one], [scores(one, [1.0, 2.0])]))])
    assert not any(name.startswith("teacher/kl/") for name in alone)
    both = teaching_metrics([group(toys, ([one], [scores(one, [1.0, 2.0])]), ([one], [scores(one, [4.0, 4.0], "b")]))])
    assert (both["teacher/kl/big"], both["teacher/kl/b"]) == (pytest.approx(1.5), pytest.approx(4.0))
    assert both["teacher/kl"] == pytest.approx(11 / 4)


def test_agreement_is_over_scored_tokens_whose_first_choice_is_known(toys: Any) -> None:
    one = segment((0, Purpose.ACT, [-1.0, -1.0, -1.0, -1.0]))
    top1 = np.isin(np.arange(len(one)), [1, 2, 4])
    known = scores(one, [1.0, 1.0, 1.0, None], top1=top1)
    unknown = scores(one, [1.0] * 4)
    found = teaching_metrics([group(toys, ([one], [known]), ([one], [unknown]))])
    assert found["teacher/top1_agreement"] == pytest.approx(2 / 3)


def test_what_cannot_be_had_is_left_out(toys: Any) -> None:
    """No teacher; a failed rollout's scores; a demonstration, which nobody sampled; nothing scored."""
    one = segment((0, Purpose.ACT, [-1.0]))
    assert teaching_metrics([group(toys, ([one], []))]) == {}
    assert teaching_metrics([]) == {}
    failed = toys.trajectory(reward=None, segments=[one], scores=(scores(one, [1.0]),))
    assert teaching_metrics([GroupResult("g0", "task", 0, (failed,))]) == {}
    shown = toys.segment(2, source=Source.DEMONSTRATION)
    told = TeacherScores("big", np.where(shown.agent_mask, -1.0, np.nan).astype(np.float32))
    shown_t = toys.trajectory(source=Source.DEMONSTRATION, segments=[shown], scores=(told,))
    nothing = {"teacher/scored_tokens": 0.0, "teacher/unscored_fraction": 1.0}
    assert teaching_metrics([GroupResult("g0", "task", 0, (shown_t,))]) == nothing
    assert teaching_metrics([group(toys, ([one], [scores(one, [None])]))]) == nothing


def test_of_tokens_scored_together_the_sum_counts(toys: Any) -> None:
    """K39: a span's log-probability stands in equal shares on its tokens; the mean over tokens is that of the sums."""
    one = segment((0, Purpose.ACT, [-0.1, -2.9, -1.0]))
    share = -6.0 / 2
    logprobs = np.array([np.nan, share, share, -1.0, np.nan], np.float32)
    told = TeacherScores("other", logprobs, spans=np.array([-1, 0, 0, 1, -1], np.int32))
    assert teaching_metrics([group(toys, ([one], [told]))])["teacher/kl"] == pytest.approx((6.0 - 3.0 + 0.0) / 3)


def test_waiting_is_the_share_of_the_rollouts_own_time(toys: Any) -> None:
    """Waits for a slot are not the teacher's; a rollout without scores has not waited for it."""
    one = segment((0, Purpose.ACT, [-1.0]))
    told = (scores(one, [1.0]),)
    info = {"wait_s": 50.0, "setup_s": 1.0, "episode_s": 6.0, "score_s": 2.0, "teacher_wait_s": 1.0}
    made = [toys.trajectory(member=i, segments=[one], scores=told if i else (), info=info) for i in range(3)]
    assert teaching_metrics([GroupResult("g0", "task", 0, tuple(made))])["teacher/wait_fraction"] == 0.1

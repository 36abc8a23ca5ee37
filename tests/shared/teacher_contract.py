"""What every teacher must do, ours or a third party's: `for check in CHECKS: await check(teacher, case)`.

A case brings segments whose tokens the teacher has not been asked for before, as many as are wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from agentrl.errors import DeadlineError, TeacherError
from agentrl.trajectory import Segment, TeacherScores
from agentrl.wire import ScoreRequest, Teacher

SAME = 1e-4
"""Nats between two answers of one question (float32)."""


@dataclass(frozen=True, slots=True)
class Case:
    """How a teacher is asked.

    `request()` gives a new request for all of the agent's tokens of a new segment (several turns, ≥ 8 tokens each);
    `too_long()` one for a segment beyond the teacher's window. `same_tokens`: the teacher has the student's tokenizer,
    so that it scores exactly what is asked. `candidates`: how many each scored token gets (None: the vocabulary).
    """

    request: Callable[[], ScoreRequest]
    too_long: Callable[[], ScoreRequest]
    same_tokens: bool = True
    candidates: int | None = 0
    timeout_s: float = 60.0


Check = Callable[[Teacher, Case], Awaitable[None]]


async def _scores(teacher: Teacher, case: Case, request: ScoreRequest) -> TeacherScores:
    found = await teacher.score(request, timeout_s=case.timeout_s)
    found.check(request.segment)
    assert found.teacher == teacher.name
    return found


async def proves_itself(teacher: Teacher, case: Case) -> None:
    """K37: the probe passes and says in lines what it found."""
    ids = case.request().segment.token_ids.tolist()
    lines = await teacher.probe(ids, timeout_s=case.timeout_s)
    assert lines
    assert all(isinstance(line, str) and line for line in lines)


async def scores_what_is_asked(teacher: Teacher, case: Case) -> None:
    """K36: a finite log-probability for each token that was asked for, and none elsewhere."""
    request = case.request()
    found = await _scores(teacher, case, request)
    assert not found.mask[0]
    assert not (found.mask & ~request.mask).any()
    assert found.mask.sum() >= 0.5 * request.mask.sum()
    if case.same_tokens:
        assert np.array_equal(found.mask, request.mask)
        assert found.spans is None
    assert (found.logprobs[found.mask] <= 1e-4).all()


async def says_the_same_again(teacher: Teacher, case: Case) -> None:
    """Asked again it gives the same scores, from disk or not."""
    request = case.request()
    first, again = [await _scores(teacher, case, request) for _ in range(2)]
    assert np.array_equal(first.mask, again.mask)
    assert np.abs(first.logprobs - again.logprobs)[first.mask].max() <= SAME


async def scores_a_part_as_the_whole(teacher: Teacher, case: Case) -> None:
    """A token's score does not depend on which other tokens are asked for; nothing is scored where nothing is asked."""
    request = case.request()
    whole = await _scores(teacher, case, request)
    part = request.mask.copy()
    part[np.flatnonzero(part)[::3]] = False
    if case.same_tokens:
        some = await _scores(teacher, case, replace(request, mask=part))
        assert np.array_equal(some.mask, part)
        assert np.abs(some.logprobs - whole.logprobs)[part].max() <= SAME
    none = await _scores(teacher, case, replace(request, mask=np.zeros_like(part)))
    assert not none.mask.any()


async def looks_at_what_stands_before(teacher: Teacher, case: Case) -> None:
    """K6: the score of token t is of token t given those before it: a later token changes none, an earlier one does."""
    if not case.same_tokens:
        return
    request = case.request()
    agent = np.flatnonzero(request.mask)
    cut = int(agent[len(agent) // 2])
    whole = await _scores(teacher, case, request)
    changed = replace(request, segment=_with_token(request.segment, cut, at=int(agent[0])))
    other = await _scores(teacher, case, changed)
    moved = np.abs(other.logprobs - whole.logprobs) > SAME
    assert not moved[:cut].any()
    assert moved[cut:].any()


def _with_token(segment: Segment, position: int, *, at: int) -> Segment:
    """The segment with its token at `position` replaced by the one that stands at `at`, or before it."""
    ids = segment.token_ids.copy()
    others = [token for token in ids[: at + 1] if token != ids[position]]
    ids[position] = others[-1]
    return replace(segment, token_ids=ids)


async def gives_candidates(teacher: Teacher, case: Case) -> None:
    """As many candidates as are wanted, probabilities at temperature 1, and the token's own score among them."""
    request = case.request()
    found = await _scores(teacher, case, request)
    if case.candidates == 0:
        assert found.candidate_logprobs is None
        return
    assert found.candidate_logprobs is not None
    values = np.where(np.isfinite(found.candidate_logprobs), found.candidate_logprobs, -np.inf).astype(np.float64)
    mass = np.exp(values).sum(axis=1)
    assert mass.max() <= 1 + 1e-3
    own, tokens = found.logprobs[found.mask], request.segment.token_ids[found.mask]
    if found.candidate_ids is None:
        assert case.candidates is None
        assert mass.min() >= 1 - 1e-3
        assert np.abs(values[np.arange(len(own)), tokens] - own).max() <= SAME
        return
    assert values.shape[1] == case.candidates
    among = found.candidate_ids == tokens[:, None]
    assert np.abs(values - own[:, None])[among].max(initial=0.0) <= SAME
    if found.top1 is not None:
        assert np.array_equal(found.top1[found.mask], among[:, 0])


async def scores_many_at_once(teacher: Teacher, case: Case) -> None:
    """Side by side each request gets its own scores."""
    requests = [case.request() for _ in range(6)]
    together = await asyncio.gather(*(_scores(teacher, case, one) for one in requests))
    for one, found in zip(requests, together, strict=True):
        alone = await _scores(teacher, case, one)
        assert np.array_equal(alone.mask, found.mask)
        assert np.abs(alone.logprobs - found.logprobs)[found.mask].max() <= SAME


async def keeps_its_deadline(teacher: Teacher, case: Case) -> None:
    """Too little time is a `DeadlineError`, or an answer that is there at once, no other error; then it goes on."""
    with contextlib.suppress(DeadlineError):
        await _scores(teacher, replace(case, timeout_s=1e-6), case.request())
    await _scores(teacher, case, case.request())


async def refuses_what_does_not_fit(teacher: Teacher, case: Case) -> None:
    """A segment beyond its window is an error that says where and what to do, never part of a score."""
    request = case.too_long()
    with pytest.raises(TeacherError) as caught:
        await teacher.score(request, timeout_s=case.timeout_s)
    assert request.trajectory_id in caught.value.where
    assert caught.value.remedy


CHECKS: tuple[Check, ...] = (
    proves_itself,
    scores_what_is_asked,
    says_the_same_again,
    scores_a_part_as_the_whole,
    looks_at_what_stands_before,
    gives_candidates,
    scores_many_at_once,
    keeps_its_deadline,
    refuses_what_does_not_fit,
)

"""What the scoring process answers when the model fails: the one that cannot be scored is refused, no other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from agentrl_teachers.worker import answers
from agentrl_teachers.worker_messages import Refused, Score, Scored


class Model:
    """Holds `room` tokens at once; beyond that it fails with `error`. `broken`: so does what comes after a failure."""

    def __init__(self, room: int, *, error: type[Exception] = RuntimeError, broken: bool = False) -> None:
        self._room, self._error, self._broken = room, error, broken
        self.asked: list[list[int]] = []
        self.freed = 0

    def fault(self, request: Score) -> str | None:
        return None

    def free(self) -> None:
        self.freed += 1
        if self._broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def score(self, requests: Sequence[Score]) -> list[Scored]:
        self.asked.append([request.number for request in requests])
        if sum(len(request.token_ids) for request in requests) > self._room:
            raise self._error("out of memory")
        return [scored(request) for request in requests]


def scored(request: Score) -> Scored:
    own, none = np.zeros(len(request.positions), np.float32), np.zeros((len(request.positions), 0), np.float32)
    return Scored(number=request.number, logprobs=own, top1=own > 0, top_ids=none.astype(np.int32), top_logprobs=none)


def request(number: int, length: int, *, vocabulary: bool = False) -> Score:
    ids = np.arange(length, dtype=np.int32)
    return Score(number=number, token_ids=ids, positions=ids[1:], vocabulary=vocabulary)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_what_does_not_fit_together_is_scored_one_by_one(error: type[Exception]) -> None:
    model = Model(10, error=error)
    got = list(answers(model, [request(number, 6) for number in range(3)]))  # type: ignore[arg-type]
    assert [(type(one), one.number) for one in got] == [(Scored, 0), (Scored, 1), (Scored, 2)]
    assert model.asked == [[0, 1, 2], [0], [1], [2]]
    assert model.freed == 1


@pytest.mark.parametrize("error", [RuntimeError, MemoryError])
def test_what_does_not_fit_alone_is_refused_alone(error: type[Exception]) -> None:
    model = Model(10, error=error)
    got = {one.number: one for one in answers(model, [request(0, 6), request(1, 11), request(2, 6)])}  # type: ignore[arg-type]
    assert isinstance(got[0], Scored)
    assert isinstance(got[2], Scored)
    refused = got[1]
    assert isinstance(refused, Refused)
    assert refused.what == f"{error.__name__}: out of memory"
    assert "agent.max_tokens" in refused.remedy
    assert model.freed == 2


def test_of_the_whole_vocabulary_one_answer_is_made_at_a_time() -> None:
    model = Model(100)
    asked = [request(0, 6, vocabulary=True), request(1, 6), request(2, 6, vocabulary=True), request(3, 6)]
    coming = answers(model, asked)  # type: ignore[arg-type]
    assert next(coming).number == 0
    assert model.asked == [[0]]
    assert [one.number for one in coming] == [2, 1, 3]
    assert model.asked == [[0], [2], [1, 3]]


def test_a_device_that_has_failed_ends_the_process() -> None:
    """Nothing can be computed there any more: the teacher is dead, no segment is at fault."""
    with pytest.raises(RuntimeError, match="illegal memory access"):
        list(answers(Model(1, broken=True), [request(0, 6)]))  # type: ignore[arg-type]

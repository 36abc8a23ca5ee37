"""`TokenTeacher` over a server that misbehaves: nothing that it did not say becomes a score."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from teacher_stand_in import StandInTeacher, serving
from teacher_toys import ToyModel, ToySource, request, teacher_spec

from agentrl.errors import (
    DeadlineError,
    TeacherDeadError,
    TeacherError,
    TeacherRefusedError,
    TeacherRequestError,
)
from agentrl.wire import Teacher, TokenScores
from agentrl_teachers import checked, openai_source
from agentrl_teachers.servers import open_server
from agentrl_teachers.source import TeacherBusyError
from agentrl_teachers.token_teacher import TokenTeacher


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "_FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(openai_source, "_RETRY_DELAYS_S", (0.001, 0.001))


@asynccontextmanager
async def opened(folder: Path, **changes: Any) -> AsyncIterator[tuple[StandInTeacher, Any]]:
    async with serving() as server, open_server(teacher_spec(folder, model=server.url, **changes)) as teacher:
        yield server, teacher


def test_scores_are_the_models_own(tmp_path: Path) -> None:
    """K6: each token's score is its own, given the token before it; candidates are the model's most likely tokens."""

    async def run() -> None:
        async with opened(tmp_path, top_k=3) as (_, teacher):
            asked = request()
            got = await teacher.score(asked, timeout_s=10)
        ids, table = asked.segment.token_ids, ToyModel().table
        positions = np.flatnonzero(asked.mask)
        assert np.abs(got.logprobs[positions] - table[ids[positions - 1], ids[positions]]).max() < 1e-5
        assert np.isnan(got.logprobs[~asked.mask]).all()
        best = np.argsort(-table[ids[positions - 1]], axis=1)[:, :3]
        assert np.array_equal(got.candidate_ids, best)
        assert np.array_equal(got.top1[positions], best[:, 0] == ids[positions])

    asyncio.run(run())


def _nan(given: list[Any]) -> list[Any]:
    """NaN as Python's JSON writes it, at every position."""
    for entries in given[1:]:
        next(iter(entries.values()))["logprob"] = math.nan
    return given


def _null(given: list[Any]) -> list[Any]:
    for entries in given[1:]:
        next(iter(entries.values()))["logprob"] = None
    return given


def _clamped(given: list[Any]) -> list[Any]:
    """What vLLM writes for −inf."""
    for entries in given[1:]:
        next(iter(entries.values()))["logprob"] = -9999.0
    return given


def _short(given: list[Any]) -> list[Any]:
    return given[:-3]


def _other_ids(given: list[Any]) -> list[Any]:
    """Another token's entry in each place."""
    return [None, *({str(int(key) + 1): value for key, value in entries.items()} for entries in given[1:])]


def _logits(given: list[Any]) -> list[Any]:
    for entries in given[1:]:
        for entry in entries.values():
            entry["logprob"] += 9.0
    return given


def _hot(given: list[Any]) -> list[Any]:
    """Half of each logarithm: what a temperature of 2 gives before it is normalised."""
    for entries in given[1:]:
        for entry in entries.values():
            entry["logprob"] *= 0.5
    return given


def _crowded(given: list[Any]) -> list[Any]:
    """More than eight candidates among the best eight."""
    for entries in given[1:]:
        entries.update({str(900 + n): {"logprob": -9.0, "rank": 8} for n in range(9)})
    return given


def _huge_id(given: list[Any]) -> list[Any]:
    for entries in given[1:]:
        entries[str(2**31)] = {"logprob": -9.0, "rank": 8}
    return given


def _none(given: list[Any]) -> None:
    return None


SPOILT: list[tuple[Callable[..., Any], str]] = [
    (_nan, "not understood"),
    (_null, "log-probability None of prompt token"),
    (_clamped, "log-probability -9999"),
    (_short, "prompt log-probabilities for"),
    (_other_ids, "no log-probability of prompt token"),
    (_logits, "cannot be scores"),
    (_hot, "probabilities that make up"),
    (_crowded, "candidates of rank 8 or better"),
    (_huge_id, r"2147483648 at \d+ is no token id"),
    (_none, "0 prompt log-probabilities"),
]


@pytest.mark.parametrize(("fault", "words"), SPOILT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_spoilt_answer_is_asked_for_again_then_an_error(fault: Any, words: str, tmp_path: Path) -> None:
    """K36: no missing score is filled in. One spoilt answer costs a second request; three cost the segment."""

    async def run() -> None:
        async with opened(tmp_path, retries=2, top_k=8) as (server, teacher):
            server.fault, server.faults = fault, 1
            good = await teacher.score(request(), timeout_s=10)
            assert np.isfinite(good.logprobs[request().mask]).all()
            assert len(server.requests) == 2
            server.faults = 3
            with pytest.raises(TeacherRequestError, match=words) as caught:
                await teacher.score(replace(request(), trajectory_id="r7", index=2), timeout_s=10)
            assert len(server.requests) == 5
            assert "trajectory r7, segment 2" in caught.value.where

    asyncio.run(run())


def test_a_busy_server_is_asked_again_and_a_refusal_is_final(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path, retries=2) as (server, teacher):
            for server.status in (500, 503, 429):
                server.requests.clear()
                server.statuses = 2
                await teacher.score(request(), timeout_s=10)
                assert len(server.requests) == 3
            server.requests.clear()
            server.status, server.statuses = 400, 1
            with pytest.raises(TeacherRefusedError, match="answered 400: as told"):
                await teacher.score(request(), timeout_s=10)
            assert len(server.requests) == 1

    asyncio.run(run())


def test_a_busy_server_is_asked_until_there_is_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """429 and 503 cost no try, and the waits between them stop growing; any other failure costs one as ever."""
    monkeypatch.setattr(checked, "_MOST_WAIT_S", 0.004)

    async def run() -> None:
        async with opened(tmp_path, retries=0) as (server, teacher):
            for server.status in (429, 503):
                server.statuses = 25
                await teacher.score(request(), timeout_s=10)
            server.status, server.statuses = 500, 1
            with pytest.raises(TeacherRequestError, match="answered 500"):
                await teacher.score(request(), timeout_s=10)
            server.status, server.statuses = 503, 1_000_000
            with pytest.raises(
                DeadlineError, match=r"within 0\.3 s \(teacher teacher answered 503: as told\)"
            ) as caught:
                await teacher.score(request(), timeout_s=0.3)
            assert "trajectory r, segment 0" in caught.value.where

    asyncio.run(run())


def test_a_busy_source_is_not_asked_before_it_wants_to_be(tmp_path: Path) -> None:
    class Busy(ToySource):
        busy = 1

        async def score(self, *given: Any, **how: Any) -> TokenScores:
            if self.busy:
                self.busy -= 1
                raise TeacherBusyError("full", after_s=0.2)
            return await super().score(*given, **how)

    async def run() -> float:
        began = time.monotonic()
        teacher = TokenTeacher(Busy(), teacher_spec(tmp_path, retries=0), identity="toy")
        await teacher.score(request(), timeout_s=10)
        return time.monotonic() - began

    assert 0.2 <= asyncio.run(run()) < 5


def test_a_dropped_connection_is_tried_again_then_the_teacher_is_dead(tmp_path: Path) -> None:
    """Killed mid-run: the run ends at once and can go on later."""

    async def run() -> None:
        async with opened(tmp_path, retries=5) as (server, teacher):
            server.drops = 2
            await teacher.score(request(), timeout_s=10)
            server.drops = 1000
            server.requests.clear()
            with pytest.raises(TeacherDeadError, match="is gone") as caught:
                await teacher.score(request(), timeout_s=10)
            assert len(server.requests) == 3
            assert "--resume" in caught.value.remedy

    asyncio.run(run())


def test_a_server_that_is_gone_is_dead(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving() as server:
            manager = open_server(teacher_spec(tmp_path, model=server.url))
            teacher = await manager.__aenter__()
        with pytest.raises(TeacherDeadError, match="is gone"):
            await teacher.score(request(), timeout_s=10)
        await manager.__aexit__(None, None, None)

    asyncio.run(run())


def test_a_slow_teacher_is_a_deadline_and_frees_its_place(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path, concurrency=1) as (server, teacher):
            server.delay_s = 30.0
            with pytest.raises(DeadlineError, match=r"within 0\.05 s") as caught:
                await teacher.score(request(), timeout_s=0.05)
            assert "distill.timeout_s" in caught.value.remedy
            assert "trajectory r" in caught.value.where
            server.delay_s = 0.0
            await teacher.score(request(), timeout_s=10)

    asyncio.run(run())


def test_no_more_requests_at_once_than_there_is_room_for(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path, concurrency=3) as (server, teacher):
            server.delay_s = 0.01
            await asyncio.gather(*(teacher.score(request(), timeout_s=10) for _ in range(12)))
            assert server.most_at_once == 3

    asyncio.run(run())


def test_a_segment_beyond_the_window_is_never_sent(tmp_path: Path) -> None:
    """K37: a teacher with a shorter context gives no part of a score."""

    async def run() -> None:
        async with serving() as server:
            server.max_model_len = len(request().segment)
            async with open_server(teacher_spec(tmp_path, model=server.url)) as teacher:
                with pytest.raises(TeacherRefusedError, match="cannot be scored in the window"):
                    await teacher.score(request(), timeout_s=10)
                assert server.requests == []

    asyncio.run(run())


def test_token_0_and_the_whole_vocabulary_are_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path, top_k=None) as (_, teacher):
            asked = request()
            with pytest.raises(TeacherRefusedError, match="own most likely tokens only"):
                await teacher.score(asked, timeout_s=10)
            mask = asked.mask.copy()
            mask[0] = True
            with pytest.raises(TeacherError, match="token 0"):
                await teacher.score(replace(asked, mask=mask), timeout_s=10)

    asyncio.run(run())


def test_what_is_sent(tmp_path: Path) -> None:
    """K37: temperature 1 is said, and the prompt is the student's ids with nothing added."""

    async def run() -> None:
        async with opened(tmp_path, top_k=5) as (server, teacher):
            asked = request()
            await teacher.score(asked, timeout_s=10)
            sent = server.requests[0]
        assert sent["prompt"] == asked.segment.token_ids.tolist()
        wanted = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 5, "add_special_tokens": False, "n": 1}
        assert {key: sent[key] for key in wanted} == wanted

    asyncio.run(run())


def test_a_key_is_sent_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def probe(server: StandInTeacher) -> Teacher:
        async with open_server(teacher_spec(tmp_path, model=server.url + "/v1")) as teacher:
            return teacher

    async def run() -> None:
        async with serving() as server:
            server.api_key = "secret"
            with pytest.raises(TeacherError, match="answered 401"):
                await probe(server)
            monkeypatch.setenv("AGENTRL_TEACHER_API_KEY", "secret")
            await probe(server)

    asyncio.run(run())

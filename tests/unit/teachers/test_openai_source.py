"""A plain server as a source: whatever it answers is a score, a token, or an error of the teachers' own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from teacher_stand_in import StandInTeacher, serving
from teacher_toys import ANSWER, TEXT, ToyModel, request, segment, teacher_spec

from agentrl.errors import (
    TeacherDeadError,
    TeacherRequestError,
    TeacherStartError,
    TeacherUnfitError,
)
from agentrl.wire import Teacher
from agentrl_teachers import openai_source
from agentrl_teachers.openai_source import OpenAISource
from agentrl_teachers.servers import open_server
from agentrl_teachers.source import TeacherBusyError

IDS = request().segment.token_ids.tolist()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_source, "_RETRY_DELAYS_S", (0.001, 0.001))


@asynccontextmanager
async def opened(api_key: str | None = None) -> AsyncIterator[tuple[StandInTeacher, OpenAISource]]:
    async with serving() as server:
        source = await OpenAISource.open(server.url, name="t", api_key=api_key, timeout_s=10)
        try:
            yield server, source
        finally:
            await source.aclose()


async def score(source: OpenAISource) -> np.ndarray:
    return (await source.score(IDS, top_k=0, timeout_s=10)).logprobs


# --- how it is asked ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["secret\n", "  secret ", "\tsecret\r\n"])
def test_space_around_a_key_is_none_of_it(key: str) -> None:
    """As it is read from a file."""

    async def run() -> None:
        async with serving() as server:
            server.api_key = "secret"
            source = await OpenAISource.open(server.url, name="t", api_key=key, timeout_s=10)
            await source.aclose()

    asyncio.run(run())


@pytest.mark.parametrize(("key", "user"), [("sec\nret", ""), ("secret", "user:pass@")])
def test_a_key_that_cannot_be_sent_is_named(key: str, user: str) -> None:
    async def run() -> None:
        async with serving() as server:
            url = server.url.replace("//", f"//{user}")
            await OpenAISource.open(url, name="t", api_key=key, timeout_s=10)

    with pytest.raises(TeacherStartError, match="cannot be asked") as caught:
        asyncio.run(run())
    assert "AGENTRL_TEACHER_API_KEY" in caught.value.remedy


@pytest.mark.parametrize(("said", "after_s"), [("7", 7.0), (None, None), ("Wed, 21 Oct 2026 07:28:00 GMT", None)])
@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_says_when_to_come_again(status: int, said: str | None, after_s: float | None) -> None:
    async def run() -> None:
        async with opened() as (server, source):
            server.status, server.statuses = status, 1
            server.headers = {"Retry-After": said} if said else {}
            with pytest.raises(TeacherBusyError, match=f"answered {status}: as told") as caught:
                await score(source)
            assert caught.value.after_s == after_s

    asyncio.run(run())


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize(
    "raw", [b"", b"[" * 100_000, b'{"error": "\xff"}', b"null"], ids=["none", "deep", "bytes", "null"]
)
def test_an_answer_that_is_none_is_a_request_that_failed(raw: bytes, status: int) -> None:
    async def run() -> None:
        async with opened() as (server, source):
            server.raw, server.status = raw, status
            with pytest.raises(TeacherRequestError, match="not understood" if status == 200 else "answered 500"):
                await score(source)

    asyncio.run(run())


# --- what it says of tokens -----------------------------------------------------------------------------------------


def _fewer_strings(answer: dict[str, Any]) -> dict[str, Any]:
    return answer | {"token_strs": answer["token_strs"][:-1]}


def _huge(answer: dict[str, Any]) -> dict[str, Any]:
    return answer | {"tokens": [*answer["tokens"][:-1], 2**31]}


def _negative(answer: dict[str, Any]) -> dict[str, Any]:
    return answer | {"tokens": [*answer["tokens"][:-1], -1]}


def _two_spellings(answer: dict[str, Any]) -> dict[str, Any]:
    first = answer["tokens"][0]
    return answer | {"tokens": [first, first], "token_strs": ["a", "b"]}


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_fewer_strings, "token_strs of"),
        (_huge, "not understood"),
        (_negative, "not understood"),
        (_two_spellings, "spells token"),
    ],
)
def test_tokens_that_cannot_be_are_a_request_that_failed(spoil: Callable[..., Any], words: str) -> None:
    async def run() -> None:
        async with opened() as (server, source):
            server.tokenized = spoil
            with pytest.raises(TeacherRequestError, match=words):
                await source.encode("def f(x):", timeout_s=10)

    asyncio.run(run())


def test_a_server_that_does_not_spell_its_tokens_is_unfit_for_bytes() -> None:
    async def run() -> None:
        async with opened() as (server, source):
            server.tokenized = lambda answer: answer | {"token_strs": None}
            ids = await source.encode("def f(x):", timeout_s=10)
            with pytest.raises(TeacherUnfitError, match="does not tell what token"):
                await source.token_bytes(ids, timeout_s=10)

    asyncio.run(run())


def test_a_text_that_the_server_changes_has_no_span_and_costs_nothing_else(tmp_path: Path) -> None:
    """A tokenizer that normalises, found out in the middle of a run: the rest of the segment keeps its scores."""
    made = segment("I look at it… and print(1)\n", ANSWER)

    async def run() -> np.ndarray:
        async with serving() as server:
            server.reads = lambda text: text.replace("…", "...")
            spec = teacher_spec(tmp_path, model=server.url, top_k=0, align_bytes=True)
            async with open_server(spec) as teacher:
                await teacher.probe(IDS, timeout_s=10)
                scores = await teacher.score(request(made), timeout_s=10)
                scores.check(made)
                return scores.mask

    mask = asyncio.run(run())
    first, second = (span for span in made.spans if span.purpose is not None)
    assert mask[second.start : second.stop].all()
    lost = np.flatnonzero(~mask[first.start : first.stop]) + first.start
    said = b"".join(TEXT.token_bytes(made.token_ids[lost].tolist())).decode()
    assert "…" in said
    assert len(said) <= 6


# --- one model, whatever happens to the server ----------------------------------------------------------------------


def test_an_answer_for_another_model_ends_the_teacher() -> None:
    async def run() -> None:
        async with opened() as (server, source):
            await score(source)
            server.answers_for = "other"
            with pytest.raises(TeacherDeadError, match="answers for 'other' where 'plain' was asked") as caught:
                await score(source)
            assert "--resume" in caught.value.remedy

    asyncio.run(run())


def test_a_model_that_is_not_there_any_more_ends_the_teacher() -> None:
    async def run() -> None:
        async with opened() as (server, source):
            server.status, server.statuses = 404, 1
            with pytest.raises(TeacherDeadError, match="is gone: answered 404: as told"):
                await score(source)

    asyncio.run(run())


def _kept(folder: Path) -> set[str]:
    return {path.name for path in (folder / "cache").glob("*/*/*")}


@asynccontextmanager
async def probed(folder: Path) -> AsyncIterator[tuple[StandInTeacher, Teacher]]:
    async with serving() as server:
        spec = teacher_spec(folder, model=server.url, retries=0, cache=folder / "cache")
        async with open_server(spec) as teacher:
            await teacher.probe(IDS, timeout_s=10)
            yield server, teacher


def test_a_server_that_comes_back_with_other_weights_ends_the_teacher(tmp_path: Path) -> None:
    """Started again under its old name, with another model: none of its scores is kept."""

    async def run() -> None:
        async with probed(tmp_path) as (server, teacher):
            kept = _kept(tmp_path)
            server.drops, server.model = 1, ToyModel(1)
            for _ in range(3):
                with pytest.raises(TeacherDeadError, match="is another model now: a prompt's scores differ"):
                    await teacher.score(request(), timeout_s=10)
            assert _kept(tmp_path) == kept != set()

    asyncio.run(run())


def test_a_server_that_was_started_again_while_nobody_asked_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request fails: idle connections are closed, and the next one reaches another server."""
    monkeypatch.setattr(openai_source, "_KEEP_ALIVE_S", 0.05)

    async def run() -> None:
        async with probed(tmp_path) as (server, teacher):
            kept = _kept(tmp_path)
            await asyncio.sleep(0.3)
            server.model = ToyModel(1)
            with pytest.raises(TeacherDeadError, match="is another model now: a prompt's scores differ"):
                await teacher.score(request(), timeout_s=10)
            assert _kept(tmp_path) == kept

    asyncio.run(run())


def test_a_server_that_comes_back_as_it_was_is_asked_once_more_and_trusted(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving() as server, open_server(teacher_spec(tmp_path, model=server.url)) as teacher:
            await teacher.probe(IDS, timeout_s=10)
            server.requests.clear()
            server.drops = 1
            await teacher.score(request(), timeout_s=10)
            assert [sent["prompt_logprobs"] for sent in server.requests] == [4, 4, 0]
            await teacher.score(request(), timeout_s=10)
            assert len(server.requests) == 4

    asyncio.run(run())

"""The real vLLM as a teacher: a frozen server of ours, and a plain OpenAI server that we did not start.

Both serve the shipped policy, so that the student is the teacher; the oracle is a float32 recompute with transformers.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import numpy as np
import pytest
import teacher_contract as contract
from plain_vllm import plain_vllm
from policy_oracle import Trainer
from teacher_toys import ANSWER, PROMPT, TEXT, TINY, request, segment, teacher_spec

from agentrl.errors import TeacherDeadError
from agentrl.policy import VllmClient
from agentrl.wire import SamplingParams
from agentrl_teachers.servers import open_server, open_vllm

pytestmark = pytest.mark.vllm

SAME = 1e-4
WANTED = 32
IDS = request().segment.token_ids.tolist()


@dataclass
class Opened:
    """A teacher in an event loop of its own; `kill` ends its server as a crash would."""

    runner: asyncio.Runner
    teacher: Any
    notes: list[str]
    candidates: int
    url: str
    kill: Callable[[], None]


def _open(runner: asyncio.Runner, manager: Any, **values: Any) -> Opened:
    teacher = runner.run(manager.__aenter__())
    notes = runner.run(teacher.probe(IDS, timeout_s=120))
    return Opened(runner, teacher, notes, **values)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """Kind `vllm`."""
    folder = tmp_path_factory.mktemp("own")
    with asyncio.Runner() as runner:
        manager = open_vllm(teacher_spec(folder, name="own", model="tiny", top_k=WANTED, cache=folder / "cache"))
        opened = _open(runner, manager, candidates=WANTED, url="", kill=lambda: None)
        client = opened.teacher._checked.source._client
        opened.url, opened.kill = client.url, lambda: os.kill(client._server.api_pid, signal.SIGKILL)
        yield opened
        runner.run(manager.__aexit__(None, None, None))
    assert (folder / "teacher-own.log").is_file()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """Kind `server`."""
    folder = tmp_path_factory.mktemp("plain")
    with plain_vllm(TINY, folder / "plain.log") as (url, group), asyncio.Runner() as runner:
        manager = open_server(teacher_spec(folder, name="plain", model=url, top_k=WANTED))
        yield _open(runner, manager, candidates=20, url=url, kill=lambda: os.killpg(group, signal.SIGKILL))
        runner.run(manager.__aexit__(None, None, None))


@pytest.fixture(params=["own", "plain"])
def opened(request: pytest.FixtureRequest) -> Opened:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(TINY, tmp_path_factory.mktemp("oracle"))


NUMBERS = itertools.count()


def new() -> contract.ScoreRequest:
    return request(segment(f"{next(NUMBERS)}. {ANSWER}", ANSWER))


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: contract.Check, opened: Opened) -> None:
    def too_long() -> contract.ScoreRequest:
        return replace(request(segment(*[ANSWER] * 20)), trajectory_id="long")

    case = contract.Case(request=new, too_long=too_long, candidates=opened.candidates)
    opened.runner.run(check(opened.teacher, case))


async def _sample_from(url: str, prompt: list[int]) -> float:
    """Sample one token twice, so that the second reads the first one's keys; how many tokens were read from there."""
    async with aiohttp.ClientSession() as session:
        for _ in range(2):
            body = {"model": str(TINY), "prompt": prompt, "max_tokens": 1}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
        async with session.get(f"{url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))


def test_a_warm_prefix_changes_nothing(plain: Opened, oracle: Trainer) -> None:
    """K26: with the prompt's keys in the server's prefix cache, every position still has its own score."""
    asked = request(segment(ANSWER, ANSWER, prompt=PROMPT * 4))
    ids = asked.segment.token_ids.tolist()
    assert plain.runner.run(_sample_from(plain.url, ids)) > 0
    got = plain.runner.run(plain.teacher.score(asked, timeout_s=60))
    assert np.abs(got.logprobs[1:] - oracle.logprobs(ids))[asked.mask[1:]].max() < SAME


def test_scores_equal_the_trainers(opened: Opened, oracle: Trainer) -> None:
    """K6: student = teacher gives no difference above 1e-4 per token in float32."""
    asked = new()
    got = opened.runner.run(opened.teacher.score(asked, timeout_s=60))
    expected = oracle.logprobs(asked.segment.token_ids.tolist())
    positions = np.flatnonzero(asked.mask)
    assert np.abs(got.logprobs[positions] - expected[positions - 1]).max() < SAME


def test_what_the_student_sampled_has_the_same_scores(own: Opened, plain: Opened) -> None:
    """K6: scored by either server, a token has the log-probability with which it was sampled."""

    async def sampled() -> tuple[list[int], np.ndarray]:
        async with VllmClient(own.url, max_model_len=512) as client:
            await client.label_version(0)
            prompt = TEXT.encode(PROMPT * 3)
            got = await client.generate(prompt, SamplingParams(max_tokens=60), request_id="s", timeout_s=60)
            return [*prompt, *got.token_ids.tolist()], got.logprobs

    ids, logprobs = own.runner.run(sampled())
    agent = np.arange(len(ids)) >= len(ids) - len(logprobs)
    base = segment(ANSWER)
    spans = (replace(base.spans[0], stop=len(ids) - len(logprobs)),)
    spans += (replace(base.spans[1], start=len(ids) - len(logprobs), stop=len(ids)),)
    one = replace(
        base,
        token_ids=np.array(ids),
        spans=spans,
        logprobs=np.where(agent, np.pad(logprobs, (len(ids) - len(logprobs), 0)), np.nan),
        versions=np.where(agent, 0, -1),
    )
    for teacher in (own, plain):
        got = teacher.runner.run(teacher.teacher.score(request(one), timeout_s=60))
        assert np.abs(got.logprobs[agent] - logprobs).max() < SAME


def test_the_probe_says_what_it_found(own: Opened, plain: Opened) -> None:
    """A plain server allows 20 log-probabilities: fewer candidates, said in a line; ours gives what is wanted."""
    for one in (own, plain):
        text = "\n".join(one.notes)
        assert "same tokenizer (1024 tokens" in text
        assert "same chat template" in text
        assert "the same when asked again" in text
    assert f"20 candidates per token instead of {WANTED}: the server gives no more" in plain.notes
    assert not any("instead of" in note for note in own.notes)


def test_both_tell_the_bytes_of_tokens(own: Opened, plain: Opened) -> None:
    """A server's /tokenize and a folder's tokenizer agree, control tokens and broken characters included."""
    text = "<|im_start|>user\nnaïve 中文 🙂\n\tdef f(x):\r\n  return x<|im_end|>"
    for one in (own, plain):
        source = one.teacher._checked
        ids = one.runner.run(source.encode(text, timeout_s=30))
        assert ids == TEXT.encode(text)
        assert one.runner.run(source.token_bytes(ids, timeout_s=30)) == TEXT.token_bytes(ids)


def test_z_a_killed_teacher_is_dead_at_once(opened: Opened) -> None:
    """Killed in the middle of a request: the run's error, not a lost rollout. Last, for it ends the server."""

    async def killed() -> float:
        asked = [asyncio.create_task(opened.teacher.score(new(), timeout_s=60)) for _ in range(8)]
        await asyncio.sleep(0.05)
        opened.kill()
        began = time.monotonic()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert any(isinstance(one, TeacherDeadError) for one in results)
        assert all(isinstance(one, TeacherDeadError) or not isinstance(one, BaseException) for one in results)
        with pytest.raises(TeacherDeadError, match=opened.teacher.name):
            await opened.teacher.score(new(), timeout_s=60)
        return time.monotonic() - began

    assert opened.runner.run(killed()) < 30

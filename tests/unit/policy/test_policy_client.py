"""`VllmClient` against the stand-in: the contract, what is sent, and what happens when the server is gone."""

from __future__ import annotations

import asyncio
import json
import math

import numpy as np
import policy_contract
import policy_stand_in
import pytest

from agentrl.errors import PolicyDeadError, PolicyRequestError, WeightDeliveryError
from agentrl.policy import ServerExit, VllmClient
from agentrl.policy.payload import generate_body, parse_generation
from agentrl.policy.server import free_port
from agentrl.wire import SamplingParams


class Dead:
    """A process that has ended."""

    async def wait_dead(self) -> ServerExit:
        return ServerExit(exit_code=-9, log_tail="last words")


@pytest.mark.parametrize("check", policy_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: policy_contract.Check) -> None:
    async def run() -> None:
        window = policy_contract.WINDOW
        async with (
            policy_stand_in.serving() as server,
            VllmClient(server.url, max_model_len=window) as client,
        ):
            await check(client, policy_stand_in.VOCABULARY)

    asyncio.run(run())


def test_a_pattern_goes_to_the_servers_grammar() -> None:
    params = SamplingParams(max_tokens=5, pattern="a+")
    sent = json.loads(generate_body([5], params, request_id="r"))["sampling_params"]
    assert sent["structured_outputs"] == {"regex": "a+"}


def test_every_sampling_field_is_sent_and_never_a_seed() -> None:
    """K8, K10: nothing is left to the server's defaults; the caller's parameters are not changed."""

    async def run() -> None:
        async with policy_stand_in.serving() as server, VllmClient(server.url, max_model_len=128) as client:
            params = SamplingParams(max_tokens=500, temperature=0.7, stop_token_ids=(2,))
            await client.generate([5, 6], params, request_id="r", timeout_s=10, priority=3)
            assert params.max_tokens == 500
            sent = server.requests[0]
        assert (sent["token_ids"], sent["request_id"], sent["priority"]) == ([5, 6], "r", 3)
        assert sent["sampling_params"] == {
            "n": 1,
            "max_tokens": 126,
            "min_tokens": 0,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "logit_bias": None,
            "allowed_token_ids": None,
            "bad_words": [],
            "stop": [],
            "stop_token_ids": [2],
            "structured_outputs": None,
            "ignore_eos": True,
            "logprobs": 0,
            "prompt_logprobs": None,
            "detokenize": False,
        }

    asyncio.run(run())


def test_a_full_window_sends_nothing() -> None:
    """K11: no request, no retry."""

    async def run() -> None:
        async with policy_stand_in.serving() as server, VllmClient(server.url, max_model_len=128) as client:
            await client.generate(np.full(128, 5), SamplingParams(max_tokens=5), request_id="r", timeout_s=10)
            assert server.requests == []

    asyncio.run(run())


def test_a_label_that_is_no_number_is_a_delivery_error() -> None:
    async def run() -> None:
        async with policy_stand_in.serving() as server, VllmClient(server.url, max_model_len=128) as client:
            server.label = "default"
            with pytest.raises(WeightDeliveryError, match="'default', which is no policy version"):
                await client.generate([5], SamplingParams(max_tokens=2), request_id="r", timeout_s=10)
            with pytest.raises(WeightDeliveryError, match="no policy version"):
                await client.version()
            await client.label_version(3)
            assert await client.version() == 3

    asyncio.run(run())


def test_a_dropped_connection_is_tried_again_and_no_more_than_twice() -> None:
    """K23: the one retry layer."""

    async def run() -> None:
        async with policy_stand_in.serving() as server, VllmClient(server.url, max_model_len=128) as client:
            server.drop_connections = 2
            got = await client.generate([5], SamplingParams(max_tokens=2), request_id="r", timeout_s=10)
            assert len(got.token_ids) == 2
            server.drop_connections = 3
            with pytest.raises(PolicyDeadError, match="no connection"):
                await client.generate([5], SamplingParams(max_tokens=2), request_id="r", timeout_s=10)
            assert server.drop_connections == 0

    asyncio.run(run())


def test_a_server_that_ended_is_named_at_once() -> None:
    async def run() -> None:
        url = f"http://127.0.0.1:{free_port()}"
        async with VllmClient(url, max_model_len=128, server=Dead()) as client:
            with pytest.raises(PolicyDeadError, match="ended with exit code -9") as caught:
                await client.generate([5], SamplingParams(max_tokens=2), request_id="r", timeout_s=1.0)
        assert "last words" in caught.value.where
        assert "--resume" in caught.value.remedy

    asyncio.run(run())


def _answer(**choice: object) -> bytes:
    import msgspec

    base = {
        "token_ids": [4, 9],
        "finish_reason": "stop",
        "logprobs": {"content": [{"token_id": 4, "logprob": -1.0}, {"token_id": 9, "logprob": -2.0}]},
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
    }
    return msgspec.json.encode({"choices": [base | choice], "usage": {"prompt_tokens": 1}})


def test_versions_follow_the_spans() -> None:
    got = parse_generation(_answer(), request_id="r", total_s=1.5)
    assert got.versions.tolist() == [3, 4]
    assert got.logprobs.tolist() == [-1.0, -2.0]
    assert got.decode_s == 1.5
    assert got.token_ids.dtype == got.versions.dtype == np.int32
    assert got.logprobs.dtype == np.float32


def test_the_sampled_tokens_logprob_is_looked_up_by_id() -> None:
    """K7: the entry leads with the most likely token, the sampled one stands further down."""
    top = [{"token_id": 7, "logprob": -0.1}, {"token_id": 4, "logprob": -3.0}]
    content = [{"token_id": 7, "logprob": -0.1, "top_logprobs": top}, {"token_id": 9, "logprob": -2.0}]
    got = parse_generation(_answer(logprobs={"content": content}), request_id="r", total_s=0)
    assert got.logprobs.tolist() == [-3.0, -2.0]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"logprobs": {"content": [{"token_id": 4, "logprob": -1.0}]}}, "1 log-probabilities for 2 tokens"),
        ({"logprobs": None}, "0 log-probabilities for 2 tokens"),
        ({"token_ids": [5, 9]}, "no log-probability of sampled token 5 at 0"),
        ({"weight_versions": [{"version": "3", "start": 0, "end": 1}]}, "versions of 1 of 2 tokens"),
        ({"weight_versions": None}, "versions of 0 of 2 tokens"),
        ({"finish_reason": "error"}, "finish reason 'error'"),
        (
            {"logprobs": {"content": [{"token_id": 4, "logprob": -9999.0}, {"token_id": 9, "logprob": -2.0}]}},
            "not finite",
        ),
    ],
)
def test_an_answer_that_does_not_add_up_is_refused(choice: dict[str, object], words: str) -> None:
    """K4: nothing is padded, cut or made up."""
    with pytest.raises(PolicyRequestError, match=words) as caught:
        parse_generation(_answer(**choice), request_id="r17", total_s=0)
    assert "r17" in caught.value.where


def test_the_stand_ins_logprob_arrives() -> None:
    async def run() -> None:
        async with policy_stand_in.serving() as server, VllmClient(server.url, max_model_len=128) as client:
            got = await client.generate([5], SamplingParams(max_tokens=4), request_id="r", timeout_s=10)
            assert np.allclose(got.logprobs, -math.log(512))
            assert np.allclose(await client.prompt_logprobs([1, 2, 3], timeout_s=10), -math.log(512))

    asyncio.run(run())

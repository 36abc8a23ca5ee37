"""Prompt log-probabilities as `TokenScores`: the right place, the right token, nothing made up."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import policy_stand_in
import pytest

from agentrl.errors import PolicyDeadError, PolicyRequestError
from agentrl.policy import ScoreFormatError, ServerExit, VllmClient, token_scores
from agentrl.policy.payload import parse_scores, score_body
from agentrl.policy.scores import PromptLogprob, PromptLogprobs
from agentrl.policy.server import free_port

# Tokens 5, 6, 7 of a vocabulary where 8 is the most likely at position 1 and 7 itself at position 2.
GIVEN: PromptLogprobs = [
    None,
    {6: PromptLogprob(-3.0, 9), 8: PromptLogprob(-0.5, 1), 9: PromptLogprob(-1.5, 2)},
    {7: PromptLogprob(-0.25, 1), 4: PromptLogprob(-2.0, 2)},
]


def test_each_row_is_of_the_token_after_it() -> None:
    """K6, K7: row t − 1 speaks of token t, looked up by its id; candidates by rank."""
    got = token_scores(GIVEN, [5, 6, 7], top_k=2)
    assert got.logprobs.tolist() == [-3.0, -0.25]
    assert got.top1.tolist() == [False, True]
    assert got.top_ids.tolist() == [[8, 9], [7, 4]]
    assert got.top_logprobs.tolist() == [[-0.5, -1.5], [-0.25, -2.0]]
    assert (got.logprobs.dtype, got.top_ids.dtype, got.top_logprobs.dtype) == (np.float32, np.int32, np.float32)
    none = token_scores(GIVEN, [5, 6, 7], top_k=0)
    assert none.top_ids.shape == none.top_logprobs.shape == (2, 0)


def test_only_what_is_asked_for_is_read() -> None:
    got = token_scores([None, {}, GIVEN[2]], [5, 6, 7], top_k=1, positions=np.array([2]))
    assert np.isnan(got.logprobs[0])
    assert got.logprobs[1] == np.float32(-0.25)
    assert got.top_ids.tolist() == [[-1], [7]]


def test_a_vocabulary_smaller_than_k_leaves_places_empty() -> None:
    """A token of probability 0 (−9999 in the server's words) is no candidate."""
    given: PromptLogprobs = [None, {6: PromptLogprob(-0.1, 1), 8: PromptLogprob(-9999.0, 2)}]
    got = token_scores(given, [5, 6], top_k=3)
    assert got.top_ids.tolist() == [[6, -1, -1]]
    assert np.isnan(got.top_logprobs[0, 1:]).all()


def changed(position: int, token: int, entry: PromptLogprob | None) -> PromptLogprobs:
    new = [None if entries is None else dict(entries) for entries in GIVEN]
    entries = new[position]
    assert entries is not None
    if entry is None:
        del entries[token]
    else:
        entries[token] = entry
    return new


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (GIVEN[:2], "2 prompt log-probabilities for 3 tokens"),
        ([*GIVEN, GIVEN[2]], "4 prompt log-probabilities for 3 tokens"),
        (None, "0 prompt log-probabilities"),
        (changed(1, 6, None), "no log-probability of prompt token 6 at 1"),
        ([None, None, GIVEN[2]], "no log-probability of prompt token 6 at 1"),
        (changed(2, 7, PromptLogprob(None, 1)), "log-probability None of prompt token 7 at 2"),
        (changed(2, 7, PromptLogprob(float("nan"), 1)), "log-probability nan"),
        (changed(2, 7, PromptLogprob(-9999.0, 1)), "log-probability -9999.0"),
        (changed(2, 4, PromptLogprob(None, 2)), "candidate 4 at 2 has rank 2 and None"),
        (changed(2, 4, PromptLogprob(-2.0, None)), "candidate 4 at 2 has rank None"),
        (changed(2, 5, PromptLogprob(-2.5, 2)), "3 candidates of rank 2 or better at 2"),
        (changed(2, 2**31, PromptLogprob(-2.5, 2)), "candidate 2147483648 at 2 is no token id"),
        (changed(2, -1, PromptLogprob(-2.5, 2)), "candidate -1 at 2 is no token id"),
    ],
)
def test_what_cannot_be_scores_is_refused(given: PromptLogprobs | None, words: str) -> None:
    """K36."""
    with pytest.raises(ScoreFormatError, match=words):
        token_scores(given, [5, 6, 7], top_k=2)


def test_an_answer_of_the_server_is_read() -> None:
    def entry(logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": None}

    prompt = [None, {"6": entry(-3.0, 2), "8": entry(-0.5, 1)}]
    answer = {"choices": [{"token_ids": [1]}], "usage": {"prompt_tokens": 2}, "prompt_logprobs": prompt}
    got = parse_scores(json.dumps(answer).encode(), [5, 6], request_id="r", top_k=1)
    assert (got.logprobs.tolist(), got.top_ids.tolist()) == ([-3.0], [[8]])
    spoilt = json.dumps(answer).replace("-3.0", "NaN").encode()
    with pytest.raises(PolicyRequestError, match="not understood"):
        parse_scores(spoilt, [5, 6], request_id="r", top_k=1)
    with pytest.raises(PolicyRequestError, match="2 prompt log-probabilities for 3"):
        parse_scores(json.dumps(answer).encode(), [5, 6, 7], request_id="r", top_k=1)


def test_so_many_candidates_are_asked_for() -> None:
    sent = json.loads(score_body([5, 6], request_id="r", top_k=7))["sampling_params"]
    assert (sent["prompt_logprobs"], sent["temperature"], sent["max_tokens"]) == (7, 1.0, 1)


def test_a_client_scores_at_the_stand_in_and_names_what_it_talks_to() -> None:
    class Dead:
        async def wait_dead(self) -> ServerExit:
            return ServerExit(exit_code=-9, log_tail="last words")

    async def run() -> None:
        async with policy_stand_in.serving() as server, VllmClient(server.url, max_model_len=128) as client:
            got = await client.score([1, 2, 3], top_k=0, timeout_s=10)
            assert np.allclose(got.logprobs, -np.log(512))
        url = f"http://127.0.0.1:{free_port()}"
        async with VllmClient(url, max_model_len=128, server=Dead(), called="teacher t") as gone:
            with pytest.raises(PolicyDeadError, match=r"teacher t at .* ended with exit code -9"):
                await gone.score([1, 2, 3], top_k=0, timeout_s=5)

    asyncio.run(run())

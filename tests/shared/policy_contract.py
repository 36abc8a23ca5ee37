"""What every policy server must do for `VllmClient`: run on the stand-in (unit) and on real vLLM
(integration).

Each check takes a client with a window of 1024 tokens, whose server holds a numbered version, and its
vocabulary's size.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from agentrl.errors import DeadlineError, PolicyRequestError, WeightDeliveryError
from agentrl.policy import VllmClient
from agentrl.policy.delivery import weight_update
from agentrl.trajectory import FinishReason
from agentrl.wire import SamplingParams

WINDOW = 1024
Check = Callable[[VllmClient, int], Awaitable[None]]


async def wait_until(condition: Callable[[], Awaitable[bool]], *, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if await condition():
            return True
        await asyncio.sleep(0.05)
    return False


async def streams_have_one_length(client: VllmClient, vocabulary: int) -> None:
    """K7: a finite log-probability and a version for each sampled token."""
    got = await client.generate([5, 6, 7], SamplingParams(max_tokens=9), request_id="c1", timeout_s=60)
    assert got.token_ids.shape == got.logprobs.shape == got.versions.shape == (9,)
    assert got.finish_reason is FinishReason.LENGTH
    assert got.prompt_tokens == 3
    assert (got.logprobs <= 0).all()
    assert np.isfinite(got.logprobs).all()
    assert set(got.versions.tolist()) == {await client.version()}
    assert got.decode_s > 0
    assert got.queue_s >= 0
    assert got.prefill_s >= 0


async def stops_at_a_stop_token(client: VllmClient, vocabulary: int) -> None:
    """Every token a stop token: one is sampled, kept, and ends the turn."""
    params = SamplingParams(max_tokens=9, stop_token_ids=tuple(range(vocabulary)))
    got = await client.generate([5, 6, 7], params, request_id="c2", timeout_s=60)
    assert len(got.token_ids) == 1
    assert got.finish_reason is FinishReason.STOP


async def clamps_to_the_window(client: VllmClient, vocabulary: int) -> None:
    """K11: max_tokens beyond the window is cut to the room; a full window gives an empty generation, no
    error.
    """
    for length, room in ((WINDOW - 3, 3), (WINDOW - 1, 1), (WINDOW, 0), (WINDOW + 5, 0)):
        prompt = [5] * length
        got = await client.generate(prompt, SamplingParams(max_tokens=50), request_id=f"c3-{length}", timeout_s=60)
        assert len(got.token_ids) == room
        assert got.finish_reason is FinishReason.LENGTH
        assert got.prompt_tokens == length


async def scores_a_prompt(client: VllmClient, vocabulary: int) -> None:
    """T − 1 log-probabilities for T tokens; what cannot be scored is refused before it is sent."""
    scored = await client.prompt_logprobs([5, 6, 7, 8], timeout_s=60)
    assert scored.shape == (3,)
    assert (scored < 0).all()
    for bad in ([5], [5] * WINDOW):
        with pytest.raises(PolicyRequestError, match="cannot be scored"):
            await client.prompt_logprobs(bad, timeout_s=60)


async def a_bad_request_carries_the_servers_words(client: VllmClient, vocabulary: int) -> None:
    with pytest.raises(PolicyRequestError, match=r"400: .*vocab") as caught:
        await client.generate([vocabulary + 7], SamplingParams(max_tokens=2), request_id="c5", timeout_s=60)
    assert "c5" in caught.value.where


async def counts_what_it_does(client: VllmClient, vocabulary: int) -> None:
    before = await client.stats()
    await client.generate([5, 6, 7], SamplingParams(max_tokens=11), request_id="c6", timeout_s=60)

    async def counted() -> bool:
        return (await client.stats()).generation_tokens - before.generation_tokens == 11

    assert await wait_until(counted, timeout_s=20)
    after = await client.stats()
    assert (after.running, after.waiting) == (0, 0)
    assert 0 <= after.kv_used_fraction <= 1
    assert after.prompt_tokens > before.prompt_tokens


async def _idle(client: VllmClient) -> bool:
    stats = await client.stats()
    return stats.running == 0 and stats.waiting == 0


async def _running(client: VllmClient) -> bool:
    return (await client.stats()).running > 0


async def a_cancelled_request_is_freed(client: VllmClient, vocabulary: int) -> None:
    """Cancelling (and a deadline) closes the connection; the server drops the request."""
    long = SamplingParams(max_tokens=WINDOW)
    many = [client.generate([5, 6, i], long, request_id=f"c7-{i}", timeout_s=60) for i in range(16)]
    tasks = [asyncio.ensure_future(one) for one in many]
    assert await wait_until(lambda: _running(client), timeout_s=20)
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)
    assert await wait_until(lambda: _idle(client), timeout_s=20)


async def a_deadline_is_an_error_and_no_retry(client: VllmClient, vocabulary: int) -> None:
    """K23: a request past its deadline is given up once, freed, and not sent again."""
    before = await client.stats()
    with pytest.raises(DeadlineError, match=r"0\.01 s"):
        await client.generate([5, 6], SamplingParams(max_tokens=WINDOW), request_id="c8", timeout_s=0.01)
    assert await wait_until(lambda: _idle(client), timeout_s=20)
    assert (await client.stats()).prompt_tokens - before.prompt_tokens in (0, 2)


async def _update(client: VllmClient, version: int) -> None:
    async with weight_update([client], version=version, timeout_s=30):
        update = {"path": "/nonexistent/w.safetensors", "tensors": 1, "num_bytes": 1}
        await client.control("/update_weights", {"update_info": update})


async def _stop_half_way(client: VllmClient, version: int, *, meanwhile: Callable[[], object] = lambda: None) -> None:
    async with weight_update([client], version=version, timeout_s=30):
        meanwhile()
        await asyncio.sleep(0.3)
        raise WeightDeliveryError("stopped half way")


async def resumes_after_a_failed_update(client: VllmClient, vocabulary: int) -> None:
    """K21: the server serves again after an update that failed, holds the old version, and takes the next
    one.
    """
    version = await client.version()
    with pytest.raises(PolicyRequestError, match=r"500"):
        await _update(client, version + 1)
    with pytest.raises(WeightDeliveryError, match="stopped half way"):
        await _stop_half_way(client, version + 1)
    got = await client.generate([5, 6], SamplingParams(max_tokens=2), request_id="c9", timeout_s=60)
    assert got.versions.tolist() == [version, version]


async def a_paused_server_can_drop_a_request(client: VllmClient, vocabulary: int) -> None:
    """K22: a request cancelled while the server stands still does no harm."""
    task = asyncio.ensure_future(
        client.generate([5, 6], SamplingParams(max_tokens=WINDOW), request_id="c10", timeout_s=60)
    )
    assert await wait_until(lambda: _running(client), timeout_s=20)
    version = await client.version()
    with pytest.raises(WeightDeliveryError, match="half way"):
        await _stop_half_way(client, version, meanwhile=task.cancel)
    assert await wait_until(lambda: _idle(client), timeout_s=20)
    got = await client.generate([5, 6], SamplingParams(max_tokens=2), request_id="c11", timeout_s=60)
    assert len(got.token_ids) == 2


async def dropping_the_cache_preempts_what_runs(client: VllmClient, vocabulary: int) -> None:
    """A running request whose cached keys a pause drops is counted as preempted, at the latest when it ends; one whose
    keys are kept is not."""
    version = await client.version()
    for keep, more in ((False, 1), (True, 0)):
        before = (await client.stats()).preemptions
        params = SamplingParams(max_tokens=400)
        task = asyncio.ensure_future(client.generate([5, 6], params, request_id=f"c12-{keep}", timeout_s=60))
        assert await wait_until(lambda: _running(client), timeout_s=20)
        async with weight_update([client], version=version, timeout_s=30, keep_cache=keep):
            pass
        assert len((await task).token_ids) == 400
        assert (await client.stats()).preemptions - before == more


CHECKS: tuple[Check, ...] = (
    streams_have_one_length,
    stops_at_a_stop_token,
    clamps_to_the_window,
    scores_a_prompt,
    a_bad_request_carries_the_servers_words,
    counts_what_it_does,
    a_cancelled_request_is_freed,
    a_deadline_is_an_error_and_no_retry,
    resumes_after_a_failed_update,
    a_paused_server_can_drop_a_request,
    dropping_the_cache_preempts_what_runs,
)

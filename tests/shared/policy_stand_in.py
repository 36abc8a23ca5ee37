"""A small server that answers like vLLM where `VllmClient` looks: every token uniform over 512, 1 ms each.

Tests use it for speed; `policy_contract.CHECKS` holds it against the real one.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

VOCABULARY = 512
LOGPROB = -math.log(VOCABULARY)


class StandIn:
    """State of the server. `requests` keeps the bodies received; `label` is what it calls its weights.

    `journal`, where several servers share one, keeps the management calls of all in their order, with the url's port.
    """

    def __init__(self, journal: list[tuple[str, str]] | None = None) -> None:
        self.journal = [] if journal is None else journal
        self.preemptions = 0
        self.seen: dict[str, asyncio.Event] = defaultdict(asyncio.Event)  # set once a management path was called
        self.fail_at: str | None = None
        self.label = "0"
        self.requests: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.running = 0
        self.generated = 0
        self.prompted = 0
        self.open = False
        self.going = asyncio.Event()
        self.going.set()
        self.probe_shift = 0.0
        self.ignore_label = False
        self.drop_connections = 0
        self.url = ""

    async def generate(self, request: web.Request) -> web.Response:
        if self.drop_connections:
            self.drop_connections -= 1
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        body = await request.json()
        self.requests.append(body)
        sampling = body["sampling_params"]
        if max(body["token_ids"]) >= VOCABULARY:
            return web.json_response({"error": {"message": "Token id out of vocabulary"}}, status=400)
        self.prompted += len(body["token_ids"])
        arrived = time.monotonic()
        self.running += 1
        try:
            tokens, versions, first = await self._sample(sampling)
        finally:
            self.running -= 1
        self.generated += len(tokens)
        return web.json_response(self._answer(body, tokens, versions, (arrived, first, time.monotonic())))

    async def _sample(self, sampling: dict[str, Any]) -> tuple[list[int], list[str], float]:
        tokens: list[int] = []
        versions: list[str] = []
        first = 0.0
        while len(tokens) < sampling["max_tokens"]:
            await asyncio.sleep(0.001)
            await self.going.wait()
            first = first or time.monotonic()
            tokens.append(random.randrange(VOCABULARY))
            versions.append(self.label)
            if tokens[-1] in sampling["stop_token_ids"]:
                break
        return tokens, versions, first

    def _answer(
        self, body: dict[str, Any], tokens: list[int], versions: list[str], times: tuple[float, float, float]
    ) -> dict[str, Any]:
        arrived, first, last = times
        sampling, prompt = body["sampling_params"], body["token_ids"]
        starts = [i for i in range(len(tokens)) if i == 0 or versions[i] != versions[i - 1]]
        spans = [
            {"version": versions[start], "start": start, "end": end}
            for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True)
        ]
        likely = {"token_id": (tokens[0] + 1) % VOCABULARY, "logprob": -0.1}
        content = [
            {
                "token_id": token,
                "logprob": LOGPROB,
                "top_logprobs": [{"token_id": token, "logprob": LOGPROB}, likely],
            }
            for token in tokens
        ]
        scored = [{str(token): {"logprob": LOGPROB + self.probe_shift}} for token in prompt[1:]]
        stopped = tokens[-1] in sampling["stop_token_ids"]
        return {
            "choices": [
                {
                    "token_ids": tokens,
                    "finish_reason": "stop" if stopped else "length",
                    "logprobs": {"content": content},
                    "weight_versions": spans,
                }
            ],
            "usage": {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": 0}},
            "timings": {"queue_s": 0.0, "prefill_s": first - arrived, "decode_s": last - first},
            "prompt_logprobs": [None, *scored] if sampling["prompt_logprobs"] is not None else None,
        }

    async def control(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        self.seen[request.path].set()
        self.journal.append((self.url, request.path_qs))
        body = await request.json()
        if request.path == self.fail_at:
            self.fail_at = None
            return web.json_response({"error": "as told"}, status=500)
        match request.path:
            case "/pause":
                self.going.clear()
                if "clear_cache=false" not in request.query_string:
                    self.preemptions += self.running  # a running request that loses its cached keys counts
            case "/resume":
                self.going.set()
            case "/start_weight_update":
                if self.open:
                    return web.json_response({"error": "already active"}, status=500)
                self.open = True
            case "/update_weights":
                if body["update_info"]["path"].startswith("/nonexistent"):
                    self.open = False
                    return web.json_response({"error": "no such file"}, status=500)
            case "/finish_weight_update":
                if not self.open:
                    return web.json_response({"error": "without a matching start"}, status=500)
                self.open = False
                if body.get("weight_version") and not self.ignore_label:
                    self.label = body["weight_version"]
            case "/update_weight_version":
                self.label = body["new_version"]
        return web.json_response({})

    async def weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def metrics(self, _: web.Request) -> web.Response:
        values = {
            "num_requests_running": self.running,
            "num_requests_waiting": 0,
            "kv_cache_usage_perc": 0.25,
            "num_preemptions_total": self.preemptions,
            "generation_tokens_total": self.generated,
            "prompt_tokens_total": self.prompted,
            "prefix_cache_queries_total": 0,
            "prefix_cache_hits_total": 0,
        }
        lines = [f'vllm:{name}{{engine="0",model_name="policy"}} {value}' for name, value in values.items()]
        return web.Response(text="# HELP vllm:num_requests_running x\n" + "\n".join(lines) + "\n")


@asynccontextmanager
async def serving(journal: list[tuple[str, str]] | None = None) -> AsyncIterator[StandIn]:
    """A stand-in on a port of the kernel's. Cancels handlers whose client disconnects, as vLLM does."""
    state = StandIn(journal)
    app = web.Application()
    app.router.add_post("/inference/v1/generate", state.generate)
    exchange = ("pause", "resume", "start_weight_update", "update_weights", "finish_weight_update")
    for path in (*exchange, "update_weight_version", "sleep", "wake_up"):
        app.router.add_post(f"/{path}", state.control)
    app.router.add_get("/weight_info", state.weight_info)
    app.router.add_get("/metrics", state.metrics)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    state.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield state
    finally:
        await runner.cleanup()

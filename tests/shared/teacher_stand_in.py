"""A server that answers like a plain vLLM OpenAI server where `OpenAISource` looks, with the toy model's scores.

`tests/integration/teachers` holds the real one against the same contract.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from teacher_toys import TEXT, TINY, ToyModel

from agentrl.chat import load_tokenizer_folder
from agentrl.wire import ChatMessage

TOKENIZER = load_tokenizer_folder(TINY).tokenizer


class StandInTeacher:
    """State of the server. `fault` takes an answer's prompt log-probabilities and spoils them, `faults` times;
    `status` is answered instead of scores, `statuses` times, with `headers`; `raw` is answered to all;
    `drops` requests get no answer at all. `tokenized` takes an answer about tokens and spoils it; `reads` is what its
    tokenizer makes of a text first."""

    def __init__(self, model: ToyModel | None = None) -> None:
        self.model = model or ToyModel()
        self.max_model_len = 512
        self.max_logprobs = 20
        self.api_key: str | None = None
        self.template = "own"
        self.template_status = 200
        self.answers_for = "plain"
        self.delay_s = 0.0
        self.fault: Callable[[list[Any]], list[Any]] | None = None
        self.faults = 0
        self.status = 500
        self.statuses = 0
        self.headers: dict[str, str] = {}
        self.raw: bytes | None = None
        self.tokenized: Callable[[dict[str, Any]], dict[str, Any]] = lambda answer: answer
        self.reads: Callable[[str], str] = lambda text: text
        self.drops = 0
        self.requests: list[dict[str, Any]] = []
        self.at_once = 0
        self.most_at_once = 0
        self.url = ""

    async def models(self, request: web.Request) -> web.Response:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"data": [{"id": "plain", "root": "r", "max_model_len": self.max_model_len}]})

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.delay_s)
            if self.drops:
                self.drops -= 1
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            return self._completion(body)
        finally:
            self.at_once -= 1

    def _completion(self, body: dict[str, Any]) -> web.Response:
        if self.raw is not None:
            return web.Response(body=self.raw, status=self.status, content_type="application/json")
        if self.statuses:
            self.statuses -= 1
            return _error(self.status, "as told", self.headers)
        ids, top_k = body["prompt"], body["prompt_logprobs"]
        if top_k > self.max_logprobs:
            return _error(400, f"Requested prompt logprobs of {top_k}, greater than max allowed: {self.max_logprobs}")
        if len(ids) + body["max_tokens"] > self.max_model_len:
            return _error(400, f"This model's maximum context length is {self.max_model_len} tokens")
        given: list[Any] = [None, *self._entries(ids, top_k)]
        if self.fault is not None and self.faults:
            self.faults -= 1
            given = self.fault(given)
        choice = {"index": 0, "text": "x", "prompt_logprobs": given, "prompt_token_ids": ids}
        answer = {"model": self.answers_for, "choices": [choice]}
        return web.Response(text=json.dumps(answer), content_type="application/json")

    def _entries(self, ids: list[int], top_k: int) -> list[dict[str, Any]]:
        """As vLLM writes them: the token itself first, then the most likely ones, each id once."""
        scores = self.model.scores(ids, top_k=top_k)
        ranks = (self.model.table[ids[:-1]] >= scores.logprobs[:, None].astype(float) - 1e-6).sum(axis=1)
        entries = []
        for row, token in enumerate(ids[1:]):
            found = {str(token): {"logprob": float(scores.logprobs[row]), "rank": int(ranks[row]), "decoded_token": ""}}
            for rank in range(top_k):
                found[str(scores.top_ids[row, rank])] = {
                    "logprob": float(scores.top_logprobs[row, rank]),
                    "rank": rank + 1,
                    "decoded_token": "",
                }
            entries.append(found)
        return entries

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "messages" in body:
            if self.template_status != 200:
                return _error(self.template_status, "as told")
            messages = [ChatMessage(role=m["role"], content=m["content"]) for m in body["messages"]]
            ids = TEXT.open_chat(messages) if self.template == "own" else TEXT.encode(self.template)
        else:
            ids = TEXT.encode(self.reads(body["prompt"]))
        strings = [TOKENIZER.token(token) for token in ids] if body.get("return_token_strs") else None
        answer = {"tokens": ids, "count": len(ids), "max_model_len": 1, "token_strs": strings}
        return web.json_response(self.tokenized(answer))


def _error(status: int, words: str, headers: dict[str, str] | None = None) -> web.Response:
    body = {"error": {"message": words, "type": "BadRequestError"}}
    return web.json_response(body, status=status, headers=headers)


@asynccontextmanager
async def serving(model: ToyModel | None = None) -> AsyncIterator[StandInTeacher]:
    """A stand-in on a port of the kernel's."""
    state = StandInTeacher(model)
    app = web.Application(client_max_size=64 << 20)
    app.router.add_get("/v1/models", state.models)
    app.router.add_post("/v1/completions", state.completions)
    app.router.add_post("/tokenize", state.tokenize)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    state.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield state
    finally:
        await runner.cleanup()

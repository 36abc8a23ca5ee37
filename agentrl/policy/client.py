"""The policy server as a `PolicyClient`: token ids in, token ids out, over aiohttp.

Waiting and failing:

* a request has one deadline (`timeout_s`), reached → the connection is closed, which frees the request at
  the server, and `DeadlineError`; it is never sent again, for the work may be healthy and merely long;
* sampling requests are sent and closed in step with weight deliveries (`agentrl.policy.traffic`);
* a connection that fails before any answer is tried again, at most twice, and only here; where the process
  behind it is gone, and where it never answers, `PolicyDeadError`;
* 4xx and 5xx → `PolicyRequestError` with the server's own words.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Self

import aiohttp
import msgspec
import numpy as np

from agentrl.errors import DeadlineError, PolicyDeadError, PolicyRequestError
from agentrl.policy.metrics import ServerStats, parse_metrics
from agentrl.policy.payload import (
    empty_generation,
    error_words,
    generate_body,
    parse_generation,
    parse_scores,
    score_body,
    version_of,
)
from agentrl.policy.server import Liveness, ServerExit
from agentrl.policy.traffic import Traffic
from agentrl.wire import Generation, SamplingParams, TokenScores

_GENERATE = "/inference/v1/generate"
_TRIES = 3
_RETRY_DELAYS_S = (0.1, 0.5)
_DEATH_NOTICE_S = 2.0
_CONTROL_TIMEOUT_S = 30.0
_KEEP_ALIVE_S = 3.0  # below the server's 5 s, so that no request meets a connection that it is just closing
_SCORE_PRIORITY = -1_000_000
_LOG_LINES = 8

# What aiohttp raises while no byte of an answer has come.
_CONNECTION_ERRORS = (aiohttp.ClientConnectorError, aiohttp.ClientOSError, aiohttp.ServerDisconnectedError)


class VllmClient:
    """One server's client; make it inside the event loop that uses it, close it with `aclose` or `async
    with`.

    `called` is its name in messages. `server` is the process behind `url` where it is ours (`VllmServer`): its death
    turns a failed connection into `PolicyDeadError` at once. `traffic` counts and paces the sampling requests.
    `cache_salt` keeps their prefix cache apart from that of requests with another salt (None: one cache for all).
    """

    def __init__(
        self, url: str, *, max_model_len: int, server: Liveness | None = None, called: str = "the policy server"
    ) -> None:
        self._url = url.rstrip("/")
        self._called = called
        self._max_model_len = max_model_len
        self._server = server
        self.traffic = Traffic()
        self.cache_salt: str | None = None
        self._numbers = itertools.count()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        )

    @property
    def url(self) -> str:
        """The server's base address."""
        return self._url

    @property
    def max_model_len(self) -> int:
        """Most tokens, prompt and continuation together."""
        return self._max_model_len

    async def aclose(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        timeout_s: float,
        priority: int = 0,
    ) -> Generation:
        """Sample one continuation; see `PolicyClient`. `max_tokens` is cut to the room the prompt leaves.

        Lower `priority` is served first. Raises `PolicyError` or `DeadlineError`.
        """
        room = self._max_model_len - len(prompt_ids)
        if room <= 0:
            return empty_generation(prompt_tokens=len(prompt_ids))
        params = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, room))
        where = f"request {request_id}, {_GENERATE}"

        def send() -> Coroutine[Any, Any, bytes]:
            body = generate_body(
                prompt_ids, params, request_id=request_id, priority=priority, cache_salt=self.cache_salt
            )
            return self._once("POST", _GENERATE, body, where=where)

        started = time.monotonic()
        data = await self._tried(lambda: self.traffic.run(send), timeout_s=timeout_s, where=where)
        return parse_generation(data, request_id=request_id, total_s=time.monotonic() - started)

    async def prompt_logprobs(
        self, token_ids: Sequence[int], *, timeout_s: float, request_id: str | None = None
    ) -> np.ndarray:
        """float32 [T − 1]: log p(token_ids[i + 1] | token_ids[: i + 1]) at temperature 1, whatever was
        sampled: the `logprobs` of `score`.
        """
        return (await self.score(token_ids, top_k=0, timeout_s=timeout_s, request_id=request_id)).logprobs

    async def score(
        self,
        token_ids: Sequence[int],
        *,
        top_k: int,
        timeout_s: float,
        positions: np.ndarray | None = None,
        request_id: str | None = None,
    ) -> TokenScores:
        """The log-probabilities of tokens [T] and of the `top_k` most likely ones in their places, at temperature 1.

        `positions` int [N] ≥ 1: read these alone. Served before waiting rollouts; never from cached keys. Needs
        2 ≤ T < max_model_len (one token is sampled and dropped) and a server that gives so many candidates.
        """
        request_id = request_id or f"score-{next(self._numbers)}"
        if not 2 <= len(token_ids) < self._max_model_len:
            raise PolicyRequestError(
                f"{len(token_ids)} tokens cannot be scored in a window of {self._max_model_len}",
                where=f"request {request_id}",
                remedy="score between 2 tokens and one less than the window",
            )
        body = score_body(token_ids, request_id=request_id, priority=_SCORE_PRIORITY, top_k=top_k)
        where = f"request {request_id}, {_GENERATE}"

        def send() -> Coroutine[Any, Any, bytes]:
            return self._once("POST", _GENERATE, body, where=where)

        # In step with deliveries like any request that the engine computes: closing it ends one that stands still.
        data = await self._tried(lambda: self.traffic.run(send), timeout_s=timeout_s, where=where)
        return parse_scores(data, token_ids, request_id=request_id, top_k=top_k, positions=positions)

    async def stats(self, *, timeout_s: float = _CONTROL_TIMEOUT_S) -> ServerStats:
        """What the server does now and did since it started."""
        text = await self._get("/metrics", timeout_s=timeout_s)
        return parse_metrics(text.decode())

    async def version(self, *, timeout_s: float = _CONTROL_TIMEOUT_S) -> int:
        """The policy version the server says it holds. Raises `WeightDeliveryError` where it holds none."""
        data = await self._get("/weight_info", timeout_s=timeout_s)
        return version_of(str(msgspec.json.decode(data)["weight_version"]), where=f"{self._url}/weight_info")

    async def label_version(self, version: int, *, timeout_s: float = _CONTROL_TIMEOUT_S) -> None:
        """Call the weights that the server loaded at start `version` (an evaluation delivers none)."""
        await self.control("/update_weight_version", {"new_version": str(version)}, timeout_s=timeout_s)

    async def control(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = _CONTROL_TIMEOUT_S
    ) -> None:
        """POST to one of the server's management routes."""
        await self._post(path, msgspec.json.encode(body or {}), request_id=path, timeout_s=timeout_s)

    async def _get(self, path: str, *, timeout_s: float) -> bytes:
        where = f"{self._url}{path}"
        return await self._tried(lambda: self._once("GET", path, b"", where=where), timeout_s=timeout_s, where=where)

    async def _post(self, path: str, body: bytes, *, request_id: str, timeout_s: float) -> bytes:
        where = f"request {request_id}, {path}"
        return await self._tried(lambda: self._once("POST", path, body, where=where), timeout_s=timeout_s, where=where)

    async def _tried(self, attempt: Callable[[], Coroutine[Any, Any, bytes]], *, timeout_s: float, where: str) -> bytes:
        """The one retry layer. Returns a 200's body."""
        try:
            async with asyncio.timeout(timeout_s):
                for number in range(_TRIES):
                    try:
                        return await attempt()
                    except _CONNECTION_ERRORS as error:
                        if number == _TRIES - 1:
                            raise await self._dead(error, where) from error
                        await self._check_alive(where, wait_s=_RETRY_DELAYS_S[number])
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._called} did not answer within {timeout_s:g} s",
                where=where,
                remedy="raise agent.episode_timeout_s, or lower the load (rollout.concurrency)",
            ) from error
        raise AssertionError("unreachable: the last try returns or raises")

    async def _once(self, method: str, path: str, body: bytes, *, where: str) -> bytes:
        headers = {"Content-Type": "application/json"} if body else {}
        async with self._session.request(method, self._url + path, data=body or None, headers=headers) as answer:
            try:
                data = await answer.read()
            except aiohttp.ClientPayloadError as error:  # an answer had begun: never sent again
                raise await self._dead(error, where) from error
            if answer.status == 200:
                return data
            raise PolicyRequestError(
                f"{self._called} answered {answer.status}: {error_words(data)}",
                where=where,
                remedy="correct the request" if answer.status < 500 else "read the server's log",
            )

    async def _check_alive(self, where: str, *, wait_s: float) -> None:
        """Wait before the next try; raise `PolicyDeadError` as soon as the process is seen to be gone."""
        end = await self._exit_within(wait_s)
        if end is not None:
            raise self._death(end, where)

    async def _exit_within(self, wait_s: float) -> ServerExit | None:
        if self._server is None:
            await asyncio.sleep(wait_s)
            return None
        try:
            async with asyncio.timeout(wait_s):
                return await self._server.wait_dead()
        except TimeoutError:
            return None

    async def _dead(self, error: Exception, where: str) -> PolicyDeadError:
        end = await self._exit_within(_DEATH_NOTICE_S) if self._server is not None else None
        if end is not None:
            return self._death(end, where)
        return PolicyDeadError(
            f"no connection to {self._called} at {self._url}: {error}",
            where=where,
            remedy="see that the server runs and its address is right",
        )

    def _death(self, end: ServerExit, where: str) -> PolicyDeadError:
        how = "ended" if end.exit_code is None else f"ended with exit code {end.exit_code}"
        return PolicyDeadError(
            f"{self._called} at {self._url} {how}",
            where="\n".join([where, *end.log_tail.splitlines()[-_LOG_LINES:]]),
            remedy="start the run again with --resume; the server's log (logs/policy*.log) says why it ended",
        )

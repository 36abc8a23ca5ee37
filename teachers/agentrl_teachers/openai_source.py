"""A running vLLM server, whoever started it, as a source: its OpenAI interface and nothing else.

    /v1/models        its name and window
    /v1/completions   token ids in; one token is sampled and dropped, `prompt_logprobs` are what is wanted
    /tokenize         text → ids with the vocabulary's spellings of them; a chat → ids by its own template

Waiting and failing: one deadline per call. A connection that fails, also in the middle of an answer, is tried again
(scoring changes nothing at the server), then the teacher is dead. 4xx is a refusal, final; 429 and 5xx may pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

import aiohttp
import msgspec
import numpy as np

from agentrl.errors import (
    DeadlineError,
    TeacherDeadError,
    TeacherError,
    TeacherRefusedError,
    TeacherRequestError,
    TeacherStartError,
    TeacherUnfitError,
)
from agentrl.policy import PromptLogprobs, ScoreFormatError, error_words, token_scores
from agentrl.wire import ChatMessage, TokenScores
from agentrl_teachers.spelling import spelling_of

API_KEY = "AGENTRL_TEACHER_API_KEY"
"""The environment variable that holds a server's key."""

_RETRY_DELAYS_S = (0.1, 0.5, 1.5)
_KEEP_ALIVE_S = 3.0  # below the server's 5 s, so that no request meets a connection that it is just closing
_MAY_PASS = (408, 429)
_NO_ENTRY = (401, 403)
_Answer = TypeVar("_Answer")


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Choice(msgspec.Struct):
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Tokens(msgspec.Struct):
    tokens: list[int]
    token_strs: list[str] | None = None


class OpenAISource:
    """The server at `url`; make it with `open`, inside the event loop that uses it, and close it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, name: str, model: _Model) -> None:
        self._session = session
        self._url = url
        self._name = name
        self._model = model.id
        self._root = model.root or model.id
        self._window = model.max_model_len or 0
        self._bytes: dict[int, bytes] = {}

    @classmethod
    async def open(cls, url: str, *, name: str, api_key: str | None, timeout_s: float) -> Self:
        """Ask the server what it is. Raises `TeacherStartError` where nothing useful answers."""
        base = url.rstrip("/").removesuffix("/v1")
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        )
        try:
            source = cls(session, base, name=name, model=_Model(id=""))
            models = await source._call("GET", "/v1/models", None, _Models, timeout_s=timeout_s)
            if not models.data or models.data[0].max_model_len is None:
                raise TeacherRefusedError("it does not say which model it serves, and with which window")
            return cls(session, base, name=name, model=models.data[0])
        except BaseException as error:
            await session.close()
            if isinstance(error, TeacherError | DeadlineError):
                raise TeacherStartError(
                    f"teacher {name} at {url} is no running vLLM server: {error.what}",
                    where="distill.teachers",
                    remedy=f"start it (vllm serve MODEL), see that the address is right, and set {API_KEY} if need be",
                ) from error
            raise

    async def aclose(self) -> None:
        """Close the connections."""
        await self._session.close()

    @property
    def name(self) -> str:
        return self._name

    @property
    def max_model_len(self) -> int:
        return self._window

    @property
    def identity(self) -> str:
        """The address and what is served there, as far as it says."""
        return "\n".join(["server", self._url, self._model, self._root])

    async def score(
        self, token_ids: Sequence[int], *, top_k: int, timeout_s: float, positions: np.ndarray | None = None
    ) -> TokenScores:
        ids = np.asarray(token_ids).tolist()
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "n": 1,
            "stream": False,
            "echo": False,
            "add_special_tokens": False,
            "return_token_ids": True,
            "prompt_logprobs": top_k,
        }
        answer = await self._call("POST", "/v1/completions", body, _Completion, timeout_s=timeout_s)
        if len(answer.choices) != 1:
            raise self._request_error(f"gave {len(answer.choices)} answers where one was asked for")
        choice = answer.choices[0]
        if choice.prompt_token_ids is not None and choice.prompt_token_ids != ids:
            raise self._request_error("scored other tokens than those it was given")
        try:
            return token_scores(choice.prompt_logprobs, ids, top_k=top_k, positions=positions)
        except ScoreFormatError as error:
            raise self._request_error(f"gave {error}") from error

    async def encode(self, text: str, *, timeout_s: float) -> list[int]:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False, "return_token_strs": True}
        found = await self._call("POST", "/tokenize", body, _Tokens, timeout_s=timeout_s)
        if found.token_strs is not None:
            spelling = spelling_of(found.token_strs, text, where=f"{self._url}/tokenize")
            self._bytes.update(zip(found.tokens, map(spelling, found.token_strs), strict=True))
        return found.tokens

    async def token_bytes(self, token_ids: Sequence[int], *, timeout_s: float) -> list[bytes]:
        """Of tokens that `encode` has given: the server tells spellings of a text's tokens only."""
        unknown = [token for token in token_ids if int(token) not in self._bytes]
        if unknown:
            raise TeacherUnfitError(
                f"teacher {self._name} does not tell what token {unknown[0]} stands for",
                where=f"{self._url}/tokenize",
                remedy="a server that gives token_strs (vLLM 0.9 or later)",
            )
        return [self._bytes[int(token)] for token in token_ids]

    async def open_chat(self, messages: Sequence[ChatMessage], *, timeout_s: float) -> list[int]:
        said = [{"role": message.role, "content": message.content} for message in messages]
        body = {"model": self._model, "messages": said, "add_generation_prompt": True}
        return (await self._call("POST", "/tokenize", body, _Tokens, timeout_s=timeout_s)).tokens

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, kind: type[_Answer], *, timeout_s: float
    ) -> _Answer:
        """The one retry layer for connections."""
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(timeout_s):
                for delay_s in (*_RETRY_DELAYS_S, None):
                    try:
                        return msgspec.json.decode(await self._once(method, path, data), type=kind)
                    except msgspec.MsgspecError as error:
                        raise self._request_error(f"gave an answer that is not understood ({error})") from error
                    except aiohttp.ClientError as error:
                        if delay_s is None:
                            raise self._dead(error) from error
                        await asyncio.sleep(delay_s)
        except TimeoutError as error:
            raise DeadlineError(
                f"teacher {self._name} did not answer within {timeout_s:g} s",
                where=self._url + path,
                remedy="raise distill.timeout_s, or lower the load (distill.concurrency)",
            ) from error
        raise AssertionError("unreachable: the last try returns or raises")

    async def _once(self, method: str, path: str, data: bytes | None) -> bytes:
        headers = {"Content-Type": "application/json"} if data else {}
        async with self._session.request(method, self._url + path, data=data, headers=headers) as answer:
            found = await answer.read()
            if answer.status == 200:
                return found
            words = f"answered {answer.status}: {error_words(found)}"
            if answer.status >= 500 or answer.status in _MAY_PASS:
                raise self._request_error(words)
            remedy = f"set {API_KEY} to its key" if answer.status in _NO_ENTRY else "see what it says"
            raise TeacherRefusedError(f"teacher {self._name} {words}", where=self._url + path, remedy=remedy)

    def _request_error(self, what: str) -> TeacherRequestError:
        return TeacherRequestError(
            f"teacher {self._name} {what}", where=self._url, remedy="read the log of the teacher's server"
        )

    def _dead(self, error: Exception) -> TeacherDeadError:
        return TeacherDeadError(
            f"teacher {self._name} at {self._url} is gone: {error or type(error).__name__}",
            where=self._url,
            remedy="see that its server runs, then start the run again with --resume",
        )

"""A running vLLM server, whoever started it, as a source: its OpenAI interface and nothing else.

    /v1/models        its name and window
    /v1/completions   token ids in; one token is sampled and dropped, `prompt_logprobs` are what is wanted
    /tokenize         text → ids with the vocabulary's spellings of them; a chat → ids by its own template

Waiting and failing: one deadline per call. A connection that fails, also in the middle of an answer, is tried again
(scoring changes nothing at the server), then the teacher is dead. 4xx is a refusal, final; 429 and 5xx may pass.

Invariant: scores of one source are one model's. An answer that names another model ends the teacher, and so does a
server that has, over a new connection, other scores for a prompt that it has scored before: a server that was started
again can be reached by new connections only. (What stands behind a proxy may change unseen.)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self, TypeVar

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
from agentrl.wire import SAME_MODEL, ChatMessage, TokenScores
from agentrl_teachers.folder_text import SAMPLE
from agentrl_teachers.source import TeacherBusyError
from agentrl_teachers.spelling import Spelling, spelling_of

API_KEY = "AGENTRL_TEACHER_API_KEY"
"""The environment variable that holds a server's key."""

_RETRY_DELAYS_S = (0.1, 0.5, 1.5)
_KEEP_ALIVE_S = 3.0  # below the server's 5 s, so that no request meets a connection that it is just closing
_BUSY = (429, 503)
_MAY_PASS = 408
_NO_ENTRY = (401, 403)
_NOT_FOUND = 404
_SCORING = "/v1/completions"
_REMEMBERED_TOKENS = 512  # of the prompt by which the model is known again
_Answer = TypeVar("_Answer")
_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


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
    model: str | None = None


class _Tokens(msgspec.Struct):
    tokens: list[_Id]
    token_strs: list[str] | None = None


class _Connections:
    """How many were opened so far."""

    def __init__(self) -> None:
        self.opened = 0

    def trace(self) -> aiohttp.TraceConfig:
        """What counts them in a session."""
        config = aiohttp.TraceConfig()
        config.on_connection_create_end.append(self._one_more)
        return config

    async def _one_more(self, *_: object) -> None:
        self.opened += 1


class OpenAISource:
    """The server at `url`; make it with `open`, inside the event loop that uses it, and close it."""

    def __init__(
        self, session: aiohttp.ClientSession, connections: _Connections, url: str, *, name: str, model: _Model
    ) -> None:
        self._session, self._connections = session, connections
        self._url = url
        self._name = name
        self._model = model.id
        self._root = model.root or model.id
        self._window = model.max_model_len or 0
        self._spelled: dict[int, str] = {}
        self._spelling: Spelling | None = None
        self._remembered: tuple[list[int], np.ndarray] = [], np.empty(0, dtype=np.float32)
        """A prompt [T] and its log-probabilities [T − 1]."""
        self._confirmed = 0
        """After how many connections the server was known again."""
        self._confirming = asyncio.Lock()

    @classmethod
    async def open(cls, url: str, *, name: str, api_key: str | None, timeout_s: float) -> Self:
        """Ask the server what it is. Raises `TeacherStartError` where nothing useful answers."""
        base = url.rstrip("/").removesuffix("/v1")
        key = (api_key or "").strip()
        connections = _Connections()
        session = aiohttp.ClientSession(
            trace_configs=[connections.trace()],
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        try:
            source = cls(session, connections, base, name=name, model=_Model(id=""))
            models = await source._call("GET", "/v1/models", None, _Models, timeout_s=timeout_s)
            if not models.data or models.data[0].max_model_len is None:
                raise TeacherRefusedError("it does not say which model it serves, and with which window")
            return cls(session, connections, base, name=name, model=models.data[0])
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
        deadline = time.monotonic() + timeout_s
        ids = np.asarray(token_ids).tolist()
        scores = await self._scores(ids, top_k=top_k, positions=positions, timeout_s=timeout_s)
        if not self._remembered[0]:
            self._confirmed = self._connections.opened  # whoever answers now is who is meant
        elif self._connections.opened != self._confirmed:
            await self._confirm(timeout_s=deadline - time.monotonic())
        if positions is None and len(self._remembered[0]) < min(len(ids), _REMEMBERED_TOKENS):
            self._remembered = ids[:_REMEMBERED_TOKENS], scores.logprobs[: _REMEMBERED_TOKENS - 1]
        return scores

    async def _scores(
        self, ids: list[int], *, top_k: int, positions: np.ndarray | None, timeout_s: float
    ) -> TokenScores:
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
        answer = await self._call("POST", _SCORING, body, _Completion, timeout_s=timeout_s)
        if answer.model not in (None, self._model):
            raise self._another_model(f"it answers for {answer.model!r} where {self._model!r} was asked")
        if len(answer.choices) != 1:
            raise self._request_error(f"gave {len(answer.choices)} answers where one was asked for")
        choice = answer.choices[0]
        if choice.prompt_token_ids is not None and choice.prompt_token_ids != ids:
            raise self._request_error("scored other tokens than those it was given")
        try:
            return token_scores(choice.prompt_logprobs, ids, top_k=top_k, positions=positions)
        except ScoreFormatError as error:
            raise self._request_error(f"gave {error}") from error

    async def _confirm(self, *, timeout_s: float) -> None:
        """Ask again for a prompt that was scored before connections were opened. Raises `TeacherDeadError` where it has
        other scores now: the server was started again, with another model."""
        async with self._confirming:
            opened, (ids, before) = self._connections.opened, self._remembered
            if opened == self._confirmed:
                return
            now = await self._scores(ids, top_k=0, positions=None, timeout_s=timeout_s)
            worst = float(np.abs(now.logprobs - before).max())
            if worst > SAME_MODEL:
                raise self._another_model(f"a prompt's scores differ from those it gave before, by {worst:.3g} nats")
            self._confirmed = opened

    async def encode(self, text: str, *, timeout_s: float) -> list[int]:
        return (await self._tokens(text, timeout_s=timeout_s)).tokens

    async def token_bytes(self, token_ids: Sequence[int], *, timeout_s: float) -> list[bytes]:
        """Of tokens that `encode` has given: the server tells spellings of a text's tokens only.

        Which spelling it is is found out once, on a sample: a text that its tokenizer changes is no reason to fail.
        """
        if unknown := [token for token in token_ids if int(token) not in self._spelled]:
            raise TeacherUnfitError(
                f"teacher {self._name} does not tell what token {unknown[0]} stands for",
                where=f"{self._url}/tokenize",
                remedy="a server that gives token_strs (vLLM 0.9 or later)",
            )
        if self._spelling is None:
            sample = await self._tokens(SAMPLE, timeout_s=timeout_s)
            self._spelling = spelling_of(sample.token_strs or [], SAMPLE, where=f"{self._url}/tokenize")
        return [self._spelling(self._spelled[int(token)]) for token in token_ids]

    async def _tokens(self, text: str, *, timeout_s: float) -> _Tokens:
        """The tokens of `text`; how they are spelled is kept for `token_bytes`."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False, "return_token_strs": True}
        found = await self._call("POST", "/tokenize", body, _Tokens, timeout_s=timeout_s)
        if found.token_strs is None:
            return found
        if len(found.token_strs) != len(found.tokens):
            raise self._request_error(f"gave {len(found.token_strs)} token_strs of {len(found.tokens)} tokens")
        for token, string in zip(found.tokens, found.token_strs, strict=True):
            if (known := self._spelled.setdefault(token, string)) != string:
                raise self._request_error(f"spells token {token} {string!r}, and {known!r} before")
        return found

    async def open_chat(self, messages: Sequence[ChatMessage], *, timeout_s: float) -> list[int]:
        said = [{"role": message.role, "content": message.content} for message in messages]
        body = {"model": self._model, "messages": said, "add_generation_prompt": True}
        return (await self._call("POST", "/tokenize", body, _Tokens, timeout_s=timeout_s)).tokens

    # --- requests -------------------------------------------------------------------------------------------

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, kind: type[_Answer], *, timeout_s: float
    ) -> _Answer:
        """One answer, whatever connections it takes."""
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(timeout_s):
                found = await self._connected(method, path, data)
        except TimeoutError as error:
            raise DeadlineError(
                f"teacher {self._name} did not answer within {timeout_s:g} s",
                where=self._url + path,
                remedy="raise distill.timeout_s, or lower the load (distill.concurrency)",
            ) from error
        try:
            return msgspec.json.decode(found, type=kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise self._request_error(f"gave an answer that is not understood ({error})") from error

    async def _connected(self, method: str, path: str, data: bytes | None) -> bytes:
        """The one retry layer for connections."""
        for delay_s in (*_RETRY_DELAYS_S, None):
            try:
                return await self._once(method, path, data)
            except aiohttp.ClientError as error:
                if delay_s is None:
                    raise self._gone(str(error) or type(error).__name__) from error
                await asyncio.sleep(delay_s)
            except ValueError as error:  # a header that cannot be, or two ways to say who asks
                raise TeacherRefusedError(
                    f"teacher {self._name} cannot be asked: {error}",
                    where=self._url + path,
                    remedy=f"an address without user and password, and in {API_KEY} the key alone, in one line",
                ) from error
        raise AssertionError("unreachable: the last try returns or raises")

    async def _once(self, method: str, path: str, data: bytes | None) -> bytes:
        headers = {"Content-Type": "application/json"} if data else {}
        async with self._session.request(method, self._url + path, data=data, headers=headers) as answer:
            found = await answer.read()
            if answer.status == 200:
                return found
            words = f"answered {answer.status}: {error_words(found)}"
            if answer.status in _BUSY:
                after_s = _seconds(answer.headers.get("Retry-After", ""))
                raise TeacherBusyError(f"teacher {self._name} {words}", where=self._url + path, after_s=after_s)
            if answer.status >= 500 or answer.status == _MAY_PASS:
                raise self._request_error(words)
            if answer.status == _NOT_FOUND and path == _SCORING:
                raise self._gone(words)
            remedy = f"set {API_KEY} to its key" if answer.status in _NO_ENTRY else "see what it says"
            raise TeacherRefusedError(f"teacher {self._name} {words}", where=self._url + path, remedy=remedy)

    def _request_error(self, what: str) -> TeacherRequestError:
        return TeacherRequestError(
            f"teacher {self._name} {what}", where=self._url, remedy="read the log of the teacher's server"
        )

    def _gone(self, why: str) -> TeacherDeadError:
        return TeacherDeadError(
            f"teacher {self._name} at {self._url} is gone: {why}",
            where=self._url,
            remedy="see that its server runs, then start the run again with --resume",
        )

    def _another_model(self, why: str) -> TeacherDeadError:
        return TeacherDeadError(
            f"teacher {self._name} at {self._url} is another model now: {why}",
            where=self._url,
            remedy=f"serve {self._root} there again, then start the run again with --resume",
        )


def _seconds(said: str) -> float | None:
    """A Retry-After header in seconds; None where it is none, or a date."""
    return float(said) if said.isascii() and said.isdecimal() and len(said) < 10 else None

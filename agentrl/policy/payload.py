"""What travels to and from `/inference/v1/generate`: pure functions over bytes, no network.

Request: every sampling field is sent, so that no default of the server or of the model folder can creep in;
what ends a turn is `stop_token_ids` alone, never an end token that the folder names. `seed` is never sent:
a seeded request that is prefilled twice repeats its random numbers on a GPU and ends the engine on a CPU.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import numpy as np

from agentrl.errors import PolicyRequestError, WeightDeliveryError
from agentrl.policy.command import SERVED_NAME
from agentrl.policy.scores import CLAMPED, PromptLogprobs, ScoreFormatError, token_scores
from agentrl.trajectory import FinishReason
from agentrl.wire import Generation, SamplingParams, TokenScores


class _Entry(msgspec.Struct):
    token_id: int
    logprob: float
    top_logprobs: list[_Entry] = []


class _Logprobs(msgspec.Struct):
    content: list[_Entry] | None = None


class _VersionSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_VersionSpan] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Timings(msgspec.Struct):
    queue_s: float
    prefill_s: float
    decode_s: float


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage
    timings: _Timings | None = None
    prompt_logprobs: PromptLogprobs | None = None


_MESSAGE_CHARS = 600

_decoder = msgspec.json.Decoder(_Answer)
_encoder = msgspec.json.Encoder()


def _plain(token_ids: Sequence[int]) -> list[int]:
    """As a list that encodes fast: a long prompt is most of a request's cost."""
    return token_ids.tolist() if isinstance(token_ids, array | np.ndarray) else [int(token) for token in token_ids]


def _body(
    prompt_ids: Sequence[int],
    *,
    request_id: str,
    priority: int,
    params: SamplingParams,
    prompt_logprobs: int | None,
    cache_salt: str | None = None,
) -> bytes:
    sampling = {
        "n": 1,
        "max_tokens": params.max_tokens,
        "min_tokens": 0,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": [],
        "stop": [],
        "stop_token_ids": list(params.stop_token_ids),
        "structured_outputs": {"regex": params.pattern} if params.pattern else None,
        "ignore_eos": True,
        "logprobs": 0,
        "prompt_logprobs": prompt_logprobs,
        "detokenize": False,
    }
    return _encoder.encode(
        {
            "model": SERVED_NAME,
            "request_id": request_id,
            "token_ids": _plain(prompt_ids),
            "sampling_params": sampling,
            "stream": False,
            "priority": priority,
            "cache_salt": cache_salt,
        }
    )


def generate_body(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    request_id: str,
    priority: int = 0,
    cache_salt: str | None = None,
) -> bytes:
    """The request for one continuation of `prompt_ids`. It reads and leaves cached keys under `cache_salt` alone."""
    return _body(
        prompt_ids,
        request_id=request_id,
        priority=priority,
        params=params,
        prompt_logprobs=None,
        cache_salt=cache_salt,
    )


def score_body(token_ids: Sequence[int], *, request_id: str, priority: int = 0, top_k: int = 0) -> bytes:
    """The request for the log-probabilities of `token_ids` themselves, and of the `top_k` most likely tokens at each
    position; the one token sampled with it is dropped.
    """
    params = SamplingParams(max_tokens=1, temperature=1.0)
    return _body(token_ids, request_id=request_id, priority=priority, params=params, prompt_logprobs=top_k)


def _decode(data: bytes, *, request_id: str) -> _Answer:
    try:
        answer = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise _malformed(f"an answer that is not understood ({error})", request_id) from error
    if len(answer.choices) != 1:
        raise _malformed(f"{len(answer.choices)} choices where one was asked for", request_id)
    return answer


def _malformed(what: str, request_id: str) -> PolicyRequestError:
    return PolicyRequestError(
        f"the server gave {what}",
        where=f"request {request_id}, /inference/v1/generate",
        remedy="use the vLLM version that pyproject.toml names",
    )


def _sampled_logprobs(choice: _Choice, request_id: str) -> np.ndarray:
    """float32 [N]: the log-probability of each *sampled* token, looked up by its id."""
    content = (choice.logprobs.content if choice.logprobs else None) or []
    if len(content) != len(choice.token_ids):
        raise _malformed(f"{len(content)} log-probabilities for {len(choice.token_ids)} tokens", request_id)
    found = np.empty(len(content), dtype=np.float32)
    for position, (token, entry) in enumerate(zip(choice.token_ids, content, strict=True)):
        if entry.token_id != token:
            matches = [candidate for candidate in entry.top_logprobs if candidate.token_id == token]
            if not matches:
                raise _malformed(f"no log-probability of sampled token {token} at {position}", request_id)
            entry = matches[0]
        found[position] = entry.logprob
    if len(found) and not (np.isfinite(found) & (found > CLAMPED)).all():
        raise _malformed("a sampled token whose log-probability is not finite", request_id)
    return found


def version_of(label: str, *, where: str) -> int:
    """The policy version a server's label stands for. Raises `WeightDeliveryError` for anything but a
    number ≥ 0.
    """
    if not (label.isascii() and label.isdigit()):
        raise WeightDeliveryError(
            f"the policy server calls its weights {label!r}, which is no policy version",
            where=where,
            remedy="deliver weights (or label the loaded ones) before the first request",
        )
    return int(label)


def _versions(choice: _Choice, request_id: str) -> np.ndarray:
    """int32 [N] from spans that must cover [0, N) in order."""
    versions = np.full(len(choice.token_ids), -1, dtype=np.int32)
    at = 0
    for span in choice.weight_versions or []:
        if span.start != at or span.end < span.start:
            break
        versions[span.start : span.end] = version_of(span.version, where=f"request {request_id}")
        at = span.end
    if at != len(versions):
        raise _malformed(f"versions of {at} of {len(versions)} tokens", request_id)
    return versions


def parse_generation(data: bytes, *, request_id: str, total_s: float) -> Generation:
    """The answer's continuation. Where the server reports no timings, `total_s` counts as decoding."""
    answer = _decode(data, request_id=request_id)
    choice = answer.choices[0]
    try:
        finish = FinishReason(choice.finish_reason or "")
    except ValueError as error:
        raise _malformed(f"finish reason {choice.finish_reason!r}", request_id) from error
    details = answer.usage.prompt_tokens_details
    timings = answer.timings or _Timings(queue_s=0.0, prefill_s=0.0, decode_s=total_s)
    return Generation(
        token_ids=np.array(choice.token_ids, dtype=np.int32),
        logprobs=_sampled_logprobs(choice, request_id),
        versions=_versions(choice, request_id),
        finish_reason=finish,
        prompt_tokens=answer.usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        queue_s=timings.queue_s,
        prefill_s=timings.prefill_s,
        decode_s=timings.decode_s,
    )


def empty_generation(*, prompt_tokens: int) -> Generation:
    """What a prompt that fills the window gives: nothing sampled, finish reason `length`."""
    return Generation(
        token_ids=np.empty(0, dtype=np.int32),
        logprobs=np.empty(0, dtype=np.float32),
        versions=np.empty(0, dtype=np.int32),
        finish_reason=FinishReason.LENGTH,
        prompt_tokens=prompt_tokens,
    )


def parse_scores(
    data: bytes, token_ids: Sequence[int], *, request_id: str, top_k: int, positions: np.ndarray | None = None
) -> TokenScores:
    """What `score_body` asked for, at temperature 1."""
    try:
        given = _decode(data, request_id=request_id).prompt_logprobs
        return token_scores(given, token_ids, top_k=top_k, positions=positions)
    except ScoreFormatError as error:
        raise _malformed(str(error), request_id) from error


def error_words(data: bytes) -> str:
    """The server's own words in an error's body."""
    text = data.decode(errors="replace").strip()
    try:
        message = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return text[:_MESSAGE_CHARS]
    if isinstance(message, dict):
        inner = message.get("error", message.get("detail", message))
        text = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    return text[:_MESSAGE_CHARS]

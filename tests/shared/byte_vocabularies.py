"""Tokenizers of any shape, and a source that scores by a rule: what stands in for a model with another tokenizer."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from agentrl.wire import TokenScores

CONTROL = ("<|im_start|>", "<|im_end|>")


class GreedyVocabulary:
    """All bytes, `words`, and control tokens; reads the longest token that fits, control tokens first."""

    def __init__(self, words: Sequence[bytes], control: Sequence[str] = CONTROL) -> None:
        self._control = [name.encode() for name in control]
        self.tokens = [*self._control, *(bytes([byte]) for byte in range(256)), *dict.fromkeys(words)]
        self._ids = {token: number for number, token in reversed(list(enumerate(self.tokens)))}
        self._longest = max(map(len, self.tokens))

    def encode(self, text: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            ids.append(self._next(text, at))
            at += len(self.tokens[ids[-1]])
        return ids

    def _next(self, text: bytes, at: int) -> int:
        for name in self._control:
            if text.startswith(name, at):
                return self._ids[name]
        stops = [found for name in self._control if (found := text.find(name, at)) >= 0]
        end = min([at + self._longest, len(text), *stops])
        return next(self._ids[text[at:stop]] for stop in range(end, at, -1) if text[at:stop] in self._ids)


class RuledSource:
    """A `Source` over a vocabulary: token t's log-probability is a function of the ids up to it."""

    name = "ruled"

    def __init__(self, vocabulary: GreedyVocabulary, *, max_model_len: int = 4096) -> None:
        self.vocabulary = vocabulary
        self.max_model_len = max_model_len
        self.asked: list[list[int]] = []

    async def score(
        self, token_ids: Sequence[int], *, top_k: int, timeout_s: float, positions: np.ndarray | None = None
    ) -> TokenScores:
        self.asked.append([int(token) for token in token_ids])
        return ruled_scores(token_ids, top_k=top_k)

    async def encode(self, text: str, *, timeout_s: float) -> list[int]:
        return self.vocabulary.encode(text.encode())

    async def token_bytes(self, token_ids: Sequence[int], *, timeout_s: float) -> list[bytes]:
        return [self.vocabulary.tokens[int(token)] for token in token_ids]


def ruled_scores(token_ids: Sequence[int], *, top_k: int = 0) -> TokenScores:
    """Made up, but always the same for the same ids: −4 … 0, and the token itself alone among the most likely."""
    ids = np.asarray(token_ids, dtype=np.int32)
    logprobs = np.array([-(zlib.crc32(ids[: t + 1].tobytes()) % 4000) / 1000 for t in range(1, len(ids))], np.float32)
    top_ids = np.full((len(logprobs), top_k), -1, np.int32)
    top_logprobs = np.full((len(logprobs), top_k), np.nan, np.float32)
    if top_k:
        top_ids[:, 0], top_logprobs[:, 0] = ids[1:], logprobs
    return TokenScores(logprobs=logprobs, top1=logprobs > -1.0, top_ids=top_ids, top_logprobs=top_logprobs)

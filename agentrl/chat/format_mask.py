"""Which of the agent's tokens are the format of a tool call, and not what it decided."""

from __future__ import annotations

import re
from itertools import accumulate

import numpy as np

from agentrl.chat.format import ChatFormat
from agentrl.chat.tool_calls import CallFormat
from agentrl.trajectory import Segment, SpanKind

# Tags with the line breaks that belong to them; a function's or a parameter's name is a decision and stays.
_FORMAT: dict[CallFormat, re.Pattern[str]] = {
    "qwen3_coder": re.compile(r"\n?</?tool_call>\n?|<function=|<parameter=|\n?</(?:function|parameter)>\n?"),
    "hermes": re.compile(r"\n?</?tool_call>\n?|\{\"name\":\s*\"|\",\s*\"arguments\":\s*\{|\}\}(?=\n</tool_call>)"),
}


def format_mask(chat: ChatFormat, segment: Segment) -> np.ndarray:
    """bool [T]: the agent's tokens that lie wholly within the format of a tool call, or end its turn."""
    mask = np.zeros(len(segment), np.bool_)
    for span in segment.spans:
        if span.kind is SpanKind.AGENT:
            ids = segment.token_ids[span.start : span.stop].tolist()
            mask[span.start : span.stop] = _format_tokens(chat, ids)
    return mask


def _format_tokens(chat: ChatFormat, ids: list[int]) -> list[bool]:
    """One entry per sampled token of a turn."""
    text = chat.decode(ids)
    ends = _ends(chat, ids, text)
    inside = bytearray(len(text))
    for match in _FORMAT[chat.call_format].finditer(text):
        inside[match.start() : match.end()] = b"\1" * (match.end() - match.start())
    return [
        token in chat.stop_token_ids or (end > start and all(inside[start:end]))
        for token, start, end in zip(ids, [0, *ends[:-1]], ends, strict=True)
    ]


def _ends(chat: ChatFormat, ids: list[int], text: str) -> list[int]:
    """Where each token ends in the text of all of them."""
    pieces = [chat.decode([token]) for token in ids]
    if "".join(pieces) == text:
        return list(accumulate(map(len, pieces)))
    # A character that several tokens make up is none until the last of them: each prefix must be read for itself.
    return [len(chat.decode(ids[: count + 1])) for count in range(len(ids))]

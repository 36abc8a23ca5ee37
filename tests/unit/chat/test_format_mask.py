"""Which of the agent's tokens are format: tags and the end of a turn, not what was decided."""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np
import pytest

from agentrl.chat import ChatFormat
from agentrl.chat.format_mask import format_mask
from agentrl.trajectory import Purpose, Segment, Span, SpanKind
from agentrl.wire import ToolCall


def segment_of(chat: ChatFormat, said: list[int]) -> Segment:
    prompt = chat.tokenizer.encode("<tool_call> in a prompt is nobody's")
    length, start = len(prompt) + len(said), len(prompt)
    logprobs = np.full(length, np.nan, np.float32)
    versions = np.full(length, -1, np.int32)
    logprobs[start:], versions[start:] = -1.0, 0
    spans = (Span(SpanKind.PROMPT, 0, start, 0), Span(SpanKind.AGENT, start, length, 0, Purpose.ACT))
    return Segment(np.array([*prompt, *said], np.int32), spans, logprobs, versions)


@pytest.mark.parametrize(
    ("call_format", "kept"),
    [
        ("qwen3_coder", "Look.run>\n<parameter=command>\ngrep -n '</b>' a.py"),
        ("hermes", 'Look.run"command": "grep -n \'</b>\' a.py"'),
    ],
)
def test_tags_are_format_and_names_and_values_are_not(call_format: Any, kept: str) -> None:
    chat = ChatFormat.load(str(resources.files("agentrl.policy") / "tiny"), call_format=call_format)
    said = chat.say("Look.", [ToolCall(name="run", arguments={"command": "grep -n '</b>' a.py"})])
    segment = segment_of(chat, said)
    mask = format_mask(chat, segment)
    start = len(segment) - len(said)
    assert not mask[:start].any()
    assert mask[-1]  # the end of the turn
    left = chat.decode([t for t, masked in zip(said, mask[start:], strict=True) if not masked])
    assert left == kept

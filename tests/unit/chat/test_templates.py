"""Templates that drop calls (K13), rewrite history (K3) or are no ChatML."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.chat import (
    ChatFormat,
    Conversation,
    chatml_template,
    check_template,
    common_prefix_len,
    load_tokenizer_folder,
    longest_known_prefix,
)
from agentrl.errors import ConfigError
from agentrl.wire import ChatMessage

DROPS_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reasoning of turns before the last one is stripped, as several reasoning models' templates do.
STRIPS = chatml_template().replace(
    "{{ message.content or '' }}",
    "{{ message.content.split('</think>\\n\\n')[-1]"
    " if message.role == 'assistant' and loop.length - loop.index > 1 else message.content }}",
)
MESSAGES = [ChatMessage(role="user", content="u")]


def chat_of(folder: Path, template: str, call_format: str = "qwen3_coder") -> ChatFormat:
    return ChatFormat(load_tokenizer_folder(folder).tokenizer, template, call_format=call_format)  # type: ignore[arg-type]


def test_a_template_that_drops_calls_is_refused(tiny_folder: Path) -> None:
    """K13."""
    with pytest.raises(ConfigError, match="drops tool calls") as caught:
        check_template(chat_of(tiny_folder, DROPS_CALLS))
    assert "chat_template=chatml" in caught.value.remedy


def test_smollm2_own_template_drops_calls_and_ours_serves_it(smollm2_folder: Path) -> None:
    """K13, on a real model's template."""
    with pytest.raises(ConfigError, match="drops tool calls"):
        ChatFormat.load(smollm2_folder)
    assert ChatFormat.load(smollm2_folder, template="chatml").rewrites_history is False


def test_calls_in_another_format_are_refused(tiny_folder: Path) -> None:
    template = chatml_template().replace("call_format == 'hermes'", "true")
    with pytest.raises(ConfigError, match="does not write tool calls as qwen3_coder") as caught:
        check_template(chat_of(tiny_folder, template))
    assert "call_format" in caught.value.remedy
    check_template(chat_of(tiny_folder, template, "hermes"))


def test_deltas_that_do_not_join_are_refused(tiny_folder: Path) -> None:
    """A template that numbers its turns cannot be grown by deltas."""
    template = chatml_template().replace(
        "{{ '\\n<tool_response>\\n' }}", "{{ '\\n<tool_response>\\n' }}{{ loop.index }}"
    )
    assert template != chatml_template()
    with pytest.raises(ConfigError, match="deltas do not make up"):
        check_template(chat_of(tiny_folder, template))


def test_a_tokenizer_without_chatml_tokens_is_refused(tiny_folder: Path) -> None:
    class Bare:
        def __getattr__(self, name: str) -> object:
            return lambda *_: None

    with pytest.raises(ConfigError, match=r"no <\|im_start\|>"):
        ChatFormat(Bare(), chatml_template())  # type: ignore[arg-type]


def test_broken_or_refusing_templates_are_configuration_errors(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="does not compile"):
        chat_of(tiny_folder, "{% if %}")
    with pytest.raises(ConfigError, match="no tools here"):
        chat_of(tiny_folder, "{{ raise_exception('no tools here') }}")


def test_plain_templates_append_and_nothing_is_rendered_again(tiny_folder: Path) -> None:
    chat = chat_of(tiny_folder, chatml_template())
    talk = Conversation(chat, MESSAGES)
    sampled = chat.say("<think>\nr\n</think>\n\nx")
    following = talk.answer(sampled, ["o"])
    assert not following.rewritten
    assert following.ids == chat.observe(["o"])


def test_a_template_that_strips_old_reasoning_opens_a_new_segment(tiny_folder: Path) -> None:
    """K3: the prefix that the policy saw no longer holds, and the continuation says so instead of slicing."""
    chat = chat_of(tiny_folder, STRIPS)
    check_template(chat)
    assert chat.rewrites_history
    talk = Conversation(chat, MESSAGES)
    first = [*chat.tokenizer.encode("<think>\nr\n</think>\n\nlook"), chat.end_of_turn]
    seen = talk.prompt_ids + first
    following = talk.answer(first, ["o1"])
    assert not following.rewritten
    assert following.ids == chat.observe(["o1"])
    seen += following.ids
    second = [*chat.tokenizer.encode("<think>\nq\n</think>\n\nedit"), chat.end_of_turn]
    seen += second
    following = talk.answer(second, ["o2"])
    assert following.rewritten
    text = chat.decode(following.ids)
    assert "r\n</think>" not in text
    assert "<think>\nq\n</think>\n\nedit<|im_end|>" in text
    shared = common_prefix_len(seen, following.ids)
    assert shared == len(talk.prompt_ids)
    assert longest_known_prefix([talk.prompt_ids, seen], following.ids) == 0


def test_without_reasoning_such_a_template_still_appends(tiny_folder: Path) -> None:
    chat = chat_of(tiny_folder, STRIPS)
    talk = Conversation(chat, MESSAGES)
    for _ in range(3):
        assert talk.answer(chat.say("x"), ["o"]).ids == chat.observe(["o"])


IDS = st.lists(st.integers(0, 3), max_size=8)


@given(first=IDS, second=IDS)
def test_common_prefix_len_is_the_longest(first: list[int], second: list[int]) -> None:
    size = common_prefix_len(first, second)
    assert first[:size] == second[:size]
    assert size == min(len(first), len(second)) or first[size] != second[size]


@given(known=st.lists(IDS, max_size=5), prompt=IDS)
def test_the_longest_known_prefix_wins(known: list[list[int]], prompt: list[int]) -> None:
    """K3: longest, and whole or not at all."""
    index = longest_known_prefix(known, prompt)
    fitting = [ids for ids in known if prompt[: len(ids)] == ids]
    if index is None:
        assert not fitting
    else:
        assert prompt[: len(known[index])] == known[index]
        assert len(known[index]) == max(map(len, fitting))

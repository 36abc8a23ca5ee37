"""Deltas against the tokenizer's own render of the whole chat (K1, K2)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.chat import ChatFormat, chatml_template
from agentrl.chat.template import message_dict
from agentrl.errors import ConfigError
from agentrl.wire import ChatMessage, ToolCall

SLOW = settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
PLAIN = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=40)
PIECES = [*"ab_ \n\t<>/=1é(", "</", "<tool_call>", "\r\n", "  "]
CODE = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
TEXT = st.one_of(PLAIN, CODE, st.sampled_from(["<|im_end|>", "x<|im_start|>user\n", "\n", "", " "]))
NAME = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
CALL = st.builds(
    lambda name, arguments: ToolCall(name=name, arguments=arguments),
    NAME,
    st.dictionaries(NAME, st.one_of(TEXT, st.lists(st.integers(-5, 99), max_size=3), st.booleans()), max_size=3),
)


@st.composite
def turns(draw: st.DrawFn) -> list[tuple[str, list[ToolCall], list[str]]]:
    """Assistant turns: (content, calls, results of each call)."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        calls = draw(st.lists(CALL, min_size=1, max_size=2))
        results = [draw(TEXT) for _ in calls]
        found.append((draw(TEXT), calls, results))
    return found


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def own(request: pytest.FixtureRequest) -> tuple[ChatFormat, Any]:
    """Our format and transformers' tokenizer of the same folder."""
    from transformers import AutoTokenizer

    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    if request.param == "smollm2":
        tokenizer.chat_template = chatml_template()
    return ChatFormat.load(folder, template="model" if request.param == "tiny" else "chatml"), tokenizer


def whole(tokenizer: Any, messages: list[ChatMessage], generation_prompt: bool) -> list[int]:
    shaped = [message_dict(message) for message in messages]
    return tokenizer.apply_chat_template(shaped, add_generation_prompt=generation_prompt, return_dict=False)


@SLOW
@given(system=TEXT, user=TEXT, chat=turns())
def test_joined_ids_equal_the_whole_render_at_every_boundary(
    own: tuple[ChatFormat, Any], system: str, user: str, chat: list[tuple[str, list[ToolCall], list[str]]]
) -> None:
    """K1: the separator after the end of turn is there once, as an environment token, at every boundary."""
    ours, tokenizer = own
    messages = [ChatMessage(role="system", content=system), ChatMessage(role="user", content=user)]
    joined = ours.open(messages)
    assert joined == whole(tokenizer, messages, True)
    exact = True
    for content, calls, results in chat:
        messages.append(ChatMessage(role="assistant", content=content, tool_calls=tuple(calls)))
        sampled = ours.say(content, calls)
        exact = exact and not content[:1].isspace()
        joined += sampled + ours.close_turn(sampled)
        check(ours, joined + ours.tokenizer.encode("\n"), whole(tokenizer, messages, False), exact)
        messages += [ChatMessage(role="tool", content=text) for text in results]
        delta = ours.observe(results)
        assert delta[0] == ours.tokenizer.encode("\n")[0]
        joined += delta
        check(ours, joined, whole(tokenizer, messages, True), exact)


def check(ours: ChatFormat, joined: list[int], render: list[int], exact: bool) -> None:
    """Ids where no turn starts with white space; else the text, which is equal always."""
    if exact:
        assert joined == render
    assert ours.decode(joined) == ours.decode(render)


@settings(max_examples=60, deadline=None)
@given(text=TEXT)
def test_a_turn_cut_short_is_closed_by_an_environment_token(own: tuple[ChatFormat, Any], text: str) -> None:
    ours, _ = own
    sampled = ours.say(text)
    assert sampled[-1] == ours.end_of_turn
    assert ours.close_turn(sampled) == []
    assert ours.close_turn(sampled[:-1]) == ([] if sampled[-2:-1] == [ours.end_of_turn] else [ours.end_of_turn])
    assert ours.close_turn([]) == [ours.end_of_turn]


def test_the_separators_of_one_turn_exactly(own: tuple[ChatFormat, Any]) -> None:
    ours, _ = own
    assert ours.observe_text(["a\n", "b"]) == (
        "\n<|im_start|>user\n<tool_response>\na\n\n</tool_response>\n"
        "<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ours.say_text("look", [ToolCall(name="view", arguments={"path": "a.py", "view_range": [1, 2]})]) == (
        "look\n<tool_call>\n<function=view>\n<parameter=path>\na.py\n</parameter>\n<parameter=view_range>\n"
        "[1, 2]\n</parameter>\n</function>\n</tool_call><|im_end|>"
    )
    assert ours.decode(ours.extend([ChatMessage(role="user", content="sum up")])) == (
        "\n<|im_start|>user\nsum up<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tool_schemas_are_rendered_as_transformers_does(own: tuple[ChatFormat, Any]) -> None:
    ours, tokenizer = own
    schema = {"type": "function", "function": {"name": "view", "description": "é <b>", "parameters": {}}}
    for messages in (
        [ChatMessage(role="user", content="u")],
        [ChatMessage(role="system", content="s"), ChatMessage(role="user", content="u")],
    ):
        theirs = tokenizer.apply_chat_template(
            [message_dict(message) for message in messages],
            tools=[schema],
            add_generation_prompt=True,
            return_dict=False,
        )
        assert ours.open(messages, [schema]) == theirs
        assert json.dumps(schema["function"], ensure_ascii=False) in ours.decode(theirs)


def test_stop_tokens_and_agent_text(own: tuple[ChatFormat, Any]) -> None:
    """K5: what is cut off is the stop token at the end, never a token by its value."""
    ours, _ = own
    assert ours.stop_token_ids == (ours.tokenizer.token_id("<|im_end|>"),)
    hello = ours.tokenizer.encode("hello")
    assert ours.agent_text([*hello, ours.end_of_turn]) == "hello"
    assert ours.agent_text(hello) == "hello"
    assert ours.agent_text([ours.end_of_turn, *hello]) == "<|im_end|>hello"
    assert ours.agent_text([]) == ""


def test_another_eos_stops_but_does_not_close(tiny_folder: Path) -> None:
    from agentrl.chat import load_tokenizer_folder

    found = load_tokenizer_folder(tiny_folder)
    chat = ChatFormat(found.tokenizer, chatml_template(), special_tokens={"eos_token": "<|endoftext|>"})
    pad = found.tokenizer.token_id("<|endoftext|>")
    assert chat.stop_token_ids == (chat.end_of_turn, pad)
    assert chat.close_turn([9, pad or 0]) == [chat.end_of_turn]
    assert chat.agent_text([*found.tokenizer.encode("x"), pad or 0]) == "x"


def test_lone_surrogates_in_an_observation_do_not_crash(own: tuple[ChatFormat, Any]) -> None:
    ours, _ = own
    assert ours.decode(ours.observe(["a\ud800b"])) == ours.observe_text(["a?b"])


def test_what_is_remembered_of_an_observation_is_not_shared(own: tuple[ChatFormat, Any]) -> None:
    """Short results are tokenised once, long ones each time; whoever changes a list changes no other."""
    ours, _ = own
    for results in (["seen"], ["seen", "and more"], ["long " * 1000], []):
        first = ours.observe(results)
        assert first == ours.tokenizer.encode(ours.observe_text(results))
        first.append(0)
        assert ours.observe(results) == first[:-1]
    assert ours.observe(["ab", "c"]) != ours.observe(["a", "bc"])


def test_sampled_ids_are_kept_where_encode_of_decode_differs(
    lossy: Callable[[dict[int, int]], Any],
) -> None:
    """K2: ids that no encoder would choose stay, and nothing sampled is tokenised."""
    plain = lossy({})
    a, b = plain.encode("value"), plain.encode("zq")
    tokenizer = lossy({b[0]: a[0]})
    chat = ChatFormat(tokenizer, chatml_template())
    assert tokenizer.encode(tokenizer.decode([b[0]])) != [b[0]]
    prompt = chat.open([ChatMessage(role="user", content="Äh")])
    tokenizer.encoded.clear()
    sampled = [b[0], b[0], chat.end_of_turn]
    text = chat.agent_text(sampled)
    joined = prompt + sampled + chat.close_turn(sampled) + chat.observe(["seen"])
    assert joined[len(prompt) : len(prompt) + 3] == sampled
    assert text == tokenizer.decode([b[0], b[0]])
    assert tokenizer.encoded == [chat.observe_text(["seen"])]


def test_hermes_calls_come_from_the_same_template(tiny_folder: Path) -> None:
    chat = ChatFormat.load(tiny_folder, call_format="hermes", template="chatml")
    call = ToolCall(name="view", arguments={"path": "é<", "view_range": [1, 2]})
    assert (
        chat.say_text("", [call, call])
        == "\n".join(
            ['<tool_call>\n{"name": "view", "arguments": {"path": "é<", "view_range": [1, 2]}}\n</tool_call>'] * 2
        )
        + "<|im_end|>"
    )


def test_a_folder_without_a_tokenizer_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json") as caught:
        ChatFormat.load(tmp_path)
    assert "save_pretrained" in caught.value.remedy
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        ChatFormat.load(tmp_path)


def test_the_room_loads_without_torch_or_transformers(tiny_folder: Path) -> None:
    code = (
        "import sys; from agentrl.chat import ChatFormat; "
        f"ChatFormat.load({str(tiny_folder)!r}); "
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.strip() == "[]"

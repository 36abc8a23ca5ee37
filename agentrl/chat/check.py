"""Probes of a chat template at start-up: one that would silently lose or change something is refused."""

from __future__ import annotations

from agentrl.chat.format import ChatFormat
from agentrl.chat.tool_calls import parse_calls
from agentrl.errors import ConfigError
from agentrl.wire import ChatMessage, ToolCall

_REMEDY = "set agent.tools.chat_template=chatml to render with agentrl's own ChatML template"
_CALL = ToolCall(name="view", arguments={"path": "a.py", "old_str": "  x < 1\n"})
_SCHEMAS = {"view": {"properties": {"path": {"type": "string"}, "old_str": {"type": "string"}}}}


def check_template(chat: ChatFormat) -> None:
    """Raise `ConfigError` unless the template keeps calls, in our format, and deltas make up its render."""
    _check_calls(chat)
    _check_deltas(chat)


def _check_calls(chat: ChatFormat) -> None:
    user = ChatMessage(role="user", content="u")
    result = ChatMessage(role="tool", content="r")
    with_call, without = (
        chat.render([user, ChatMessage(role="assistant", content="", tool_calls=calls), result])
        for calls in ((_CALL,), ())
    )
    if with_call == without:
        raise ConfigError("the chat template drops tool calls", where="chat template", remedy=_REMEDY)
    found = parse_calls(chat.say_text("", (_CALL,)), chat.call_format, _SCHEMAS)
    if found != [_CALL]:
        raise ConfigError(
            f"the chat template does not write tool calls as {chat.call_format}",
            where="chat template",
            remedy="set agent.tools.call_format to the model's own, or agent.tools.chat_template=chatml",
        )


def _check_deltas(chat: ChatFormat) -> None:
    """Two turns, the second with two calls, built by deltas and rendered whole."""
    opening = [ChatMessage(role="system", content="s"), ChatMessage(role="user", content="u")]
    rest = [
        ChatMessage(role="assistant", content="a", tool_calls=(_CALL,)),
        ChatMessage(role="tool", content="r\n1"),
        ChatMessage(role="assistant", content="b", tool_calls=(_CALL, _CALL)),
        ChatMessage(role="tool", content="r2"),
        ChatMessage(role="tool", content=" r3\n"),
    ]
    built = chat.open(opening)
    built += chat.say("a", (_CALL,)) + chat.observe(["r\n1"])
    built += chat.say("b", (_CALL, _CALL)) + chat.observe(["r2", " r3\n"])
    whole = chat.tokenizer.encode(chat.render(opening + rest, add_generation_prompt=True))
    if built != whole:
        raise ConfigError(
            "token deltas do not make up the chat template's own render",
            where="chat template",
            remedy=_REMEDY,
        )

"""The agent's text → tool calls, and back: Qwen3-Coder XML and Hermes JSON.

Nothing the policy may write raises here: what is no call comes back as `MalformedCall`, whose message is the
observation. Values are raw text, not XML: they may hold `<`, `</` and even `</parameter>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from agentrl.wire import ToolCall

CallFormat = Literal["qwen3_coder", "hermes"]

NO_CALL = "Error: no valid tool call."


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """What began like a call and is none. `message` goes back to the agent as the observation."""

    message: str


def _malformed(detail: str) -> MalformedCall:
    return MalformedCall(f"{NO_CALL[:-1]}: {detail}.")


def parse_calls(
    text: str,
    call_format: CallFormat,
    schemas: Mapping[str, Mapping[str, Any] | None],
    *,
    cut: bool = False,
) -> list[ToolCall | MalformedCall]:
    """The calls in an agent's turn, in order; empty where it made none.

    `schemas` maps a tool's name to the JSON schema of its parameters, which says how Qwen3-Coder values are
    read. A stop string may have swallowed the closing tags of the last call, so they may lack; but where
    `cut` says that a token limit ended the turn, a call without its closing tag is malformed: half a file
    must not be written.
    """
    said = _after_reasoning(text)
    return list(_parse_hermes(said, cut) if call_format == "hermes" else _parse_qwen(said, schemas, cut))


def render_call(call: ToolCall, call_format: CallFormat) -> str:
    """The text of one call."""
    if call_format == "hermes":
        name, arguments = (json.dumps(part, ensure_ascii=False) for part in (call.name, call.arguments))
        return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
    parameters = "".join(f"<parameter={name}>\n{_raw(value)}\n</parameter>\n" for name, value in call.arguments.items())
    return f"<tool_call>\n<function={call.name}>\n{parameters}</function>\n</tool_call>"


def _raw(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def render_calls(calls: Sequence[ToolCall], call_format: CallFormat) -> str:
    """The text of a turn that is only calls."""
    return "\n".join(render_call(call, call_format) for call in calls)


def call_pattern(schemas: Mapping[str, Mapping[str, Any]], call_format: CallFormat) -> str:
    """A regular expression for a turn that is one call of one of these tools, its needed arguments in order.

    A value is one line without `<`, `>`, `"` or a backslash: where a longer one ends, a model that was never
    taught calls would not find.
    """
    calls = "|".join(_shape(name, schema, call_format) for name, schema in schemas.items())
    return rf"<tool_call>\n({calls})\n</tool_call>"


def _shape(name: str, schema: Mapping[str, Any], call_format: CallFormat) -> str:
    kinds = {key: schema["properties"][key].get("type", "string") for key in schema.get("required", ())}
    text = r'[^<>"\\\n]+'
    if call_format == "hermes":
        values = {key: "[0-9]+" if kind == "integer" else f'"{text}"' for key, kind in kinds.items()}
        arguments = ", ".join(f'"{key}": {value}' for key, value in values.items())
        return rf'\{{"name": "{name}", "arguments": \{{{arguments}\}}\}}'
    values = {key: "[0-9]+" if kind == "integer" else text for key, kind in kinds.items()}
    parameters = "".join(rf"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return rf"<function={name}>\n{parameters}</function>"


def _after_reasoning(text: str) -> str:
    """The text after a leading reasoning block: calls that are only thought about are not made."""
    thought, end, said = text.partition("</think>")
    if end and ("<tool_call>" not in thought or thought.lstrip().startswith("<think>")):
        return said
    return text


# --- Qwen3-Coder --------------------------------------------------------------------------------------------

_HEAD = re.compile(r"<tool_call>(?:\s*<function=([^<>\n]+)>)?|<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>")
# A tag that ends a value stands at the start of a line or right after a tag; elsewhere it may be part of the
# value.
_NEXT = re.compile(r"(?:(?<=\n)|(?<=>))[ \t]*(<parameter=[^<>\n]+>|</function>)")
_NEXT_ANYWHERE = re.compile(r"(<parameter=[^<>\n]+>|</function>)")
_CLOSE = "</parameter>"
_END = "</function>"


def _parse_qwen(
    text: str, schemas: Mapping[str, Mapping[str, Any] | None], cut: bool
) -> Iterator[ToolCall | MalformedCall]:
    at = 0
    while head := _HEAD.search(text, at):
        at = head.end()
        name = (head[1] or head[2] or "").strip()
        if not name:
            yield _malformed("<function=NAME> is missing")
            continue
        properties = (schemas.get(name) or {}).get("properties") or {}
        arguments: dict[str, Any] = {}
        twice = ""
        closed = False
        while True:
            end = text.find(_END, at)
            parameter = _PARAMETER.search(text, at, end if end >= 0 else len(text))
            if parameter is None:
                closed = end >= 0
                at = end + len(_END) if closed else len(text)
                break
            raw, at = _value(text, parameter.end())
            key = parameter[1].strip()
            twice = key if key in arguments else twice
            arguments[key] = _convert(raw, properties.get(key, {}))
        if cut and not closed:
            yield _malformed("it was cut by the token limit")
        elif twice:
            yield _malformed(f"parameter {twice} is given twice")
        else:
            yield ToolCall(name=name, arguments=arguments)


def _value(text: str, start: int) -> tuple[str, int]:
    """(raw value that begins at `start`, where to read on).

    The value ends at the last closing tag before the next `<parameter=` or `</function>`; where that closing
    tag lacks, at the next tag itself; where everything after lacks, at `</tool_call>` or the end of the text.
    """
    for tag in (_NEXT, _NEXT_ANYWHERE):
        following = tag.search(text, start)
        limit = following.start(1) if following else _end_of_call(text, start)
        close = text.rfind(_CLOSE, start, limit)
        if close >= 0:
            break
    raw = text[start : close if close >= 0 else limit]
    return raw.removeprefix("\n").removesuffix("\n"), limit


def _end_of_call(text: str, start: int) -> int:
    found = text.find("\n</tool_call>", start)
    return found + 1 if found >= 0 else len(text)


def _convert(raw: str, schema: Mapping[str, Any]) -> Any:
    """The value by its schema's type. What does not convert stays text, and the tool's check names it."""
    kind = schema.get("type", "string")
    try:
        if kind == "integer":
            return int(raw)
        if kind == "number":
            return float(raw)
        if kind == "boolean":
            return {"true": True, "false": False}[raw.strip().lower()]
        if kind in ("array", "object", "null"):
            return json.loads(raw, parse_constant=_refuse)
    except (ValueError, KeyError, RecursionError):
        return raw
    return raw


# --- Hermes -------------------------------------------------------------------------------------------------


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")


# Models write line breaks inside JSON strings; strict=False takes them.
_JSON = json.JSONDecoder(strict=False, parse_constant=_refuse)


def _parse_hermes(text: str, cut: bool) -> Iterator[ToolCall | MalformedCall]:
    opening, closing = "<tool_call>", "</tool_call>"
    at = text.find(opening)
    while at >= 0:
        start = at + len(opening)
        start += len(text[start:]) - len(text[start:].lstrip())
        try:
            value, stop = _JSON.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            close = text.find(closing, start)
            at = text.find(opening, close if close >= 0 else start)
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error) or "too deeply nested"
            yield _malformed(f"not JSON ({reason})")
            continue
        closed = text[stop:].lstrip().startswith(closing)
        at = text.find(opening, stop)
        yield _malformed("it was cut by the token limit") if cut and not closed else _hermes_call(value)


def _hermes_call(value: Any) -> ToolCall | MalformedCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _malformed('the JSON object needs a "name"')
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = _JSON.decode(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return _malformed('"arguments" is no JSON object')
    return ToolCall(name=value["name"], arguments=arguments)

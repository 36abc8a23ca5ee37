"""A model's chat template (Jinja) rendered to text, as transformers renders it, without importing
transformers.

Same sandboxed environment, same block trimming, same `tojson`: `tests/unit/chat` holds the two against each
other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import resources
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.errors import ConfigError
from agentrl.wire import ChatMessage


def chatml_template() -> str:
    """Our own ChatML template with tools, for models whose template knows none."""
    return (resources.files("agentrl.chat") / "chatml.jinja").read_text(encoding="utf-8")


def message_dict(message: ChatMessage) -> dict[str, Any]:
    """The message in the shape that chat templates read."""
    shaped: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        shaped["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in message.tool_calls
        ]
    return shaped


class _Generation(Extension):
    """`{% generation %}` marks assistant text in some templates; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


class ChatTemplate:
    """`source` is the Jinja text; `variables` go into every rendering (special tokens, `call_format`)."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda shape: datetime.now().strftime(shape)
        self._environment = environment
        self._variables = dict(variables)
        try:
            self._compiled = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}", where="chat_template") from error

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The chat as text. Raises `ConfigError` where the template refuses the messages."""
        try:
            return self._rendered(
                {
                    "messages": [message_dict(message) for message in messages],
                    "tools": list(tools) if tools else None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    **self._variables,
                }
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ConfigError(
                f"the chat template refuses the chat: {error}",
                where=f"chat template, roles {[message.role for message in messages]}",
                remedy="set agent.tools.chat_template=chatml to render with agentrl's own ChatML template",
            ) from error

    def _rendered(self, variables: dict[str, Any]) -> str:
        """`Template.render`, after which nothing is left for the garbage collector.

        A template's macros and its context hold each other: thirty objects a turn, which with thousands of episodes
        in memory would make the collector stop the event loop for a second, again and again.
        """
        context = self._compiled.new_context(variables)
        try:
            return self._environment.concat(self._compiled.root_render_func(context))
        finally:
            context.vars.clear()

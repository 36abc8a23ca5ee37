"""The agent's tools: names, what each takes, and the check of a call's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the agent sees it. `parameters`: name → JSON schema, required unless `optional`."""

    name: str
    description: str
    parameters: Mapping[str, Mapping[str, Any]]
    optional: frozenset[str] = frozenset()

    @property
    def parameter_schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments object."""
        return {
            "type": "object",
            "properties": {name: dict(schema) for name, schema in self.parameters.items()},
            "required": [name for name in self.parameters if name not in self.optional],
        }


_PATH = {"type": "string", "description": "path of a file, absolute or relative to the repository"}

_TOOLS = (
    Tool(
        "bash",
        "Run a command in a fresh bash at the repository's root.",
        {"command": {"type": "string", "description": "the command"}},
    ),
    Tool(
        "view",
        "Show a file, or the files of a folder.",
        {
            "path": _PATH,
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "[first line, last line], counted from 1; -1 is the last line",
            },
        },
        frozenset({"view_range"}),
    ),
    Tool(
        "create",
        "Write a new file.",
        {"path": _PATH, "file_text": {"type": "string", "description": "the whole file"}},
    ),
    Tool(
        "str_replace",
        "Replace a text that stands exactly once in a file.",
        {
            "path": _PATH,
            "old_str": {"type": "string", "description": "the text to replace, white space included"},
            "new_str": {"type": "string", "description": "what stands there instead"},
        },
    ),
    Tool(
        "insert",
        "Insert a text after a line of a file.",
        {
            "path": _PATH,
            "insert_line": {"type": "integer", "description": "the line after which to insert; 0 is the top"},
            "new_str": {"type": "string", "description": "the text"},
        },
    ),
    Tool("undo_edit", "Take back the last edit of a file.", {"path": _PATH}),
    Tool("submit", "End: the work tree as it stands is the answer.", {}),
)
TOOLS: dict[str, Tool] = {tool.name: tool for tool in _TOOLS}


def select_tools(names: Sequence[str]) -> dict[str, Tool]:
    """The tools of those names. Raises `ConfigError` that lists the names there are."""
    unknown = [name for name in names if name not in TOOLS]
    if unknown:
        raise ConfigError(
            f"no tool {unknown[0]!r}", where="Environment.tool_names", remedy=f"one of {', '.join(TOOLS)}"
        )
    return {name: TOOLS[name] for name in names}


def tool_schemas(names: Sequence[str]) -> list[dict[str, Any]]:
    """JSON schemas in the shape that chat templates read."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameter_schema,
            },
        }
        for tool in select_tools(names).values()
    ]


def check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with a call's arguments, in a few words; None where nothing is."""
    for name in tool.parameters:
        if name not in arguments and name not in tool.optional:
            return f"missing parameter {name}"
    for name, value in arguments.items():
        schema = tool.parameters.get(name)
        if schema is None:
            return f"unknown parameter {name}"
        if not _is_a(value, schema):
            items = f" of {schema['items']['type']}" if "items" in schema else ""
            return f"parameter {name} must be {schema['type']}{items}"
        if isinstance(value, str) and (fault := _text_fault(name, value)):
            return fault
    return None


def _is_a(value: Any, schema: Mapping[str, Any]) -> bool:
    if schema["type"] == "string":
        return isinstance(value, str)
    if schema["type"] == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, list) and all(_is_a(item, schema["items"]) for item in value)


def _text_fault(name: str, value: str) -> str | None:
    """What is wrong with text that no process or file system takes: the agent's fault, not the sandbox's."""
    if not value.isascii() and value.encode("utf-8", "replace").decode("utf-8") != value:
        return f"parameter {name} is not valid text"
    if name in ("path", "command") and ("\0" in value or not value.strip()):
        return f"parameter {name} is empty or holds a NUL byte"
    return None

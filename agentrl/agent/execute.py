"""One episode's tool calls, executed in its sandbox and counted.

Whatever the agent does wrong is an observation and a bad call: unknown tools, wrong arguments, edits that do
not apply, malformed calls are all treated alike. Only a sandbox that fails raises (`SandboxError`).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from agentrl.agent.observations import command_text, cut_text, edit_text
from agentrl.agent.tools import check_arguments, select_tools
from agentrl.chat import MalformedCall
from agentrl.config import ToolsConfig
from agentrl.wire import EditCommand, Sandbox, ToolCall

_TEST_COMMAND = re.compile(r"(?:^|[\s;&|(])(?:pytest|py\.test)(?:$|[\s;&|)])")
_CHANGES = ("create", "str_replace", "insert")
_SHORTEST_S = 0.5


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gave: the observation, whether it was a bad call, whether the agent submitted."""

    text: str
    bad: bool = False
    submitted: bool = False


class ToolRunner:
    """Executes calls in order and counts them: `tool_calls` all that could be read, `sandbox_calls` those that the
    sandbox carried out. Counts only grow."""

    def __init__(self, *, names: Sequence[str], sandbox: Sandbox, config: ToolsConfig) -> None:
        self._tools = select_tools(names)
        self._sandbox = sandbox
        self._config = config
        self._compact = config.observations == "compact"
        self.counts: dict[str, int] = dict.fromkeys(
            ("tool_calls", "sandbox_calls", "bad_calls", "edits", "tests", "submitted"), 0
        )

    @property
    def parameter_schemas(self) -> dict[str, dict[str, Any]]:
        """JSON schema of each offered tool's arguments, by the tool's name."""
        return {name: tool.parameter_schema for name, tool in self._tools.items()}

    async def execute(self, call: ToolCall | MalformedCall, *, time_left_s: float) -> ToolResult:
        """Run one call. A command gets `command_timeout_s`, or what is left of the episode where that is
        less.

        Raises `SandboxError` where the sandbox itself failed.
        """
        if isinstance(call, MalformedCall):
            result = ToolResult(cut_text(call.message, self._config.output_limit_chars), bad=True)
        else:
            self.counts["tool_calls"] += 1
            result = await self._run(call, max(_SHORTEST_S, min(self._config.command_timeout_s, time_left_s)))
        self.counts["bad_calls"] += result.bad
        self.counts["submitted"] += result.submitted
        return result

    async def _run(self, call: ToolCall, timeout_s: float) -> ToolResult:
        tool = self._tools.get(call.name)
        if tool is None:
            return ToolResult(f"Error: unknown tool. Tools: {', '.join(self._tools)}.", bad=True)
        if fault := check_arguments(tool, call.arguments):
            return ToolResult(cut_text(f"Error: {fault}.", self._config.output_limit_chars), bad=True)
        if call.name == "submit":
            return ToolResult("", submitted=True)
        if call.name == "bash":
            return await self._bash(call.arguments["command"], timeout_s)
        for command in get_args(EditCommand):
            if command == call.name:
                return await self._edit(command, call.arguments, timeout_s)
        raise NotImplementedError(f"tool {call.name} has no execution")

    async def _bash(self, command: str, timeout_s: float) -> ToolResult:
        limit = self._config.output_limit_chars
        is_test = _TEST_COMMAND.search(command) is not None
        # Four bytes a character at most: what the sandbox keeps of head and tail always covers ours.
        self.counts["sandbox_calls"] += 1
        ended = await self._sandbox.run(command, timeout_s=timeout_s, output_limit=4 * limit)
        self.counts["tests"] += is_test
        return ToolResult(
            command_text(ended, limit_chars=limit, timeout_s=timeout_s, compact=self._compact, is_test=is_test)
        )

    async def _edit(self, command: EditCommand, arguments: dict[str, Any], timeout_s: float) -> ToolResult:
        rest = {name: value for name, value in arguments.items() if name != "path"}
        path = posixpath.normpath(posixpath.join(self._sandbox.workdir, arguments["path"]))
        self.counts["sandbox_calls"] += 1
        answer = await self._sandbox.edit(command, path=path, timeout_s=timeout_s, **rest)
        if answer.ok and command in _CHANGES:
            self.counts["edits"] += 1
        text = edit_text(command, answer, limit_chars=self._config.output_limit_chars, compact=self._compact)
        return ToolResult(text, bad=not answer.ok)

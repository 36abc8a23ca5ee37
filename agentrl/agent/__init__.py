"""The episode loop: an agent, its tools, and what it leaves behind."""

from agentrl.agent.demonstrate import run_demonstration
from agentrl.agent.episode import run_episode
from agentrl.agent.execute import ToolResult, ToolRunner
from agentrl.agent.result import EpisodeResult, StopReason
from agentrl.agent.tools import TOOLS, Tool, check_arguments, select_tools, tool_schemas

__all__ = [
    "TOOLS",
    "EpisodeResult",
    "StopReason",
    "Tool",
    "ToolResult",
    "ToolRunner",
    "check_arguments",
    "run_demonstration",
    "run_episode",
    "select_tools",
    "tool_schemas",
]

"""A scripted expert's episode: calls rendered as the agent would say them, all observations real."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

from agentrl.agent.execute import ToolRunner
from agentrl.agent.result import EpisodeResult, StopReason
from agentrl.agent.segments import SegmentBuilder
from agentrl.agent.tools import tool_schemas
from agentrl.chat import ChatFormat
from agentrl.config import AgentConfig
from agentrl.trajectory import Source, TurnTiming
from agentrl.wire import Environment, Sandbox, Task, ToolCall


async def run_demonstration(
    *,
    task: Task,
    environment: Environment,
    sandbox: Sandbox,
    expert_turns: Generator[ToolCall, str, None],
    chat: ChatFormat,
    config: AgentConfig,
    clock: Callable[[], float] = time.monotonic,
) -> EpisodeResult:
    """Play `expert_turns` on a sandbox that is already prepared: it yields calls and is sent their
    observations.

    The segment's source is `demonstration`: no log-probabilities, no versions. An expert that ends without
    `submit` stops with TURNS. Raises `SandboxError` where the sandbox failed.
    """
    names = environment.tool_names(task)
    tools = tool_schemas(names) if config.tools.described_by == "template" else None
    runner = ToolRunner(names=names, sandbox=sandbox, config=config.tools)
    segment = SegmentBuilder(chat.open(environment.prompt(task), tools), turn=0, source=Source.DEMONSTRATION)
    deadline = clock() + config.episode_timeout_s
    timings: list[TurnTiming] = []
    stop: StopReason | None = None
    pending: list[int] = []
    observation: str | None = None
    try:
        while stop is None:
            call = _next_call(expert_turns, observation)
            said = [] if call is None else chat.say("", [call])
            if call is None or len(timings) >= config.max_turns:
                stop = StopReason.TURNS
            elif len(segment) + len(pending) + len(said) > config.max_tokens:
                stop = StopReason.TOKENS
            elif clock() >= deadline:
                stop = StopReason.TIME
            else:
                segment.add_environment(pending, turn=len(timings) - 1)
                segment.add_demonstrated(said, turn=len(timings))
                started = clock()
                result = await runner.execute(call, time_left_s=deadline - started)
                timings.append(TurnTiming(tool_s=clock() - started))
                observation = result.text
                pending = chat.observe([observation])
                stop = StopReason.SUBMITTED if result.submitted else None
    finally:
        expert_turns.close()
    counts = {**runner.counts, "turns": len(timings), "rewrites": 0}
    return EpisodeResult(
        segments=(segment.seal(),),
        turns=tuple(timings),
        stop=stop,
        info={name: float(count) for name, count in counts.items()},
    )


def _next_call(expert: Generator[ToolCall, str, None], observation: str | None) -> ToolCall | None:
    """The expert's next call; None where it has said all."""
    try:
        return next(expert) if observation is None else expert.send(observation)
    except StopIteration:
        return None

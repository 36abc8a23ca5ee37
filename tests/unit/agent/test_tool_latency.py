"""Delays that an environment adds to tool calls: which calls wait, whose time it is, and that a deadline cuts them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from agentrl.agent import EpisodeResult, StopReason, run_episode
from agentrl.chat import ChatFormat, render_call
from agentrl.config import AgentConfig
from agentrl.wire import Delaying, SamplingParams, Task, ToolCall

VIEW = render_call(ToolCall(name="view", arguments={"path": "a.py"}), "qwen3_coder")
BASH = render_call(ToolCall(name="bash", arguments={"command": "ls"}), "qwen3_coder")
BAD = render_call(ToolCall(name="brew", arguments={}), "qwen3_coder")
SUBMIT = render_call(ToolCall(name="submit", arguments={}), "qwen3_coder")


class Slow:
    """An environment that adds `delay_s` to every call and keeps what it was asked."""

    def __init__(self, inner: Any, delay_s: float) -> None:
        self.inner, self.delay_s = inner, delay_s
        self.asked: list[tuple[str, str, int]] = []
        self.reached = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def tool_delay_s(self, task: Task, *, rollout: str, call: int) -> float:
        self.asked.append((task.id, rollout, call))
        self.reached.set()
        return self.delay_s


def play(chat: ChatFormat, config: AgentConfig, kit: Any, environment: Any, *texts: str) -> EpisodeResult:
    ids = [[*chat.tokenizer.encode(text), chat.end_of_turn] for text in texts]
    policy = kit.ScriptedPolicy([kit.Reply(each) for each in ids])
    return asyncio.run(
        run_episode(
            task=kit.task,
            environment=environment,
            sandbox=kit.FakeSandbox(),
            policy=policy,
            chat=chat,
            config=config,
            sampling=SamplingParams(max_tokens=1),
            request_id="r1",
        )
    )


def test_calls_that_the_sandbox_carries_out_wait_and_it_is_tool_time(
    chat: ChatFormat, config: AgentConfig, kit: Any
) -> None:
    environment = Slow(kit.environment, 0.1)
    assert isinstance(environment, Delaying)
    result = play(chat, config, kit, environment, VIEW, BAD, BASH + BASH, SUBMIT)
    assert environment.asked == [("t", "r1", 0), ("t", "r1", 1), ("t", "r1", 2)]
    view, bad, two, submit = (turn.tool_s for turn in result.turns)
    assert view >= 0.1
    assert two >= 0.2
    assert max(bad, submit) < 0.1, "neither an unknown tool nor a submit reaches the sandbox"
    assert result.submitted


def test_a_delay_ends_with_the_episode_and_what_was_sampled_is_kept(
    chat: ChatFormat, config: AgentConfig, kit: Any
) -> None:
    """K19: a delay is a wait like any other, with a deadline."""
    began = time.monotonic()
    short = config.model_copy(update={"episode_timeout_s": 0.3})
    result = play(chat, short, kit, Slow(kit.environment, 60.0), VIEW, SUBMIT)
    assert time.monotonic() - began < 5
    assert result.stop is StopReason.TIME
    assert result.segments[0].agent_mask.sum() == len(chat.tokenizer.encode(VIEW)) + 1


def test_a_delay_can_be_cancelled(chat: ChatFormat, config: AgentConfig, kit: Any) -> None:
    environment = Slow(kit.environment, 60.0)

    async def drop() -> float:
        policy = kit.ScriptedPolicy([kit.Reply([*chat.tokenizer.encode(VIEW), chat.end_of_turn])])
        episode = asyncio.create_task(
            run_episode(
                task=kit.task,
                environment=environment,
                sandbox=kit.FakeSandbox(),
                policy=policy,
                chat=chat,
                config=config,
                sampling=SamplingParams(max_tokens=1),
                request_id="r1",
            )
        )
        async with asyncio.timeout(10):
            await environment.reached.wait()
            began = time.monotonic()
            episode.cancel()
            await asyncio.gather(episode, return_exceptions=True)
        assert episode.cancelled()
        return time.monotonic() - began

    assert asyncio.run(drop()) < 1

"""A scripted expert's episode: the same tokens as an agent's, no log-probabilities, real observations."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from agentrl.agent import EpisodeResult, StopReason, run_demonstration, run_episode
from agentrl.chat import ChatFormat
from agentrl.config import AgentConfig
from agentrl.errors import SandboxDeadError
from agentrl.trajectory import Source, SpanKind
from agentrl.wire import SamplingParams, ToolCall

VIEW = ToolCall(name="view", arguments={"path": "a.py"})
SUBMIT = ToolCall(name="submit", arguments={})


class Expert:
    """Views, edits by what it saw, submits; keeps what it was sent."""

    def __init__(self, *, submits: bool = True) -> None:
        self.seen: list[str] = []
        self.closed = False
        self._submits = submits

    def turns(self) -> Generator[ToolCall, str, None]:
        try:
            self.seen.append((yield VIEW))
            edit = {"path": "a.py", "old_str": self.seen[0], "new_str": "y"}
            self.seen.append((yield ToolCall(name="str_replace", arguments=edit)))
            if self._submits:
                self.seen.append((yield SUBMIT))
        finally:
            self.closed = True


def demonstrate(kit: Any, chat: ChatFormat, config: AgentConfig, expert: Expert, sandbox: Any = None) -> EpisodeResult:
    return asyncio.run(
        run_demonstration(
            task=kit.task,
            environment=kit.environment,
            sandbox=sandbox or kit.FakeSandbox(),
            expert_turns=expert.turns(),
            chat=chat,
            config=config,
        )
    )


def test_a_demonstration_reads_like_the_agent_s_own_episode(kit: Any, chat: ChatFormat, config: AgentConfig) -> None:
    """The policy that learns it samples exactly these tokens: the same spans and ids as a sampled episode."""
    expert = Expert()
    shown = demonstrate(kit, chat, config, expert)
    assert expert.seen == ["x = 1", "Edited."]
    assert expert.closed
    assert (shown.stop, shown.info["edits"], shown.info["bad_calls"], shown.info["turns"]) == (
        StopReason.SUBMITTED,
        1,
        0,
        3,
    )
    calls = [
        VIEW,
        ToolCall(name="str_replace", arguments={"path": "a.py", "old_str": "x = 1", "new_str": "y"}),
        SUBMIT,
    ]
    policy = kit.ScriptedPolicy([kit.Reply(chat.say("", [call])) for call in calls])
    sampled = asyncio.run(
        run_episode(
            task=kit.task,
            environment=kit.environment,
            sandbox=kit.FakeSandbox(),
            policy=policy,
            chat=chat,
            config=config,
            sampling=SamplingParams(max_tokens=1),
            request_id="r",
        )
    )
    ours, theirs = shown.segments[0], sampled.segments[0]
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    assert ours.spans == theirs.spans
    assert ours.source is Source.DEMONSTRATION
    assert np.isnan(ours.logprobs).all()
    assert (ours.versions == -1).all()
    assert ours.token_ids[ours.spans[1].stop - 1] == chat.end_of_turn


def test_limits_hold_for_experts_too(kit: Any, chat: ChatFormat, config: AgentConfig) -> None:
    expert = Expert()
    capped = demonstrate(kit, chat, config.model_copy(update={"max_turns": 1}), expert)
    assert (capped.stop, capped.info["turns"], expert.closed) == (StopReason.TURNS, 1, True)
    assert capped.segments[0].spans[-1].kind is SpanKind.AGENT
    prompt = len(chat.open(kit.environment.prompt(kit.task)))
    small = prompt + len(chat.say("", [VIEW])) + 3
    short = demonstrate(kit, chat, config.model_copy(update={"max_tokens": small}), Expert())
    assert (short.stop, short.info["turns"]) == (StopReason.TOKENS, 1)
    assert len(short.segments[0]) <= small


def test_an_expert_that_does_not_submit(kit: Any, chat: ChatFormat, config: AgentConfig) -> None:
    result = demonstrate(kit, chat, config, Expert(submits=False))
    assert (result.stop, result.submitted, result.info["turns"]) == (StopReason.TURNS, False, 2)


def test_a_dead_sandbox_raises_and_closes_the_expert(kit: Any, chat: ChatFormat, config: AgentConfig) -> None:
    class Dead(kit.FakeSandbox):
        async def edit(self, *_: Any, **__: Any) -> Any:
            raise SandboxDeadError("gone")

    expert = Expert()
    with pytest.raises(SandboxDeadError):
        demonstrate(kit, chat, config, expert, Dead())
    assert expert.closed

"""The agent's episode in the driver's shape."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from one_policy import OnePolicy

from agentrl.agent import run_episode
from agentrl.errors import SandboxDeadError
from agentrl.rollout.episode import AgentEpisode, RunEpisode
from agentrl.trajectory import FinishReason
from agentrl.wire import Generation, SamplingParams


class Policy:
    """Answers with these finish reasons in turn."""

    max_model_len = 64

    def __init__(self, *reasons: FinishReason) -> None:
        self.reasons = list(reasons)
        self.requests: list[str] = []

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float
    ) -> Generation:
        self.requests.append(request_id)
        empty = np.zeros(0)
        return Generation(
            token_ids=empty,
            logprobs=empty,
            versions=empty,
            finish_reason=self.reasons.pop(0),
            prompt_tokens=1,
        )


def test_turns_are_told_and_an_aborted_request_goes_on_with_its_turn(toys: Any) -> None:
    policy = Policy(FinishReason.STOP, FinishReason.ABORT, FinishReason.STOP)
    seen: list[tuple[int, str]] = []

    async def run_agent(*, policy: Any, sampling: SamplingParams, request_id: str, **rest: Any) -> Any:
        assert policy.max_model_len == 64
        assert rest.keys() == {"task", "sandbox", "on_sealed"}
        for part in range(3):
            await policy.generate([1], sampling, request_id=f"{request_id}.{part}", timeout_s=1)
        return "result"

    episode = AgentEpisode(run_agent, OnePolicy(policy), SamplingParams(max_tokens=4, temperature=0.7))
    request = toys.request()

    def on_turn(turn: int, doing: str) -> None:
        seen.append((turn, doing))

    sandbox: Any = None
    result: Any = asyncio.run(
        episode(request.task, sandbox, trajectory_id="g0-1", on_turn=on_turn, on_sealed=lambda *_: None)
    )
    assert result == "result"
    assert episode.temperature == 0.7
    assert policy.requests == ["g0-1.0", "g0-1.1", "g0-1.2"]
    assert seen == [(turn, doing) for turn in (0, 1, 1) for doing in ("sampling", "acting")]


@pytest.mark.parametrize("fails", [False, True])
def test_an_episode_is_one_session_however_it_ends(toys: Any, fails: bool) -> None:
    """The router learns from the session's end that the trajectory holds no KV room any more."""
    router = OnePolicy(Policy(FinishReason.STOP))

    async def run_agent(*, policy: Any, sampling: SamplingParams, request_id: str, **_: Any) -> Any:
        assert router.open == {"g0-1"}
        await policy.generate([1], sampling, request_id=request_id, timeout_s=1)
        if fails:
            raise SandboxDeadError("gone")

    async def scenario() -> None:
        episode = AgentEpisode(run_agent, router, SamplingParams(max_tokens=4))
        sandbox: Any = None
        with pytest.raises(SandboxDeadError) if fails else contextlib.nullcontext():
            await episode(
                toys.request().task,
                sandbox,
                trajectory_id="g0-1",
                on_turn=lambda turn, doing: None,
                on_sealed=lambda *_: None,
            )

    asyncio.run(scenario())
    assert (router.open, router.seen) == (set(), ["g0-1"])


def test_the_agents_episode_takes_what_the_driver_gives() -> None:
    """Bound with environment, chat and configuration, `run_episode` has the shape of `RunEpisode`."""
    ours = set(inspect.signature(RunEpisode.__call__).parameters) - {"self"}
    theirs = inspect.signature(run_episode).parameters
    needed = {name for name, parameter in theirs.items() if parameter.default is parameter.empty}
    assert ours <= theirs.keys()
    assert needed - ours == {"environment", "chat", "config"}

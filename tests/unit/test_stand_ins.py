"""The benchmarks' stand-ins: the contract that the real parts pass in `tests/integration/test_stand_in_twins.py`, and
that an episode with them has an episode's real shape."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import orchestration
import pytest
import stand_in_contract as contract
from stand_in_server import serving
from stand_ins import Delay, LatencyPolicy, LatencyPool, expert_of, expert_scripts, generated_groups, tiny_chat

from agentrl.agent import run_episode
from agentrl.config.load import load_config
from agentrl.policy import PolicyRouter, VllmClient, model_location
from agentrl.rollout.driver import Limits
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.episode import AgentEpisode
from agentrl.wire import SamplingParams

WINDOW = 768


def vocabulary() -> int:
    return int(json.loads((Path(model_location("tiny")) / "config.json").read_text())["vocab_size"])


def policy() -> LatencyPolicy:
    environment, requests = generated_groups(1, group_size=2)
    scripts = expert_scripts(requests, expert_of(environment), tiny_chat())
    return LatencyPolicy(scripts, turn=Delay(0.001), max_model_len=WINDOW)


@pytest.mark.parametrize("check", contract.SANDBOX_CHECKS, ids=lambda check: check.__name__)
def test_the_sandbox_keeps_the_contract(check: contract.SandboxCheck) -> None:
    async def run() -> None:
        async with LatencyPool(tool=Delay(0.25)).lease("image", timeout_s=5) as box:
            await check(box)

    asyncio.run(run())


@pytest.mark.parametrize("check", contract.POLICY_CHECKS, ids=lambda check: check.__name__)
def test_the_policy_keeps_the_contract(check: contract.PolicyCheck) -> None:
    asyncio.run(check(policy(), vocabulary()))


def test_the_server_keeps_the_contract_and_says_what_the_policy_says() -> None:
    async def run(url: str) -> None:
        async with VllmClient(url, max_model_len=WINDOW) as client:
            router = PolicyRouter([client])
            for check in contract.POLICY_CHECKS:
                await check(router, vocabulary())
            params = SamplingParams(max_tokens=60)
            with router.session("train-000000-0") as http, policy().session("train-000000-0") as inside:
                for turn in range(3):
                    name = f"train-000000-0.{turn}.0"
                    first = await http.generate([5], params, request_id=name, timeout_s=10)
                    second = await inside.generate([5], params, request_id=name, timeout_s=10)
                    assert first.token_ids.tolist() == second.token_ids.tolist()
                    assert first.finish_reason is second.finish_reason

    with serving(groups=1, turn=Delay(0.001)) as url:
        asyncio.run(run(url))


def test_delays_have_their_median_and_their_tail() -> None:
    delay = Delay(2.0, 4.0)
    seconds = [delay.seconds(f"call {number}") for number in range(20_000)]
    assert median(seconds) == pytest.approx(2.0, rel=0.05)
    assert np.percentile(seconds, 95) == pytest.approx(8.0, rel=0.05)
    assert delay.seconds("call 7") == seconds[7]
    assert Delay(2.0).seconds("any") == 2.0


def test_an_episode_has_its_real_shape_and_its_tool_time_is_known() -> None:
    """Find, view, edit, test, submit; graded as solved. A replay's waits between turns are what the tools took."""
    environment, requests = generated_groups(1, group_size=2)
    config = load_config(preset="demo")
    pool, scripted = LatencyPool(tool=Delay(0.02)), policy()
    recording = orchestration.Recording()

    async def run() -> None:
        engine = RolloutEngine(
            environment=environment,
            pool=pool,
            limits=Limits.from_config(config),
            concurrency=2,
            emit=lambda event: None,
        )
        agent = partial(run_episode, environment=environment, chat=tiny_chat(), config=config.agent)
        router = orchestration.RecordingRouter(scripted, pool, recording)
        episode = AgentEpisode(agent, router, SamplingParams(max_tokens=config.agent.max_turn_tokens))
        (group,) = await engine.run_groups(requests, episode=episode)
        for trajectory in group.trajectories:
            assert trajectory.outcome.kind.value == "solved"
            assert len(trajectory.turns) == 5
            assert trajectory.info["bad_calls"] == 0
            asked = recording.trajectories[trajectory.trajectory_id]
            assert [round(one.wait_s, 6) for one in asked] == [0.0, 0.02, 0.02, 0.02, 0.02]
            ids = trajectory.segments[0].token_ids.tolist()
            assert [*asked[-1].prompt_ids, *asked[-1].sampled_ids] == ids
        assert scripted.turns == recording.turns == 10
        assert scripted.tokens == recording.tokens == sum(t.agent_tokens for t in group.trajectories)

    asyncio.run(run())
    assert scripted.active == 0


def test_same_tokens_counts_by_place_and_refuses_another_number_of_them() -> None:
    recording = orchestration.Recording({"t": [orchestration.Asked(0.0, (1,), (5, 6, 7, 8))]})

    def answer(*ids: int) -> list[bytes]:
        return [json.dumps({"choices": [{"token_ids": ids}]}).encode()]

    assert orchestration.same_tokens(recording, answer(5, 6, 0, 8)) == 0.75
    with pytest.raises(SystemExit, match="gave 3 tokens"):
        orchestration.same_tokens(recording, answer(5, 6, 7))

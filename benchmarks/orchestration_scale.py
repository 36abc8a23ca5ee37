"""Can one orchestrator process run thousands of trajectories at once? CPU per turn, memory, event-loop lag.

    python benchmarks/orchestration_scale.py [--concurrency 2000] [--rollouts 8000] [--turn-s 2] [--tool-s 1]

Everything in the orchestrator is real (engine, driver, agent loop, chat template, tool-call parser, records, scores,
buffer on disk); policy and sandboxes only wait (`stand_ins.py`), lognormal times. Two ways, each in a process of its
own: `in_process` with a policy that is a function call, and `http` with the real router and HTTP client before a
server in another process. CPU time is the whole process's, stand-ins and meters included, from the first set-up to
the last grade, divided by turns. Memory is the growth of the resident set from before the first rollout to its peak
under full load, divided by the rollouts in progress then. Lag is how late a 10 ms timer fires; a stop of the loop
counts once for each tick that it swallowed (one of 100 ms is ten late timers, not one). Writes
benchmarks/results/orchestration_scale.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from orchestration_result import ROOT, document, write
from stand_in_server import serving
from stand_ins import Delay, LatencyPolicy, LatencyPool, expert_of, expert_scripts, generated_groups, tiny_chat

from agentrl.agent import run_episode
from agentrl.config import RunConfig
from agentrl.config.load import load_config
from agentrl.policy import PolicyRouter as HttpRouter
from agentrl.policy import VllmClient
from agentrl.rollout.buffer import GroupBuffer
from agentrl.rollout.driver import Limits
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.episode import AgentEpisode
from agentrl.rollout.groups import GroupRequest, GroupResult, score_group
from agentrl.rollout.stream import RolloutStream
from agentrl.run.garbage import calm_collector
from agentrl.wire import Environment, PolicyRouter, SamplingParams

OUTPUT = ROOT / "benchmarks" / "results" / "orchestration_scale.json"
GROUP_SIZE = 8
WAYS = ("in_process", "http")
_TICK_S = 0.01
_LOOK_S = 0.5
_NEARLY = 0.95
_ADMIT_S = 0.05
_READY_SHARE = 20  # one rollout for so many active ones is set up ahead, so that a free slot finds one ready
_NEXT_S = 600.0
_WAY_S = 1800.0
_FILES_PER_TRAJECTORY = 4


def resident_bytes() -> int:
    """This process's resident set now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class LagMeter:
    """How late a timer fires that is due every 10 ms, in seconds; a stop of the loop counts once per tick it ate."""

    lags_s: list[float] = field(default_factory=list)

    async def run(self) -> None:
        due = time.monotonic()
        while True:
            due += _TICK_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            while due <= now:
                self.lags_s.append(now - due)
                due += _TICK_S
            due -= _TICK_S


@dataclass
class MemoryMeter:
    """(rollouts in progress, resident bytes), twice a second."""

    looks: list[tuple[int, int]] = field(default_factory=list)

    async def run(self, stream: RolloutStream) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.looks.append((len(stream.statuses), resident_bytes()))

    def largest(self) -> tuple[int, int]:
        """The look with the largest resident set of those with (nearly) the most rollouts in progress."""
        enough = _NEARLY * max(rollouts for rollouts, _ in self.looks)
        return max((look for look in self.looks if look[0] >= enough), key=lambda look: look[1])


@dataclass(frozen=True)
class World:
    """What both ways share: tasks, agent, sandboxes."""

    config: RunConfig
    environment: Environment
    requests: Sequence[GroupRequest]
    options: argparse.Namespace

    def engine(self) -> RolloutEngine:
        options = self.options
        pool = LatencyPool(
            tool=Delay(options.tool_s, options.tool_p95),
            tests=Delay(options.tool_s, options.tool_p95),
            start=Delay(options.start_s, options.tool_p95),
            transfer_s=0.05,
            starters=max(64, options.concurrency // 4),
        )
        return RolloutEngine(
            environment=self.environment,
            pool=pool,
            limits=Limits.from_config(self.config),
            concurrency=options.concurrency,
            ready_ahead=options.concurrency // _READY_SHARE,
            stuck_timeout_s=_NEXT_S,
            stall_timeout_s=_NEXT_S,
            emit=lambda _: None,
        )

    def episode(self, policy: PolicyRouter) -> AgentEpisode:
        agent = partial(run_episode, environment=self.environment, chat=tiny_chat(), config=self.config.agent)
        return AgentEpisode(agent, policy, SamplingParams(max_tokens=self.config.agent.max_turn_tokens))


@dataclass
class Counted:
    """What came back; the groups themselves are scored, kept on disk and let go, as a run does."""

    turns: int = 0
    tokens: int = 0
    sampled: int = 0
    solved: int = 0
    rollouts: int = 0

    def take(self, group: GroupResult) -> None:
        for trajectory in group.trajectories:
            self.rollouts += 1
            self.turns += len(trajectory.turns)
            self.tokens += trajectory.tokens
            self.sampled += trajectory.agent_tokens
            self.solved += trajectory.outcome.kind.value == "solved"


async def admit(
    engine: RolloutEngine, stream: RolloutStream, requests: Sequence[GroupRequest], *, concurrency: int
) -> None:
    """Keep a few more rollouts started than can be active."""
    enough = concurrency + concurrency // _READY_SHARE
    for request in requests:
        while engine.active + engine.waiting >= enough:  # noqa: ASYNC110 (the engine tells of groups, not of rollouts)
            await asyncio.sleep(_ADMIT_S)
        stream.start(request)


async def work_off(
    world: World, engine: RolloutEngine, policy: PolicyRouter, requests: Sequence[GroupRequest], memory: MemoryMeter
) -> Counted:
    """Run all groups, as a run does: groups are admitted while rollouts end, finished ones scored and kept on disk."""
    counted = Counted()
    with tempfile.TemporaryDirectory() as folder, GroupBuffer(Path(folder) / "buffer.sqlite") as buffer:
        async with engine.open(world.episode(policy)) as stream, asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(memory.run(stream))
            tasks.create_task(admit(engine, stream, requests, concurrency=world.options.concurrency))
            for _ in range(len(requests)):
                group = await stream.next(timeout_s=_NEXT_S)
                score_group(group, advantage="group_std")
                buffer.put(group)
                counted.take(group)
            watching.cancel()
    return counted


@asynccontextmanager
async def policy_for(world: World, *, http: bool) -> AsyncIterator[PolicyRouter]:
    """The router over HTTP to the waiting server, or the policy inside this process."""
    options, window = world.options, world.config.policy.max_model_len
    turn = Delay(options.turn_s, options.turn_p95)
    if not http:
        scripts = expert_scripts(world.requests, expert_of(world.environment), tiny_chat())
        yield LatencyPolicy(scripts, turn=turn, max_model_len=window)
        return
    with serving(groups=len(world.requests), turn=turn) as url:
        async with VllmClient(url, max_model_len=window) as client:
            yield HttpRouter([client])


async def measure(world: World, *, http: bool) -> dict[str, Any]:
    """One way, all rollouts."""
    async with policy_for(world, http=http) as policy, AsyncExitStack() as stack:
        warm = world.requests[: max(1, 64 // GROUP_SIZE)]
        await work_off(world, world.engine(), policy, warm, MemoryMeter())
        stack.enter_context(calm_collector())  # as a run does
        before, engine, lag, memory = resident_bytes(), world.engine(), LagMeter(), MemoryMeter()
        watching = asyncio.create_task(lag.run())
        began, cpu_before = time.monotonic(), time.process_time()
        counted = await work_off(world, engine, policy, world.requests[len(warm) :], memory)
        seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu_before
        watching.cancel()
    usage, (in_memory, resident) = engine.take_usage(), memory.largest()
    lags_ms = np.array(lag.lags_s) * 1e3
    return {
        "rollouts": counted.rollouts,
        "solved": counted.solved,
        "turns": counted.turns,
        "tokens_per_trajectory": counted.tokens / counted.rollouts,
        "sampled_tokens_per_turn": counted.sampled / counted.turns,
        "seconds": seconds,
        "turns_per_s": counted.turns / seconds,
        "concurrency_mean": usage.concurrency_mean,
        "concurrency_peak": usage.concurrency_peak,
        "cpu_s": cpu_s,
        "cpu_ms_per_turn": cpu_s * 1e3 / counted.turns,
        "cpu_share_of_a_core": cpu_s / seconds,
        "rollouts_in_memory": in_memory,
        "growth_bytes": resident - before,
        "bytes_per_trajectory": (resident - before) / in_memory,
        "loop_lag_ms": {f"p{q:g}": float(np.percentile(lags_ms, q)) for q in (50, 90, 99, 99.9)}
        | {"max": float(lags_ms.max())},
    }


def apart(way: str, arguments: list[str]) -> dict[str, Any]:
    """One way in a process of its own, whose memory nothing else has touched."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, __file__, *arguments, "--only", way, "--output", str(output)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=_WAY_S)
        found: dict[str, Any] = json.loads(output.read_text())["results"][way]
        return found


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`cpu_ms_per_turn` is without HTTP where that was measured; memory and lag are the worst of all ways."""
    found: dict[str, Any] = {
        "concurrent_trajectories": min(result["concurrency_peak"] for result in results.values()),
        "bytes_per_trajectory": max(result["bytes_per_trajectory"] for result in results.values()),
        "loop_lag_p99_ms": max(result["loop_lag_ms"]["p99"] for result in results.values()),
    }
    names = {"in_process": "cpu_ms_per_turn", "http": "cpu_ms_per_turn_with_http"}
    return found | {names[way]: result["cpu_ms_per_turn"] for way, result in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=2000)
    parser.add_argument("--rollouts", type=int, default=10000)
    parser.add_argument("--turn-s", type=float, default=2.0, help="median seconds of a turn's sampling")
    parser.add_argument("--tool-s", type=float, default=1.0, help="median seconds of a tool call and of grading")
    parser.add_argument("--turn-p95", type=float, default=2.0, help="the slowest twentieth of turns, in medians")
    parser.add_argument("--tool-p95", type=float, default=4.0, help="the slowest twentieth of tool calls, in medians")
    parser.add_argument("--start-s", type=float, default=0.5, help="median seconds of a sandbox's start")
    parser.add_argument("--only", choices=WAYS)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    result = document("orchestration_scale")
    result["settings"] = {name: getattr(options, name) for name in vars(options) if name not in ("output", "only")}
    if options.only:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = min(hard, 1024 + _FILES_PER_TRAJECTORY * options.concurrency)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        environment, requests = generated_groups(-(-options.rollouts // GROUP_SIZE), group_size=GROUP_SIZE)
        world = World(load_config(preset="demo"), environment, requests, options)
        result["results"] = {options.only: asyncio.run(measure(world, http=options.only == "http"))}
    else:
        settings = [f"--{name.replace('_', '-')}={value}" for name, value in result["settings"].items()]
        result["results"] = {way: apart(way, settings) for way in WAYS}
    result["summary"] = summary(result["results"])
    write(result, options.output)


if __name__ == "__main__":
    main()

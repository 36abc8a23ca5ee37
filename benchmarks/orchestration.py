"""What does orchestration cost? Rollout tokens per second of the engine against a bare client on the same requests.

    python benchmarks/orchestration.py [--concurrency 32] [--rollouts 384] [--rounds 5] [--tool-s 0.3]

One real vLLM server with the shipped policy; sandboxes only wait (`stand_ins.py`). The engine rolls out generated
tasks, every part of it real; each request's prompt ids, the number of tokens it gave, and how long the tools between
two turns took are written down. The bare client then sends these very requests, made before the clock starts, with the
same waits between them, and as many trajectories at once: it reads each answer's bytes and looks at none. Both take
turns, round by round, on an empty prefix cache. Greedy sampling, so that the bare client's requests find what it
sampled before in the cache, as the engine's do. Tokens per second count from the start (the engine's first set-up too)
to the last answer. Writes benchmarks/results/orchestration.json; `summary.ratio` is the median over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from orchestration_result import ROOT, document, write
from stand_ins import Delay, LatencyPool, generated_groups, tiny_chat

from agentrl.agent import run_episode
from agentrl.config import RunConfig
from agentrl.config.load import load_config
from agentrl.policy import PolicyRouter as HttpRouter
from agentrl.policy import VllmClient, VllmServer
from agentrl.policy.payload import generate_body
from agentrl.rollout.driver import Limits
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.episode import AgentEpisode
from agentrl.rollout.groups import GroupRequest
from agentrl.wire import Environment, Generation, PolicyClient, PolicyRouter, SamplingParams

OUTPUT = ROOT / "benchmarks" / "results" / "orchestration.json"
PATH = "/inference/v1/generate"
TARGET = 0.9
_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as the engine made it: `wait_s` seconds of tools before it, ids in, ids out."""

    wait_s: float
    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]


@dataclass
class Recording:
    """The requests of each trajectory, in the order in which the trajectories began; when the last answer came."""

    trajectories: dict[str, list[Asked]] = field(default_factory=dict)
    last_answer: float = 0.0

    @property
    def turns(self) -> int:
        return sum(len(asked) for asked in self.trajectories.values())

    @property
    def tokens(self) -> int:
        return sum(len(one.sampled_ids) for asked in self.trajectories.values() for one in asked)


@dataclass(frozen=True)
class RecordingRouter:
    """Satisfies `PolicyRouter`: the real one, written down."""

    router: PolicyRouter
    pool: LatencyPool
    recording: Recording

    @property
    def max_model_len(self) -> int:
        return self.router.max_model_len

    @contextmanager
    def session(self, trajectory_id: str) -> Iterator[PolicyClient]:
        with self.router.session(trajectory_id) as client:
            yield _RecordingClient(client, self.pool, trajectory_id, self.recording)


class _RecordingClient:
    def __init__(self, client: PolicyClient, pool: LatencyPool, label: str, recording: Recording) -> None:
        self._client, self._pool, self._label, self._recording = client, pool, label, recording
        self._asked = recording.trajectories.setdefault(label, [])
        self._waited_s = pool.waited_s[label]

    @property
    def max_model_len(self) -> int:
        return self._client.max_model_len

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float
    ) -> Generation:
        waited_s = self._pool.waited_s[self._label]
        wait_s, self._waited_s = waited_s - self._waited_s, waited_s
        got = await self._client.generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)
        self._asked.append(Asked(wait_s, tuple(prompt_ids), tuple(got.token_ids.tolist())))
        self._recording.last_answer = time.monotonic()
        return got


@dataclass(frozen=True)
class Passed:
    """One pass: tokens sampled, turns, seconds to the last answer, this process's CPU seconds."""

    tokens: int
    turns: int
    seconds: float
    cpu_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    def json(self) -> dict[str, float]:
        return {
            "tokens": self.tokens,
            "turns": self.turns,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "client_cpu_ms_per_turn": self.cpu_s * 1e3 / self.turns,
        }


@dataclass(frozen=True)
class Bench:
    """The two ways to send the same requests to the same server."""

    config: RunConfig
    options: argparse.Namespace
    environment: Environment
    requests: Sequence[GroupRequest]
    client: VllmClient
    router: PolicyRouter

    async def engine(self) -> tuple[Passed, Recording]:
        """The engine's pass, and what it asked for."""
        await self._empty_cache()
        recording, pool = Recording(), self._pool()
        router: PolicyRouter = RecordingRouter(self.router, pool, recording)
        engine = RolloutEngine(
            environment=self.environment,
            pool=pool,
            limits=Limits.from_config(self.config),
            concurrency=self.options.concurrency,
            ready_ahead=self.options.ready_ahead,
            emit=lambda _: None,
        )
        agent = partial(run_episode, environment=self.environment, chat=tiny_chat(), config=self.config.agent)
        sampling = SamplingParams(max_tokens=self.config.agent.max_turn_tokens, temperature=0.0)
        episode = AgentEpisode(agent, router, sampling)
        began, cpu = time.monotonic(), time.process_time()
        async with asyncio.timeout(_DEADLINE_S):
            await engine.run_groups(self.requests, episode=episode)
        cpu_s = time.process_time() - cpu
        return Passed(recording.tokens, recording.turns, recording.last_answer - began, cpu_s), recording

    async def bare(self, recording: Recording) -> tuple[Passed, float]:
        """The bare client's pass over the same requests, and the share of sampled tokens that are the same again."""
        await self._empty_cache()
        work = [
            [(one.wait_s, self._body(one, f"{name}.{turn}")) for turn, one in enumerate(asked) if one.sampled_ids]
            for name, asked in recording.trajectories.items()
        ]
        slots = asyncio.Semaphore(self.options.concurrency)
        url = self.client.url + PATH
        headers = {"Content-Type": "application/json"}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)) as session:

            async def trajectory(asked: list[tuple[float, bytes]]) -> list[bytes]:
                answers = []
                async with slots:
                    for wait_s, body in asked:
                        await asyncio.sleep(wait_s)
                        async with session.post(url, data=body, headers=headers) as answer:
                            answer.raise_for_status()
                            answers.append(await answer.read())
                return answers

            began, cpu = time.monotonic(), time.process_time()
            async with asyncio.timeout(_DEADLINE_S), asyncio.TaskGroup() as tasks:
                jobs = [tasks.create_task(trajectory(asked)) for asked in work]
            seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu
        answers = [data for job in jobs for data in job.result()]
        again = same_tokens(recording, answers)
        return Passed(recording.tokens, len(answers), seconds, cpu_s), again

    def _pool(self) -> LatencyPool:
        tool = Delay(self.options.tool_s, self.options.tool_p95)
        return LatencyPool(tool=tool, start=Delay(self.options.start_s), transfer_s=0.01)

    def _body(self, asked: Asked, request_id: str) -> bytes:
        """As many tokens as the engine's request gave, whatever they are."""
        params = SamplingParams(max_tokens=len(asked.sampled_ids), temperature=0.0)
        return generate_body(asked.prompt_ids, params, request_id=request_id)

    async def _empty_cache(self) -> None:
        await self.client.control("/reset_prefix_cache")


def same_tokens(recording: Recording, answers: Sequence[bytes]) -> float:
    """Share of the tokens that came out again. Raises where an answer has another number of them."""
    asked = [one.sampled_ids for requests in recording.trajectories.values() for one in requests if one.sampled_ids]
    same = 0
    for ids, data in zip(asked, answers, strict=True):
        got = msgspec.json.decode(data)["choices"][0]["token_ids"]
        if len(got) != len(ids):
            raise SystemExit(f"the bare client's request gave {len(got)} tokens, the engine's {len(ids)}")
        same += sum(first == second for first, second in zip(ids, got, strict=True))
    return same / sum(map(len, asked))


async def rounds(bench: Bench, count: int) -> list[dict[str, Any]]:
    """A pass to get warm, then rounds in which the two take turns at being first."""
    _, recording = await bench.engine()
    await bench.bare(recording)
    found = []
    for number in range(count):
        if number % 2:
            bare, again = await bench.bare(recording)
            engine, recording = await bench.engine()
        else:
            engine, recording = await bench.engine()
            bare, again = await bench.bare(recording)
        ratio = engine.tokens_per_s / bare.tokens_per_s
        found.append({"engine": engine.json(), "bare": bare.json(), "ratio": ratio, "same_tokens": again})
        print(
            f"round {number + 1}: engine {engine.tokens_per_s:.0f} tokens/s, bare client {bare.tokens_per_s:.0f}, "
            f"ratio {ratio:.3f}, {again:.1%} of the tokens the same",
            flush=True,
        )
    return found


async def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Start the server, measure, end it."""
    config = load_config(preset="demo")
    environment, requests = generated_groups(options.rollouts, group_size=1)
    async with (
        await VllmServer.start(config.policy, log_path=folder / "policy.log", seed=0) as server,
        VllmClient(server.url, max_model_len=config.policy.max_model_len, server=server) as client,
    ):
        router = HttpRouter([client])
        await router.label_version(0)
        return await rounds(Bench(config, options, environment, requests, client, router), options.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--rollouts", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tool-s", type=float, default=0.3, help="median seconds of a tool call")
    parser.add_argument("--tool-p95", type=float, default=4.0, help="the slowest twentieth of tool calls, in medians")
    parser.add_argument("--start-s", type=float, default=0.1, help="seconds of a sandbox's start")
    parser.add_argument(
        "--ready-ahead",
        type=int,
        default=16,
        help="sandboxes beyond the concurrency: those being started, and those whose patch is being collected",
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    result = document("orchestration")
    result["settings"] = {name: value for name, value in vars(options).items() if name != "output"}
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(options, Path(folder)))
    result["rounds"] = found
    ratios = [one["ratio"] for one in found]
    result["summary"] = {
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "engine_tokens_per_s": statistics.median(one["engine"]["tokens_per_s"] for one in found),
        "bare_tokens_per_s": statistics.median(one["bare"]["tokens_per_s"] for one in found),
        "target": TARGET,
    }
    write(result, options.output)


if __name__ == "__main__":
    main()

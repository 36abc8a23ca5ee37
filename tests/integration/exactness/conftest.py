"""The whole loop in small: the session's policy server, the trainer's core in this process, real episodes in
bubblewrap sandboxes on generated tasks. `loop` is what the tests drive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from one_policy import OnePolicy

from agentrl.agent import run_episode
from agentrl.chat import ChatFormat
from agentrl.config import CheckpointConfig, RunConfig, TrainConfig
from agentrl.config.load import load_config
from agentrl.policy import VllmClient, deliver, model_location
from agentrl.rollout import AgentEpisode, RolloutEngine, ScoredGroup, TaskCursor, Verdict, form_batch
from agentrl.rollout.driver import Limits
from agentrl.sandbox import open_pool
from agentrl.sandbox.backend import bubblewrap_fault
from agentrl.train.packing import pack
from agentrl.train.trainer import Trainer
from agentrl.train.update import old_logprobs
from agentrl.trajectory import Segment, Split, Trajectory
from agentrl.wire import Batch, Delivery, Generation, PolicyClient, SamplingParams, SandboxPool
from agentrl_envs.swe_gym import SweGymEnvironment

T = TypeVar("T")
CONCURRENCY = 8
DEADLINE_S = 240.0


class RecordingPolicy:
    """A policy client that keeps every prompt and generation, by request id."""

    def __init__(self, policy: PolicyClient) -> None:
        self._policy = policy
        self.calls: dict[str, tuple[list[int], Generation]] = {}

    @property
    def max_model_len(self) -> int:
        return self._policy.max_model_len

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float
    ) -> Generation:
        generation = await self._policy.generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)
        self.calls[request_id] = (list(prompt_ids), generation)
        return generation

    def of(self, trajectory_id: str) -> list[tuple[list[int], Generation]]:
        """The calls of one trajectory, in order (request ids are `TRAJECTORY.turn.part`)."""
        found = [(key.removeprefix(f"{trajectory_id}."), call) for key, call in self.calls.items()]
        own = [(tuple(map(int, rest.split("."))), call) for rest, call in found if rest.count(".") == 1]
        return [call for _, call in sorted(own, key=lambda item: item[0])]


class Loop:
    """One trainer, one server, one pool, and how a run connects them."""

    def __init__(self, shared: Any, pool: SandboxPool, trainer: Trainer, config: RunConfig, runner: Any) -> None:
        self.shared, self.trainer, self.config = shared, trainer, config
        self.chat = ChatFormat.load(shared.model)
        self.version = -1
        self._pool, self._runner = pool, runner
        self._environment = SweGymEnvironment({})
        self._names = 0
        self._task = 0

    def client(self) -> VllmClient:
        return VllmClient(self.shared.server.url, max_model_len=self.shared.max_model_len, server=self.shared.server)

    def run(self, body: Callable[[VllmClient], Awaitable[T]]) -> T:
        """Run `body` with a client, under a deadline."""

        async def main() -> T:
            async with asyncio.timeout(DEADLINE_S), self.client() as client:
                return await body(client)

        return self._runner.run(main())

    def deliver(self) -> Delivery:
        """The trainer's weights to the server, as a version that no test has used."""
        version = self.shared.next_version()
        manifest = self.trainer.publish(version)
        delivery = self.run(lambda client: deliver(client, manifest, tolerance=1e-4, timeout_s=60))
        self.version = version
        return delivery

    def play(
        self,
        tasks: int,
        size: int,
        *,
        temperature: float = 1.0,
        chat: ChatFormat | None = None,
        policy: Callable[[VllmClient], PolicyClient] | None = None,
        again: bool = False,
    ) -> list[Trajectory]:
        """Episodes of `tasks` tasks, `size` of each; new tasks each time, or the last ones `again`."""
        cursor = TaskCursor(
            self._environment, Split.TRAIN, seed=17, position=self._task - tasks if again else self._task
        )
        self._names += 1
        requests = cursor.take(tasks, group_size=size, prefix=f"play{self._names}-")
        self._task = cursor.position
        agent = partial(run_episode, environment=self._environment, chat=chat or self.chat, config=self.config.agent)
        sampling = SamplingParams(max_tokens=self.config.agent.max_turn_tokens, temperature=temperature)

        async def body(client: VllmClient) -> list[Trajectory]:
            engine = RolloutEngine(
                environment=self._environment,
                pool=self._pool,
                limits=Limits.from_config(self.config),
                concurrency=CONCURRENCY,
                emit=lambda event: None,
            )
            episode = AgentEpisode(agent, OnePolicy(policy(client) if policy else client), sampling)
            self.groups = await engine.run_groups(requests, episode=episode)
            return [trajectory for group in self.groups for trajectory in group.trajectories]

        played = self.run(body)
        assert [t.outcome.cause for t in played if t.outcome.cause] == []
        return played

    def batch(self, step: int, *, version: int, max_staleness: int = 0) -> Batch:
        """The last played groups as a batch. Advantages are +1 and −1 by turns, so that whatever the episodes
        were worth there is a gradient."""
        scored = [
            ScoredGroup(group, np.resize([1.0, -1.0], len(group.trajectories)), Verdict.ACCEPTED)
            for group in self.groups
        ]
        return form_batch(
            scored,
            step=step,
            version=version,
            updates=1,
            temperature=self.groups[0].trajectories[0].temperature,
            max_staleness=max_staleness,
        )

    def recompute(self, batch: Batch, *, temperature: float | None = None) -> list[np.ndarray]:
        """float32 [T] per sequence: what the trainer's own packed forward pass makes of the sampled tokens, under
        its present weights (0 off them)."""
        sequences = list(batch.sequences)
        micro_batches = pack(sequences, tokens_per_microbatch=4096, device=torch.device("cpu"))
        found = old_logprobs(
            self.trainer.model, micro_batches, temperature=batch.temperature if temperature is None else temperature
        )
        return [found[row].numpy() for row in range(len(sequences))]

    def errors(self, batch: Batch, *, temperature: float | None = None) -> np.ndarray:
        """float32 [N]: trainer's minus recorded log-probability of every sampled token of the batch."""
        return np.concatenate(
            [
                (found - sequence.behaviour_logprobs)[sequence.pg_mask]
                for found, sequence in zip(self.recompute(batch, temperature=temperature), batch.sequences, strict=True)
            ]
        )


def versions_of(segments: Sequence[Segment]) -> set[int]:
    """The policy versions among sampled tokens."""
    return {int(v) for segment in segments for v in np.unique(segment.versions[segment.versions >= 0])}


@pytest.fixture(scope="session")
def start_trainer(policy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trainer]:
    """Makes trainers of the shipped policy: no warm-up and a high rate, so that one step moves the policy far."""

    def start(**settings: Any) -> Trainer:
        folder = tmp_path_factory.mktemp("trainer")
        optimizer = {"learning_rate": 1e-3, "warmup_updates": 0} | settings.pop("optimizer", {})
        return Trainer.load(
            model_folder=policy_model,
            config=TrainConfig.model_validate({"optimizer": optimizer} | settings),
            checkpoint=CheckpointConfig(),
            checkpoint_folder=folder / "checkpoints",
            publish_folder=folder / "weights",
        )

    return start


@pytest.fixture(scope="package")
def sandboxes() -> Iterator[tuple[asyncio.Runner, SandboxPool, RunConfig]]:
    """The demonstration's sandboxes and limits, fewer of them, and the event loop they live in."""
    if fault := bubblewrap_fault():
        pytest.skip(str(fault))
    if not (Path(model_location("tiny")) / "config.json").is_file():
        pytest.skip(
            "the shipped policy is not built: agentrl sft swe-gym --preset tiny-start --out agentrl/policy/tiny"
        )
    config = load_config(
        preset="demo",
        file=None,
        overrides=[f"--rollout.concurrency={CONCURRENCY}", f"--sandbox.size={CONCURRENCY + 2}"],
        run_dir="unused",
    )
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        pool = runner.run(stack.enter_async_context(open_pool(config.sandbox, run_id="exactness")))
        try:
            yield runner, pool, config
        finally:
            runner.run(stack.aclose())


@pytest.fixture
def loop(
    sandboxes: tuple[asyncio.Runner, SandboxPool, RunConfig],
    policy_server: Any,
    start_trainer: Callable[..., Trainer],
) -> Loop:
    """The shipped policy in the trainer and, delivered, in the server."""
    runner, pool, config = sandboxes
    torch.set_num_threads(1)
    loop = Loop(policy_server, pool, start_trainer(), config, runner)
    loop.deliver()
    return loop

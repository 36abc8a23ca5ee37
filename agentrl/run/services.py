"""The processes of a run: sandboxes, policy server, trainer. Started together, ended together, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from agentrl.agent import run_episode
from agentrl.chat import ChatFormat
from agentrl.config import RunConfig
from agentrl.errors import InfrastructureError, first_error
from agentrl.policy import Device, VllmClient, VllmServer, deliver, find_vllm, local_model
from agentrl.rollout.driver import Limits
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.episode import AgentEpisode
from agentrl.run.folder import RunFolder
from agentrl.run.recorder import Recorder
from agentrl.sandbox import Pool, open_pool
from agentrl.train.client import TrainerProcess
from agentrl.wire import Delivery, Environment, SamplingParams

_TRAINER_START_S = 300.0
_LOAD_EVERY_S = 0.5


@dataclass(slots=True)
class LoadMeter:
    """Samples of a policy server's load between two `take`s."""

    samples: list[tuple[float, float]] = field(default_factory=list)

    def add(self, *, kv_used_fraction: float, running: float) -> None:
        self.samples.append((kv_used_fraction, running))

    def take(self) -> dict[str, float]:
        """Means since the last call, by their public names; {} where nothing was sampled."""
        found, self.samples = self.samples, []
        if not found:
            return {}
        return {
            "kv/used_fraction_mean": sum(kv for kv, _ in found) / len(found),
            "concurrency/requests_mean": sum(running for _, running in found) / len(found),
        }


@dataclass(slots=True)
class Services:
    """What the loop calls. `trainer` is None in an evaluation."""

    config: RunConfig
    environment: Environment
    engine: RolloutEngine
    client: VllmClient
    chat: ChatFormat
    load: LoadMeter
    devices: int
    trainer: TrainerProcess | None = None
    pool: Pool | None = None

    def sandbox_metrics(self) -> dict[str, float]:
        """Mean seconds of a sandbox's start and failed sandboxes, both since the run began; {} without a pool."""
        if self.pool is None:
            return {}
        stats = self.pool.stats()
        return {"sandbox/start_s": stats.start_s_mean, "sandbox/failures": float(stats.failures)}

    def episode(self, *, temperature: float, top_p: float = 1.0, top_k: int = 0) -> AgentEpisode:
        """The agent with one way of sampling."""
        agent = partial(run_episode, environment=self.environment, chat=self.chat, config=self.config.agent)
        sampling = SamplingParams(
            max_tokens=self.config.agent.max_turn_tokens, temperature=temperature, top_p=top_p, top_k=top_k
        )
        return AgentEpisode(agent, self.client, sampling)

    async def deliver(self, version: int) -> Delivery:
        """Publish the trainer's weights as `version` and prove that the policy server holds them."""
        assert self.trainer is not None
        timeout_s = self.config.policy.delivery_timeout_s
        manifest = await self.trainer.publish(version, timeout_s=timeout_s)
        return await deliver(self.client, manifest, tolerance=self.config.policy.probe_limit, timeout_s=timeout_s)


@asynccontextmanager
async def open_services(
    config: RunConfig,
    folder: RunFolder,
    recorder: Recorder,
    environment: Environment,
    *,
    train: bool,
    resume: Path | None = None,
    sampling_seed: int = 0,
) -> AsyncIterator[Services]:
    """Start sandboxes, server and (for training) trainer side by side; end all of them, whatever happens.

    `resume` is the checkpoint the trainer goes on from; `sampling_seed` starts the server's stream of
    random numbers. Raises the typed error of the part that did not come up.
    """
    model = resume or local_model(config.policy.model)
    chat = ChatFormat.load(model, call_format=config.agent.tools.call_format, template=config.agent.tools.chat_template)
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        pool, server, trainer = await _start_parts(
            stack, config, folder, model, train=train, resume=resume, seed=sampling_seed
        )
        client = await stack.enter_async_context(
            VllmClient(server.url, max_model_len=config.policy.max_model_len, server=server)
        )
        load = LoadMeter()
        stack.push_async_callback(_cancelled, asyncio.create_task(_sample_load(client, load), name="load meter"))
        engine = RolloutEngine(
            environment=environment,
            pool=pool,
            limits=Limits.from_config(config),
            concurrency=config.rollout.concurrency,
            emit=recorder.emit,
        )
        parts = "server, sandboxes and trainer" if train else "server and sandboxes"
        recorder.note(f"{parts} are up after {time.monotonic() - began:.0f} s ({server.url})")
        yield Services(
            config=config,
            environment=environment,
            engine=engine,
            client=client,
            chat=chat,
            load=load,
            devices=_devices(),
            trainer=trainer,
            pool=pool,
        )


async def _start_parts(
    stack: AsyncExitStack,
    config: RunConfig,
    folder: RunFolder,
    model: Path,
    *,
    train: bool,
    resume: Path | None,
    seed: int,
) -> tuple[Pool, VllmServer, TrainerProcess | None]:
    """All parts at once: a server takes most of a minute, so nothing else is waited for first."""

    async def pool() -> Pool:
        return await stack.enter_async_context(open_pool(config.sandbox, run_id=folder.path.name))

    async def server() -> VllmServer:
        policy = config.policy.model_copy(update={"model": str(model)})
        started = await VllmServer.start(policy, log_path=folder.logs / "policy.log", seed=seed)
        stack.push_async_callback(started.aclose)
        return started

    async def trainer() -> TrainerProcess | None:
        if not train:
            return None
        started = await TrainerProcess.start(
            config=config,
            model_dir=model,
            checkpoint_dir=folder.checkpoints,
            log_path=folder.logs / "trainer.log",
            resume=resume,
            timeout_s=_TRAINER_START_S,
        )
        stack.push_async_callback(started.close)
        return started

    try:
        async with asyncio.TaskGroup() as tasks:
            parts = [tasks.create_task(part()) for part in (pool, server, trainer)]
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    return parts[0].result(), parts[1].result(), parts[2].result()  # type: ignore[return-value]


async def _sample_load(client: VllmClient, load: LoadMeter) -> None:
    """Look at the server's load for ever; a look that fails is left out (the server's death has its own watch)."""
    while True:
        await asyncio.sleep(_LOAD_EVERY_S)
        with contextlib.suppress(InfrastructureError):
            stats = await client.stats()
            load.add(kv_used_fraction=stats.kv_used_fraction, running=stats.running)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _devices() -> int:
    """How many devices throughput is divided by: cores here; on GPUs the policy's and the trainer's."""
    return len(os.sched_getaffinity(0)) if find_vllm().device is Device.CPU else 2

"""The processes of a run: sandboxes, policy servers, trainer. Started together, ended together, nothing left behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentrl.agent import run_episode
from agentrl.chat import ChatFormat
from agentrl.config import RunConfig
from agentrl.errors import first_error
from agentrl.policy import (
    ConcurrencyController,
    Device,
    PolicyRouter,
    VllmClient,
    VllmServer,
    find_vllm,
    local_model,
    open_replicas,
    start_limit,
)
from agentrl.rollout.driver import Limits
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.episode import AgentEpisode
from agentrl.rollout.scoring import Scorer
from agentrl.run.folder import RunFolder
from agentrl.run.garbage import calm_collector
from agentrl.run.load import LoadMeter
from agentrl.run.placement import Placement, available_devices, place
from agentrl.run.recorder import Recorder
from agentrl.run.teachers import StudentScores, TeacherParts, make_scorer, probe_teachers
from agentrl.sandbox import Pool, open_pool
from agentrl.train.client import TrainerProcess
from agentrl.wire import Delivery, Environment, SamplingParams, Teacher, Trainer

_TRAINER_START_S = 300.0


@dataclass(slots=True)
class Services:
    """What the loop calls. `trainer` is None in an evaluation; `process` is the process behind it, to be watched.
    `scorer` is None where no teacher is asked."""

    config: RunConfig
    environment: Environment
    engine: RolloutEngine
    router: PolicyRouter
    controller: ConcurrencyController | None
    chat: ChatFormat
    load: LoadMeter
    placement: Placement
    servers: Sequence[VllmServer] = ()
    trainer: Trainer | None = None
    process: TrainerProcess | None = None
    pool: Pool | None = None
    scorer: Scorer | None = None

    @property
    def devices(self) -> int:
        """How many devices throughput is divided by."""
        return self.placement.devices

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
        return AgentEpisode(agent, self.router, sampling)

    async def deliver(self, version: int) -> Delivery:
        """Publish the trainer's weights as `version` and prove that every policy server holds them."""
        assert self.trainer is not None
        timeout_s = self.config.policy.delivery_timeout_s
        manifest = await self.trainer.publish(version, timeout_s=timeout_s)
        await self.router.wake(timeout_s=timeout_s)
        return await self.router.deliver(manifest, tolerance=self.config.policy.probe_limit, timeout_s=timeout_s)

    async def give_devices_to_trainer(self) -> None:
        """Colocated servers put their weights and cache aside; `deliver` wakes them. Nothing is in flight then."""
        if self.placement.colocated:
            await self.router.sleep(timeout_s=self.config.policy.delivery_timeout_s)


def place_here(config: RunConfig, *, train: bool) -> Placement:
    """`place` on the devices of this machine. Raises `ConfigError`, and `MissingRequirementError` without vLLM."""
    cuda = find_vllm().device is Device.CUDA
    return place(config, available=available_devices(cuda=cuda), bind=cuda or config.placement.pin, train=train)


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
    wrap_trainer: Callable[[TrainerProcess], Trainer] = lambda process: process,
) -> AsyncIterator[Services]:
    """Start sandboxes, servers and (for training) trainer side by side; end all of them, whatever happens.

    `resume` is the checkpoint the trainer goes on from; `sampling_seed` starts the servers' streams of random
    numbers; the loop sees the trainer through `wrap_trainer`. Raises the typed error of the part that did not come up.
    """
    placement = await asyncio.to_thread(place_here, config, train=train)
    model = resume or local_model(config.policy.model)
    chat = ChatFormat.load(model, call_format=config.agent.tools.call_format, template=config.agent.tools.chat_template)
    began = time.monotonic()
    async with AsyncExitStack() as stack:
        student = StudentScores()
        teaching = TeacherParts(stack, config, folder, environment, chat, model, placement, student) if train else None
        parts = _Parts(stack, config, folder, model, placement, sampling_seed, teaching)
        pool, servers, process, teachers = await parts.start(train=train, resume=resume)
        clients = [
            await stack.enter_async_context(VllmClient(s.url, max_model_len=config.policy.max_model_len, server=s))
            for s in servers
        ]
        router = PolicyRouter(
            clients, kv_on_delivery=config.policy.kv_on_delivery, sleeps=any(server.sleeps for server in servers)
        )
        engine = RolloutEngine(
            environment=environment,
            pool=pool,
            limits=Limits.from_config(config),
            concurrency=config.rollout.concurrency,
            ready_ahead=config.rollout.ready_ahead,
            stuck_timeout_s=config.rollout.stuck_timeout_s,
            stall_timeout_s=config.rollout.stall_timeout_s,
            emit=recorder.emit,
        )
        controller = await _controller(config, router) if config.rollout.adaptive else None
        if controller is not None:
            engine.limit = controller.limit
        student.router = router
        if teachers:
            await probe_teachers(teachers, chat, environment, recorder.note, timeout_s=config.distill.timeout_s)
        what = "servers, sandboxes and trainer" if train else "servers and sandboxes"
        addresses = ", ".join(server.url for server in servers)
        recorder.note(f"{what} are up after {time.monotonic() - began:.0f} s ({addresses})")
        stack.enter_context(calm_collector())
        yield Services(
            config=config,
            environment=environment,
            engine=engine,
            router=router,
            controller=controller,
            chat=chat,
            load=LoadMeter(ranks=len(placement.ranks), colocated=placement.colocated),
            placement=placement,
            servers=servers,
            trainer=None if process is None else wrap_trainer(process),
            process=process,
            pool=pool,
            scorer=make_scorer(config, teachers, chat, student) if teachers else None,
        )


async def _controller(config: RunConfig, router: PolicyRouter) -> ConcurrencyController:
    """Begins with as many trajectories as surely have room, where the servers say how much there is."""
    cap = config.rollout.concurrency
    rooms = [stats.kv_tokens for stats in await router.stats()]
    known = [room for room in rooms if room is not None]
    if len(known) < len(rooms):
        return ConcurrencyController(cap)
    start = start_limit(sum(known), tokens_per_trajectory=config.agent.max_tokens, cap=cap)
    return ConcurrencyController(cap, start=start)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What is started, and where it is registered to be ended."""

    stack: AsyncExitStack
    config: RunConfig
    folder: RunFolder
    model: Path
    placement: Placement
    seed: int
    teaching: TeacherParts | None

    async def start(
        self, *, train: bool, resume: Path | None
    ) -> tuple[Pool, list[VllmServer], TrainerProcess | None, dict[str, Teacher]]:
        """All parts at once: a server takes most of a minute, so nothing else is waited for first."""
        try:
            async with asyncio.TaskGroup() as tasks:
                pool = tasks.create_task(self._pool())
                servers = tasks.create_task(self._servers())
                trainer = tasks.create_task(self._trainer(resume)) if train else None
                teachers = tasks.create_task(self.teaching.open()) if self.teaching is not None else None
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return (
            pool.result(),
            servers.result(),
            None if trainer is None else trainer.result(),
            {} if teachers is None else teachers.result(),
        )

    async def _pool(self) -> Pool:
        return await self.stack.enter_async_context(open_pool(self.config.sandbox, run_id=self.folder.path.name))

    async def _servers(self) -> list[VllmServer]:
        policy = self.config.policy.model_copy(update={"model": str(self.model)})
        started = await open_replicas(
            policy,
            devices=self.placement.replicas,
            log_dir=self.folder.logs,
            seed=self.seed,
            sleep_mode=self.placement.colocated,
        )
        for server in started:
            self.stack.push_async_callback(server.aclose)
        return started

    async def _trainer(self, resume: Path | None) -> TrainerProcess:
        started = await TrainerProcess.start(
            config=self.config,
            model_dir=self.model,
            checkpoint_dir=self.folder.checkpoints,
            log_path=self.folder.logs / "trainer.log",
            resume=resume,
            timeout_s=_TRAINER_START_S,
            ranks=len(self.placement.ranks),
            devices=self.placement.ranks,
        )
        self.stack.push_async_callback(started.close)
        return started

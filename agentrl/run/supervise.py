"""What watches a run from beside it: processes that end unasked, and how busy everything is.

A background fault cancels the foreground and reaches the caller as itself, at once: a dead trainer or server is not
found out at the next call to it, which may be minutes away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentrl.errors import InfrastructureError, PolicyDeadError, first_error
from agentrl.policy import ServerLoad, ServerStats, VllmServer
from agentrl.rollout.engine import RolloutEngine
from agentrl.run.load import LoadSample, event_data
from agentrl.run.recorder import Recorder
from agentrl.run.services import Services
from agentrl.train.client import TrainerProcess
from agentrl.wire import EventKind

_SAMPLE_EVERY_S = 0.5
_TELL_EVERY_S = 1.0
_SILENT_S = 120.0  # several looks, each with its deadline
_LOG_LINES = 8


@dataclass(slots=True)
class Doing:
    """What the loop is doing, for those who watch: groups in flight, groups queued, and whether it trains."""

    in_flight: int = 0
    queued: int = 0
    training: bool = False


@asynccontextmanager
async def supervised(
    services: Services, recorder: Recorder, doing: Callable[[], Doing]
) -> AsyncIterator[asyncio.TaskGroup]:
    """Run the block with watchers beside it; tasks added to the group are supervised too, and end with it."""
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = [tasks.create_task(_load(services, recorder, doing), name="load meter")]
            watching += [tasks.create_task(_watch_server(s), name=f"watch {s.url}") for s in services.servers]
            if services.process is not None:
                watching.append(tasks.create_task(_watch_trainer(services.process), name="watch trainer"))
            yield tasks
            for task in watching:
                task.cancel()
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None


async def _watch_server(server: VllmServer) -> None:
    end = await server.wait_dead()
    how = "ended" if end.exit_code is None else f"ended with exit code {end.exit_code}"
    raise PolicyDeadError(
        f"the policy server at {server.url} {how}",
        where="\n".join([str(server.log_path), *end.log_tail.splitlines()[-_LOG_LINES:]]),
        remedy="start the run again with --resume; the server's log says why it ended",
    )


async def _watch_trainer(process: TrainerProcess) -> None:
    raise await process.wait_ended()


async def _load(services: Services, recorder: Recorder, doing: Callable[[], Doing]) -> None:
    """Look at the load for ever, and let the controller move the limit of active trajectories. A look that fails is
    left out: a server's death has its own watch. One that lives and is silent for long has none: its episodes would
    all run out of time, and count against the policy. Raises `PolicyDeadError` for it."""
    told, answered = 0.0, time.monotonic()
    while True:
        await asyncio.sleep(_SAMPLE_EVERY_S)
        try:
            stats = await services.router.stats()
        except InfrastructureError as error:
            silent_s = time.monotonic() - answered
            if silent_s < _SILENT_S:
                continue
            raise PolicyDeadError(
                f"a policy server has not said how it does for {silent_s:.0f} s: {error.what}",
                where=error.where,
                remedy="start the run again with --resume; the server's log says what it did last",
            ) from error
        now = answered = time.monotonic()
        if services.controller is not None:
            services.engine.limit = services.controller.observe(_server_load(stats, services.engine.active, now))
        sample = _sample(stats, services.engine, doing(), now)
        services.load.add(sample)
        if now - told >= _TELL_EVERY_S:
            told = now
            recorder.tell(EventKind.LOAD, **event_data(sample))


def _server_load(stats: Sequence[ServerStats], active: int, now: float) -> ServerLoad:
    return ServerLoad(
        kv_used_fraction=max(s.kv_used_fraction for s in stats),
        running=sum(s.running for s in stats),
        waiting=sum(s.waiting for s in stats),
        preemptions=sum(s.preemptions for s in stats),
        active=active,
        now=now,
    )


def _sample(stats: Sequence[ServerStats], engine: RolloutEngine, doing: Doing, now: float) -> LoadSample:
    return LoadSample(
        now=now,
        active=engine.active,
        waiting=engine.waiting,
        limit=engine.limit,
        running=tuple(s.running + s.waiting for s in stats),
        kv=tuple(s.kv_used_fraction for s in stats),
        preemptions=sum(s.preemptions for s in stats),
        training=doing.training,
        in_flight=doing.in_flight,
        queued=doing.queued,
    )

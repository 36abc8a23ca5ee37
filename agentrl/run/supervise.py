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
from agentrl.run.load import LoadSample, event_data
from agentrl.run.recorder import Recorder
from agentrl.run.services import Services
from agentrl.train.client import TrainerProcess
from agentrl.wire import EventKind

_ASK_EVERY_S = 0.5
_LOOK_EVERY_S = 0.1
_TELL_EVERY_S = 1.0
_SILENT_S = 120.0  # several looks, each with its deadline
_LOG_LINES = 8


@dataclass(slots=True)
class Doing:
    """What the loop is doing, for those who watch: groups in flight, groups queued, and whether it trains."""

    in_flight: int = 0
    queued: int = 0
    training: bool = False


@dataclass(slots=True)
class _Seen:
    """The servers' last answers; empty before the first."""

    stats: Sequence[ServerStats] = ()


@asynccontextmanager
async def supervised(
    services: Services, recorder: Recorder, doing: Callable[[], Doing]
) -> AsyncIterator[asyncio.TaskGroup]:
    """Run the block with watchers beside it; tasks added to the group are supervised too, and end with it."""
    try:
        async with asyncio.TaskGroup() as tasks:
            seen = _Seen()
            watching = [
                tasks.create_task(_ask(services, recorder, seen, doing), name="load of the servers"),
                tasks.create_task(_look(services, seen, doing), name="load meter"),
            ]
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


async def _ask(services: Services, recorder: Recorder, seen: _Seen, doing: Callable[[], Doing]) -> None:
    """Ask the servers for ever how they do, and let the controller move the limit of active trajectories.

    An answer that fails is left out: a server's death has its own watch. One that lives and is silent for long has
    none: its episodes would all run out of time, and count against the policy. Raises `PolicyDeadError` for it.
    """
    told, answered = 0.0, time.monotonic()
    while True:
        await asyncio.sleep(_ASK_EVERY_S)
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
        seen.stats, now = stats, time.monotonic()
        answered = now
        if services.controller is not None:
            services.engine.limit = services.controller.observe(_server_load(stats, services.engine.active, now))
        if now - told >= _TELL_EVERY_S:
            told = now
            recorder.tell(EventKind.LOAD, **event_data(_sample(services, seen, doing())))


async def _look(services: Services, seen: _Seen, doing: Callable[[], Doing]) -> None:
    """Look for ever at what the orchestrator itself knows; no server is asked, so that looks may be many."""
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        if seen.stats:
            services.load.add(_sample(services, seen, doing()))


def _server_load(stats: Sequence[ServerStats], active: int, now: float) -> ServerLoad:
    return ServerLoad(
        kv_used_fraction=max(s.kv_used_fraction for s in stats),
        running=sum(s.running for s in stats),
        waiting=sum(s.waiting for s in stats),
        preemptions=sum(s.preemptions for s in stats),
        active=active,
        now=now,
    )


def _sample(services: Services, seen: _Seen, doing: Doing) -> LoadSample:
    """What is busy now; KV use and preemptions are those of the servers' last answer."""
    return LoadSample(
        now=time.monotonic(),
        active=services.engine.active,
        waiting=services.engine.waiting,
        limit=services.engine.limit,
        running=tuple(services.router.in_flight()),
        kv=tuple(s.kv_used_fraction for s in seen.stats),
        preemptions=sum(s.preemptions for s in seen.stats),
        training=doing.training,
        in_flight=doing.in_flight,
        queued=doing.queued,
    )

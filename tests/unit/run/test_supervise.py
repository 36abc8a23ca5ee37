"""What watches a run from beside it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.errors import DeadlineError, PolicyDeadError
from agentrl.policy import ConcurrencyController, ServerStats
from agentrl.run import supervise
from agentrl.run.load import LoadMeter
from agentrl.run.supervise import Doing, supervised
from agentrl.wire import EventKind


class Router:
    """Fails twice, then answers; the fullest server has preempted at last. `enough` is set after `until` looks."""

    looks, until = 0, 0

    def __init__(self) -> None:
        self.enough = asyncio.Event()

    def in_flight(self) -> list[int]:
        return [4, 2]

    async def stats(self) -> list[ServerStats]:
        self.looks += 1
        if self.looks >= self.until:
            self.enough.set()
        if self.looks == 1:
            raise DeadlineError("no answer within 30 s")
        if self.looks == 2:
            raise PolicyDeadError("gone")
        preemptions = 5 if self.looks > 4 else 0
        return [ServerStats(3, 1, 0.5, 0, 0, 0, 0, 0), ServerStats(2, 0, 0.9, preemptions, 0, 0, 0, 0)]


def parts(controller: ConcurrencyController | None = None) -> Any:
    engine = SimpleNamespace(limit=10, active=10, waiting=2)
    return SimpleNamespace(
        router=Router(), engine=engine, controller=controller, load=LoadMeter(), servers=(), process=None
    )


def watch(services: Any, monkeypatch: pytest.MonkeyPatch, *, looks: int) -> list[tuple[EventKind, dict[str, Any]]]:
    """Run the watchers beside a block that ends after so many looks."""
    told: list[tuple[EventKind, dict[str, Any]]] = []
    recorder = SimpleNamespace(tell=lambda kind, **data: told.append((kind, data)))
    monkeypatch.setattr(supervise, "_ASK_EVERY_S", 0.01)
    monkeypatch.setattr(supervise, "_LOOK_EVERY_S", 0.005)

    async def scenario() -> None:
        async with asyncio.timeout(5), supervised(services, recorder, lambda: Doing(4, 1, True)):  # type: ignore[arg-type]
            services.router.until = looks
            await services.router.enough.wait()

    asyncio.run(scenario())
    return told


def test_k20_a_look_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not come back as the run's error when the run ends."""
    services = parts()
    told = watch(services, monkeypatch, looks=4)
    assert services.load.take()["kv/used_fraction_mean"] == pytest.approx(0.7)
    (kind, data), *_ = told
    assert kind is EventKind.LOAD
    assert (data["running"], data["kv"]) == ([4, 2], [0.5, 0.9])
    assert (data["active"], data["waiting"], data["in_flight"], data["queued"]) == (10, 2, 4, 1)
    assert data["training"] is True


def test_the_controller_moves_the_limit_of_active_trajectories(monkeypatch: pytest.MonkeyPatch) -> None:
    services = parts(controller=ConcurrencyController(10))
    watch(services, monkeypatch, looks=7)
    assert services.engine.limit == 8  # 0.8 of those active when the server preempted


def test_what_the_block_raises_is_raised_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with supervised(parts(), SimpleNamespace(tell=lambda *_, **__: None), Doing):  # type: ignore[arg-type]
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(scenario())


def test_k20_a_server_that_lives_and_is_silent_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """K20: one that is stopped, not dead: each of its episodes would time out and count as the policy's failure."""

    class Silent:
        async def stats(self) -> list[ServerStats]:
            raise DeadlineError("the policy server did not answer within 30 s", where="/metrics")

    services = parts()
    services.router = Silent()
    monkeypatch.setattr(supervise, "_ASK_EVERY_S", 0.01)
    monkeypatch.setattr(supervise, "_LOOK_EVERY_S", 0.005)
    monkeypatch.setattr(supervise, "_SILENT_S", 0.2)

    async def scenario() -> None:
        recorder = SimpleNamespace(tell=lambda *_, **__: None)
        async with asyncio.timeout(5), supervised(services, recorder, Doing):  # type: ignore[arg-type]
            await asyncio.sleep(60)

    with pytest.raises(PolicyDeadError, match="did not answer within 30 s") as caught:
        asyncio.run(scenario())
    assert "--resume" in caught.value.remedy
    assert "/metrics" in caught.value.where

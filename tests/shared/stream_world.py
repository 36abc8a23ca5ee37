"""A stream over toy parts, for the tests of the engine's streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.stream import RolloutStream
from agentrl.wire import Event

Body = Callable[[RolloutStream], Awaitable[None]]


class World:
    """An engine in the toy world, and an episode that each test can hold back by rollout."""

    def __init__(self, toys: Any, *, concurrency: int = 4, limits: Any = None, **engine: Any) -> None:
        self.toys = toys
        self.events: list[Event] = []
        self.began: list[str] = []
        self.held: dict[str, asyncio.Event] = {}
        self.errors: dict[str, Exception] = {}
        self.environment = toys.Environment()
        self.pool = toys.Pool()
        self.settings = {
            "environment": self.environment,
            "pool": self.pool,
            "limits": limits or toys.limits(),
            "concurrency": concurrency,
            "emit": self.events.append,
            **engine,
        }

    async def episode(self, name: str) -> None:
        self.began.append(name)
        if name in self.held:
            await self.held[name].wait()
        if error := self.errors.pop(name, None):
            raise error

    def hold(self, *names: str) -> None:
        self.held |= {name: asyncio.Event() for name in names}

    def run(self, body: Body, **arguments: Any) -> None:
        async def scenario() -> None:
            self.engine, episode = RolloutEngine(**self.settings), self.toys.Episode(hook=self.episode)
            try:
                async with asyncio.timeout(20), self.engine.open(episode, **arguments) as stream:
                    await body(stream)
            finally:
                assert (self.pool.out, self.engine.active, self.engine.waiting) == (0, 0, 0)
                assert len(asyncio.all_tasks()) == 1

        asyncio.run(scenario())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 (a condition of the world, no event)
            await asyncio.sleep(0.001)

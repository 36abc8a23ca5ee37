"""Engine and scheduler together: whatever fails, hangs or is dropped, every place and slot comes back (K17, K20)."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import SandboxDeadError
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.groups import score_group
from agentrl.rollout.schedule import BoundedSchedule
from agentrl.rollout.scheduler import Scheduler
from agentrl.rollout.stream import RolloutStream

STEPS = 3


class Run:
    """A run's loop in small: admit, take, batch, drop what would be stale, deliver."""

    def __init__(self, toys: Any, rng: random.Random, schedule: BoundedSchedule) -> None:
        self.toys, self.rng = toys, rng
        self.scheduler = Scheduler(schedule)
        self.agent = toys.Episode(hook=self.episode)
        self.environment = toys.Environment(hooks={"grade": self.grade})
        self.environment.collect = self.collect
        self.names = iter(range(10_000))
        self.admitted: list[str] = []
        self.gone: list[str] = []  # taken or dropped

    def request(self, number: int) -> Any:
        return self.toys.request(f"g{number}", size=2, index=number)

    def audit(self) -> None:
        counts = self.scheduler.counts()
        assert counts.balanced, counts

    async def episode(self, name: str) -> None:
        """May take a while, and fail."""
        for _ in range(self.rng.randrange(6)):
            await asyncio.sleep(0)
        if self.rng.random() < 0.2:
            raise SandboxDeadError("gone")

    async def collect(self, task: Any, sandbox: Any) -> str:
        """Groups of equal rewards are filtered."""
        return self.rng.choice(["good", "bad"])

    async def grade(self, task: Any) -> None:
        if self.rng.random() < 0.2:
            raise SandboxDeadError("gone while grading")

    def admit(self, stream: RolloutStream) -> None:
        for _ in range(self.scheduler.admissible()):
            request = self.request(next(self.names))
            self.scheduler.submit(request.group_id)
            self.admitted.append(request.group_id)
            stream.start(request)
            self.audit()

    async def take(self, stream: RolloutStream) -> None:
        group = await stream.next(10)
        self.gone.append(group.group_id)
        scored = score_group(group, advantage="group_mean")
        self.scheduler.finish(group.group_id, scored.verdict, group.versions)
        self.audit()

    async def step(self, stream: RolloutStream) -> None:
        self.admit(stream)
        while not self.scheduler.ready():
            await self.take(stream)
            self.admit(stream)
        taken = self.scheduler.batch()
        self.audit()
        if not taken.trained:
            self.scheduler.next_round()
            return
        running = set(stream.running)
        for name in self.scheduler.doomed():
            self.scheduler.drop(name)
            self.audit()
            if name in running:
                assert await stream.drop([name]) == (name,)
                self.gone.append(name)
        self.scheduler.delivered(self.scheduler.version + 1)
        self.agent.version = self.scheduler.version
        self.audit()


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    groups=st.integers(1, 3),
    max_staleness=st.integers(0, 2),
    oversample=st.sampled_from([1.0, 1.5]),
    replace_filtered=st.booleans(),
    concurrency=st.integers(1, 5),
)
def test_k17_places_and_slots_come_back_whatever_happens(
    toys: Any, seed: int, groups: int, max_staleness: int, oversample: float, replace_filtered: bool, concurrency: int
) -> None:
    """submitted = accepted + filtered + failed + running after every event, and the engine counts the same groups:
    each admitted one is taken once or dropped, and at the end no slot, room or sandbox is held."""
    schedule = BoundedSchedule(
        groups=groups, max_staleness=max_staleness, oversample=oversample, replace_filtered=replace_filtered
    )
    run, pool = Run(toys, random.Random(seed), schedule), toys.Pool()
    rng = random.Random(seed + 1)

    async def scenario() -> None:
        engine = RolloutEngine(
            environment=run.environment,
            pool=pool,
            limits=toys.limits(retries=1),
            concurrency=concurrency,
            emit=lambda event: None,
            ready_ahead=1,
        )
        async with asyncio.timeout(30), engine.open(run.agent) as stream:
            for _ in range(STEPS):
                await run.step(stream)
                assert run.scheduler.counts().running == len(stream.running)
                assert sorted([*run.gone, *stream.running]) == sorted(run.admitted)
                engine.limit = rng.randint(1, concurrency)
        assert (engine.active, engine.waiting, pool.out) == (0, 0, 0)

    asyncio.run(scenario())

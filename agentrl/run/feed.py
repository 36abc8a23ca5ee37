"""Groups in, batches out: what runs beside the loop from one delivery to the next.

The feed admits groups as the scheduler's places fall free, takes finished ones in as they come, scores them, keeps
them on disk, and says when a batch is ready. It is the same for every schedule: in `sync` nothing is admissible
between a batch and its delivery, in `async` the next groups run meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from agentrl.config import RunConfig
from agentrl.rollout.buffer import GroupBuffer
from agentrl.rollout.filters import DrySpell, FilterCounts, Verdict
from agentrl.rollout.groups import GroupRequest, GroupResult, ScoredGroup, score_group
from agentrl.rollout.schedule import ScheduleError
from agentrl.rollout.scheduler import Scheduler, VersionSpan
from agentrl.rollout.source import GroupCursor, GroupStream


@dataclass(frozen=True, slots=True)
class Settled:
    """What a step settles: the groups of its batch, and those that ended since the last one without being trained.

    `given_up_s`: how long each group had run that was dropped unfinished, and of which only the count is left.
    """

    trained: tuple[ScoredGroup, ...]
    others: tuple[ScoredGroup, ...]
    given_up_s: tuple[float, ...] = ()

    @property
    def groups(self) -> list[GroupResult]:
        """All of them, in the order of the data."""
        return sorted((scored.group for scored in (*self.trained, *self.others)), key=lambda group: group.index)

    @property
    def counts(self) -> FilterCounts:
        verdicts = [scored.verdict for scored in (*self.trained, *self.others)]
        return FilterCounts.of([*verdicts, *(Verdict.STALE for _ in self.given_up_s)])


class GroupFeed:
    """Between `Scheduler`, data position, buffer and the engine's stream. `kept` are finished groups of an earlier
    sitting, taken as they are where they are as if generated now; `note` takes a line for whoever watches."""

    def __init__(
        self,
        *,
        config: RunConfig,
        scheduler: Scheduler,
        cursor: GroupCursor,
        buffer: GroupBuffer,
        stream: GroupStream,
        dry: DrySpell,
        kept: Mapping[str, GroupResult],
        note: Callable[[str], None],
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._cursor = cursor
        self._buffer = buffer
        self._stream = stream
        self._dry = dry
        self._kept = dict(kept)
        self._note = note
        self._scored: dict[str, ScoredGroup] = {}  # finished and not settled yet
        self._loose: list[ScoredGroup] = []  # finished and replaced: the next batch settles them
        self._barren: list[Verdict] = []
        self._given_up: set[str] = set()
        self._started_at: dict[str, float] = {}
        self._backlog: deque[tuple[GroupRequest, int]] = deque()  # of an earlier sitting, with the versions it had
        self._held = False
        self._news = asyncio.Event()

    # --- beside the loop --------------------------------------------------------------------------

    async def run(self) -> None:
        """Admit and take in, for ever. Raises the first fault of the program, and whatever ends the run."""
        while True:
            self.admit()
            if self._stream.running:
                self._take_in(await self._stream.next(timeout_s=None))
            else:
                self._news.clear()
                await self._news.wait()

    def admit(self) -> None:
        """Submit as many groups as there are free places; none while the feed is held."""
        for _ in range(0 if self._held else self._scheduler.admissible()):
            if self._backlog:
                self._submit(*self._backlog.popleft())
                continue
            for request in self._cursor.take(1, group_size=self._config.rollout.group_size):
                self._submit(request, None)
        self._news.set()

    def hold(self, held: bool) -> None:
        """While held, nothing is admitted: an evaluation on devices that take turns has them for itself."""
        self._held = held

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps: groups submitted and not in any batch, oldest first, with their versions."""
        return dict(self._scheduler.state()) | {request.group_id: version for request, version in self._backlog}

    def restore(self, in_flight: Mapping[str, int]) -> None:
        """Groups that an earlier sitting had submitted (`state`): they go first, in their order. What it kept of others
        before the data position had been replaced, and only waits to be settled."""
        indices = [int(name.rpartition("-")[2]) for name in in_flight]
        for request in self._cursor.at(indices, group_size=self._config.rollout.group_size):
            self._backlog.append((request, in_flight[request.group_id]))
        replaced = [g for g in self._kept.values() if g.index < self._cursor.position and g.group_id not in in_flight]
        for group in replaced:
            del self._kept[group.group_id]
            self._loose.append(self._score(group))

    def next_step(self, step: int) -> None:
        """Rollouts that finish from now on are of this step, for whoever watches."""
        self._stream.step = step

    def look_ahead(self) -> None:
        """Set the sandboxes of the next groups up, so that their first tokens need not wait for them."""
        count = min(self._config.rollout.groups, self._scheduler.to_come)
        waiting = [request for request, _ in self._backlog if request.group_id not in self._kept][:count]
        new = self._cursor.peek(count - len(waiting), group_size=self._config.rollout.group_size)
        self._stream.prepare([*waiting, *new])

    # --- for the loop -----------------------------------------------------------------------------

    async def batch(self) -> Settled:
        """Wait for the next batch; its groups are settled by this. Raises `ScheduleError` where none can ever come."""
        while not self._scheduler.ready():
            if not self._stream.running and not self._scheduler.admissible():
                raise ScheduleError("no batch is ready and nothing runs", where=f"GroupFeed.batch, {self._scheduler}")
            self._news.clear()
            await self._news.wait()
        taken = self._scheduler.batch()
        trained = tuple(self._scored.pop(name) for name in taken.trained)
        spent = [self._scored.pop(name) for name in taken.spent]
        loose, self._loose = self._loose, []
        return Settled(trained, (*spent, *loose))

    async def drop(self, settled: Settled, group_ids: Iterable[str]) -> Settled:
        """Give groups up that the next delivery would make too old: they are settled as stale with this batch."""
        late, given_up_s = [], {}
        for name in group_ids:
            verdict = self._scheduler.drop(name)
            scored = self._scored.pop(name, None)
            if scored is None:
                given_up_s[name] = time.monotonic() - self._started_at.pop(name)
            else:
                late.append(ScoredGroup(scored.group, scored.advantages, verdict))
        self._given_up.update(given_up_s)  # one that ends while it is being closed is not taken in any more
        await self._stream.drop(given_up_s)
        return replace(settled, others=(*settled.others, *late), given_up_s=tuple(given_up_s.values()))

    # --- inside -----------------------------------------------------------------------------------

    def _submit(self, request: GroupRequest, version: int | None) -> None:
        """Submit a group and start it, or take what an earlier sitting kept of it.

        A kept group of the backlog has the place that it had, while a batch can still hold it; any other is taken
        only where it is as if generated now.
        """
        kept = self._kept.pop(request.group_id, None)
        scheduler = self._scheduler
        oldest = scheduler.version if version is None else scheduler.schedule.oldest_in_time(scheduler.view())
        if kept is None or not _is_within(kept, oldest, scheduler.version):
            if kept is not None:
                self._buffer.drop([kept.group_id])
            scheduler.submit(request.group_id)
            self._started_at[request.group_id] = time.monotonic()
            self._stream.start(request)
            return
        scheduler.restore(request.group_id, scheduler.version if version is None else version)
        self._take_in(kept, known=True)

    def _take_in(self, group: GroupResult, *, known: bool = False) -> None:
        if group.group_id in self._given_up:
            return
        self._started_at.pop(group.group_id, None)
        scored = self._score(group)
        if not known:
            self._buffer.put(group)
        self._scheduler.finish(group.group_id, scored.verdict, self._versions(group))
        if scored.verdict is not Verdict.ACCEPTED and self._config.rollout.replace_filtered:
            self._loose.append(scored)
            self._note_barren(scored.verdict)
        else:
            self._scored[group.group_id] = scored
            self._barren.clear()
        self._news.set()

    def _versions(self, group: GroupResult) -> VersionSpan | None:
        """What the staleness bound is about: not the versions of another run, which mean nothing in this one."""
        if self._config.distill.from_run is None or group.versions is None:
            return group.versions
        return VersionSpan(self._scheduler.version, self._scheduler.version)

    def _score(self, group: GroupResult) -> ScoredGroup:
        return score_group(group, advantage=self._config.train.advantage.name, taught=self._config.distill.active)

    def _note_barren(self, verdict: Verdict) -> None:
        """Replaced groups end no step, so a spell without an accepted one is counted here, P groups to a step."""
        self._barren.append(verdict)
        groups = self._config.rollout.groups
        rounds, rest = divmod(len(self._barren), groups)
        if rest == 0:
            self._dry.length = rounds - 1
            if warning := self._dry.observe(FilterCounts.of(self._barren[-groups:])):
                self._note(warning)


def _is_within(group: GroupResult, oldest: int, newest: int) -> bool:
    """Whether all of a group's tokens are of these versions."""
    span = group.versions
    return span is not None and oldest <= span.oldest and span.newest <= newest

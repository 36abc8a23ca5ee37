"""Who may hold a sandbox, and who may be active: the two queues that a rollout passes.

    queued ─▶ room (a sandbox is leased and prepared) ─▶ ready ─▶ slot (active: in its episode) ─▶ collect ─▶ out
                  at most 2 · limit, or concurrency                   at most limit
                  where that is less, + ready_ahead

A rollout may be set up *ahead*, before its group is admitted: it then takes a room, never a slot. Invariants: slots
held ≤ limit (but for those that held one when it was lowered); both queues serve admitted rollouts in the order of
their admission, a rollout that is tried again in its old place; no admitted rollout waits for a room, nor for long
for a sandbox, that one set up ahead holds: the youngest of these gives way (`GiveWay`) and is set up again later.
Every change costs O(log n).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agentrl.rollout.deadline import Interruptible
from agentrl.rollout.status import ConcurrencyMeter, Usage

Rank = tuple[bool, int]
"""(set up ahead, order of admission): the lowest is served first."""


class GiveWay(Exception):
    """A rollout set up ahead leaves its room to an admitted one. No failure: it is set up again."""


class Slots:
    """At most `limit` holders; a free slot goes to the waiter of the lowest rank.

    Raising the limit lets waiters in at once, lowering it takes nothing away. Waiters that are set up ahead stay
    outside while `admitted_only`, and leave `reserved` slots free.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._heap: list[tuple[Rank, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._admitted_only = False
        self._reserved = 0
        self._short: set[asyncio.Future[None]] = set()
        self.held = 0

    @property
    def short(self) -> int:
        """How many admitted ones wait."""
        return len(self._short)

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        self._limit = limit
        self._hand_out()

    @property
    def admitted_only(self) -> bool:
        return self._admitted_only

    @admitted_only.setter
    def admitted_only(self, only: bool) -> None:
        self._admitted_only = only
        self._hand_out()

    @property
    def reserved(self) -> int:
        return self._reserved

    @reserved.setter
    def reserved(self, count: int) -> None:
        self._reserved = count
        self._hand_out()

    def ask(self, rank: Rank) -> asyncio.Future[None]:
        """A future that is done once the slot is had. Whoever stops waiting calls `withdraw`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ask_again(future, rank)
        return future

    def ask_again(self, future: asyncio.Future[None], rank: Rank) -> None:
        """Ask for a waiter; one that waits ahead already moves up to `rank`, that of an admitted one."""
        if not rank[0]:
            self._short.add(future)
        heapq.heappush(self._heap, (rank, next(self._numbers), future))
        self._hand_out()

    def withdraw(self, future: asyncio.Future[None]) -> None:
        """Stop waiting; a slot that came in the same turn of the loop is given back."""
        self._short.discard(future)
        if future.done() and not future.cancelled():
            self.release()
        future.cancel()

    def release(self) -> None:
        """Give a slot back."""
        self.held -= 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._heap and self.held < self._limit:
            (ahead, _), _, future = self._heap[0]
            if ahead and not future.done() and (self._admitted_only or self.held + self._reserved >= self._limit):
                return
            heapq.heappop(self._heap)
            if not future.done():  # else it was served as an admitted one, or withdrawn
                self.held += 1
                self._short.discard(future)
                future.set_result(None)


class Floor:
    """Rooms and slots of all rollouts. `concurrency` is the highest limit of active ones."""

    def __init__(self, *, concurrency: int, ready_ahead: int, monotonic: Callable[[], float]) -> None:
        self._concurrency, self._ready_ahead = concurrency, ready_ahead
        self._monotonic = monotonic
        self._meter = ConcurrencyMeter(now=monotonic())
        self.rooms = Slots(self._room(concurrency))
        self.slots = Slots(concurrency)
        self.numbers = itertools.count()
        self.waiting = 0
        self.ahead: dict[Place, None] = {}  # hold a room without being admitted, oldest first
        self.leaving = 0  # such as give way and still hold their room
        self._leasing = 0  # admitted ones that wait for a sandbox

    @property
    def limit(self) -> int:
        """How many rollouts may be active now."""
        return self.slots.limit

    @limit.setter
    def limit(self, limit: int) -> None:
        if not 1 <= limit <= self._concurrency:
            raise ValueError(f"the limit of active rollouts must be in 1…{self._concurrency}, not {limit}")
        self.slots.limit = limit
        self.rooms.limit = self._room(limit)

    def _room(self, limit: int) -> int:
        """Rooms for a limit of active rollouts: so many that after it was doubled there are rollouts ready, and no
        more, because each holds a sandbox."""
        return min(2 * limit, self._concurrency) + self._ready_ahead

    def take_usage(self) -> Usage:
        """Active rollouts since the last call."""
        return self._meter.read(now=self._monotonic())

    def count_active(self, by: int) -> None:
        self._meter.change(by, now=self._monotonic())

    def count_leasing(self, by: int) -> None:
        """Who is set up ahead asks for no sandbox while an admitted rollout waits for one."""
        self._leasing += by
        if (self._leasing > 0) != self.rooms.admitted_only:
            self.rooms.admitted_only = self._leasing > 0

    def make_room(self) -> None:
        """Let as many of those set up ahead give way as there are admitted ones without a room."""
        self.make_way(self.rooms.short - self.leaving)

    def make_way(self, count: int) -> None:
        """The `count` youngest of those set up ahead give way."""
        while count > 0 and self.ahead:
            place, _ = self.ahead.popitem()
            place.leaves = place.block.interrupt(GiveWay())
            self.leaving += place.leaves
            count -= 1


class Place:
    """One rollout's way over the floor. `block` is its attempt in progress, which others may end."""

    def __init__(self, floor: Floor, *, admitted: bool) -> None:
        self._floor = floor
        self._order = next(floor.numbers)
        self._admission = asyncio.Event()
        self._asking: asyncio.Future[None] | None = None
        self._before_episode = True
        self._wants_sandbox = False  # to be graded, or set up again
        self.block = Interruptible()
        self.leaves = False
        if admitted:
            self.admit()

    @property
    def admitted(self) -> bool:
        return self._admission.is_set()

    def admit(self) -> None:
        """The rollout may become active; its place in both queues is that of now."""
        floor = self._floor
        self._order = next(floor.numbers)
        self._admission.set()
        floor.waiting += self._before_episode
        floor.ahead.pop(self, None)
        if self._asking is not None and not self._asking.done():
            floor.rooms.ask_again(self._asking, (False, self._order))
            floor.make_room()

    async def enter_room(self) -> None:
        """Wait until the rollout may hold a sandbox."""
        floor, admitted = self._floor, self.admitted
        if not self._before_episode:
            self._before_episode = True
            floor.waiting += admitted
        self._want_sandbox(False)
        self._asking = asking = floor.rooms.ask((not admitted, self._order))
        if not asking.done():
            floor.make_room()
            try:
                await asking
            except asyncio.CancelledError:
                floor.rooms.withdraw(asking)
                raise
            finally:
                self._asking = None
        if not self.admitted:
            floor.ahead[self] = None

    def leave_room(self) -> None:
        """The sandbox has been given back."""
        floor = self._floor
        floor.ahead.pop(self, None)
        floor.leaving -= self.leaves
        self.leaves = False
        self._want_sandbox(self.admitted)
        floor.rooms.release()

    async def become_active(self) -> None:
        """Wait for admission and for a slot."""
        floor = self._floor
        if not self.admitted:
            await self._admission.wait()
        asking = floor.slots.ask((False, self._order))
        if not asking.done():
            try:
                await asking
            except asyncio.CancelledError:
                floor.slots.withdraw(asking)
                raise
        self._before_episode = False
        floor.waiting -= 1
        floor.count_active(+1)

    def end_active(self) -> None:
        """The episode is over."""
        self._floor.count_active(-1)
        self._floor.slots.release()

    @contextmanager
    def leasing(self) -> Iterator[None]:
        """The block waits for a sandbox."""
        admitted = self.admitted
        self._floor.count_leasing(+admitted)
        try:
            yield
        finally:
            self._floor.count_leasing(-admitted)

    def end(self, _: object = None) -> None:
        """The rollout's task (given where this is its callback) is over, however it ended."""
        if self._before_episode and self.admitted:
            self._floor.waiting -= 1
        self._before_episode = False
        self._want_sandbox(False)

    def _want_sandbox(self, wants: bool) -> None:
        """Without a room an admitted rollout still has a sandbox to come, which nobody set up ahead may take."""
        if wants != self._wants_sandbox:
            self._wants_sandbox = wants
            self._floor.rooms.reserved += 1 if wants else -1

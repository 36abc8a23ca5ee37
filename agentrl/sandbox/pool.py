"""The pool: sandboxes started ahead, leased one at a time, wiped between leases.

Life cycle of a sandbox:

    starting ─▶ idle ─▶ leased ─▶ resetting ─▶ idle …
       │          │        └─▶ closing: after an error, out of memory, `reuse` leases, or half its allowed age
       └─▶ failed └─▶ closing: found dead, or another image needs its place

Invariants: starting + idle + leased + resetting + closing ≤ `size`; starting ≤ `starters`; a sandbox is in
one state; a lease gets a sandbox in which nothing of an earlier lease is left; no lease waits longer than it
asked for; after `close` nothing of the pool's lives. A sandbox that has graded serves only to grade from then on:
hidden tests went through its server's memory, of which a warm fork (an agent's pytest) has a copy. All changes
happen in the event loop's thread between two awaits, so there are no locks: every change ends in `_pump`, which
alone hands out and starts.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from agentrl.config import SandboxConfig
from agentrl.errors import AgentRLError, DeadlineError, SandboxError
from agentrl.sandbox.backend import Backend, BackendName, make_backend
from agentrl.sandbox.limits import MAX_AGE_S
from agentrl.sandbox.pool_starts import Starts, for_waiter
from agentrl.sandbox.reaper import reap
from agentrl.sandbox.session import RESET_TIMEOUT_S, ServedSandbox, Session

log = logging.getLogger("agentrl.sandbox")

CLOSE_TIMEOUT_S = 60.0
LOOK_AGAIN_S = 1.0  # while someone waits: room may have come where nothing of ours has happened


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Counts since the pool opened, and how many sandboxes are in which state now.

    `start_s_mean` is seconds from the request to the server's first words, over successful starts. `failures`
    counts failed starts, failed resets, and leases that ended with a dead or out-of-memory sandbox.
    """

    starts: int
    start_s_mean: float
    leases: int
    failures: int
    alive: int
    idle: int
    leased: int


@dataclass(slots=True, eq=False)
class _Waiter:
    image: str
    grading: bool
    session: asyncio.Future[Session]
    since: float


def starts_wanted(*, waiting: int, reserve: int, supply: int, room: int, starters_free: int) -> int:
    """How many sandboxes of an image to start now: enough for those who wait and the reserve, beyond what is
    idle or soon will be (`supply`), within the pool's room and its starters."""
    return max(0, min(waiting + reserve - supply, room, starters_free))


class Pool:
    """Where leases come from (`agentrl.wire.protocols.SandboxPool`). Made by `open_pool`."""

    def __init__(self, config: SandboxConfig, backend: Backend) -> None:
        self._config = config
        self._backend = backend
        self._reserve = {config.image: min(config.starters, config.size)}
        self._idle: dict[str, deque[Session]] = {}
        self._graders: dict[str, deque[Session]] = {}  # idle too, but such as have graded
        self._waiters: deque[_Waiter] = deque()
        self._leased: set[Session] = set()
        self._resetting: set[Session] = set()
        self._closing: set[Session] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts = Starts(config, backend, self)
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._leases = self._failures = 0
        self._pump()

    @property
    def backend(self) -> BackendName:
        """Which backend the sandboxes are of."""
        return self._backend.name

    def stats(self) -> PoolStats:
        """The figures now."""
        idle = sum(map(len, [*self._idle.values(), *self._graders.values()]))
        return PoolStats(
            starts=self._starts.count,
            start_s_mean=self._starts.seconds / max(1, self._starts.count),
            leases=self._leases,
            failures=self._failures + self._starts.failures,
            alive=idle + len(self._leased) + len(self._resetting) + len(self._closing),
            idle=idle,
            leased=len(self._leased),
        )

    def prefetch(self, images: Sequence[str]) -> None:
        """Have the images of tasks to come, in the background; returns at once and never fails."""
        if not self._is_closed:
            self._starts.prefetch(images)

    # --- leases ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(
        self, image: str, *, timeout_s: float, label: str = "", grading: bool = False
    ) -> AsyncIterator[ServedSandbox]:
        """A fresh sandbox for the block. `label` names the lease-holder in errors; `grading` says that the sandbox will
        be told hidden tests.

        Raises `DeadlineError` where none is free within `timeout_s`; `SandboxStartError`,
        `DaemonUnreachableError` or `ImageMissingError` where none can be started; `SandboxError` where the
        pool is closed.
        """
        session = await self._acquire(_waiter(image, grading), timeout_s=timeout_s, label=label)
        session.has_graded |= grading
        session.leases += 1
        self._leases += 1
        sandbox = ServedSandbox(session)
        failed = False
        try:
            yield sandbox
        except SandboxError:
            failed = True
            raise
        finally:
            sandbox.end_lease()
            self._give_back(session, failed=failed or sandbox.ran_out_of_memory)

    async def _acquire(self, waiter: _Waiter, *, timeout_s: float, label: str) -> Session:
        """A session in state leased. Whatever it raises, none is lost."""
        if self._is_closed:
            raise SandboxError("the sandbox pool is closed", where=label, remedy="lease inside `open_pool`")
        self._waiters.append(waiter)
        self._pump()
        if waiter.session.done():  # the common case, without a turn of the loop
            return waiter.session.result()
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter.session
        except BaseException as error:
            self._abandon(waiter)
            if not isinstance(error, TimeoutError):
                raise
            raise DeadlineError(
                f"no sandbox was free within {timeout_s:g} s ({self._describe()})",
                where=f"lease {label or '(no label)'}, image {waiter.image}",
                remedy="raise sandbox.size, or lower rollout.concurrency",
            ) from None

    def _abandon(self, waiter: _Waiter) -> None:
        """Its holder waits no more; what it was handed meanwhile goes back unused."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        if waiter.session.done() and not waiter.session.cancelled() and waiter.session.exception() is None:
            session = waiter.session.result()
            if session in self._leased:  # else the pool was closed meanwhile, and the sandbox with it
                self._leased.discard(session)
                self._shelve(session)
        self._pump()

    def _give_back(self, session: Session, *, failed: bool) -> None:
        """The lease is over. Never waits, so that it cannot be cancelled half-way."""
        if session not in self._leased:
            return  # the pool was closed meanwhile, and the sandbox with it
        self._leased.discard(session)
        failed = failed or not session.is_usable
        self._failures += failed
        abandoned = session.is_busy  # its holder left an operation in progress, which has a deadline of its own
        worn = session.leases >= self._config.reuse or time.monotonic() - session.started_at > MAX_AGE_S / 2
        if failed or worn or abandoned:
            self._retire(session)
        else:
            self._resetting.add(session)
            self._spawn(self._reset(session))
        self._pump()

    async def _reset(self, session: Session) -> None:
        try:
            # Both reset and start may have a whole work tree to copy, so a reset has as long.
            await session.reset(timeout_s=max(RESET_TIMEOUT_S, self._config.start_timeout_s))
        except Exception as error:
            if session not in self._resetting:
                return  # the pool was closed meanwhile, and the sandbox with it
            why = error.what if isinstance(error, AgentRLError) else repr(error)
            log.warning("sandbox %s cannot be reset and is closed: %s", session.machine.id, why)
            self._failures += 1
            session.condemn("its reset failed")
        if session not in self._resetting:
            return  # the pool was closed meanwhile
        self._resetting.discard(session)
        self._shelve(session)
        self._pump()

    # --- states ---------------------------------------------------------------------------------------------

    def _shelve(self, session: Session) -> None:
        """Idle, where it is fit for it."""
        if self._is_closed or not session.is_usable:
            self._retire(session)
        else:
            shelves = self._graders if session.has_graded else self._idle
            shelves.setdefault(session.machine.image, deque()).append(session)

    def _retire(self, session: Session) -> None:
        """Close it in the background; its place stays taken until it is gone."""
        self._closing.add(session)
        self._spawn(self._close_session(session))

    async def _close_session(self, session: Session) -> None:
        try:
            session.condemn("it was closed")
            await session.machine.close()
        finally:
            self._closing.discard(session)
            self._pump()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _pump(self) -> None:
        """Hand out what is idle to those who wait, first come first served per image; start what is missing."""
        if self._is_closed:
            return
        for waiter in list(self._waiters):
            session = self._take_idle(waiter)
            if session is not None:
                self._waiters.remove(waiter)
                if waiter.session.done():  # cancelled in this very turn of the loop; `_abandon` comes after
                    self._shelve(session)
                    continue
                self._leased.add(session)
                waiter.session.set_result(session)
        waiting = Counter(waiter.image for waiter in self._waiters)
        for image in list(dict.fromkeys([*waiting, *self._reserve])):
            self._start_missing(image, waiting[image])
        if self._waiters and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._pump()

    def _take_idle(self, waiter: _Waiter) -> Session | None:
        """For grading one that has graded, or else one that has not; for all else only such as have not."""
        shelves = [self._graders.get(waiter.image)] if waiter.grading else []
        if not waiter.grading or self._may_become_grader(waiter):
            shelves.append(self._idle.get(waiter.image))
        for shelf in shelves:
            while shelf:
                session = shelf.popleft()
                if session.is_usable:
                    return session
                self._failures += 1
                log.warning("idle sandbox %s was found dead", session.machine.id)
                self._retire(session)
        return None

    def _may_become_grader(self, waiter: _Waiter) -> bool:
        """Few are kept for grading, which is short, so that a burst of it does not use up the agents' sandboxes;
        whoever has waited gets one all the same."""
        graders = sum(session.has_graded for session in self._leased | self._resetting)
        return graders < max(1, self._config.size // 8) or time.monotonic() - waiter.since >= LOOK_AGAIN_S

    def _start_missing(self, image: str, waiting: int) -> None:
        starting = self._starts.starting
        supply = len(self._idle.get(image, ())) + starting[image]
        supply += sum(s.machine.image == image and not s.has_graded for s in self._resetting)
        if waiting + self._reserve.get(image, 0) <= supply or not self._starts.may_start(image):
            return
        room = self._config.size - self.stats().alive - starting.total()
        if (free := self._backend.free_room()) is not None:
            room = min(room, free)
        # Places that will be free when what is closing has gone count as found.
        missing = min(waiting - supply, self._config.starters - starting.total()) - max(0, room) - len(self._closing)
        for _ in range(missing):
            if not self._evict_for(image):
                break
        count = starts_wanted(
            waiting=waiting,
            reserve=self._reserve.get(image, 0),
            supply=supply,
            room=room,
            starters_free=self._config.starters - starting.total(),
        )
        for _ in range(count):
            self._starts.start(image)

    def _evict_for(self, image: str) -> bool:
        """Give up one idle sandbox of another image, or one that has graded; its end pumps again. False: none is."""
        others = [shelf for other, shelf in self._idle.items() if other != image]
        for shelf in [*others, *self._graders.values()]:
            if shelf:
                self._retire(shelf.popleft())
                return True
        return False

    # --- what the starts tell (`Taker`) ---------------------------------------------------------------------

    def take_started(self, session: Session) -> None:
        self._shelve(session)

    def take_broken(self, session: Session) -> None:
        self._retire(session)

    def take_fault(self, image: str, error: AgentRLError) -> None:
        """Those who wait fail with the reason, unless others of the image are at work (started or starting): these
        will come back, and who waits for them has a deadline."""
        at_work = self._starts.starting[image] + sum(
            session.machine.image == image for session in self._leased | self._resetting
        )
        if at_work:
            return
        for waiter in [w for w in self._waiters if w.image == image]:
            self._waiters.remove(waiter)
            if not waiter.session.done():
                waiter.session.set_exception(for_waiter(error, image))

    def take_change(self) -> None:
        self._pump()

    def _describe(self) -> str:
        stats = self.stats()
        return (
            f"{stats.leased} leased, {stats.idle} idle, {self._starts.starting.total()} starting, "
            f"{len(self._waiters)} waiting, size {self._config.size}"
        )

    # --- the end --------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End every sandbox, leased ones too (their holders get `SandboxDeadError`), and every start; wait for it."""
        if not self._is_closed:
            self._is_closed = True
            for waiter in self._waiters:
                if not waiter.session.done():
                    waiter.session.set_exception(SandboxError("the sandbox pool was closed", where=waiter.image))
            self._waiters.clear()
            if self._timer is not None:
                self._timer.cancel()
            self._starts.cancel()
            for session in [
                *self._leased,
                *self._resetting,
                *(s for shelves in (self._idle, self._graders) for shelf in shelves.values() for s in shelf),
            ]:
                self._retire(session)
            self._leased.clear()
            self._resetting.clear()
            self._idle.clear()
            self._graders.clear()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while pending := [*self._starts.pending, *self._tasks]:
                    await asyncio.gather(*pending, return_exceptions=True)
        except TimeoutError:
            log.warning("%d sandboxes did not end in time and are left to the reaper", len(self._closing))
        finally:
            await self._backend.close()


def _waiter(image: str, grading: bool) -> _Waiter:
    return _Waiter(image, grading, asyncio.get_running_loop().create_future(), time.monotonic())


@asynccontextmanager
async def open_pool(config: SandboxConfig, *, run_id: str) -> AsyncIterator[Pool]:
    """A pool on the backend that `config` means, its reserve starting; closed, and everything reaped, at the end.

    Has `config.image` here before it yields, which may take minutes the first time. `run_id` goes into names
    and labels. Raises `NoSandboxBackendError`, `ImageMissingError`, `DaemonUnreachableError`.
    """
    backend = await asyncio.to_thread(make_backend, config, re.sub(r"[^A-Za-z0-9_.]+", "-", run_id)[:40] or "run")
    uses_docker = backend.name == "docker"
    pool: Pool | None = None
    try:
        await asyncio.to_thread(reap, containers=uses_docker, hosts=config.hosts)
        await backend.prepare(config.image)
        pool = Pool(config, backend)
        yield pool
    finally:
        await (pool.close() if pool is not None else backend.close())
        await asyncio.to_thread(reap, containers=uses_docker, hosts=config.hosts)

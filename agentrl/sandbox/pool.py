"""The pool: sandboxes started ahead, leased one at a time, wiped between leases.

Life cycle of a sandbox:

    starting ─▶ idle ─▶ leased ─▶ resetting ─▶ idle …
       │          │        └─▶ closing: after an error, out of memory, `reuse` leases, or half its allowed age
       └─▶ failed └─▶ closing: found dead, or another image needs its place

Invariants: starting + idle + leased + resetting + closing ≤ `size`; starting ≤ `starters`; a sandbox is in
one state; a lease gets a sandbox in which nothing of an earlier lease is left; no lease waits longer than it
asked for; after `close` nothing of the pool's lives. All changes happen in the event loop's thread between
two awaits, so there are no locks: every change ends in `_pump`, which alone hands out and starts.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from agentrl.config import SandboxConfig
from agentrl.errors import (
    AgentRLError,
    DaemonUnreachableError,
    DeadlineError,
    ImageMissingError,
    NoSandboxBackendError,
    SandboxError,
    SandboxStartError,
)
from agentrl.sandbox.backend import Backend, BackendName, choose_backend
from agentrl.sandbox.limits import MAX_AGE_S
from agentrl.sandbox.reaper import reap
from agentrl.sandbox.session import ServedSandbox, Session

log = logging.getLogger("agentrl.sandbox")

START_ATTEMPTS = 4
BACKOFF_S = 0.25
COOLDOWN_S = 2.0
CLOSE_TIMEOUT_S = 60.0


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
    session: asyncio.Future[Session]


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
        self._waiters: deque[_Waiter] = deque()
        self._leased: set[Session] = set()
        self._resetting: set[Session] = set()
        self._closing: set[Session] = set()
        self._starting: Counter[str] = Counter()
        self._not_before: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._starters: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._starts = self._leases = self._failures = 0
        self._start_s = 0.0
        self._pump()

    @property
    def backend(self) -> BackendName:
        """Which backend the sandboxes are of."""
        return self._backend.name

    def stats(self) -> PoolStats:
        """The figures now."""
        idle = sum(map(len, self._idle.values()))
        return PoolStats(
            starts=self._starts,
            start_s_mean=self._start_s / self._starts if self._starts else 0.0,
            leases=self._leases,
            failures=self._failures,
            alive=idle + len(self._leased) + len(self._resetting) + len(self._closing),
            idle=idle,
            leased=len(self._leased),
        )

    # --- leases
    # ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, image: str, *, timeout_s: float, label: str = "") -> AsyncIterator[ServedSandbox]:
        """A fresh sandbox for the block. `label` names the lease-holder in errors.

        Raises `DeadlineError` where none is free within `timeout_s`; `SandboxStartError`,
        `DaemonUnreachableError` or `ImageMissingError` where none can be started; `SandboxError` where the
        pool is closed.
        """
        session = await self._acquire(image, timeout_s=timeout_s, label=label)
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

    async def _acquire(self, image: str, *, timeout_s: float, label: str) -> Session:
        """A session in state leased. Whatever it raises, none is lost."""
        if self._is_closed:
            raise SandboxError("the sandbox pool is closed", where=label, remedy="lease inside `open_pool`")
        waiter = _Waiter(image, asyncio.get_running_loop().create_future())
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
                f"no sandbox was free within {timeout_s:g} s ({self._describe(image)})",
                where=f"lease {label or '(no label)'}, image {image}",
                remedy="raise sandbox.size, or lower rollout.concurrency",
            ) from None

    def _abandon(self, waiter: _Waiter) -> None:
        """Its holder waits no more; what it was handed meanwhile goes back unused."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        if waiter.session.done() and not waiter.session.cancelled() and waiter.session.exception() is None:
            session = waiter.session.result()
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
        worn = session.leases >= self._config.reuse or time.monotonic() - session.started_at > MAX_AGE_S / 2
        if failed or worn:
            self._retire(session)
        else:
            self._resetting.add(session)
            self._spawn(self._reset(session), self._tasks)
        self._pump()

    async def _reset(self, session: Session) -> None:
        try:
            await session.reset()
        except AgentRLError as error:
            if session not in self._resetting:
                return  # the pool was closed meanwhile, and the sandbox with it
            log.warning("sandbox %s cannot be reset and is closed: %s", session.machine.id, error.what)
            self._failures += 1
            session.condemn("its reset failed")
        if session not in self._resetting:
            return  # the pool was closed meanwhile
        self._resetting.discard(session)
        self._shelve(session)
        self._pump()

    # --- states
    # ---------------------------------------------------------------------------------------------------

    def _shelve(self, session: Session) -> None:
        """Idle, where it is fit for it."""
        if self._is_closed or not session.is_usable:
            self._retire(session)
        else:
            self._idle.setdefault(session.machine.image, deque()).append(session)

    def _retire(self, session: Session) -> None:
        """Close it in the background; its place stays taken until it is gone."""
        self._closing.add(session)
        self._spawn(self._close_session(session), self._tasks)

    async def _close_session(self, session: Session) -> None:
        try:
            session.condemn("it was closed")
            await session.machine.close()
        finally:
            self._closing.discard(session)
            self._pump()

    def _spawn(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _pump(self) -> None:
        """Hand out what is idle to those who wait, first come first served per image; start what is
        missing."""
        if self._is_closed:
            return
        for waiter in [w for w in self._waiters if self._idle.get(w.image)]:
            session = self._take_idle(waiter.image)
            if session is not None:
                self._waiters.remove(waiter)
                if waiter.session.done():  # cancelled in this very turn of the loop; `_abandon` comes after
                    self._idle[waiter.image].append(session)
                    continue
                self._leased.add(session)
                waiter.session.set_result(session)
        waiting = Counter(waiter.image for waiter in self._waiters)
        for image in list(dict.fromkeys([*waiting, *self._reserve])):
            self._start_missing(image, waiting[image])

    def _take_idle(self, image: str) -> Session | None:
        shelf = self._idle[image]
        while shelf:
            session = shelf.popleft()
            if session.is_usable:
                return session
            self._failures += 1
            log.warning("idle sandbox %s was found dead", session.machine.id)
            self._retire(session)
        return None

    def _start_missing(self, image: str, waiting: int) -> None:
        pause_s = self._not_before.get(image, 0.0) - time.monotonic()
        if pause_s > 0:
            return  # a start series has failed just now; `_fail_series` has set a timer for the next `_pump`
        supply = len(self._idle.get(image, ())) + self._starting[image]
        supply += sum(session.machine.image == image for session in self._resetting)
        taken = self.stats().alive + self._starting.total()
        if waiting > supply and taken >= self._config.size and not self._closing:
            self._evict_for(image)
        count = starts_wanted(
            waiting=waiting,
            reserve=self._reserve.get(image, 0),
            supply=supply,
            room=self._config.size - taken,
            starters_free=self._config.starters - self._starting.total(),
        )
        for _ in range(count):
            self._starting[image] += 1
            self._spawn(self._start_series(image), self._starters)

    def _evict_for(self, image: str) -> None:
        """Give up one idle sandbox of another image; its end pumps again."""
        for other, shelf in self._idle.items():
            if other != image and shelf:
                self._retire(shelf.popleft())
                return

    # --- starts
    # ---------------------------------------------------------------------------------------------------

    async def _start_series(self, image: str) -> None:
        """Start one sandbox, trying a few times with growing pauses."""
        error: AgentRLError | None = None
        session: Session | None = None
        try:
            for attempt in range(START_ATTEMPTS):
                try:
                    session = await self._start_once(image)
                    break
                except (ImageMissingError, NoSandboxBackendError) as fault:
                    error = fault
                    break
                except AgentRLError as fault:
                    error = fault
                except Exception as fault:
                    log.exception("a sandbox start failed in an unforeseen way")
                    error = SandboxStartError(f"{type(fault).__name__}: {fault}", where=f"image {image}")
                self._failures += 1
                log.warning("start %d of %d failed: %s", attempt + 1, START_ATTEMPTS, error.what)
                if attempt + 1 < START_ATTEMPTS:
                    await asyncio.sleep(BACKOFF_S * 2**attempt)
        finally:
            self._starting[image] -= 1
        if session is not None:
            self._shelve(session)
        elif error is not None:
            self._fail_series(image, error)
        self._pump()

    async def _start_once(self, image: str) -> Session:
        began = time.monotonic()
        machine = await self._backend.start(image, timeout_s=self._config.start_timeout_s)
        session = Session(machine)
        try:
            await session.wait_ready(timeout_s=self._config.start_timeout_s)
        except BaseException:
            self._retire(session)
            raise
        self._starts += 1
        self._start_s += time.monotonic() - began
        return session

    def _fail_series(self, image: str, error: AgentRLError) -> None:
        """No start succeeded. Those who wait fail with the reason, unless others of the image are at work
        (started or starting): these will come back, and who waits for them has a deadline."""
        self._not_before[image] = time.monotonic() + COOLDOWN_S
        asyncio.get_running_loop().call_later(COOLDOWN_S + 0.01, self._pump)
        at_work = self._starting[image] + sum(
            session.machine.image == image for session in self._leased | self._resetting
        )
        if at_work:
            return
        for waiter in [w for w in self._waiters if w.image == image]:
            self._waiters.remove(waiter)
            if not waiter.session.done():
                waiter.session.set_exception(_for_waiter(error, image))

    def _describe(self, image: str) -> str:
        stats = self.stats()
        return (
            f"{stats.leased} leased, {stats.idle} idle, {self._starting.total()} starting, "
            f"{len(self._waiters)} waiting, size {self._config.size}"
        )

    # --- the end
    # --------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End every sandbox, leased ones too (their holders get `SandboxDeadError`), and every start; wait
        for it."""
        if not self._is_closed:
            self._is_closed = True
            for waiter in self._waiters:
                if not waiter.session.done():
                    waiter.session.set_exception(SandboxError("the sandbox pool was closed", where=waiter.image))
            self._waiters.clear()
            for task in self._starters:
                task.cancel()
            for session in [
                *self._leased,
                *self._resetting,
                *(s for shelf in self._idle.values() for s in shelf),
            ]:
                self._retire(session)
            self._leased.clear()
            self._resetting.clear()
            self._idle.clear()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while pending := [*self._starters, *self._tasks]:
                    await asyncio.gather(*pending, return_exceptions=True)
        except TimeoutError:
            log.warning("%d sandboxes did not end in time and are left to the reaper", len(self._closing))
        await self._backend.close()


def _for_waiter(error: AgentRLError, image: str) -> AgentRLError:
    """A new error for each who waits (an exception object carries one traceback)."""
    if isinstance(error, DaemonUnreachableError | ImageMissingError | NoSandboxBackendError):
        return type(error)(error.what, where=error.where, remedy=error.remedy)
    return SandboxStartError(
        f"no sandbox of {image} could be started in {START_ATTEMPTS} tries: {error.what}",
        where=error.where,
        remedy=error.remedy,
    )


def _make_backend(config: SandboxConfig, run_id: str) -> Backend:
    if choose_backend(config) == "docker":
        from agentrl.sandbox.docker import DockerBackend  # its SDK takes 0.2 s to import

        return DockerBackend(config, run_id=run_id)
    from agentrl.sandbox.bubblewrap import BubblewrapBackend

    return BubblewrapBackend(config, run_id=run_id)


@asynccontextmanager
async def open_pool(config: SandboxConfig, *, run_id: str) -> AsyncIterator[Pool]:
    """A pool on the backend that `config` means, its reserve starting; closed, and everything reaped, at the
    end.

    Has `config.image` here before it yields, which may take minutes the first time. `run_id` goes into names
    and labels. Raises `NoSandboxBackendError`, `ImageMissingError`, `DaemonUnreachableError`.
    """
    backend = await asyncio.to_thread(_make_backend, config, re.sub(r"[^A-Za-z0-9_.]+", "-", run_id)[:40] or "run")
    uses_docker = backend.name == "docker"
    pool: Pool | None = None
    try:
        await asyncio.to_thread(reap, containers=uses_docker)
        await backend.prepare(config.image)
        pool = Pool(config, backend)
        yield pool
    finally:
        await (pool.close() if pool is not None else backend.close())
        await asyncio.to_thread(reap, containers=uses_docker)

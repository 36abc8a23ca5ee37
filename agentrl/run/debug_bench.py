"""A prepared sandbox of one task for a person at a terminal.

The event loop lives in a thread of its own, so that the terminal's thread can wait in a line editor, and Ctrl-C there
ends what is running in the sandbox and not the loop:

    with open_bench(config, environment, task) as bench:
        result = bench.run("pytest -q", timeout_s=60)      # Ctrl-C: the command ends, the sandbox stays
        patch = bench.call(environment.collect(task, bench.sandbox))
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from agentrl.config import RunConfig
from agentrl.errors import DeadlineError, SandboxError
from agentrl.rollout.deadline import deadline
from agentrl.rollout.driver import Limits
from agentrl.run.debug import debug_pool
from agentrl.run.grading import Grader, retried
from agentrl.run.signals import Interrupted
from agentrl.sandbox import Pool
from agentrl.wire import CommandResult, Environment, Grade, Sandbox, Task

Result = TypeVar("Result")

_ENDS = (signal.SIGTERM, signal.SIGHUP)
_CLOSE_S = 90.0
# After an interrupt the server has this long to end the command; then its sandbox is given up.
_INTERRUPT_S = 20.0


class Bench:
    """One task's sandbox at a time. All methods are for the thread that made it; made by `open_bench`."""

    def __init__(
        self, config: RunConfig, environment: Environment, task: Task, *, spare: int, note: Callable[[str], None]
    ) -> None:
        self.config, self.environment, self.task = config, environment, task
        self.limits = Limits.from_config(config)
        self.was_interrupted = False
        self._note = note
        self._spare = spare
        self._sandbox: Sandbox | None = None
        self._grader: Grader | None = None
        self._loop = asyncio.new_event_loop()
        self._wanted: asyncio.Queue[Future[Sandbox] | None] = asyncio.Queue()
        self._thread = threading.Thread(target=self._live, name="agentrl-bench", daemon=True)
        self._keeper: asyncio.Task[None] | None = None

    @property
    def sandbox(self) -> Sandbox:
        """The prepared sandbox."""
        if self._sandbox is None:
            raise SandboxError("there is no sandbox", where=f"task {self.task.id}", remedy="take a fresh one")
        return self._sandbox

    # --- for the terminal's thread

    def call(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`, run in the loop. Ctrl-C cancels it and raises KeyboardInterrupt."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def work_inside(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`, which waits for a command in the sandbox. Ctrl-C ends that command alone
        (`was_interrupted`): `work` gets its output so far, and the sandbox stays.

        Raises SandboxError, also where an interrupted command gives no answer.
        """
        sandbox = self.sandbox
        self.was_interrupted = False
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            self.was_interrupted = True
            asyncio.run_coroutine_threadsafe(_interrupt(sandbox), self._loop)
        try:
            return future.result(_INTERRUPT_S)
        except (KeyboardInterrupt, TimeoutError):
            future.cancel()  # the sandbox goes with it: it has given no answer
            raise SandboxError(
                "the command did not end", where=f"sandbox {sandbox.id}", remedy="take a fresh sandbox"
            ) from None

    def run(self, command: str, *, timeout_s: float, **options: Any) -> CommandResult:
        """`Sandbox.run` as `work_inside`."""
        return self.work_inside(self.sandbox.run(command, timeout_s=timeout_s, **options))

    def grade(self, patch: str) -> Grade:
        """The task's grade of `patch`, in another sandbox. Raises as `Grader.grade`."""
        if self._grader is None:
            raise SandboxError("there is no pool", where=f"task {self.task.id}")
        return self.call(self._grader.grade(self.task, patch))

    def renew(self) -> Sandbox:
        """Give the sandbox back and take a fresh, prepared one. Raises InfrastructureError, DatasetError."""
        self._sandbox = None
        answer: Future[Sandbox] = Future()
        if not self._thread.is_alive():
            raise SandboxError("the bench is closed", where=f"task {self.task.id}", remedy="start again")
        self._loop.call_soon_threadsafe(self._wanted.put_nowait, answer)
        try:
            self._sandbox = answer.result()
        except (KeyboardInterrupt, Interrupted):
            self._loop.call_soon_threadsafe(self._abandon)
            raise
        return self._sandbox

    def close(self) -> None:
        """Give everything back; bounded in time."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._wanted.put_nowait, None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise DeadlineError(
                f"sandboxes did not end within {_CLOSE_S:g} s",
                where=f"task {self.task.id}",
                remedy="`agentrl sandbox reap` removes what is left",
            )

    # --- in the loop's thread

    def start(self) -> None:
        """Start the thread; the first `renew` says what went wrong."""
        self._thread.start()

    def _live(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._keeper = self._loop.create_task(self._keep())
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._keeper)
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    def _abandon(self) -> None:
        """Whoever waits has left: end even a start that takes long."""
        if self._keeper is not None:
            self._keeper.cancel()

    async def _keep(self) -> None:
        """Hold pool and lease: they are entered and left by this one task. Who wants a sandbox gets a fresh one."""
        wanted = await self._wanted.get()
        image = self.environment.image(self.task)
        try:
            async with debug_pool(self.config, size=1 + self._spare, image=image) as pool:
                self._grader = Grader(self.environment, pool, self.limits, self._note)
                while wanted is not None:
                    async with AsyncExitStack() as stack:
                        await self._answer(wanted, partial(self._lease, stack, pool, image))
                        wanted = await self._wanted.get()
        except Exception as error:
            if wanted is None:
                raise
            while wanted is not None:  # no pool, no sandbox
                wanted.set_exception(error)
                wanted = await self._wanted.get()

    async def _answer(self, wanted: Future[Sandbox], once: Callable[[], Awaitable[Sandbox]]) -> None:
        """A prepared sandbox for `wanted`, or why there is none."""
        try:
            wanted.set_result(await retried(once, retries=self.limits.retries, note=self._note))
        except Exception as error:
            wanted.set_exception(error)

    async def _lease(self, stack: AsyncExitStack, pool: Pool, image: str) -> Sandbox:
        """A leased, prepared sandbox that `stack` holds."""
        async with AsyncExitStack() as inner:
            lease = pool.lease(image, timeout_s=self.limits.lease_s, label=f"debug {self.task.id}")
            sandbox = await inner.enter_async_context(lease)
            async with deadline(self.limits.prepare_s, lambda: self._late(sandbox)):
                await self.environment.prepare(self.task, sandbox)
            stack.push_async_exit(inner.pop_all())
        return sandbox

    def _late(self, sandbox: Sandbox) -> DeadlineError:
        return DeadlineError(
            "preparing the work tree ran past its deadline", where=f"task {self.task.id}, sandbox {sandbox.id}"
        )


async def _interrupt(sandbox: Sandbox) -> None:
    interrupt = getattr(sandbox, "interrupt", None)
    if interrupt is not None:
        await interrupt()


@contextmanager
def open_bench(
    config: RunConfig, environment: Environment, task: Task, *, note: Callable[[str], None], spare: int = 0
) -> Iterator[Bench]:
    """A bench whose sandbox is prepared; `spare` sandboxes may live beside it (grading needs one).

    Raises InfrastructureError, DatasetError, Interrupted. Everything is given back at the end.
    """
    bench = Bench(config, environment, task, spare=spare, note=note)
    with _ended_by_signals():
        bench.start()
        try:
            bench.renew()
            yield bench
        finally:
            bench.close()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """The first SIGTERM, or SIGHUP where the terminal goes away, raises Interrupted in this (the main) thread; more of
    them are ignored, so that sandboxes are given back."""

    def end(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted

    # what is ignored (nohup) stays so
    before = {each: signal.getsignal(each) for each in _ENDS if signal.getsignal(each) is not signal.SIG_IGN}
    for each in before:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

"""One way to grade a patch of a task: in a fresh sandbox, and in another where a machine failed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar

from agentrl.errors import AgentRLError, DeadlineError, GradingTimeoutError, handling
from agentrl.rollout.deadline import being_cancelled, deadline
from agentrl.rollout.driver import Limits
from agentrl.wire import Environment, Grade, SandboxPool, Task

# What the pool gets beyond the deadline it keeps by itself.
_GRACE_S = 30.0

Result = TypeVar("Result")


async def retried(
    attempt: Callable[[], Awaitable[Result]],
    *,
    retries: int,
    note: Callable[[str], None],
    final: tuple[type[AgentRLError], ...] = (),
) -> Result:
    """`attempt`, up to `retries` times again where the table of errors allows it. `final` are not tried again.

    Raises the last error.
    """
    for left in range(retries, -1, -1):
        try:
            return await attempt()
        except Exception as error:
            if being_cancelled():
                # A sandbox that fails while it is torn down must not swallow the cancellation.
                raise asyncio.CancelledError from error
            row = handling(error)
            if row is None or not row.retry or not left or isinstance(error, final):
                raise
            what = error.what if isinstance(error, AgentRLError) else str(error)
            note(f"{type(error).__name__}: {what.splitlines()[0]}; tried again in a fresh sandbox")
    raise AssertionError("the last try returns or raises")


@dataclass(frozen=True, slots=True)
class Grader:
    """Grades patches of an environment's tasks. `note` takes a line about a failure that is tried again."""

    environment: Environment
    pool: SandboxPool
    limits: Limits
    note: Callable[[str], None]

    async def grade(self, task: Task, patch: str, *, final: tuple[type[AgentRLError], ...] = ()) -> Grade:
        """The grade of `patch`, whose bytes are used as they are. Raises the typed error of a machine that failed in
        every try (`final` in the first), and UsageError for a task that cannot be used."""
        return await retried(
            lambda: self._once(task, patch), retries=self.limits.retries, note=self._noting(task), final=final
        )

    def _noting(self, task: Task) -> Callable[[str], None]:
        return lambda text: self.note(f"{task.id}: {text}")

    async def _once(self, task: Task, patch: str) -> Grade:
        image, lease_s = self.environment.image(task), self.limits.lease_s
        async with AsyncExitStack() as stack:
            async with deadline(lease_s + _GRACE_S, lambda: _no_start(task, image)):
                lease = self.pool.lease(image, timeout_s=lease_s, label=f"grade {task.id}", grading=True)
                sandbox = await stack.enter_async_context(lease)
            async with deadline(self.limits.grade_s, lambda: self._late(task, sandbox.id)):
                return await self.environment.grade(task, sandbox, patch)

    def _late(self, task: Task, sandbox: str) -> GradingTimeoutError:
        return GradingTimeoutError(
            f"grading did not end within {self.limits.grade_s:g} s",
            where=f"task {task.id}, sandbox {sandbox}",
            remedy="raise rollout.grade_timeout_s, or leave the task out",
        )


def _no_start(task: Task, image: str) -> DeadlineError:
    return DeadlineError(
        "a sandbox's start ran past its deadline",
        where=f"task {task.id}, image {image}",
        remedy="look at the machine's load; raise sandbox.start_timeout_s",
    )

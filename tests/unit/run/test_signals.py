"""Ctrl-C and SIGTERM cancel the work once; its clean-up runs to its end."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from agentrl.errors import PolicyDeadError, SandboxError, SandboxStartError
from agentrl.run.signals import Interrupted, run_interruptible


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_work_after_its_clean_up(number: int) -> None:
    done: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(10)
        finally:
            os.kill(os.getpid(), number)  # an impatient second one
            await asyncio.sleep(0.05)
            done.append("cleaned up")

    with pytest.raises(Interrupted):
        run_interruptible(work())
    assert done == ["cleaned up"]


def test_a_part_that_reports_its_own_end_does_not_hide_the_signal() -> None:
    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            raise SandboxError("the pool is closed") from None

    with pytest.raises(Interrupted):
        run_interruptible(work())


def test_results_and_errors_pass() -> None:
    async def work() -> int:
        return 3

    async def fails() -> None:
        raise PolicyDeadError("gone")

    before = signal.getsignal(signal.SIGTERM)
    assert run_interruptible(work()) == 3
    with pytest.raises(PolicyDeadError, match="gone"):
        run_interruptible(fails())
    assert signal.getsignal(signal.SIGTERM) == before


def test_an_error_of_a_task_group_arrives_as_itself() -> None:
    async def fails() -> None:
        async with asyncio.TaskGroup() as outer:
            outer.create_task(raises())

    async def raises() -> None:
        raise SandboxStartError("no sandbox", where="here")

    with pytest.raises(SandboxStartError, match="no sandbox"):
        run_interruptible(fails())

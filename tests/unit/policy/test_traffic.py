"""Requests in step with deliveries, and their time-weighted count. No server, a clock of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agentrl.errors import DeadlineError
from agentrl.policy.traffic import InFlight, Traffic


class Requests:
    """What was sent and closed. A request ends when told to."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.closed: list[str] = []
        self.answer = asyncio.Event()
        self.close_s = 0.0

    def one(self, name: str) -> Callable[[], Coroutine[Any, Any, bytes]]:
        async def send() -> bytes:
            self.sent.append(name)
            try:
                await self.answer.wait()
            except asyncio.CancelledError:
                await asyncio.sleep(self.close_s)
                self.closed.append(name)
                raise
            return name.encode()

        return send


async def turns(count: int = 20) -> None:
    """Let every task go as far as it can."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_the_mean_is_weighted_by_time() -> None:
    now = 0.0
    counter = InFlight(lambda: now)
    counter.add(1)
    now = 1.0
    counter.add(1)
    now = 4.0
    counter.add(-1)
    now = 10.0
    assert counter.take() == pytest.approx((1 * 1 + 2 * 3 + 1 * 6) / 10)
    assert counter.now == 1
    now = 12.0
    counter.add(-1)
    now = 14.0
    assert counter.take() == pytest.approx(0.5)
    assert counter.take() == 0.0  # no time has passed: the present number


def test_an_answer_and_an_error_both_leave_the_count() -> None:
    async def run() -> None:
        traffic, requests = Traffic(), Requests()
        task = asyncio.create_task(traffic.run(requests.one("a")))
        await turns()
        assert traffic.in_flight.now == 1
        requests.answer.set()
        assert await task == b"a"

        async def broken() -> bytes:
            raise ValueError("the server's words")

        with pytest.raises(ValueError, match="the server's words"):
            await traffic.run(broken)
        assert (traffic.in_flight.now, traffic.closed) == (0, 0)

    asyncio.run(run())


def test_a_request_waits_unsent_while_held() -> None:
    async def run() -> None:
        traffic, requests = Traffic(), Requests()
        await traffic.hold(timeout_s=1)
        task = asyncio.create_task(traffic.run(requests.one("a")))
        await turns()
        assert (requests.sent, traffic.in_flight.now) == ([], 0)
        traffic.let_send()
        await turns()
        assert requests.sent == ["a"]
        requests.answer.set()
        await task

    asyncio.run(run())


def test_closing_waits_for_the_end_of_the_delivery() -> None:
    """K22: nothing is aborted while the server stands still, nor when it has just been resumed."""

    async def run() -> None:
        traffic, requests = Traffic(), Requests()
        task = asyncio.create_task(traffic.run(requests.one("a")))
        await turns()
        await traffic.hold(timeout_s=1)
        task.cancel()
        await turns()
        assert (requests.closed, task.done()) == ([], False)
        traffic.let_send()
        await turns()
        assert (requests.closed, traffic.in_flight.now) == ([], 1)
        traffic.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (requests.closed, traffic.in_flight.now, traffic.closed) == (["a"], 0, 1)

    asyncio.run(run())


def test_a_deadline_reached_while_held_closes_afterwards() -> None:
    async def run() -> None:
        traffic, requests = Traffic(), Requests()

        async def bounded() -> None:
            async with asyncio.timeout(0.02):
                await traffic.run(requests.one("a"))

        task = asyncio.create_task(bounded())
        await turns()
        await traffic.hold(timeout_s=1)
        await asyncio.sleep(0.05)
        assert requests.closed == []
        traffic.release()
        with pytest.raises(TimeoutError):
            await task
        assert requests.closed == ["a"]

    asyncio.run(run())


def test_an_answer_that_comes_while_its_closing_waits_is_no_closing() -> None:
    async def run() -> None:
        traffic, requests = Traffic(), Requests()
        task = asyncio.create_task(traffic.run(requests.one("a")))
        await turns()
        await traffic.hold(timeout_s=1)
        task.cancel()
        await turns()
        requests.answer.set()
        await turns()
        traffic.release()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert requests.closed == []

    asyncio.run(run())


def test_a_delivery_waits_for_closings_under_way() -> None:
    """K22: stale work is dropped before the pause."""

    async def run() -> None:
        traffic, requests = Traffic(), Requests()
        requests.close_s = 0.05
        task = asyncio.create_task(traffic.run(requests.one("a")))
        await turns()
        task.cancel()
        await turns()
        with pytest.raises(DeadlineError, match=r"1 requests .* still being closed"):
            await traffic.hold(timeout_s=0.001)
        await traffic.hold(timeout_s=1)
        assert requests.closed == ["a"]
        traffic.release()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_a_second_cancellation_does_not_wait() -> None:
    async def run() -> None:
        traffic, requests = Traffic(), Requests()
        task = asyncio.create_task(traffic.run(requests.one("a")))
        await turns()
        await traffic.hold(timeout_s=1)
        task.cancel()
        await turns()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert requests.closed == ["a"]

    asyncio.run(run())

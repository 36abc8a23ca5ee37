"""Rooms and slots: order, limits that move, who is set up ahead gives way. No clock, no driver."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import DeadlineError
from agentrl.rollout.deadline import Interruptible, deadline
from agentrl.rollout.slots import Floor, GiveWay, Place, Slots


def floor(concurrency: int = 2, ready_ahead: int = 0) -> Floor:
    return Floor(concurrency=concurrency, ready_ahead=ready_ahead, monotonic=lambda: 0.0)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_free_slots_go_by_rank_and_raising_the_limit_lets_waiters_in() -> None:
    async def scenario() -> None:
        slots = Slots(1)
        futures = {rank: slots.ask((False, rank)) for rank in (5, 7, 3, 9)}
        assert [rank for rank, future in futures.items() if future.done()] == [5]
        slots.limit = 3
        assert sorted(rank for rank, future in futures.items() if future.done()) == [3, 5, 7]
        slots.limit = 1
        assert slots.held == 3, "lowering takes nothing away"
        for _ in range(2):
            slots.release()
            assert not futures[9].done()
        slots.release()
        assert futures[9].done()

    asyncio.run(scenario())


def test_a_slot_that_comes_as_its_waiter_is_cancelled_goes_to_the_next() -> None:
    """K17: no slot leaks in the turn of the loop in which it was handed out and its waiter cancelled."""

    async def scenario() -> None:
        ground = floor(concurrency=1)
        first, second, third = (Place(ground, admitted=True) for _ in range(3))
        await first.become_active()
        waiting = [asyncio.create_task(place.become_active()) for place in (second, third)]
        await turns()
        first.end_active()  # hands the slot to the second
        waiting[0].cancel()
        await asyncio.wait(waiting, timeout=5)
        assert waiting[0].cancelled()
        assert not waiting[1].cancelled()
        third.end_active()
        assert (ground.slots.held, ground.slots.short) == (0, 0)

    asyncio.run(scenario())


def test_a_slot_waits_for_admission_and_goes_by_its_order() -> None:
    async def scenario() -> None:
        ground, order = floor(concurrency=1), []
        first, second = (Place(ground, admitted=False) for _ in range(2))

        async def act(place: Place, name: str) -> None:
            await place.become_active()
            order.append(name)
            await turns()
            place.end_active()

        tasks = [asyncio.create_task(act(place, name)) for place, name in ((first, "first"), (second, "second"))]
        await turns()
        assert (order, ground.waiting) == ([], 0)
        second.admit()
        first.admit()
        assert ground.waiting == 2
        await asyncio.gather(*tasks)
        assert (order, ground.waiting) == (["second", "first"], 0)

    asyncio.run(scenario())


async def holding(place: Place, until: asyncio.Event, log: list[str], name: str) -> None:
    """What the driver does: a room for an attempt; an attempt that gave way begins again."""
    while True:
        try:
            async with place.block.entered():
                await place.enter_room()
                log.append(f"{name} in")
                try:
                    await until.wait()
                finally:
                    place.leave_room()
                    log.append(f"{name} out")
            place.end()
            return
        except GiveWay:
            continue


def test_who_is_set_up_ahead_gives_way_to_the_admitted_youngest_first() -> None:
    """Else an evaluation would wait for ever for rooms that the next batch's sandboxes hold."""

    async def scenario() -> None:
        ground, done, log = floor(concurrency=2), asyncio.Event(), []
        old, young, newcomer = (Place(ground, admitted=False) for _ in range(3))
        tasks = [asyncio.create_task(holding(p, done, log, n)) for p, n in ((old, "old"), (young, "young"))]
        await turns()
        newcomer.admit()
        finished = asyncio.Event()
        tasks.append(asyncio.create_task(holding(newcomer, finished, log, "newcomer")))
        await turns(10)
        assert log == ["old in", "young in", "young out", "newcomer in"]
        assert ground.leaving == 0
        finished.set()
        await turns(10)
        assert log[4:] == ["newcomer out", "young in"], "it is set up again as soon as there is room"
        done.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 5)
        assert (ground.rooms.held, ground.rooms.short, ground.ahead) == (0, 0, {})

    asyncio.run(scenario())


def test_a_group_that_is_admitted_while_it_waits_for_room_moves_up() -> None:
    async def scenario() -> None:
        ground, done, log = floor(concurrency=1), asyncio.Event(), []
        holder, waiter = (Place(ground, admitted=False) for _ in range(2))
        tasks = [asyncio.create_task(holding(p, done, log, n)) for p, n in ((holder, "holder"), (waiter, "waiter"))]
        await turns()
        assert log == ["holder in"]
        waiter.admit()
        await turns(10)
        assert log == ["holder in", "holder out", "waiter in"]
        done.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 5)

    asyncio.run(scenario())


def test_nothing_is_set_up_ahead_while_an_admitted_rollout_waits_for_a_sandbox() -> None:
    async def scenario() -> None:
        ground, done, log = floor(concurrency=2), asyncio.Event(), []
        admitted, ahead = Place(ground, admitted=True), Place(ground, admitted=False)
        with admitted.leasing():
            task = asyncio.create_task(holding(ahead, done, log, "ahead"))
            await turns()
            assert log == []
        await turns()
        assert log == ["ahead in"]
        done.set()
        await asyncio.wait_for(task, 5)

    asyncio.run(scenario())


def test_nothing_set_up_ahead_takes_the_sandbox_that_a_grading_will_need() -> None:
    async def scenario() -> None:
        ground, done, log = floor(concurrency=2), asyncio.Event(), []
        graded, ahead, more = (Place(ground, admitted=number == 0) for number in range(3))
        await graded.enter_room()
        tasks = [asyncio.create_task(holding(p, done, log, n)) for p, n in ((ahead, "ahead"), (more, "more"))]
        await turns()
        assert log == ["ahead in"]
        graded.leave_room()
        await turns()
        assert log == ["ahead in"], "of two sandboxes one is the grading's"
        graded.end()
        await turns()
        assert log == ["ahead in", "more in"]
        done.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 5)

    asyncio.run(scenario())


def test_the_limit_stays_within_its_bounds() -> None:
    ground = floor(concurrency=4, ready_ahead=1)
    for limit, rooms in ((4, 5), (3, 5), (2, 5), (1, 3)):
        ground.limit = limit
        assert (ground.limit, ground.rooms.limit) == (limit, rooms)
    for wrong in (0, 5):
        with pytest.raises(ValueError, match=f"1…4, not {wrong}"):
            ground.limit = wrong


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 2), st.integers(1, 12))
def test_k17_every_count_comes_back_to_nothing(seed: int, concurrency: int, ready_ahead: int, rollouts: int) -> None:
    """Rollouts that are admitted early, late or never, cancelled anywhere, and tried again; a limit that moves.

    At every moment active ≤ the highest limit since the last one began, rooms ≤ limit + ready_ahead as long as
    the limit is not lowered; in the end nothing is held, counted or waiting.
    """
    rng = random.Random(seed)

    async def rollout(ground: Floor, place: Place, pauses: list[int], tries: int) -> None:
        for _ in range(tries):
            while True:
                try:
                    async with place.block.entered():
                        await attempt(ground, place, pauses)
                    break
                except GiveWay:
                    continue

    async def attempt(ground: Floor, place: Place, pauses: list[int]) -> None:
        await place.enter_room()
        try:
            with place.leasing():
                await turns(pauses[0])
            await place.become_active()
            try:
                assert place.admitted
                assert ground.slots.held <= concurrency
                assert ground.rooms.held <= concurrency + ready_ahead
                await turns(pauses[1])
            finally:
                place.end_active()
        finally:
            place.leave_room()

    async def scenario() -> None:
        ground = floor(concurrency, ready_ahead)
        places = [Place(ground, admitted=rng.random() < 0.4) for _ in range(rollouts)]
        tasks = [
            asyncio.create_task(rollout(ground, place, [rng.randrange(4), rng.randrange(4)], rng.randint(1, 2)))
            for place in places
        ]
        for place, task in zip(places, tasks, strict=True):
            task.add_done_callback(place.end)
            await turns(rng.randrange(4))
            ground.limit = rng.randint(1, concurrency)
            if rng.random() < 0.2:
                task.cancel()
            if not place.admitted:
                place.admit() if rng.random() < 0.7 else task.cancel()
            ground.make_room()
        ground.limit = concurrency
        _, left = await asyncio.wait(tasks, timeout=5)
        assert not left, "a rollout waits for ever"
        counts = (ground.rooms.held, ground.slots.held, ground.rooms.short, ground.slots.short)
        assert (counts, ground.waiting, ground.leaving, ground.ahead) == ((0, 0, 0, 0), 0, 0, {})
        assert ground.rooms.reserved == 0
        assert not ground.rooms.admitted_only
        assert [task.exception() for task in tasks if not task.cancelled()] == [None] * sum(
            not task.cancelled() for task in tasks
        )

    asyncio.run(scenario())


# --- blocks that others end ----------------------------------------------------------------------------------------


def interrupted(work: Callable[[], Awaitable[Any]], error: Exception) -> Any:
    """What comes of a block with this work where it is ended by `error` after a few turns of the loop."""

    async def scenario() -> Any:
        block = Interruptible()
        assert not block.interrupt(error), "nobody is in it"

        async def inside() -> Any:
            async with block.entered():
                return await work()

        task = asyncio.create_task(inside())
        await turns()
        block.interrupt(error)
        assert not block.interrupt(ValueError("another")), "the first reason stands"
        return await asyncio.wait_for(task, 5)

    return asyncio.run(scenario())


def test_a_block_that_is_ended_raises_the_reason() -> None:
    with pytest.raises(GiveWay):
        interrupted(lambda: asyncio.Event().wait(), GiveWay())


def test_a_block_that_fails_while_it_is_ended_raises_its_own_error() -> None:
    async def torn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted(torn, GiveWay())


def test_a_deadline_stands_still_while_it_is_paused() -> None:
    def late() -> DeadlineError:
        return DeadlineError("late")

    async def paused_then(seconds: float) -> None:
        async with deadline(0.2, late) as whole:
            with whole.paused():
                await asyncio.sleep(0.3)
            await asyncio.sleep(seconds)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        await paused_then(0)
        began = loop.time()
        with pytest.raises(DeadlineError, match="late"):
            await paused_then(30)
        assert 0.45 < loop.time() - began < 10

    asyncio.run(scenario())

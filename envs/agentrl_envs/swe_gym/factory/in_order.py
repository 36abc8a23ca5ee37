"""Work on many things at once, results in the order of the things."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_AHEAD = 4


async def in_order(
    items: AsyncIterator[Item], work: Callable[[Item], Awaitable[Result]], *, jobs: int
) -> AsyncGenerator[tuple[Item, Result], None]:
    """`(item, await work(item))` for each item, in order; at most `jobs` at work, at most four times as many begun
    before the first is taken. Closing the iterator cancels what is at work and waits for its end."""
    slots = asyncio.Semaphore(jobs)
    begun: deque[tuple[Item, asyncio.Task[Result]]] = deque()

    async def one(item: Item) -> Result:
        async with slots:
            return await work(item)

    try:
        ended = False
        while True:
            while not ended and len(begun) < _AHEAD * jobs:
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    ended = True
                    break
                begun.append((item, asyncio.create_task(one(item))))
            if not begun:
                return
            item, task = begun[0]
            result = await task
            begun.popleft()
            yield item, result
    finally:
        for _, task in begun:
            task.cancel()
        for _, task in begun:
            with suppress(asyncio.CancelledError, Exception):
                await task

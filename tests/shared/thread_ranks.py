"""Ranks of a trainer as threads of one process: for tests of the sums, which need no process of their own.

`rank_contract` is what they and the real ranks both pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from agentrl.train.ranks import Ranks

T = TypeVar("T")
MEETING_S = 10.0


class Meeting:
    """What the threads share."""

    def __init__(self, size: int) -> None:
        self.slots: list[object] = [None] * size
        self.barrier = threading.Barrier(size, timeout=MEETING_S)

    def exchange(self, rank: int, value: object) -> list:
        """Every rank's value, in order."""
        self.slots[rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


class ThreadRanks:
    """One rank; implements `agentrl.train.ranks.Ranks`."""

    def __init__(self, *, rank: int, size: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = size
        self._meeting = meeting

    def add(self, values: Tensor) -> None:
        found = self._meeting.exchange(self.rank, values.clone())
        values.copy_(sum(found[1:], found[0]))

    def hand_out(self, parts: Sequence[T] | None) -> T:
        assert (parts is None) == (self.rank > 0)
        return self._meeting.exchange(self.rank, parts)[0][self.rank]

    def collect(self, part: T) -> list[T]:
        found = self._meeting.exchange(self.rank, part)
        return found if self.rank == 0 else []


def run_ranks(size: int, work: Callable[[Ranks], T]) -> list[T]:
    """`work` on each of `size` ranks at once, the results in order; the first error is raised."""
    meeting = Meeting(size)
    results: list[T | None] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank=rank, size=size, meeting=meeting))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=MEETING_S)
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]


def rank_contract(ranks: Ranks) -> None:
    """Sums are exact and in place, parts and records arrive at their rank and in order."""
    numbers = torch.tensor([1.0, float(ranks.rank), 2.0**40], dtype=torch.float64)
    ranks.add(numbers)
    rest = sum(range(ranks.size))
    assert numbers.tolist() == [ranks.size, rest, ranks.size * 2.0**40]
    whole = torch.full((3, 2), ranks.rank, dtype=torch.int64)
    ranks.add(whole)
    assert whole.tolist() == [[rest, rest]] * 3
    parts = [("part", rank, [1.5] * rank) for rank in range(ranks.size)] if ranks.rank == 0 else None
    part = ranks.hand_out(parts)
    assert part == ("part", ranks.rank, [1.5] * ranks.rank)
    records = ranks.collect({ranks.rank: torch.full((ranks.rank + 1,), 7.0)})
    if ranks.rank > 0:
        assert records == []
    else:
        assert [list(record) for record in records] == [[rank] for rank in range(ranks.size)]
        assert [len(record[rank]) for rank, record in enumerate(records)] == [rank + 1 for rank in range(ranks.size)]
    assert ranks.hand_out([None] * ranks.size if ranks.rank == 0 else None) is None

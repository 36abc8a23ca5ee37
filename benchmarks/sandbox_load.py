"""What the parts of `benchmarks/sandbox.py` share: a load, and what can be loaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

COMMANDS_PER_EPISODE = 10
STARTERS = 4
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Load:
    """What a load did: seconds each command (or episode) took, the wall time of all, CPU seconds of our end."""

    seconds: float
    client_cpu_s: float
    latencies_s: list[float] = field(default_factory=list)
    leases_s: list[float] = field(default_factory=list)


class System(Protocol):
    """One way of running commands in sandboxes."""

    name: str
    share: float
    """Of a load's seconds: less than 1 where several of them are ways of one system."""

    async def load(self, command: str, *, count: int, seconds: float) -> Load:
        """Run `command` over and over in `count` sandboxes at once for `seconds`."""
        ...

    async def inside_cpu_s(self) -> float | None:
        """CPU seconds that the processes in the sandboxes have used so far; None where that cannot be seen."""
        ...


async def in_turn(workers: Sequence[Callable[[float], Any]], seconds: float) -> Load:
    """Run the coroutines' loops at once until `seconds` are over; they return when their last piece is done."""
    cpu, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*(worker(began + seconds) for worker in workers))
    return Load(seconds=time.perf_counter() - began, client_cpu_s=time.process_time() - cpu)

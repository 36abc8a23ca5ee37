"""Python's cycle collector, told that it serves an event loop with thousands of episodes in memory.

Nearly all of the orchestrator's memory is freed by reference counts. By default the collector still walks through every
live object whenever a quarter of them is new, which at two thousand trajectories means a stop of several hundred
milliseconds every few seconds, in which no request is sent and no answer is read.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Young objects before a look at them (some 10 ms), such looks before one at the middle generation, then a full one.
_THRESHOLDS = (50_000, 20, 100)


@contextmanager
def calm_collector() -> Iterator[None]:
    """For the block: what is alive now is never looked at again, and what comes is looked at rarely."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()

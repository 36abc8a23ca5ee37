"""Tools that take longer than their own work, as a CI service or a large test suite would.

A call's delay is drawn from a lognormal distribution: half of the calls wait less than the median, one in twenty more
than `p95_ratio` medians. Nothing random is kept: a delay is a function of (task, rollout, call), so that two schedules
that play the same rollouts wait the same seconds for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from statistics import NormalDist

_NORMAL = NormalDist()
_Z95 = _NORMAL.inv_cdf(0.95)
_STEPS = 2**53  # as many different floats as lie evenly in [0, 1)


@dataclass(frozen=True, slots=True)
class ToolLatency:
    """Seconds by the distribution above; `slow_fraction` of the tasks wait `slow_factor` times as long."""

    median_s: float
    p95_ratio: float
    slow_fraction: float
    slow_factor: float

    def delay_s(self, task_id: str, *, rollout: str, call: int) -> float:
        """Seconds that call number `call` of `rollout` takes; 0 where the median is."""
        if self.median_s == 0:
            return 0.0
        sigma = math.log(self.p95_ratio) / _Z95
        scale = self.slow_factor if self.is_slow(task_id) else 1.0
        return scale * self.median_s * math.exp(sigma * _NORMAL.inv_cdf(_uniform(task_id, rollout, str(call))))

    def is_slow(self, task_id: str) -> bool:
        """Whether the task is one of the slow ones: the same for all its rollouts."""
        return _uniform("slow", task_id) < self.slow_fraction


def _uniform(*words: str) -> float:
    """A number in (0, 1) that the words decide."""
    digest = blake2b("\0".join(words).encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return ((int.from_bytes(digest, "big") >> 11) + 0.5) / _STEPS

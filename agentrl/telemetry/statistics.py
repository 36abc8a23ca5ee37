"""Intervals for solve rates: Wilson's for one rate, pass@k unbiased with a bootstrap over tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its bounds at 95 %, all in [0, 1]."""

    value: float
    low: float
    high: float


def wilson(successes: float, n: int, *, z: float = _Z95) -> Interval:
    """Wilson's score interval of a rate. `n` = 0 knows nothing: [0, 1] around NaN.

    Treats the `n` trials as independent: samples of the same task are not, see `pass_at_k_interval` for
    those.
    """
    if n < 0 or not 0 <= successes <= max(n, 0):
        raise ValueError(f"{successes} successes of {n} trials")
    if n == 0:
        return Interval(math.nan, 0.0, 1.0)
    rate = successes / n
    scale = 1 + z * z / n
    middle = (rate + z * z / (2 * n)) / scale
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / scale
    # The bounds of 0 of n and n of n are exactly 0 and 1; rounding would leave 1e-17.
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    high = 1.0 if successes == n else min(1.0, middle + half)
    return Interval(rate, low, high)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate that at least one of k samples solves a task that c of n samples solved.

    1 − C(n − c, k) / C(n, k), as a product so that nothing overflows. Raises ValueError
    unless 0 ≤ c ≤ n and 1 ≤ k ≤ n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} solved in {n} samples")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def pass_at_k_interval(
    counts: Sequence[tuple[int, int]], k: int, *, resamples: int = 2000, seed: int = 0, level: float = 0.95
) -> Interval:
    """Mean pass@k over tasks with a percentile bootstrap *over tasks* (a task's samples move together).

    `counts` holds (samples, solved) per task. Where every task gives the same value the bootstrap has no
    width, so the Wilson interval over tasks is taken instead: 0 of 20 tasks is not proof of 0.
    """
    if not counts:
        return Interval(math.nan, 0.0, 1.0)
    values = np.array([pass_at_k(n, c, k) for n, c in counts])
    if np.ptp(values) == 0:
        return wilson(float(values.sum()), len(values))
    picks = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    tail = (1 - level) / 2
    low, high = np.quantile(values[picks].mean(axis=1), [tail, 1 - tail])
    return Interval(float(values.mean()), float(low), float(high))

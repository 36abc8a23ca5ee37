"""Means over seeds and ratios paired by seed, with 95 % intervals. Pure; nothing here ever gives a NaN.

A ratio of two schedules is taken seed by seed, as both played the same tasks. Where every value is positive the
interval is Student's on the logarithms of the ratios, so the estimate is their geometric mean: a seed on which one of
them took twice as long weighs as much as a seed on which it took half. A value at or below 0 (a seed that did not
improve) has no logarithm: then the estimate is the ratio of the means, with Fieller's interval, which asks for
which ratios ρ the paired differences x − ρ·y could have mean 0. It has no bounds where the mean of y itself is not
told apart from 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev, variance

_TAIL = 0.975
_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean or ratio over `n` seeds with its 95 % bounds; None where the data give none, and `note` says why.

    `method`: student (a mean), log-student or fieller (a ratio).
    """

    value: float | None
    low: float | None
    high: float | None
    n: int
    method: str
    note: str = ""


def student_quantile(df: int) -> float:
    """The t below which 97.5 % of Student's distribution with `df` ≥ 1 degrees of freedom lies.

    The distribution's closed form for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4), inverted by
    bisection.
    """
    if df < 1:
        raise ValueError(f"{df} degrees of freedom")
    low, high = 0.0, 13.0  # of df 1, the largest, it is 12.706
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _central(middle, df) < 2 * _TAIL - 1 else (low, middle)
    return (low + high) / 2


def _central(t: float, df: int) -> float:
    """The probability that Student's variable lies between −t and t."""
    theta = math.atan(t / math.sqrt(df))
    sine, cosine = math.sin(theta), math.cos(theta)
    first = df % 2  # the series runs over powers of the cosine: odd ones for odd df, even ones for even df
    term, total = (cosine if first else 1.0), 0.0
    for power in range(first, df - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    return (theta + sine * total) * 2 / math.pi if first else sine * total


def mean_of(values: Sequence[float]) -> Estimate:
    """The mean of one value per seed with Student's interval."""
    if not values:
        return Estimate(None, None, None, 0, "student", "no seed has it")
    mean = fmean(values)
    if len(values) == 1:
        return Estimate(mean, None, None, 1, "student", "one seed gives no interval")
    half = student_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, len(values), "student")


def paired_ratio(values: Sequence[float], base: Sequence[float]) -> Estimate:
    """values[i] ÷ base[i] over seeds i, as the module says."""
    if len(values) != len(base):
        raise ValueError(f"{len(values)} values are paired with {len(base)}")
    if not values:
        return Estimate(None, None, None, 0, "log-student", "no seed has both")
    if min(*values, *base) <= 0:
        return _fieller(values, base)
    logs = mean_of([math.log(x) - math.log(y) for x, y in zip(values, base, strict=True)])
    value, low, high = map(_exp, (logs.value, logs.low, logs.high))
    return Estimate(value, low, high, logs.n, "log-student", logs.note)


def _exp(x: float | None) -> float | None:
    """e to the x; None for a bound too far off to be a number."""
    return None if x is None or x > _LARGEST_EXPONENT else math.exp(x)


def _fieller(values: Sequence[float], base: Sequence[float]) -> Estimate:
    """The ratio of means; bounds are the roots ρ of n·(x̄ − ρ·ȳ)² = t²·var(x − ρ·y), where they enclose it."""
    n, x, y = len(values), fmean(values), fmean(base)
    losing = sum(v <= 0 for v in values), sum(v <= 0 for v in base)
    note = f"{losing[0]} of {n} seeds did not improve, {losing[1]} of the baseline's"
    if y <= 0:
        return Estimate(None, None, None, n, "fieller", f"{note}: the baseline did not improve, so no ratio is told")
    if n == 1:
        return Estimate(x / y, None, None, 1, "fieller", f"{note}; one seed gives no interval")
    t2_n = student_quantile(n - 1) ** 2 / n
    covariance = sum((v - x) * (b - y) for v, b in zip(values, base, strict=True)) / (n - 1)
    a = y * y - t2_n * variance(base)
    if a <= 0:
        return Estimate(x / y, None, None, n, "fieller", f"{note}: the baseline is not told apart from 0, so no bounds")
    b = x * y - t2_n * covariance
    c = x * x - t2_n * variance(values)
    root = math.sqrt(max(0.0, b * b - a * c))
    return Estimate(x / y, (b - root) / a, (b + root) / a, n, "fieller", note)

"""How a group's rewards become advantages. Pure numpy.

An advantage in ten lines: write one function over the rewards of a group's *valid* members, give it a row in
`_FUNCTIONS` and its name in `agentrl.config.AdvantageConfig`; the test of every choice follows.

A member that an infrastructure failure struck has no reward (None). It takes no part in mean and deviation
and its advantage is NaN: "not trained", never 0, which is a value. A reward of 0.0 is a value like any other.
However many segments context compression cut a rollout into, it counts once here and all its segments get its
advantage: a group of 4 rollouts with 3, 1, 2, 1 segments and rewards 1, 0, 0, 1 has mean 0.5, not 4/7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import ConfigError

Float64 = NDArray[np.float64]

# Rewards closer than this, relative to their size, are one value: 0.1 + 0.2 and 0.3 must not make a signal.
_SAME = 1e-9


def group_mean(rewards: Float64) -> Float64:
    """Reward minus the group's mean [n] → [n] (Dr. GRPO). A group of one gives 0."""
    return rewards - rewards.mean()


def group_std(rewards: Float64) -> Float64:
    """Reward minus mean, over the population deviation [n] → [n] (GRPO). Equal rewards give 0."""
    if has_no_spread(rewards):
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) / rewards.std()


def rloo(rewards: Float64) -> Float64:
    """Reward minus the mean of the *other* members [n] → [n] (leave one out). A group of one gives 0."""
    if rewards.size == 1:
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) * (rewards.size / (rewards.size - 1))


def reward(rewards: Float64) -> Float64:
    """The reward itself, without a baseline [n] → [n]."""
    return rewards.copy()


_FUNCTIONS: dict[str, Callable[[Float64], Float64]] = {
    "group_std": group_std,
    "group_mean": group_mean,
    "rloo": rloo,
    "reward": reward,
}


def advantage_names() -> tuple[str, ...]:
    """Every choice of `train.advantage.name`."""
    return tuple(_FUNCTIONS)


def has_no_spread(rewards: Float64) -> bool:
    """True where all rewards are one value, up to rounding."""
    return float(np.ptp(rewards)) <= _SAME * max(1.0, float(np.abs(rewards).max()))


def advantages(name: str, rewards: Sequence[float | None]) -> Float64:
    """Advantages [n] of a group's members; NaN where the member has no reward.

    Rewards of one value get exactly 0 from every group-relative choice. Raises `ConfigError` for an unknown
    name.
    """
    if name not in _FUNCTIONS:
        raise ConfigError(
            f"no advantage {name!r}",
            where="train.advantage.name",
            remedy=f"one of {', '.join(_FUNCTIONS)}",
        )
    valid = np.array([value is not None for value in rewards], dtype=np.bool_)
    result = np.full(len(rewards), np.nan)
    if valid.any():
        found = np.array([value for value in rewards if value is not None], dtype=np.float64)
        if has_no_spread(found):
            found = np.full_like(found, found[0])
        result[valid] = _FUNCTIONS[name](found)
    return result

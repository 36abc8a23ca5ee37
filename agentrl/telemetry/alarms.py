"""Alarms: pure rules over one step's metrics. A metric that is missing raises none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.config import AlarmConfig

SUBMIT_RATE = "agent/submit_rate"
BAD_CALLS = "agent/bad_calls"
ENTROPY = "entropy"
ESS = "correction/ess"
KL = "correction/kl"


@dataclass(frozen=True, slots=True)
class Alarm:
    """`name` is the metric, `value` broke `bound`, `advice` says what to look at."""

    name: str
    value: float
    bound: float
    advice: str

    def __str__(self) -> str:
        side = "<" if self.value < self.bound else ">"
        return f"{self.name} {self.value:.3g} {side} {self.bound:g}: {self.advice}"


def check_alarms(metrics: Mapping[str, float], config: AlarmConfig) -> tuple[Alarm, ...]:
    """The alarms of one step, in a fixed order. A value that equals its bound raises none."""
    found = []
    for name, bound, upper, advice in _rules(config):
        value = metrics.get(name, math.nan)
        reached = abs(value) if name == KL else value
        if (reached > bound) if upper else (reached < bound):
            found.append(Alarm(name, reached, bound, advice))
    return tuple(found)


def _rules(config: AlarmConfig) -> tuple[tuple[str, float, bool, str], ...]:
    """(metric, bound, True for an upper bound, advice); NaN compares false and so never alarms."""
    return (
        (
            SUBMIT_RATE,
            config.submit_rate_min,
            False,
            "episodes end without submit; look at truncated trajectories in the viewer and raise "
            "agent.max_turns or agent.max_tokens if work is cut off",
        ),
        (
            BAD_CALLS,
            config.bad_calls_max,
            True,
            "malformed tool calls per episode; read a few in the viewer, check agent.tools.call_format, "
            "or go back to the last good checkpoint and lower train.optimizer.learning_rate",
        ),
        (
            ESS,
            config.ess_min,
            False,
            "few tokens carry the whole update: the policy that sampled is far from the one trained; "
            "lower the staleness or the learning rate, and check that trainer and server agree in dtype "
            "and temperature",
        ),
        (
            ENTROPY,
            config.entropy_min,
            False,
            "the policy has almost stopped exploring; raise rollout.temperature, lower "
            "train.optimizer.learning_rate, or stop here and keep the best checkpoint",
        ),
        (
            KL,
            config.kl_abs_max,
            True,
            "trainer and policy server disagree on the sampled tokens; check the last delivery's probe, "
            "dtype and temperature before you trust this step",
        ),
    )

"""Alarms at their borders."""

from __future__ import annotations

import math

import pytest

from agentrl.config import AlarmConfig
from agentrl.telemetry.alarms import BAD_CALLS, ENTROPY, ESS, KL, SUBMIT_RATE, check_alarms

HEALTHY = {SUBMIT_RATE: 0.95, BAD_CALLS: 0.2, ESS: 0.99, ENTROPY: 0.4, KL: 1e-4}


@pytest.mark.parametrize(
    ("name", "border", "beyond"),
    [
        (SUBMIT_RATE, 0.8, 0.7999),
        (BAD_CALLS, 1.5, 1.5001),
        (ESS, 0.5, 0.4999),
        (ENTROPY, 0.02, 0.0199),
        (KL, 0.1, 0.1001),
        (KL, -0.1, -0.1001),
    ],
)
def test_border_is_quiet_and_beyond_alarms(name: str, border: float, beyond: float) -> None:
    config = AlarmConfig()
    assert check_alarms(HEALTHY | {name: border}, config) == ()
    (alarm,) = check_alarms(HEALTHY | {name: beyond}, config)
    assert alarm.name == name
    assert alarm.value == abs(beyond)
    assert alarm.bound == abs(border)
    assert len(alarm.advice.split()) > 8


def test_bounds_come_from_the_configuration() -> None:
    assert check_alarms(HEALTHY, AlarmConfig(ess_min=0.995))[0].bound == 0.995


def test_missing_and_nan_raise_none() -> None:
    assert check_alarms({}, AlarmConfig()) == ()
    assert check_alarms({ESS: math.nan, KL: math.nan}, AlarmConfig()) == ()


def test_text_says_which_side() -> None:
    low, high = check_alarms({SUBMIT_RATE: 0.5, BAD_CALLS: 2.0}, AlarmConfig())
    assert str(low).startswith("agent/submit_rate 0.5 < 0.8: ")
    assert str(high).startswith("agent/bad_calls 2 > 1.5: ")

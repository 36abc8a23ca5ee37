"""Figures of how busy everything is: weighted by time, exact where training begins and ends, the tail told apart."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.run.load import LoadMeter, LoadSample, event_data


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def look(now: float, **changes: Any) -> LoadSample:
    """A look at two servers under work, everything full."""
    values: dict[str, Any] = {
        "active": 8,
        "waiting": 3,
        "limit": 8,
        "running": (2, 2),
        "kv": (0.25, 0.75),
        "preemptions": 0,
        "training": False,
        "in_flight": 4,
        "queued": 0,
    }
    return LoadSample(now=now, **values | changes)


def figures(*looks: LoadSample, until: float, **settings: Any) -> dict[str, float]:
    clock = Clock()
    meter = LoadMeter(clock=clock, **settings)
    for sample in looks:
        meter.add(sample)
    clock.now = until
    return meter.take()


def test_a_look_holds_until_the_next() -> None:
    """1 s at 0.5 and 3 s at 0.1 of the KV room: 0.2, although each was looked at once."""
    found = figures(look(0, limit=8), look(1, kv=(0.1, 0.1), limit=4), until=4)
    assert found["kv/used_fraction_mean"] == pytest.approx(0.2)
    assert found["concurrency/limit"] == pytest.approx(5.0)


def test_an_interval_begins_where_the_last_one_ended() -> None:
    clock = Clock()
    meter = LoadMeter(clock=clock)
    assert meter.take() == {}
    meter.add(look(0, kv=(0.5,), preemptions=7))
    clock.now = 2
    assert meter.take()["kv/preemptions"] == 0.0, "those before the first look are not of this interval"
    meter.add(look(3, kv=(0.1,), preemptions=9))
    clock.now = 4
    found = meter.take()
    assert found["kv/used_fraction_mean"] == pytest.approx(0.3)
    assert found["kv/preemptions"] == 2.0
    clock.now = 5
    assert meter.take()["kv/preemptions"] == 0.0
    assert meter.take() == {}, "no time has passed"


def test_training_is_exact_between_looks() -> None:
    """Training from 2 s to 5 s of 10 s, with no look in between."""
    clock = Clock()
    meter = LoadMeter(clock=clock)
    meter.mark(training=True)  # before anything is known: nothing to hold on to
    meter.add(look(0))
    for clock.now, training in ((2.0, True), (5.0, False)):
        meter.mark(training=training)
    clock.now = 10
    assert meter.take()["idle/trainer_fraction"] == pytest.approx(0.7)


def test_colocated_device_idles_where_it_neither_serves_nor_trains() -> None:
    """One second each: both serve; one serves; nothing; both train; and the same with one rank alone."""
    looks = [look(0), look(1, running=(1, 0)), look(2, running=(0, 0)), look(3, running=(0, 0), training=True)]
    found = figures(*looks, until=4, ranks=2)
    assert found["idle/device_fraction"] == pytest.approx((0 + 0.5 + 1 + 0) / 4)
    assert found["idle/inference_fraction"] == pytest.approx((0 + 0.5 + 1 + 1) / 4)
    assert found["idle/trainer_fraction"] == pytest.approx(0.75)
    assert figures(*looks, until=4, ranks=1)["idle/device_fraction"] == pytest.approx((0 + 0.5 + 1 + 0.5) / 4)


def test_disaggregated_devices_each_have_their_own_work() -> None:
    """One server and one rank: a device that serves does not make the trainer's busy."""
    looks = [look(0, running=(3,)), look(1, running=(3,), training=True), look(2, running=(0,), training=True)]
    found = figures(*looks, until=4, ranks=1, colocated=False)
    assert found["idle/device_fraction"] == pytest.approx((0.5 + 0 + 2 * 0.5) / 4)


def test_the_tail_is_told_apart() -> None:
    """Ramp-up (others wait) and training are no tail; empty slots that nothing can fill are. One of the two devices
    idles in the tail's second, none for the body's five."""
    found = figures(
        look(0, active=2, waiting=6),
        look(1, active=8, waiting=2),
        look(4, active=3, waiting=0, running=(1, 0)),
        look(5, active=0, waiting=0, in_flight=0, running=(0, 0), training=True),
        until=6,
        ranks=2,
    )
    assert found["time/tail_s"] == pytest.approx(1.0)
    assert found["idle/device_fraction"] == pytest.approx(0.5 / 6)
    assert found["idle/outside_tail_fraction"] == 0.0


def test_a_round_without_peak_has_no_tail() -> None:
    found = figures(look(0, waiting=0), until=3)
    assert found["time/tail_s"] == 0.0
    assert found["idle/outside_tail_fraction"] == found["idle/device_fraction"] == 0.0


def test_event_data_is_small_and_plain() -> None:
    assert event_data(look(1, kv=(0.123456789,), running=(5,))) == {
        "active": 8,
        "waiting": 3,
        "limit": 8,
        "running": [5],
        "kv": [0.1235],
        "training": False,
        "in_flight": 4,
        "queued": 0,
    }

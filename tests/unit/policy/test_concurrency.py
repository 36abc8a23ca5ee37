"""The limit of active trajectories against a simulated server: it finds the saturation point and stays in bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.policy import ConcurrencyController, ServerLoad, start_limit

IDLE = ServerLoad(kv_used_fraction=0.1, running=4, waiting=0, preemptions=0, active=4, now=0.0)


@dataclass
class Simulated:
    """A server with room for `room` trajectories; whatever is active beyond it is preempted and waits, and is counted
    at once or, as vLLM does, when it comes back (`late`).

    `demand` trajectories would like to be active; lowering the limit lets a tenth of the active end per sample.
    """

    room: int
    demand: int
    late: bool
    active: int = 0
    waiting: int = 0
    preemptions: int = 0
    now: float = 0.0

    def sample(self, limit: int) -> ServerLoad:
        self.now += 0.5
        wanted = min(limit, self.demand)
        self.active = wanted if wanted >= self.active else max(wanted, self.active - max(1, self.active // 10))
        surplus = max(0, self.active - self.room)
        self.preemptions += max(0, self.waiting - surplus if self.late else surplus - self.waiting)
        self.waiting = surplus
        return ServerLoad(
            kv_used_fraction=min(1.0, self.active / self.room),
            running=min(self.active, self.room),
            waiting=surplus,
            preemptions=self.preemptions,
            active=self.active,
            now=self.now,
        )


def drive(controller: ConcurrencyController, server: Simulated, *, samples: int) -> list[int]:
    limits = [controller.limit]
    for _ in range(samples):
        limits.append(controller.observe(server.sample(limits[-1])))
    return limits[1:]


@settings(max_examples=40, deadline=None)
@given(room=st.integers(2, 400), cap=st.integers(1, 500), start=st.integers(1, 600), late=st.booleans(), data=st.data())
def test_it_finds_the_saturation_point_and_stays_in_bounds(
    room: int, cap: int, start: int, late: bool, data: st.DataObject
) -> None:
    """The server is kept filled to at least 0.6 (KV room is left from 0.85 on), and never far beyond it."""
    floor = data.draw(st.integers(1, min(cap, 4)))
    controller = ConcurrencyController(cap, start=start, floor=floor)
    limits = drive(controller, Simulated(room=room, demand=10_000, late=late), samples=2400)
    assert all(floor <= limit <= cap for limit in limits)
    settled = limits[1200:]
    saturation = min(room, cap)
    assert sum(settled) / len(settled) >= 0.6 * saturation
    assert sum(settled) / len(settled) <= max(1.1 * saturation, saturation + 1, floor)


@settings(max_examples=40, deadline=None)
@given(
    samples=st.lists(
        st.builds(
            ServerLoad,
            kv_used_fraction=st.floats(0, 1),
            running=st.integers(0, 50),
            waiting=st.integers(0, 50),
            preemptions=st.integers(0, 100),
            active=st.integers(0, 300),
            now=st.just(0.0),
        ),
        max_size=80,
    ),
    cap=st.integers(1, 200),
)
def test_whatever_is_told_the_limit_keeps_its_bounds(samples: list[ServerLoad], cap: int) -> None:
    controller = ConcurrencyController(cap, floor=1, settle_s=0.5, cool_down_s=2)
    for tick, sample in enumerate(samples):
        assert 1 <= controller.observe(replace(sample, now=tick * 0.5)) <= cap


def test_it_doubles_until_the_first_back_off_and_steps_afterwards() -> None:
    controller = ConcurrencyController(1000, start=32, settle_s=1, cool_down_s=5)
    assert controller.observe(replace(IDLE, active=32, now=0)) == 64
    assert controller.observe(replace(IDLE, active=64, now=0.5)) == 64  # not yet settled
    assert controller.observe(replace(IDLE, active=64, now=1)) == 128
    assert controller.doubling
    assert controller.observe(replace(IDLE, active=128, preemptions=3, now=2)) == 102  # 0.8 of those active
    assert not controller.doubling
    assert controller.observe(replace(IDLE, active=102, preemptions=9, now=4)) == 102  # cooling down
    assert controller.observe(replace(IDLE, active=102, preemptions=9, now=7)) == 108  # a sixteenth of 102
    assert controller.observe(replace(IDLE, active=108, preemptions=9, now=8)) == 114


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"active": 31}, "the limit holds nobody back"),
        ({"waiting": 1}, "requests wait at a server"),
        ({"kv_used_fraction": 0.85}, "KV room is short"),
    ],
)
def test_it_holds_where_a_raise_would_not_help(change: dict[str, float], why: str) -> None:
    controller = ConcurrencyController(1000, start=32)
    busy = replace(IDLE, active=32)
    assert controller.observe(replace(busy, **change)) == 32, why  # type: ignore[arg-type]
    assert controller.observe(replace(busy, now=100)) == 64


def test_a_raise_that_goes_too_far_is_taken_back_at_once() -> None:
    controller = ConcurrencyController(1000, start=32, settle_s=10)
    assert controller.observe(replace(IDLE, active=32, now=0)) == 64
    assert controller.observe(replace(IDLE, active=60, preemptions=1, now=0.5)) == 48


def test_requests_that_wait_at_a_full_server_are_a_shortage() -> None:
    """A server tells of a preemption only once the request is back."""
    controller = ConcurrencyController(64, start=40)
    assert controller.observe(replace(IDLE, active=40, waiting=4, kv_used_fraction=0.9, now=1)) == 40
    assert controller.observe(replace(IDLE, active=40, waiting=4, kv_used_fraction=0.98, now=2)) == 32


def test_preemptions_of_before_do_not_count() -> None:
    """Servers that were busy before the first sample, and a count that goes back for a while."""
    controller = ConcurrencyController(64, start=64)
    assert controller.observe(replace(IDLE, preemptions=500, active=64, now=1)) == 64
    assert controller.observe(replace(IDLE, preemptions=480, active=64, now=2)) == 64
    assert controller.observe(replace(IDLE, preemptions=500, active=64, now=3)) == 64
    assert controller.observe(replace(IDLE, preemptions=501, active=64, now=4)) == 51


def test_it_recovers_when_trajectories_get_shorter() -> None:
    """Room for 40, then for 160: from the back-off at 40 it climbs again."""
    controller = ConcurrencyController(512, start=8)
    server = Simulated(room=40, demand=10_000, late=True)
    small = drive(controller, server, samples=600)
    assert max(small[300:]) <= 48
    server.room = 160
    assert drive(controller, server, samples=1200)[-1] > 100


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="a floor of 5 with a cap of 4"):
        ConcurrencyController(4, floor=5)


def test_where_to_start() -> None:
    assert start_limit(65_536, tokens_per_trajectory=1024, cap=128) == 64
    assert start_limit(65_536, tokens_per_trajectory=1024, cap=32) == 32
    assert start_limit(500, tokens_per_trajectory=1024, cap=32) == 1

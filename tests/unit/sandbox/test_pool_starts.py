"""How a pool's sandboxes come up: tries and pauses, images ahead of starts, daemons that are away (K43)."""

from __future__ import annotations

import asyncio
import time

import pytest
from pool_fakes import IMAGE, FakeBackend, drive, quicken, until

from agentrl.errors import (
    AgentRLError,
    ConfigError,
    DaemonUnreachableError,
    ImageMissingError,
    ImageUnfitError,
    MissingRequirementError,
    SandboxStartError,
)
from agentrl.sandbox import pool_starts as starts_module
from agentrl.sandbox.pool import Pool


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


def test_a_start_that_fails_is_tried_again() -> None:
    """K43."""

    async def body(pool: Pool, backend: FakeBackend) -> None:
        async with pool.lease(IMAGE, timeout_s=5):
            pass
        assert pool.stats().failures == 2

    backend = FakeBackend()
    backend.faults = [SandboxStartError("busy"), RuntimeError("unforeseen")]
    drive(body, backend=backend, size=1, starters=1)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (SandboxStartError("no room"), SandboxStartError),
        (DaemonUnreachableError("gone", remedy="start it"), DaemonUnreachableError),
        (ImageMissingError("no image"), ImageMissingError),
        (RuntimeError("unforeseen"), SandboxStartError),
    ],
)
def test_when_no_start_succeeds_those_who_wait_fail_with_the_reason(fault: Exception, kind: type[AgentRLError]) -> None:
    async def wait(pool: Pool) -> None:
        async with pool.lease(IMAGE, timeout_s=30):
            pass

    async def body(pool: Pool, backend: FakeBackend) -> None:
        began = time.monotonic()
        results = await asyncio.gather(*(wait(pool) for _ in range(8)), return_exceptions=True)
        assert time.monotonic() - began < 5
        assert [type(result) for result in results] == [kind] * 8
        assert str(fault).splitlines()[0] in str(results[0])
        backend.always = None
        async with pool.lease(IMAGE, timeout_s=5):
            pass  # a pool that failed once recovers

    backend = FakeBackend()
    backend.always = fault
    drive(body, backend=backend, starters=1, daemon_patience_s=0.02)


def test_k43_a_daemon_that_is_away_fails_nobody_who_can_wait() -> None:
    """Far more silent tries than a failing start gets; counted as one failure."""

    async def body(pool: Pool, backend: FakeBackend) -> None:
        async def use() -> None:
            async with pool.lease(IMAGE, timeout_s=10):
                pass

        users = [asyncio.create_task(use()) for _ in range(6)]
        await until(lambda: backend.attempts > 3 * starts_module.START_ATTEMPTS)
        assert not any(user.done() for user in users)
        backend.always = None
        await asyncio.gather(*users)
        assert pool.stats().failures == 1

    backend = FakeBackend()
    backend.always = DaemonUnreachableError("gone")
    drive(body, backend=backend, starters=1)


def test_an_image_that_is_slow_to_come_holds_up_no_other() -> None:
    async def body(pool: Pool, backend: FakeBackend) -> None:
        backend.prepare_s["slow"] = 60.0
        slow = asyncio.create_task(pool.lease("slow", timeout_s=30).__aenter__())
        await until(lambda: "slow" in backend.prepared)
        for _ in range(3):
            async with pool.lease(IMAGE, timeout_s=2):
                pass
        slow.cancel()

    drive(body, size=1, starters=1, reuse=1)


def test_prefetch_has_images_ahead_and_never_fails() -> None:
    async def body(pool: Pool, backend: FakeBackend) -> None:
        backend.missing = {"none"}
        await until(lambda: pool.stats().idle > 0)
        pool.prefetch(["first", "none", "second", IMAGE])
        pool.prefetch(["second", "third"])
        await until(lambda: "third" in backend.prepared)
        assert backend.prepared == [IMAGE, "first", "none", "second", "third"]
        assert backend.most_preparing == 1
        async with pool.lease("second", timeout_s=5):
            pass
        assert backend.prepared.count("second") == 1
        with pytest.raises(ImageMissingError):
            async with pool.lease("none", timeout_s=5):
                pass

    drive(body)


def test_a_backend_without_room_is_not_asked_and_asked_again() -> None:
    async def body(pool: Pool, backend: FakeBackend) -> None:
        await asyncio.sleep(0.02)
        assert backend.attempts == 0
        user = asyncio.create_task(pool.lease(IMAGE, timeout_s=10).__aenter__())
        await asyncio.sleep(0.02)
        assert backend.attempts == 0
        backend.room = 1
        await user

    backend = FakeBackend()
    backend.room = 0
    drive(body, backend=backend)


def test_another_image_takes_the_place_of_an_idle_one() -> None:
    async def body(pool: Pool, backend: FakeBackend) -> None:
        await until(lambda: pool.stats().idle == 2)
        async with pool.lease("other", timeout_s=5) as box:
            assert box.image == "other"
        async with pool.lease(IMAGE, timeout_s=5) as box:
            assert box.image == IMAGE

    assert drive(body, size=2, starters=2).most_alive <= 2


@pytest.mark.parametrize("error", [ImageUnfitError, ConfigError, MissingRequirementError, ImageMissingError])
def test_what_no_further_try_would_mend_fails_at_once(error: type[AgentRLError]) -> None:
    async def body(pool: Pool, backend: FakeBackend) -> None:
        with pytest.raises(error, match="as it is"):
            async with pool.lease(IMAGE, timeout_s=5):
                pass
        assert backend.attempts == 1

    backend = FakeBackend()
    backend.always = error("as it is", remedy="change it")
    drive(body, backend=backend, size=1, starters=1)

"""Hostile episodes among honest ones through the real driver, a small edition of `benchmarks/sandbox_stress.py`."""

from __future__ import annotations

import asyncio

import sandbox_stress as stress

from agentrl.config import SandboxConfig
from agentrl.sandbox import open_pool
from agentrl.wire import CommandResult

CONCURRENCY = 8


def test_every_hostile_episode_gets_its_status_and_nothing_is_left(backend_name: str) -> None:
    """K40, K41, K42: no hang, no leak, every hostile episode its right status, no honest one affected."""
    pairs = zip(stress.HOSTILE[::2], stress.HOSTILE[1::2], strict=True)
    plan = [kind for pair in pairs for kind in (None, *pair)]
    config = SandboxConfig(
        backend=backend_name,
        size=CONCURRENCY + 2,
        memory_mb=stress.MEMORY_MB,
        disk_mb=stress.DISK_MB,
        pids=stress.PIDS,
    )

    async def main() -> None:
        async with open_pool(config, run_id="hostile-warm-up") as pool:
            await stress.run_all(pool, [None], concurrency=1)
        before = stress.census(backend_name)
        async with asyncio.timeout(300), open_pool(config, run_id="hostile") as pool:
            done = await stress.run_all(pool, plan, concurrency=CONCURRENCY)
        assert [fault for each in done for fault in each.faults] == []
        assert {each.hostile for each in done} == {"", *(hostile.name for hostile in stress.HOSTILE)}
        assert stress.leaks(before, stress.census(backend_name)) == []

    asyncio.run(main())


def test_the_judge_of_hostile_episodes_sees_a_wrong_status() -> None:
    """The benchmark's own eyes: a command that should have timed out and did not is a fault; so is what is left."""
    fine = CommandResult(exit_code=0, output="", output_bytes=0, timed_out=False, out_of_memory=False, duration_s=0.1)
    by_name = {hostile.name: hostile for hostile in stress.HOSTILE}
    assert not any(by_name[name].right(fine) for name in ("infinite loop", "memory hog", "disk filler", "output flood"))
    assert stress.leaks({"a": 1, "b": 2}, {"a": 1, "b": 3}) == ["b: 2 before, 3 after"]

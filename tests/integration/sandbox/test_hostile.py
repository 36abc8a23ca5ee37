"""Hostile episodes among honest ones through the real driver, a small edition of `benchmarks/sandbox_stress.py`."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from agentrl.config import SandboxConfig
from agentrl.sandbox import open_pool

CONCURRENCY = 8


@pytest.fixture(scope="module")
def stress() -> ModuleType:
    """The benchmark as a module."""
    path = Path(__file__).parents[3] / "benchmarks" / "sandbox_stress.py"
    spec = importlib.util.spec_from_file_location("sandbox_stress", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_hostile_episode_gets_its_status_and_nothing_is_left(backend_name: str, stress: ModuleType) -> None:
    """K40, K41, K42: no hang, no leak, every hostile episode its right status, no honest one affected."""
    plan = [kind for hostile in stress.HOSTILE for kind in (None, hostile, None)]
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


def test_the_judge_of_hostile_episodes_sees_a_wrong_status(stress: ModuleType) -> None:
    """The benchmark's own eyes: a command that should have timed out and did not is a fault; so is what is left."""
    from agentrl.wire import CommandResult

    fine = CommandResult(exit_code=0, output="", output_bytes=0, timed_out=False, out_of_memory=False, duration_s=0.1)
    by_name = {hostile.name: hostile for hostile in stress.HOSTILE}
    assert not any(by_name[name].right(fine) for name in ("infinite loop", "memory hog", "disk filler", "output flood"))
    assert stress.leaks({"a": 1, "b": 2}, {"a": 1, "b": 3}) == ["b: 2 before, 3 after"]

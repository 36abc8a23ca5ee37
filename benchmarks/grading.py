"""Grading: verdicts of gold and of nothing over every good mined row, and what one generated grading costs.

    python benchmarks/grading.py [--rows N] [--output FILE]

The baseline of the second figure is printed beside it: leasing and resetting a sandbox without grading anything.
Needs bubblewrap. CPU time is that of this process and everything below it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agentrl.config import SandboxConfig
from agentrl.sandbox import open_pool
from agentrl.trajectory import Split
from agentrl.wire import Sandbox, SandboxPool, Task
from agentrl_envs.swe_gym import SweGymEnvironment

MINED = Path(__file__).parents[1] / "tests" / "data" / "mined" / "instances.jsonl"
GENERATED = 100
PARALLEL = 2


def tree_cpu_s() -> float:
    """CPU seconds of this process and its living descendants, with the children they have waited for."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # ended since
            continue
        pid, fields = int(text.split()[0]), text.rpartition(")")[2].split()
        children[int(fields[1])].append(pid)
        ticks[pid] = sum(map(int, fields[11:15]))
    total, todo = 0, [os.getpid()]
    while todo:
        pid = todo.pop()
        total += ticks.get(pid, 0)
        todo += children[pid]
    return total / os.sysconf("SC_CLK_TCK")


async def verdicts(pool: SandboxPool, count: int) -> dict[str, Any]:
    """Grade gold twice and nothing once on the first `count` good rows."""
    environment = SweGymEnvironment({"dataset": str(MINED), "fresh_fraction": 1.0})
    tasks = environment.tasks(Split.FRESH, start=0, count=count)
    slots = asyncio.Semaphore(PARALLEL)

    async def one(task: Task, patch: str) -> tuple[float, float]:
        async with slots, pool.lease(environment.image(task), timeout_s=120) as sandbox:
            begun = time.perf_counter()
            grade = await environment.grade(task, sandbox, patch)
            return grade.reward, time.perf_counter() - begun

    gold = [environment.reference_patch(task) for task in tasks]
    first, second, nothing = [
        await asyncio.gather(*(one(task, patch) for task, patch in zip(tasks, patches, strict=True)))
        for patches in (gold, gold, [""] * len(tasks))
    ]
    seconds = [duration for _, duration in first]
    return {
        "rows": len(tasks),
        "gold_resolved": sum(reward == 1.0 for reward, _ in first),
        "gold_resolved_again": sum(reward == 1.0 for reward, _ in second),
        "nothing_resolved": sum(reward == 1.0 for reward, _ in nothing),
        "gold_s_median": round(statistics.median(seconds), 3),
        "gold_s_max": round(max(seconds), 3),
    }


async def cost(pool: SandboxPool) -> dict[str, float]:
    """CPU milliseconds per generated grading, and of a lease without one."""
    environment = SweGymEnvironment({})
    tasks = environment.tasks(Split.TRAIN, start=0, count=GENERATED)

    async def measure(work: Callable[[Task, Sandbox], Awaitable[object]]) -> float:
        begun = tree_cpu_s()
        for task in tasks:
            async with pool.lease(environment.image(task), timeout_s=120) as sandbox:
                await work(task, sandbox)
        return round((tree_cpu_s() - begun) / len(tasks) * 1e3, 1)

    async def nothing(task: Task, sandbox: Sandbox) -> None:
        return None

    async def gold(task: Task, sandbox: Sandbox) -> None:
        grade = await environment.grade(task, sandbox, environment.reference_patch(task))
        if grade.reward != 1.0:
            raise SystemExit(f"{task.id}: the reference patch does not resolve\n{grade.log}")

    await measure(gold)  # warm: sandbox started, pytest loaded
    return {"baseline_lease_cpu_ms": await measure(nothing), "grading_cpu_ms": await measure(gold)}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000, help="most rows to verify")
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    config = SandboxConfig(backend="bubblewrap", size=PARALLEL, starters=2, reuse=10_000)
    async with open_pool(config, run_id="bench-grading") as pool:
        result = {"mined": await verdicts(pool, arguments.rows), "generated": await cost(pool)}
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    asyncio.run(main())

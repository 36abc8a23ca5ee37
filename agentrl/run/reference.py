"""Grading each task's reference patch: proof that tasks, sandboxes and grading are right, with no agent in the way."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from agentrl.config import RunConfig
from agentrl.errors import InfrastructureError
from agentrl.rollout.cursor import TaskCursor
from agentrl.rollout.driver import Limits
from agentrl.run.evaluate import EVAL_SEED
from agentrl.run.folder import RunFolder
from agentrl.run.grading import Grader
from agentrl.run.recorder import Recorder
from agentrl.sandbox import open_pool
from agentrl.trajectory import Split
from agentrl.wire import Environment, EventKind, Task
from agentrl.wire.events import Phase

_AT_ONCE = 4


async def grade_references(
    config: RunConfig, folder: RunFolder, recorder: Recorder, environment: Environment, *, split: Split, tasks: int
) -> dict[str, Any]:
    """Grade the reference patches of a split's first `tasks` tasks; a line each in `references.jsonl`."""
    requests = TaskCursor(environment, split, seed=EVAL_SEED).take(tasks, group_size=1)
    recorder.phase(Phase.EVALUATE, step=0, total=len(requests))
    slots = asyncio.Semaphore(_AT_ONCE)
    done = 0
    async with open_pool(config.sandbox, run_id=folder.path.name) as pool:
        grader = Grader(environment, pool, Limits.from_config(config), recorder.note)

        async def one(task: Task) -> dict[str, Any]:
            nonlocal done
            async with slots:
                verdict = await _grade(grader, task)
            done += 1
            recorder.tell(
                EventKind.ROLLOUT_FINISHED,
                step=0,
                done=done,
                total=len(requests),
                task=task.id,
                outcome=verdict["verdict"],
                reward=float(verdict["resolved"]),
            )
            return verdict

        async with asyncio.TaskGroup() as group:
            jobs = [group.create_task(one(request.task)) for request in requests]
    verdicts = [job.result() for job in jobs]
    with (folder.path / "references.jsonl").open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(verdict) + "\n" for verdict in verdicts)
    unresolved = [verdict["task"] for verdict in verdicts if not verdict["resolved"]]
    return {
        "tasks": len(verdicts),
        "resolved": len(verdicts) - len(unresolved),
        "errors": sum(verdict["verdict"] == "error" for verdict in verdicts),
        "unresolved": unresolved,
    }


async def _grade(grader: Grader, task: Task) -> dict[str, Any]:
    began = time.monotonic()
    try:
        grade = await grader.grade(task, grader.environment.reference_patch(task))
    except InfrastructureError as error:
        resolved, verdict, log = False, "error", str(error)
    else:
        resolved, verdict, log = grade.resolved, "resolved" if grade.resolved else "unresolved", grade.log[-4000:]
    return {
        "task": task.id,
        "resolved": resolved,
        "verdict": verdict,
        "log": log,
        "seconds": time.monotonic() - began,
    }

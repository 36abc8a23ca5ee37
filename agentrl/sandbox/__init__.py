"""Sandboxes: isolated machines with a work tree, from a pool, on Docker or bubblewrap.

async with open_pool(config, run_id="demo") as pool:
    async with pool.lease("agentrl/base", timeout_s=30, label="rollout 7") as sandbox:
        result = await sandbox.run("python -m pytest -q", timeout_s=60)
"""

from agentrl.sandbox.backend import choose_backend
from agentrl.sandbox.images import recipe_names
from agentrl.sandbox.pool import Pool, PoolStats, open_pool
from agentrl.sandbox.reaper import ReapReport, reap
from agentrl.sandbox.session import ServedSandbox

__all__ = ["Pool", "PoolStats", "ReapReport", "ServedSandbox", "choose_backend", "open_pool", "reap", "recipe_names"]

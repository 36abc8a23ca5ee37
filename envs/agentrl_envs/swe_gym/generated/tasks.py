"""The families of generated tasks."""

from __future__ import annotations

from agentrl.trajectory import Split
from agentrl_envs.swe_gym.generated.functions import make_function_task
from agentrl_envs.swe_gym.generated.problem import GeneratedTask
from agentrl_envs.swe_gym.generated.settings import make_settings_task

FAMILIES = {"functions": make_function_task, "settings": make_settings_task}


def make_task(seed: int, split: Split, *, family: str = "functions") -> GeneratedTask:
    """The task of `seed` in `split`; the same seed gives other tasks in other splits and families."""
    return FAMILIES[family](seed, split)

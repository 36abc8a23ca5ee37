"""The SWE-Gym environment: one class, two families of tasks (generated repositories, real rows)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.sandbox.images import BASE_IMAGE
from agentrl.trajectory import Split
from agentrl.wire import ChatMessage, Expert, Grade, Sandbox, Task
from agentrl_envs.swe_gym.generated.family import GeneratedFamily
from agentrl_envs.swe_gym.options import GENERATED, parse_options
from agentrl_envs.swe_gym.row_family import RowFamily


class SweGymEnvironment:
    """Satisfies `agentrl.wire.Environment`, `TaskCatalog`, `Delaying` and `Privileged`. `ConfigError` and
    `DatasetError` come from the constructor.

    `expert` plays generated tasks; None for real rows, which have none.
    """

    name = "swe-gym"

    def __init__(self, options: Mapping[str, Any]) -> None:
        parsed = parse_options(options)
        self._latency = parsed.latency
        self._family: GeneratedFamily | RowFamily
        if parsed.dataset == GENERATED:
            self._family = GeneratedFamily(
                environment=self.name, image=parsed.image or BASE_IMAGE, families=parsed.families
            )
        else:
            self._family = RowFamily(environment=self.name, options=parsed)

    @property
    def expert(self) -> Expert | None:
        return self._family.expert

    @property
    def grade_unsubmitted(self) -> bool:
        """Real rows are graded as they stand; a generated task must be submitted."""
        return self._family.grade_unsubmitted

    def tasks(self, split: Split, *, start: int, count: int, seed: int = 0) -> list[Task]:
        return self._family.tasks(split, start=start, count=count, seed=seed)

    def find(self, task_id: str) -> Task:
        """The task of that id. Raises `DatasetError` that names close ids."""
        return self._family.find(task_id)

    def every(self) -> list[Task] | None:
        """Every row, of whatever split and kind; None for generated tasks, which have no end."""
        return self._family.every()

    def use_recipes(self, names: frozenset[str]) -> None:
        """Bundled trees whose repository and version have a recipe run in its image."""
        if isinstance(self._family, RowFamily):
            self._family.recipes = names

    def tool_names(self, task: Task) -> tuple[str, ...]:
        return self._family.tool_names(task)

    def prompt(self, task: Task) -> list[ChatMessage]:
        return self._family.prompt(task)

    def tool_delay_s(self, task: Task, *, rollout: str, call: int) -> float:
        """Seconds that the options add to a tool call of a training task, the same for the same arguments."""
        if task.split is not Split.TRAIN:
            return 0.0  # an evaluation asks how good the policy is, not how long it takes
        return self._latency.delay_s(task.id, rollout=rollout, call=call)

    def image(self, task: Task) -> str:
        return self._family.image(task)

    async def prepare(self, task: Task, sandbox: Sandbox) -> None:
        await self._family.prepare(task, sandbox)

    async def collect(self, task: Task, sandbox: Sandbox) -> str:
        return await self._family.collect(task, sandbox)

    async def grade(self, task: Task, sandbox: Sandbox, patch: str) -> Grade:
        return await self._family.grade(task, sandbox, patch)

    def reference_patch(self, task: Task) -> str:
        return self._family.reference_patch(task)

    def hint(self, task: Task) -> str:
        """What solves the task: a row's patch, the changed lines of a generated task."""
        return self._family.hint(task)

"""The data position: which task is next. Deterministic from (seed, index): a resumed run goes on in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from agentrl.errors import DatasetError
from agentrl.rollout.groups import GroupRequest
from agentrl.trajectory import Split
from agentrl.wire import Environment


class TaskCursor:
    """Walks through an environment's split: the next `take` starts where the last one ended.

    Invariant: group i of a split is the same task under the same name for the same seed, however many calls
    or restarts lie between. `state()` is all there is to save.
    """

    def __init__(self, environment: Environment, split: Split, *, seed: int, position: int = 0) -> None:
        self._environment = environment
        self.split = split
        self.seed = seed
        self.position = position

    def take(self, count: int, *, group_size: int, prefix: str = "") -> list[GroupRequest]:
        """The next `count` tasks as groups; fewer where a finite evaluation split ends.

        `prefix` sets repeated walks (evaluations) apart. Raises `DatasetError` for an empty split.
        """
        requests = self.peek(count, group_size=group_size, prefix=prefix)
        self.position += len(requests)
        return requests

    def peek(self, count: int, *, group_size: int, prefix: str = "") -> list[GroupRequest]:
        """What `take` would give, without moving."""
        requests = self._requests(self.position, count, group_size, prefix)
        if not requests and self.position == 0 and count > 0:
            raise DatasetError(
                f"environment {self._environment.name} has no tasks in split {self.split.value}",
                where=f"environment.{self._environment.name}",
                remedy="give it tasks, or leave this split out (eval.fresh_tasks, eval.unseen_tasks)",
            )
        return requests

    def at(self, indices: Iterable[int], *, group_size: int, prefix: str = "") -> list[GroupRequest]:
        """The groups at these places of the data, in this order, without moving: those in flight at a checkpoint.

        Raises `DatasetError` where the data ends before one of them.
        """
        found = []
        for index in indices:
            requests = self._requests(index, 1, group_size, prefix)
            if not requests:
                raise DatasetError(
                    f"environment {self._environment.name} has no task {index} in split {self.split.value}",
                    where=f"environment.{self._environment.name}",
                    remedy="resume with the data that the run was started with",
                )
            found += requests
        return found

    def _requests(self, start: int, count: int, group_size: int, prefix: str) -> list[GroupRequest]:
        tasks = self._environment.tasks(self.split, start=start, count=count, seed=self.seed)
        return [
            GroupRequest(f"{prefix}{self.split.value}-{index:06d}", task, index, group_size)
            for index, task in enumerate(tasks, start)
        ]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"split": self.split.value, "seed": self.seed, "position": self.position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises `DatasetError` where it is of another seed or split."""
        if (state.get("split"), state["seed"]) != (self.split.value, self.seed):
            raise DatasetError(
                f"the checkpoint's data position is of split {state.get('split')}, seed {state['seed']}; "
                f"this run has split {self.split.value}, seed {self.seed}",
                where="TaskCursor.restore",
                remedy="resume with the seed of the run's config.toml",
            )
        self.position = int(state["position"])

"""A recorded run as data to distil from: which rollouts there are, whether they fit, and in which order they come.

    recorded = RecordedRun.open(folder, model=…, config=…)
    cursor = RecordedCursor(recorded, environment)              # in place of TaskCursor
    async with RecordedStream(recorded, scorer, …) as stream: …    # in place of the engine's (`run.recorded_stream`)

A *unit* of the data is a recorded group, cut where it has more than `rollout.group_size` members. Of a group only the
rollouts count that a policy sampled, that no machine failed, and that hold a token to be scored. Data position i is
unit i % U of epoch i // U, for U units. Every epoch has an order of its own, the same for the same seed: files are
shuffled, and units within `_MIXED` files together, so that a batch mixes ages and at most `2 · _MIXED` files are in
memory.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.config import DistillConfig, RunConfig
from agentrl.config.distill import SELF
from agentrl.errors import ConfigError, DatasetError, NoTeacherError
from agentrl.policy import local_model
from agentrl.rollout.groups import GroupRequest
from agentrl.rollout.scoring import routed
from agentrl.run.folder import check_run_folder
from agentrl.run.recorded_index import RecordedRollout, check_same_tokenizer, read_rollouts
from agentrl.run.resume import Start
from agentrl.trajectory import Split, Trajectory, read_trajectories
from agentrl.wire import Environment, Task, TaskCatalog

_WHERE = "distill.from_run"
_MIXED = 8
_FILES = "*-train.parquet"
_LOOKED_AT = 256  # recorded tasks, whether a teacher serves them


@dataclass(frozen=True, slots=True)
class RecordedUnit:
    """Rollouts of one task, by name, all of one file."""

    file: Path
    task_id: str
    environment: str
    split: Split
    members: tuple[str, ...]


@dataclass(slots=True, eq=False)
class RecordedRun:
    """The units of a run folder and their order. `read` may be called from threads."""

    folder: Path
    units: tuple[RecordedUnit, ...]
    rollouts: int
    seed: int
    _orders: dict[int, np.ndarray] = field(default_factory=dict)
    _held: dict[Path, dict[str, Trajectory]] = field(default_factory=dict)  # the longest unused first
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, folder: Path, *, model: Path, config: RunConfig) -> RecordedRun:
        """Look a run folder through. `model` is the student's folder.

        Raises `RunFolderError` or `DatasetError` for what is no run folder or no trajectory file, `ConfigError` where
        the student cannot learn from what is recorded: another tokenizer, another temperature, nothing sampled,
        segments too long, or the run itself.
        """
        check_run_folder(folder)
        if folder.resolve() == config.run_dir.resolve():
            raise ConfigError(
                "a run cannot learn from itself", where=_WHERE, remedy="write into another folder (--run-dir)"
            )
        check_same_tokenizer(folder / "tokenizer", model)
        files = sorted((folder / "trajectories").glob(_FILES))
        found = {file: read_rollouts(file) for file in files}
        every = [rollout for rollouts in found.values() for rollout in rollouts]
        _check(every, folder=folder, longest=config.agent.max_tokens)
        units = tuple(
            unit for file, rollouts in found.items() for unit in _units(file, rollouts, config.rollout.group_size)
        )
        return cls(folder, units, sum(len(unit.members) for unit in units), config.seed)

    @property
    def digest(self) -> str:
        """Changes with the data and with how they are cut."""
        text = "\n".join(f"{unit.file.name} {unit.task_id} {' '.join(unit.members)}" for unit in self.units)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """A line for whoever watches."""
        tasks = len({unit.task_id for unit in self.units})
        return f"learning from {self.rollouts} rollouts of {tasks} tasks, recorded in {self.folder}"

    def at(self, position: int) -> RecordedUnit:
        """The unit at a data position; there is no end of them."""
        epoch, place = divmod(position, len(self.units))
        if epoch not in self._orders:
            self._orders = {at: order for at, order in self._orders.items() if at >= epoch - 1}  # those in flight
            self._orders[epoch] = self._order(epoch)
        return self.units[self._orders[epoch][place]]

    def read(self, unit: RecordedUnit) -> tuple[Trajectory, ...]:
        """A unit's rollouts, without the scores that they may have. Raises `DatasetError`, `RecordError`."""
        with self._lock:
            held = self._held.pop(unit.file, None)
            if held is None:
                held = {t.trajectory_id: replace(t, scores=()) for t, _ in read_trajectories([unit.file])}
            self._held[unit.file] = held
            while len(self._held) > 2 * _MIXED:
                del self._held[next(iter(self._held))]
        if missing := [name for name in unit.members if name not in held]:
            raise DatasetError(
                f"trajectory {missing[0]} is there no more",
                where=str(unit.file),
                remedy="distil from a run that has ended and is not gone on with meanwhile",
            )
        return tuple(held[name] for name in unit.members)

    def _order(self, epoch: int) -> np.ndarray:
        """int [U]: the units of an epoch."""
        random = np.random.default_rng([self.seed, epoch])
        by_file: dict[Path, list[int]] = {}
        for index, unit in enumerate(self.units):
            by_file.setdefault(unit.file, []).append(index)
        files = list(by_file.values())
        shuffled = [files[at] for at in random.permutation(len(files))]
        mixed = [shuffled[at : at + _MIXED] for at in range(0, len(shuffled), _MIXED)]
        return np.concatenate([random.permutation(np.concatenate(together)) for together in mixed])


def _check(rollouts: Sequence[RecordedRollout], *, folder: Path, longest: int) -> None:
    """Raise `ConfigError` where nothing can be learned from these rollouts, or not all that could."""

    def refuse(what: str, remedy: str) -> ConfigError:
        return ConfigError(what, where=f"{_WHERE} ({folder})", remedy=remedy)

    if not rollouts:
        raise refuse("the run has no trajectories of training", "name a run of `agentrl train` that has done a step")
    if not any(rollout.sampled for rollout in rollouts):
        raise refuse(
            "all its trajectories are demonstrations, without log-probabilities",
            "name a run whose rollouts a policy sampled",
        )
    usable = [rollout for rollout in rollouts if rollout.usable]
    if not usable:
        raise refuse("machines failed every rollout of it, or none sampled a token", "name another run")
    hot = next((rollout for rollout in usable if rollout.temperature != 1), None)
    if hot is not None:
        raise refuse(
            f"trajectory {hot.trajectory_id} was sampled at temperature {hot.temperature:g}, and teachers score at 1: "
            "the divergence would be between different things",
            "name a run with rollout.temperature 1",
        )
    most = max(usable, key=lambda rollout: rollout.longest)
    if most.longest > longest:
        raise refuse(
            f"trajectory {most.trajectory_id} has a segment of {most.longest} tokens, more than agent.max_tokens "
            f"({longest}), for which teachers are prepared",
            f"--agent.max-tokens {most.longest}, with a policy.max_model_len that holds it",
        )


def _units(file: Path, rollouts: Iterable[RecordedRollout], most: int) -> list[RecordedUnit]:
    """The usable rollouts of a file by group, in its order; one of more than `most` is cut into about equal parts."""
    groups: dict[str, list[RecordedRollout]] = {}
    for rollout in rollouts:
        if rollout.usable:
            groups.setdefault(rollout.group_id, []).append(rollout)
    units = []
    for members in groups.values():
        first, parts = members[0], -(-len(members) // most)
        for part in np.array_split(np.arange(len(members)), parts):
            names = tuple(members[at].trajectory_id for at in part)
            units.append(RecordedUnit(file, first.task_id, first.environment, first.split, names))
    return units


def open_recorded(config: RunConfig, environment: Environment, start: Start) -> RecordedRun | None:
    """The run that `distill.from_run` names, for a student that begins at `start`; None where none is named.

    Raises what `RecordedRun.open` and `check_tasks` do.
    """
    if config.distill.from_run is None:
        return None
    student = start.checkpoint or local_model(config.policy.model)
    recorded = RecordedRun.open(config.distill.from_run, model=student, config=config)
    check_tasks(recorded, environment, config.distill)
    return recorded


def check_tasks(recorded: RecordedRun, environment: Environment, config: DistillConfig) -> None:
    """Raise `ConfigError` where the teachers need the tasks themselves and they cannot be had, `NoTeacherError` where
    none of the teachers serves one of them (looked for in the first tasks, by name)."""
    names = {teacher.name for teacher in config.teachers}
    if config.route == "environment":
        for unit in recorded.units:
            if unit.environment not in names:
                raise NoTeacherError.of(unit.task_id, route=config.route, value=unit.environment, names=names)
    if config.route in (None, "environment") and all(t.resolved_kind != SELF for t in config.teachers):
        return
    strangers = sorted({unit.environment for unit in recorded.units} - {environment.name})
    if strangers or not isinstance(environment, TaskCatalog):
        raise ConfigError(
            f"the recorded tasks are of environment {strangers[0] if strangers else environment.name}, and here they "
            "cannot be found by their ids, which distill.route and teacher `self` need",
            where=_WHERE,
            remedy="distil in the environment that the run was recorded in, with its settings",
        )
    if config.route in (None, "environment"):
        return
    for task_id in sorted({unit.task_id for unit in recorded.units})[:_LOOKED_AT]:
        routed(environment.find(task_id), config.route, names)


class RecordedCursor:
    """Walks through a recorded run, epoch after epoch: what `TaskCursor` is to an environment's split."""

    def __init__(self, recorded: RecordedRun, environment: Environment) -> None:
        self._recorded, self._environment = recorded, environment
        self.position = 0

    def take(self, count: int, *, group_size: int) -> list[GroupRequest]:
        """The next `count` units as groups; of `group_size` members at most, as the run was opened with."""
        requests = self.peek(count, group_size=group_size)
        self.position += len(requests)
        return requests

    def peek(self, count: int, *, group_size: int) -> list[GroupRequest]:
        """What `take` would give, without moving."""
        return self.at(range(self.position, self.position + count), group_size=group_size)

    def at(self, indices: Iterable[int], *, group_size: int) -> list[GroupRequest]:
        """The groups at these places of the data, in this order, without moving.

        Raises `DatasetError` where the environment has not the task.
        """
        return [self._request(index, group_size) for index in indices]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"recorded": self._recorded.digest, "seed": self._recorded.seed, "position": self.position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Raises `DatasetError` where it is of other data."""
        if (state.get("recorded"), state["seed"]) != (self._recorded.digest, self._recorded.seed):
            raise DatasetError(
                f"the recorded rollouts in {self._recorded.folder} are not those of the checkpoint, or cut otherwise",
                where="RecordedCursor.restore",
                remedy="resume with the recorded run, rollout.group_size and seed that the run was started with",
            )
        self.position = int(state["position"])

    def _request(self, index: int, group_size: int) -> GroupRequest:
        unit = self._recorded.at(index)
        size = len(unit.members)
        if size > group_size:
            raise ValueError(f"the recorded groups are cut to more than {group_size} members")
        return GroupRequest(f"recorded-{index:06d}", self._task(unit), index, size)

    def _task(self, unit: RecordedUnit) -> Task:
        """The task by its id; where the environment is another or has no catalogue, a task without data."""
        environment = self._environment
        if unit.environment == environment.name and isinstance(environment, TaskCatalog):
            return environment.find(unit.task_id)
        return Task(id=unit.task_id, environment=unit.environment, split=unit.split, data={})

"""Groups of rollouts: what is asked for, what came back, how it was judged. Joined by id, not by order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import RecordError
from agentrl.rollout.advantages import advantages
from agentrl.rollout.filters import Verdict, judge, judge_taught
from agentrl.rollout.scheduler import VersionSpan
from agentrl.trajectory import OutcomeKind, Trajectory
from agentrl.wire import Task


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """`size` rollouts of one task. `index` is the task's place in the data (`agentrl.rollout.cursor`)."""

    group_id: str
    task: Task
    index: int
    size: int

    def trajectory_id(self, member: int) -> str:
        """The name of a member's trajectory, unique in the run because the group's is."""
        return f"{self.group_id}-{member}"


@dataclass(frozen=True, slots=True)
class GroupResult:
    """A finished group: one trajectory per member, in their order. Raises `RecordError` for a stranger."""

    group_id: str
    task_id: str
    index: int
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        names = {trajectory.trajectory_id for trajectory in self.trajectories}
        strangers = [t.trajectory_id for t in self.trajectories if t.group_id != self.group_id]
        if not self.trajectories or strangers or len(names) != len(self.trajectories):
            raise RecordError(
                f"trajectories {strangers or sorted(names)} do not make group {self.group_id}",
                where=f"group {self.group_id}",
                remedy="every trajectory of a group carries the group's id and a name of its own",
            )

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """One per rollout, None where infrastructure failed."""
        return tuple(trajectory.reward for trajectory in self.trajectories)

    @property
    def valid(self) -> tuple[Trajectory, ...]:
        """The members that count."""
        return tuple(t for t in self.trajectories if t.outcome.kind is not OutcomeKind.INFRASTRUCTURE)

    @property
    def versions(self) -> VersionSpan | None:
        """Oldest and newest version of the valid members' sampled tokens; None where none was sampled."""
        found = [s.versions[s.versions >= 0] for t in self.valid for s in t.segments]
        sampled = [versions for versions in found if versions.size]
        if not sampled:
            return None
        return VersionSpan(min(int(v.min()) for v in sampled), max(int(v.max()) for v in sampled))


@dataclass(frozen=True, slots=True, eq=False)
class ScoredGroup:
    """A group with its advantages float64 [n] (NaN: not trained) and its verdict."""

    group: GroupResult
    advantages: NDArray[np.float64]
    verdict: Verdict


def score_group(group: GroupResult, *, advantage: str, min_valid: int = 2, taught: bool = False) -> ScoredGroup:
    """Fill a group's advantages (`train.advantage.name`) and judge it. `taught`: by teachers, who have something to say
    of every rollout, whatever its reward."""
    values = advantages(advantage, group.rewards)
    if taught:
        return ScoredGroup(group, values, judge_taught([bool(s.mask.any()) for t in group.valid for s in t.scores]))
    return ScoredGroup(group, values, judge(values, min_valid=min_valid))

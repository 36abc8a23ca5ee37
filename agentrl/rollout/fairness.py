"""Do slow tasks get their share of training? A schedule that gives up on stragglers teaches the policy fast tasks only.

*Slow* is the slowest quarter of the groups so far, by `group_seconds`. The share of slow groups among the trained
ones ÷ their share among all groups that could have been trained is 1 where a schedule is fair, and below 1 where slow
groups are dropped, go stale or run into a deadline. Groups that teach nothing (equal rewards, too few valid rollouts)
are told to nobody: leaving them out is the filter's doing, not the schedule's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from agentrl.rollout.groups import GroupResult

SLOW_QUANTILE = 0.75
MIN_GROUPS = 8


@dataclass(slots=True)
class FairnessMeter:
    """Durations in seconds of the groups so far: `trained` ones, and those that `lost` their place in a batch."""

    _trained: list[float] = field(default_factory=list)
    _lost: list[float] = field(default_factory=list)

    def trained(self, seconds: float) -> None:
        """A group was trained."""
        self._trained.append(seconds)

    def lost(self, seconds: float) -> None:
        """A group was dropped, stale or failed; `seconds` is how long it had run."""
        self._lost.append(seconds)

    def metrics(self) -> dict[str, float]:
        """`fairness/slow_share_ratio`; {} below `MIN_GROUPS` groups or while none was trained."""
        every = np.array(self._trained + self._lost)
        if len(every) < MIN_GROUPS or not self._trained:
            return {}
        # Equal durations fall on the same side, so that no tie is broken for or against anyone.
        slow = every >= np.quantile(every, SLOW_QUANTILE, method="higher")
        return {"fairness/slow_share_ratio": float(slow[: len(self._trained)].mean() / slow.mean())}


def group_seconds(group: GroupResult) -> float:
    """How slow a group is: the longest of its rollouts, from its sandbox's lease to its grade. Waiting for a slot is
    the schedule's doing and does not count."""
    return max(
        sum(trajectory.info.get(name, 0.0) for name in ("setup_s", "episode_s", "score_s"))
        for trajectory in group.trajectories
    )

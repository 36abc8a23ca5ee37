"""Rollouts: groups through a scheduler, a buffer, filters and advantages, into batches."""

from agentrl.rollout.advantages import advantage_names, advantages
from agentrl.rollout.batching import form_batch, trained_records
from agentrl.rollout.buffer import GroupBuffer
from agentrl.rollout.cursor import TaskCursor
from agentrl.rollout.driver import Limits
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.episode import AgentEpisode, EpisodeRunner
from agentrl.rollout.fairness import FairnessMeter, group_seconds
from agentrl.rollout.filters import DrySpell, FilterCounts, Verdict
from agentrl.rollout.groups import GroupRequest, GroupResult, ScoredGroup, score_group
from agentrl.rollout.metrics import (
    concurrency_metrics,
    correction_metrics,
    filter_metrics,
    is_solved,
    rollout_metrics,
    staleness_metrics,
    throughput_metrics,
)
from agentrl.rollout.schedule import BoundedSchedule, SchedulerView
from agentrl.rollout.scheduler import Counts, Scheduler, Taken, VersionSpan
from agentrl.rollout.status import RolloutPhase, RolloutStatus, Usage
from agentrl.rollout.stream import RolloutStream

__all__ = [
    "AgentEpisode",
    "BoundedSchedule",
    "Counts",
    "DrySpell",
    "EpisodeRunner",
    "FairnessMeter",
    "FilterCounts",
    "GroupBuffer",
    "GroupRequest",
    "GroupResult",
    "Limits",
    "RolloutEngine",
    "RolloutPhase",
    "RolloutStatus",
    "RolloutStream",
    "Scheduler",
    "SchedulerView",
    "ScoredGroup",
    "Taken",
    "TaskCursor",
    "Usage",
    "Verdict",
    "VersionSpan",
    "advantage_names",
    "advantages",
    "concurrency_metrics",
    "correction_metrics",
    "filter_metrics",
    "form_batch",
    "group_seconds",
    "is_solved",
    "rollout_metrics",
    "score_group",
    "staleness_metrics",
    "throughput_metrics",
    "trained_records",
]

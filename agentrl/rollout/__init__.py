"""Rollouts: groups through a scheduler, a buffer, filters and advantages, into batches."""

from agentrl.rollout.advantages import advantage_names, advantages
from agentrl.rollout.batching import form_batch, trained_records
from agentrl.rollout.buffer import GroupBuffer
from agentrl.rollout.cursor import TaskCursor
from agentrl.rollout.driver import Limits
from agentrl.rollout.engine import RolloutEngine
from agentrl.rollout.episode import AgentEpisode, EpisodeRunner
from agentrl.rollout.filters import DrySpell, FilterCounts, Verdict
from agentrl.rollout.groups import GroupRequest, GroupResult, ScoredGroup, score_group, score_groups
from agentrl.rollout.metrics import (
    filter_metrics,
    is_solved,
    rollout_metrics,
    staleness_metrics,
    throughput_metrics,
)
from agentrl.rollout.schedule import Schedule, SchedulerView, SyncSchedule
from agentrl.rollout.scheduler import Counts, Scheduler, VersionSpan
from agentrl.rollout.status import RolloutPhase, RolloutStatus, Usage

__all__ = [
    "AgentEpisode",
    "Counts",
    "DrySpell",
    "EpisodeRunner",
    "FilterCounts",
    "GroupBuffer",
    "GroupRequest",
    "GroupResult",
    "Limits",
    "RolloutEngine",
    "RolloutPhase",
    "RolloutStatus",
    "Schedule",
    "Scheduler",
    "SchedulerView",
    "ScoredGroup",
    "SyncSchedule",
    "TaskCursor",
    "Usage",
    "Verdict",
    "VersionSpan",
    "advantage_names",
    "advantages",
    "filter_metrics",
    "form_batch",
    "is_solved",
    "rollout_metrics",
    "score_group",
    "score_groups",
    "staleness_metrics",
    "throughput_metrics",
    "trained_records",
]

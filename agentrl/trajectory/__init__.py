"""The record of what was sampled; its checks; Parquet out and in."""

from agentrl.trajectory.parquet import SCHEMA_VERSION, TrajectoryItem, read_trajectories, write_rows
from agentrl.trajectory.record import (
    FinishReason,
    Outcome,
    OutcomeKind,
    Purpose,
    Segment,
    Source,
    Span,
    SpanKind,
    Split,
    TeacherScores,
    Trained,
    Trajectory,
    TurnTiming,
)

__all__ = [
    "SCHEMA_VERSION",
    "FinishReason",
    "Outcome",
    "OutcomeKind",
    "Purpose",
    "Segment",
    "Source",
    "Span",
    "SpanKind",
    "Split",
    "TeacherScores",
    "Trained",
    "Trajectory",
    "TrajectoryItem",
    "TurnTiming",
    "read_trajectories",
    "write_rows",
]

"""How an episode ended and what it left behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from agentrl.trajectory import Segment, TurnTiming


class StopReason(StrEnum):
    """Why an episode ended: the agent submitted, or a limit (turns, context window, time) was reached."""

    SUBMITTED = "submitted"
    TURNS = "turns"
    TOKENS = "tokens"
    TIME = "time"


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeResult:
    """One episode's record, not graded yet.

    `info` counts bad_calls, edits, tests, tool_calls, submitted (0 or 1), turns and rewrites (segments
    opened because the chat template rewrote history).
    """

    segments: tuple[Segment, ...]
    turns: tuple[TurnTiming, ...]
    stop: StopReason
    info: Mapping[str, float]

    @property
    def submitted(self) -> bool:
        return self.stop is StopReason.SUBMITTED

"""What the rollouts in progress are doing, as numbers and names: phases, the watchdog, mean concurrency.

No clock in here: every call is given the time, so that each rule is a unit test.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class RolloutPhase(StrEnum):
    """Where a rollout is. Every await of the driver belongs to exactly one."""

    LEASE = "lease"
    PREPARE = "prepare"
    EPISODE = "episode"
    COLLECT = "collect"
    GRADE_LEASE = "grade_lease"
    GRADE = "grade"
    DONE = "done"


@dataclass(slots=True)
class RolloutStatus:
    """One rollout in progress. `since` is when its phase, or its turn, began; `attempt` counts from 1."""

    trajectory_id: str
    task_id: str
    since: float
    phase: RolloutPhase = RolloutPhase.LEASE
    turn: int = 0
    doing: str = ""
    sandbox_id: str = ""
    attempt: int = 1
    seconds: dict[RolloutPhase, float] = field(default_factory=dict)
    _entered: float = field(init=False)

    def __post_init__(self) -> None:
        self._entered = self.since

    def enter(self, phase: RolloutPhase, *, now: float, sandbox_id: str = "") -> None:
        """The phase changes; the time in the old one is booked."""
        self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._entered
        self.phase, self.since, self._entered = phase, now, now
        self.sandbox_id = sandbox_id
        if phase is RolloutPhase.LEASE:
            self.turn, self.doing = 0, ""

    def enter_turn(self, turn: int, doing: str, *, now: float) -> None:
        """The episode is `doing` (sampling, acting) its turn number `turn` from now on."""
        self.turn, self.doing, self.since = turn, doing, now

    def spent(self, *phases: RolloutPhase) -> float:
        """Seconds booked in these phases, over all attempts."""
        return sum(self.seconds.get(phase, 0.0) for phase in phases)

    def __str__(self) -> str:
        turn = f", turn {self.turn} {self.doing}".rstrip() if self.phase is RolloutPhase.EPISODE else ""
        sandbox = f", sandbox {self.sandbox_id}" if self.sandbox_id else ""
        return f"rollout {self.trajectory_id}, phase {self.phase.value}{turn}{sandbox}, attempt {self.attempt}"


@dataclass(slots=True)
class Watchdog:
    """Names rollouts that stand still: `after_s` in one phase and turn. Each standstill is named once."""

    after_s: float
    _named: set[tuple[str, RolloutPhase, int, str, int]] = field(default_factory=set)

    def look(self, rollouts: Iterable[RolloutStatus], *, now: float) -> list[str]:
        """One sentence for each rollout newly found standing still."""
        found = []
        for rollout in rollouts:
            key = (rollout.trajectory_id, rollout.phase, rollout.turn, rollout.doing, rollout.attempt)
            if now - rollout.since >= self.after_s and key not in self._named:
                self._named.add(key)
                found.append(f"no progress for {now - rollout.since:.0f} s: {rollout}")
        return found


@dataclass(frozen=True, slots=True)
class Usage:
    """An interval of rollout work: its wall seconds, time-weighted mean and peak of rollouts in progress."""

    wall_s: float
    concurrency_mean: float
    concurrency_peak: int


class ConcurrencyMeter:
    """Time-weighted count of rollouts in progress between `start` and `stop`."""

    def __init__(self, *, now: float) -> None:
        self._began = self._at = now
        self._area = 0.0
        self._count = self._peak = 0

    def change(self, by: int, *, now: float) -> None:
        """`by` rollouts more (or fewer) from `now` on."""
        self._area += self._count * (now - self._at)
        self._at = now
        self._count += by
        self._peak = max(self._peak, self._count)

    def read(self, *, now: float) -> Usage:
        """The interval so far; a new one begins."""
        self.change(0, now=now)
        wall = now - self._began
        usage = Usage(wall, self._area / wall if wall > 0 else float(self._count), self._peak)
        self._began, self._area, self._peak = now, 0.0, self._count
        return usage

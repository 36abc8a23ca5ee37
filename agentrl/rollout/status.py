"""What the rollouts in progress are doing, as numbers and names: phases, the watchdog, how many are active.

No clock in here: every call is given the time, so that each rule is a unit test.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class RolloutPhase(StrEnum):
    """Where a rollout is. Every await of the driver belongs to exactly one.

    queued: waits to be set up · ready: is set up, waits for its group's admission and for a slot · score: all else is
    done, a teacher's scores are waited for.
    """

    QUEUED = "queued"
    LEASE = "lease"
    PREPARE = "prepare"
    READY = "ready"
    EPISODE = "episode"
    COLLECT = "collect"
    GRADE_LEASE = "grade_lease"
    GRADE = "grade"
    SCORE = "score"
    DONE = "done"


# A wait for others: never the rollout's own standstill. Waits for a sandbox keep a deadline of their own.
LEASES = frozenset({RolloutPhase.LEASE, RolloutPhase.GRADE_LEASE})
WAITS = LEASES | {RolloutPhase.QUEUED, RolloutPhase.READY}


@dataclass(slots=True)
class Pulse:
    """When any rollout at all last made progress."""

    at: float


@dataclass(slots=True)
class RolloutStatus:
    """One rollout in progress. `since` is when its phase, or its turn, began; `attempt` counts from 1.

    Every change of phase or turn is felt by the `pulse`, which all rollouts of an engine share.
    """

    trajectory_id: str
    task_id: str
    since: float
    pulse: Pulse | None = None
    phase: RolloutPhase = RolloutPhase.QUEUED
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
        if phase is RolloutPhase.QUEUED:
            self.turn, self.doing = 0, ""
        if self.pulse is not None:
            self.pulse.at = now

    def enter_turn(self, turn: int, doing: str, *, now: float) -> None:
        """The episode is `doing` (sampling, acting) its turn number `turn` from now on."""
        self.turn, self.doing, self.since = turn, doing, now
        if self.pulse is not None:
            self.pulse.at = now

    def spent(self, *phases: RolloutPhase) -> float:
        """Seconds booked in these phases, over all attempts."""
        return sum(self.seconds.get(phase, 0.0) for phase in phases)

    def __str__(self) -> str:
        turn = f", turn {self.turn} {self.doing}".rstrip() if self.phase is RolloutPhase.EPISODE else ""
        sandbox = f", sandbox {self.sandbox_id}" if self.sandbox_id else ""
        return f"rollout {self.trajectory_id}, phase {self.phase.value}{turn}{sandbox}, attempt {self.attempt}"


@dataclass(frozen=True, slots=True)
class Watchdog:
    """Finds what stands still: a rollout for `stuck_s` in one phase and turn, all of them for `stall_s`."""

    stuck_s: float
    stall_s: float

    def is_stuck(self, status: RolloutStatus, *, now: float) -> bool:
        """True where it stands still by itself; who waits for a sandbox, for admission or a slot does not."""
        return now - status.since >= self.stuck_s and status.phase not in WAITS

    def is_stalled(self, pulse: Pulse, *, now: float) -> bool:
        """True where no rollout has made progress for `stall_s`."""
        return now - pulse.at >= self.stall_s


@dataclass(frozen=True, slots=True)
class Usage:
    """An interval: its wall seconds, time-weighted mean and peak of active rollouts."""

    wall_s: float
    concurrency_mean: float
    concurrency_peak: int


class ConcurrencyMeter:
    """Time-weighted count of active rollouts, from one `read` to the next."""

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

"""Which finished groups are trained, and how long a run may go on with nothing to learn from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import RunFailedError


class Verdict(StrEnum):
    """What becomes of a finished group."""

    ACCEPTED = "accepted"
    ZERO_VARIANCE = "zero_variance"
    TOO_FEW_VALID = "too_few_valid"
    STALE = "stale"
    FAILED = "failed"

    @property
    def filtered(self) -> bool:
        """True where the group ran to its end and is left out all the same."""
        return self in (Verdict.ZERO_VARIANCE, Verdict.TOO_FEW_VALID, Verdict.STALE)


def judge(advantages: NDArray[np.float64], *, min_valid: int) -> Verdict:
    """The verdict on a group with these advantages [n] (NaN: the member failed on infrastructure).

    No valid member: failed. Fewer than `min_valid` (at most the group's size counts): too few. Every
    advantage 0: nothing to learn, whatever the advantage function, because a policy gradient of 0 only
    dilutes the batch.
    """
    valid = advantages[~np.isnan(advantages)]
    if valid.size == 0:
        return Verdict.FAILED
    if valid.size < min(min_valid, advantages.size):
        return Verdict.TOO_FEW_VALID
    return Verdict.ACCEPTED if np.any(valid != 0) else Verdict.ZERO_VARIANCE


def judge_taught(scored: Sequence[bool]) -> Verdict:
    """The verdict on a group that teachers score: one entry per segment of its valid members, True where any token was
    scored."""
    if not scored:
        return Verdict.FAILED
    return Verdict.ACCEPTED if any(scored) else Verdict.ZERO_VARIANCE


@dataclass(frozen=True, slots=True)
class FilterCounts:
    """How many groups got which verdict."""

    accepted: int = 0
    zero_variance: int = 0
    too_few_valid: int = 0
    stale: int = 0
    failed: int = 0

    @classmethod
    def of(cls, verdicts: Iterable[Verdict]) -> FilterCounts:
        """Count verdicts."""
        found = list(verdicts)
        return cls(**{verdict.value: found.count(verdict) for verdict in Verdict})

    @property
    def filtered(self) -> int:
        return self.zero_variance + self.too_few_valid + self.stale

    @property
    def submitted(self) -> int:
        return self.accepted + self.filtered + self.failed


@dataclass(slots=True)
class DrySpell:
    """Steps in a row without an accepted group: a warning after `warn`, the end of the run after `stop`.

    Without it a run whose groups are all filtered or failing looks alive and hangs for ever.
    """

    warn: int
    stop: int
    length: int = 0

    def observe(self, counts: FilterCounts) -> str | None:
        """Take note of a step; the warning's text once the spell is `warn` long. Raises `RunFailedError`."""
        if counts.accepted:
            self.length = 0
            return None
        self.length += 1
        reason = (
            f"{self.length} steps in a row with nothing to learn from; the last had "
            f"{counts.zero_variance} groups of equal rewards, {counts.too_few_valid} with too few valid "
            f"rollouts, {counts.failed} failed"
        )
        if self.length >= self.stop:
            raise RunFailedError(
                reason,
                where="rollout.zero_variance_stop",
                remedy="look at trajectories with `agentrl view RUN`; try other tasks, a larger "
                "rollout.group_size or a better start (`agentrl sft`)",
            )
        return reason if self.length >= self.warn else None

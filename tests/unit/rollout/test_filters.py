"""Verdicts and the dry spell (K18, K42)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentrl.errors import RunFailedError
from agentrl.rollout.filters import DrySpell, FilterCounts, Verdict, judge
from agentrl.rollout.groups import score_group

nan = np.nan


@pytest.mark.parametrize(
    ("advantages", "verdict"),
    [
        ([1.0, -1.0], Verdict.ACCEPTED),
        ([0.0, 0.0, 0.0], Verdict.ZERO_VARIANCE),
        ([1.0, nan, nan], Verdict.TOO_FEW_VALID),
        ([1.0], Verdict.ACCEPTED),
        ([nan, nan], Verdict.FAILED),
        ([1.0, 0.0, nan], Verdict.ACCEPTED),
    ],
)
def test_verdicts(advantages: list[float], verdict: Verdict) -> None:
    assert judge(np.array(advantages), min_valid=2) is verdict


def test_a_group_is_judged_by_its_valid_members(toys: Any) -> None:
    scored = score_group(toys.group(rewards=[1.0, None, 1.0]), advantage="group_std")
    assert scored.verdict is Verdict.ZERO_VARIANCE
    assert score_group(toys.group(rewards=[1.0, None, 0.0]), advantage="group_std").verdict is Verdict.ACCEPTED
    # Without a baseline equal rewards do teach, unless they are all 0.
    assert score_group(toys.group(rewards=[1.0, 1.0]), advantage="reward").verdict is Verdict.ACCEPTED
    assert score_group(toys.group(rewards=[0.0, 0.0]), advantage="reward").verdict is Verdict.ZERO_VARIANCE


def test_counts_add_up() -> None:
    counts = FilterCounts.of([*Verdict, Verdict.ACCEPTED])
    assert (counts.accepted, counts.filtered, counts.failed, counts.submitted) == (2, 3, 1, 6)


def test_k18_a_dry_spell_warns_then_ends_the_run() -> None:
    spell = DrySpell(warn=2, stop=4)
    dry, wet = FilterCounts(zero_variance=3, failed=1), FilterCounts(accepted=1)
    assert spell.observe(dry) is None
    assert "2 steps in a row" in str(spell.observe(dry))
    assert spell.observe(wet) is None
    assert [spell.observe(dry) is None for _ in range(3)] == [True, False, False]
    with pytest.raises(RunFailedError, match="3 groups of equal rewards, 0 with too few valid rollouts, 1 failed"):
        spell.observe(dry)

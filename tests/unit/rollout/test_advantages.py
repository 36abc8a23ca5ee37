"""Advantages: right values, and the edges (K29, K32, K42)."""

from __future__ import annotations

import math
import typing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import AdvantageConfig
from agentrl.errors import ConfigError
from agentrl.rollout.advantages import advantage_names, advantages

RELATIVE = ("group_std", "group_mean", "rloo")
rewards = st.floats(-100, 100, allow_nan=False)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("group_mean", [0.5, -0.5, -0.5, 0.5]),
        ("group_std", [1.0, -1.0, -1.0, 1.0]),
        ("rloo", [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        ("reward", [1.0, 0.0, 0.0, 1.0]),
    ],
)
def test_worked_example_counts_rollouts_not_segments(name: str, expected: list[float]) -> None:
    """K29: four rollouts of 3, 1, 2, 1 segments have mean 0.5, because only rollouts are passed in."""
    np.testing.assert_allclose(advantages(name, [1.0, 0.0, 0.0, 1.0]), expected)


def test_rloo_is_the_reward_minus_the_others_mean() -> None:
    np.testing.assert_allclose(advantages("rloo", [3.0, 1.0, 2.0]), [3 - 1.5, 1 - 2.5, 2 - 2.0])


@pytest.mark.parametrize("name", advantage_names())
def test_k42_a_failed_member_takes_no_part(name: str) -> None:
    with_failure = advantages(name, [1.0, None, 0.0, 0.0])
    np.testing.assert_allclose(with_failure[[0, 2, 3]], advantages(name, [1.0, 0.0, 0.0]))
    assert math.isnan(with_failure[1])


@pytest.mark.parametrize("name", advantage_names())
def test_k32_a_score_of_zero_is_a_value(name: str) -> None:
    assert not np.isnan(advantages(name, [0.0, 0.0])).any()
    assert advantages("group_mean", [0.0, 1.0])[0] == -0.5


@pytest.mark.parametrize("name", RELATIVE)
@pytest.mark.parametrize("group", [[1.0], [0.0], [0.3, 0.1 + 0.2], [1e6 * (0.1 + 0.2), 1e6 * 0.3], [7.0] * 5])
def test_k32_a_group_of_one_and_equal_rewards_give_exactly_zero(name: str, group: list[float]) -> None:
    assert advantages(name, group).tolist() == [0.0] * len(group)


@pytest.mark.parametrize("name", advantage_names())
def test_a_group_without_valid_members_is_all_nan(name: str) -> None:
    assert np.isnan(advantages(name, [None, None])).all()
    assert advantages(name, []).shape == (0,)


@settings(deadline=None)
@given(st.sampled_from(RELATIVE), st.lists(rewards | st.none(), min_size=1, max_size=8))
def test_relative_advantages_are_finite_and_sum_to_zero(name: str, group: list[float | None]) -> None:
    values = advantages(name, group)
    assert np.isnan(values).tolist() == [reward is None for reward in group]
    valid = values[~np.isnan(values)]
    assert np.isfinite(valid).all()
    assert abs(valid.sum()) <= 1e-6 * max(1.0, np.abs(valid).max(initial=0.0))


@settings(deadline=None)
@given(st.lists(rewards, min_size=2, max_size=8, unique_by=lambda r: round(r, 1)))
def test_group_std_has_unit_deviation(group: list[float]) -> None:
    assert advantages("group_std", group).std() == pytest.approx(1.0)


def test_the_table_and_the_configuration_offer_the_same_choices() -> None:
    assert typing.get_args(AdvantageConfig.model_fields["name"].annotation) == advantage_names()


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match="no advantage 'gae'") as caught:
        advantages("gae", [1.0])
    assert "rloo" in caught.value.remedy

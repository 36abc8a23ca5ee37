"""Rollout correction: golden vectors, edges, and properties."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import CorrectionConfig, RejectionRule
from agentrl.errors import RecordError
from agentrl.train.correction import METRIC_NAMES, correct, preset

ROLLOUT = [[-1.0, -0.5, -2.0, -0.1], [-0.7, -3.0, -0.2, -9.0]]
TRAIN = [[-1.2, -0.4, -1.0, -0.1], [-0.5, -1.5, -0.9, -9.0]]
MASK = [[1, 1, 1, 1], [1, 1, 0, 0]]
AGENT = torch.tensor(MASK, dtype=torch.bool)


def golden(config: CorrectionConfig):
    return correct(
        torch.tensor(TRAIN, dtype=torch.float64),
        torch.tensor(ROLLOUT, dtype=torch.float64),
        torch.tensor(MASK),
        config,
    )


def none(*rules: RejectionRule) -> CorrectionConfig:
    return CorrectionConfig(action="none", upper=None, reject=rules)


def close(found, expected, tolerance: float = 5e-6) -> None:
    np.testing.assert_allclose(np.asarray(found), expected, atol=tolerance, rtol=0)


class TestGolden:
    def test_token_clamp(self):
        found = golden(preset("token-clamp-2"))
        close(found.weights, [[0.81873, 1.10517, 2, 1], [1.22140, 2, 0, 0]])
        close(found.weights[AGENT].mean(), 1.357551, 1e-6)
        close(found.weights[AGENT].std(correction=0), 0.470086, 1e-6)
        metrics = found.metrics
        close(
            [metrics[k] for k in ("ess", "clamped_fraction", "applied_weight_mean", "applied_weight_std")],
            [0.892932, 1 / 3, 1.357551, 0.470086],
            1e-6,
        )
        raw = [0.81873, 1.10517, 2.71828, 1, 1.22140, 4.48169]
        close(
            [metrics[k] for k in ("weight_mean", "weight_max", "weight_min", "weight_std")],
            [np.mean(raw), 4.48169, 0.81873, np.std(raw)],
        )
        assert torch.equal(found.mask, AGENT)
        assert found.weights.dtype == torch.float64

    def test_token_mask(self):
        found = golden(preset("token-mask-2"))
        close(found.weights, [[0.81873, 1.10517, 0, 1], [1.22140, 0, 0, 0]])
        close(
            [found.metrics[k] for k in ("masked_token_fraction", "ess", "clamped_fraction", "weight_max")],
            [1 / 3, 0.653335, 0, 4.48169],
        )
        assert torch.equal(found.mask, AGENT)  # zeroed weights stay in the denominator

    def test_sequence(self):
        found = golden(CorrectionConfig(level="sequence", upper=100.0))
        close(found.weights, [[2.459603] * 4, [5.473947] * 2 + [0, 0]], 1e-6)
        close(golden(CorrectionConfig(level="sequence")).weights, [[2] * 4, [2, 2, 0, 0]])

    def test_geometric(self):
        found = golden(CorrectionConfig(level="geometric", upper=100.0))
        close(found.weights, [[1.252323] * 4, [2.339647] * 2 + [0, 0]], 1e-6)

    @pytest.mark.parametrize(
        ("stat", "agg", "first", "second"),
        [
            ("k1", "sum", 0.9, 1.7),
            ("k1", "mean", 0.225, 0.85),
            ("k1", "max", 1.0, 1.5),
            ("k2", "sum", 0.525, 1.145),
            ("k2", "mean", 0.13125, 0.5725),
            ("k2", "max", 0.5, 1.125),
            ("k3", "sum", 0.742183, 2.003092),
            ("k3", "mean", 0.185546, 1.001546),
            ("k3", "max", 0.71828, 1.98169),
            ("ratio", "max", 2.71828, 4.48169),
        ],
    )
    def test_sequence_rules(self, stat, agg, first, second):
        """The statistic itself is not returned: a bound just below and just above it brackets the golden
        value."""

        def rows_kept(upper: float) -> list[bool]:
            rule = RejectionRule(stat=stat, level="sequence", agg=agg, upper=upper)
            return golden(none(rule)).mask.any(-1).tolist()

        assert rows_kept(first - 2e-5) == [False, False]
        assert rows_kept(first + 2e-5) == [True, False]
        assert rows_kept(second - 2e-5) == [True, False]
        assert rows_kept(second + 2e-5) == [True, True]

    @pytest.mark.parametrize(
        ("upper", "kept"),
        [
            (0.2, [[1, 1, 0, 1], [1, 0, 0, 0]]),
            (0.02, [[1, 1, 0, 1], [0, 0, 0, 0]]),
            (0.0186, [[0, 1, 0, 1], [0, 0, 0, 0]]),
        ],
    )
    def test_token_k3(self, upper, kept):
        found = golden(none(RejectionRule(stat="k3", upper=upper)))
        assert found.mask.int().tolist() == kept
        close(found.weights, np.array(MASK))  # rejection never changes a weight
        close(found.metrics["masked_token_fraction"], 1 - sum(map(sum, kept)) / 6, 1e-9)
        close(found.metrics["masked_sequence_fraction"], 0.0 if sum(kept[1]) else 0.5, 1e-9)

    @pytest.mark.parametrize("config", [preset("token-clamp-2"), preset("token-mask-2"), preset("off")])
    def test_shared_metrics(self, config):
        metrics = golden(config).metrics
        names = ("kl", "k3_kl", "train_ppl", "rollout_ppl", "ppl_ratio", "chi2_token", "chi2_sequence")
        expected = [-0.433333, 0.457546, 2.341157, 4.409711, 0.612966, 4.309690, 17.006874]
        close([metrics[k] for k in names], expected, 1e-6)
        close([metrics["weight_max"], metrics["weight_min"]], [4.48169, 0.81873])
        assert set(metrics) == {*METRIC_NAMES, "nonfinite_tokens"}

    def test_lists_arrays_and_float32(self):
        wide = correct(TRAIN, ROLLOUT, MASK, preset("token-clamp-2"))
        assert wide.weights.dtype == torch.float64
        narrow = correct(
            np.array(TRAIN, np.float32), torch.tensor(ROLLOUT), np.array(MASK, bool), preset("token-clamp-2")
        )
        assert narrow.weights.dtype == torch.float32
        close(narrow.weights, wide.weights.numpy(), 1e-6)
        half = correct(torch.tensor(TRAIN).bfloat16(), torch.tensor(ROLLOUT).bfloat16(), MASK, preset("token-clamp-2"))
        assert half.weights.dtype == torch.float32


class TestActions:
    def test_clamp_has_no_lower_bound_unless_given(self):
        train, rollout, mask = [[-5.0, -1.0]], [[-1.0, -1.0]], [[1, 1]]
        close(correct(train, rollout, mask, preset("token-clamp-2")).weights, [[math.exp(-4), 1]])
        lifted = correct(train, rollout, mask, CorrectionConfig(lower=0.5, upper=2.0))
        close(lifted.weights, [[0.5, 1]])
        assert lifted.metrics["clamped_fraction"] == 0.5

    def test_lower_clamp_does_not_lift_masked_positions(self):
        found = correct(TRAIN, ROLLOUT, MASK, CorrectionConfig(lower=0.5, upper=2.0))
        assert found.weights[1, 2:].tolist() == [0, 0]

    def test_mask_without_lower_keeps_small_ratios(self):
        found = correct([[-9.0, 0.0]], [[-1.0, -1.0]], [[1, 1]], CorrectionConfig(action="mask", upper=2.0))
        close(found.weights, [[math.exp(-8), 0]])
        assert found.metrics["masked_token_fraction"] == 0.5

    def test_rejection_bounds_are_inclusive_and_rules_are_anded(self):
        train, rollout, mask = [[0.0, -0.5, -1.0]], [[-1.0, -1.0, -1.0]], [[1, 1, 1]]
        edge = correct(train, rollout, mask, none(RejectionRule(stat="k1", lower=0.5, upper=1.0)))
        assert edge.mask.tolist() == [[True, True, False]]
        both = correct(
            train,
            rollout,
            mask,
            none(RejectionRule(stat="k1", lower=0.5), RejectionRule(stat="k1", upper=0.5)),
        )
        assert both.mask.tolist() == [[False, True, False]]
        assert both.metrics["masked_token_fraction"] == pytest.approx(2 / 3)

    def test_a_sequence_is_masked_only_when_all_its_tokens_are(self):
        train = [[0.0, -1.0, -5.0], [0.0, 0.0, -5.0], [0.0, 0.0, 0.0]]
        rollout = [[-1.0, -1.0, -5.0], [-1.0, -1.0, -5.0], [0.0, 0.0, 0.0]]
        mask = [[1, 1, 0], [1, 1, 0], [0, 0, 0]]  # the last row is padding
        found = correct(train, rollout, mask, preset("token-mask-2"))
        assert found.metrics["masked_sequence_fraction"] == 0.5
        assert found.metrics["masked_token_fraction"] == 0.75

    def test_mask_action_and_rejection_join_in_the_masked_fraction(self):
        train, rollout, mask = [[0.0, -2.0, -1.0]], [[-1.0, -1.0, -1.0]], [[1, 1, 1]]
        config = CorrectionConfig(action="mask", upper=2.0, reject=(RejectionRule(stat="k1", lower=-0.5),))
        found = correct(train, rollout, mask, config)
        assert found.mask.tolist() == [[True, False, True]]
        assert found.metrics["masked_token_fraction"] == pytest.approx(2 / 3)

    def test_off_leaves_every_weight_one(self):
        found = golden(preset("off"))
        close(found.weights, np.array(MASK))
        assert (found.metrics["ess"], found.metrics["masked_token_fraction"]) == (1.0, 0.0)


class TestEdges:
    @pytest.mark.parametrize("junk", [math.nan, 1e9, -1e9, math.inf, -math.inf])
    @pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
    def test_masked_positions_contribute_exactly_nothing(self, junk, level):
        train, rollout = torch.tensor(TRAIN, dtype=torch.float64), torch.tensor(ROLLOUT, dtype=torch.float64)
        rules = tuple(RejectionRule(stat="k3", level="sequence", agg=agg, upper=5.0) for agg in ("sum", "mean", "max"))
        config = CorrectionConfig(level=level, upper=3.0, reject=rules)
        clean = correct(train, rollout, AGENT, config)
        for a, b in ((junk, 0.0), (0.0, junk), (junk, junk)):
            dirty = correct(
                torch.where(AGENT, train, a).to(train),
                torch.where(AGENT, rollout, b).to(train),
                AGENT,
                config,
            )
            assert torch.equal(dirty.weights, clean.weights)
            assert torch.equal(dirty.mask, clean.mask)
            assert dirty.metrics == clean.metrics

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("side", ["train", "rollout"])
    def test_non_finite_token_leaves_and_is_counted(self, value, side):
        train, rollout = np.array(TRAIN), np.array(ROLLOUT)
        (train if side == "train" else rollout)[0, 2] = value
        found = correct(train, rollout, MASK, CorrectionConfig(level="sequence", upper=100.0))
        without = correct(TRAIN, ROLLOUT, [[1, 1, 0, 1], [1, 1, 0, 0]], CorrectionConfig(level="sequence", upper=100.0))
        assert torch.equal(found.weights, without.weights)
        assert found.mask.tolist() == [[True, True, False, True], [True, True, False, False]]
        assert found.metrics["nonfinite_tokens"] == 1
        assert without.metrics["nonfinite_tokens"] == 0
        assert {**found.metrics, "nonfinite_tokens": 0} == without.metrics
        assert all(math.isfinite(v) for v in found.metrics.values())

    @pytest.mark.parametrize("shape", [(2, 3), (0, 4), (2, 0)])
    def test_nothing_left_is_no_exception(self, shape):
        found = correct(torch.zeros(shape), torch.zeros(shape), torch.zeros(shape), preset("token-clamp-2"))
        assert not found.mask.any()
        assert float(found.weights.sum()) == 0
        assert set(found.metrics.values()) == {0.0}

    def test_every_weight_masked_has_ess_zero(self):
        found = correct([[0.0, 0.0]], [[-3.0, -3.0]], [[1, 1]], preset("token-mask-2"))
        assert found.weights.tolist() == [[0, 0]]
        assert found.metrics["ess"] == 0
        assert found.metrics["masked_sequence_fraction"] == 1
        assert found.mask.all()

    @pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
    def test_exponent_is_bounded(self, level):
        config = CorrectionConfig(level=level, upper=1e30)
        for sign in (1, -1):
            found = correct([[sign * 500.0] * 3], [[0.0] * 3], [[1, 1, 1]], config)
            close(found.weights / math.exp(sign * 20), np.ones((1, 3)), 1e-9)
            assert all(math.isfinite(v) for v in found.metrics.values())

    def test_unequal_shapes_are_refused(self):
        """K4: never padded, truncated or broadcast."""
        for shapes in (
            ((2, 4), (2, 3), (2, 4)),
            ((2, 4), (1, 4), (2, 4)),
            ((4,), (4,), (4,)),
            ((2, 4), (2, 4), (2, 1)),
        ):
            with pytest.raises(RecordError, match="shape"):
                correct(*(torch.zeros(s) for s in shapes), preset("token-clamp-2"))

    def test_gradient_never_flows_through_the_weights(self):
        train = torch.tensor(TRAIN, requires_grad=True)
        found = correct(train, torch.tensor(ROLLOUT), AGENT, preset("token-clamp-2"))
        assert not found.weights.requires_grad

    def test_presets_are_those_of_the_configuration(self):
        assert preset("token-mask-2").lower == 0.5
        assert preset("token-clamp-2").action == "clamp"
        with pytest.raises(ValueError, match="token-clamp-2"):
            preset("nonsense")


@settings(max_examples=40, deadline=None)
@given(data=st.data(), rows=st.integers(1, 4), width=st.integers(1, 6))
def test_rows_and_padding_are_independent(data, rows, width):
    """A row's weights and mask do not depend on what it is batched with or how far it is padded (K31)."""
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    train, rollout = draw.normal(-1, 1.5, (2, rows, width))
    mask = draw.random((rows, width)) < 0.7
    level = data.draw(st.sampled_from(["token", "sequence", "geometric"]))
    action = data.draw(st.sampled_from(["clamp", "mask"]))
    rules = (
        RejectionRule(stat="k3", level="sequence", agg="mean", upper=1.0),
        RejectionRule(stat="ratio", upper=6.0),
    )
    config = CorrectionConfig(level=level, action=action, lower=0.4, upper=2.5, reject=rules)
    whole = correct(train, rollout, mask, config)
    assert not (whole.mask.numpy() & ~mask).any()
    for row in range(rows):
        padded = [
            np.pad(x[row : row + 1], ((0, 0), (0, 3)), constant_values=c) for x, c in ((train, np.nan), (rollout, 9))
        ]
        alone = correct(*padded, np.pad(mask[row : row + 1], ((0, 0), (0, 3))), config)
        np.testing.assert_allclose(alone.weights[0, :width], whole.weights[row], rtol=1e-12)
        assert torch.equal(alone.mask[0, :width], whole.mask[row])
        assert not alone.weights[0, width:].any()

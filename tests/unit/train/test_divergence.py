"""Divergences: their gradient against the formulas on three tokens, clamp, discount, spans, tail."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import CorrectionConfig, DivergenceConfig, LossConfig, correction_preset
from agentrl.train.divergence import candidate_divergence, sampled_advantages
from agentrl.train.logprobs import Candidates, token_logprobs
from agentrl.train.packing import pack
from agentrl.train.update import Gradient, Objective, compute_gradient
from agentrl.wire import TrainSequence

OVER_CANDIDATES = ("reverse_kl", "forward_kl", "jsd")
BETA = 0.3
OFF = correction_preset("off")

TOKENS = np.array([0, 1, 0, 2, 1], np.int32)  # each scored token after another one
SCORED = np.array([False, True, True, False, True])
LOGITS = [[0.5, -1.0, 0.3], [1.2, 0.1, -0.7], [-0.4, 0.8, 0.2]]
TEACHER = np.array([[0.2, 0.7, 0.1], [0.05, 0.15, 0.8], [0.6, 0.3, 0.1]])


class TableModel(torch.nn.Module):
    """A language model over three tokens in float64: row v of `table` is the logits after token v."""

    def __init__(self, logits=LOGITS) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor(logits, dtype=torch.float64))

    def base_model(self, *, input_ids, use_cache):
        return SimpleNamespace(last_hidden_state=self.table[input_ids])

    def get_output_embeddings(self):
        return torch.nn.Identity()


def student() -> np.ndarray:
    """p [3, 3]: rows by the token before."""
    return torch.tensor(LOGITS, dtype=torch.float64).softmax(-1).numpy()


def divergence(name: str, **settings) -> DivergenceConfig:
    return DivergenceConfig(name=name, **({"jsd_beta": BETA} if name == "jsd" else {}) | {"clamp": 50.0} | settings)


def given_tokens(**streams) -> TrainSequence:
    """TOKENS, scored by TEACHER at the three tokens of SCORED; behaviour is the student's own."""
    own = np.log(student()[TOKENS[:-1], TOKENS[1:]])
    teacher = np.full(5, np.nan)
    teacher[SCORED] = np.log(TEACHER[np.arange(3), TOKENS[SCORED]])
    values = {
        "pg_mask": np.zeros(5, bool),
        "advantages": np.zeros(5, np.float32),
        "behaviour_logprobs": np.concatenate([[0.0], own]),
        "versions": np.zeros(5, np.int32),
        "teacher_logprobs": teacher,
        "teacher_weights": SCORED.astype(np.float32),
    }
    return TrainSequence(trajectory_id="t", group_id="g", segment=0, update=0, token_ids=TOKENS, **(values | streams))


def trained(
    sequence: TrainSequence,
    config: DivergenceConfig,
    *,
    correction: CorrectionConfig = OFF,
    loss: LossConfig | None = None,
) -> tuple[Gradient, np.ndarray]:
    """The update's summary and the gradient [3, 3] of the table."""
    model = TableModel()
    goal = Objective(
        loss=loss or LossConfig(name="reinforce"), correction=correction, temperature=1.0, old={}, divergence=config
    )
    (micro,) = pack([sequence], tokens_per_microbatch=64, candidates=config.name != "sampled")
    summary = compute_gradient(model, [micro], goal)  # type: ignore[arg-type]
    return summary, model.table.grad.numpy()


def analytic(name: str, p: np.ndarray, q: np.ndarray, group: np.ndarray) -> tuple[float, np.ndarray]:
    """D and ∂D/∂logits [V] of one token, by hand: outcomes are groups of tokens, P_k = Σ p_v of the group.

    With h_k = ∂D/∂P_k, ∂D/∂z_j = p_j (h_{k(j)} − Σ_i p_i h_{k(i)}), whatever constant is added to h.
    """
    big_p, big_q = np.bincount(group, p), np.bincount(group, q)
    big_m = BETA * big_q + (1 - BETA) * big_p
    reverse, forward = big_p @ np.log(big_p / big_q), big_q @ np.log(big_q / big_p)
    mixed = BETA * (big_q @ np.log(big_q / big_m)) + (1 - BETA) * (big_p @ np.log(big_p / big_m))
    value = {"reverse_kl": reverse, "forward_kl": forward, "jsd": mixed}[name]
    slope = {
        "reverse_kl": np.log(big_p / big_q),
        "forward_kl": -big_q / big_p,
        "jsd": (1 - BETA) * np.log(big_p / big_m),
    }[name][group]
    return float(value), p * (slope - p @ slope)


def candidates_of(groups: list[list[int]]) -> dict[str, np.ndarray]:
    """Streams with these candidates at the three scored tokens, −1 and NaN where a row has fewer."""
    width = max(len(row) for row in groups)
    ids = np.full((3, width), -1, np.int32)
    logprobs = np.full((3, width), np.nan)
    for i, row in enumerate(groups):
        ids[i, : len(row)] = row
        logprobs[i, : len(row)] = np.log(TEACHER[i, row])
    return {"candidate_ids": ids, "candidate_logprobs": logprobs}


SUPPORTS = {
    "vocabulary": ({"candidate_logprobs": np.log(TEACHER)}, [[0, 1, 2]] * 3),
    "all three by id": (candidates_of([[2, 0, 1], [0, 1, 2], [1, 2, 0]]), [[0, 1, 2]] * 3),
    "two and a tail of one": (candidates_of([[1, 0], [2, 1], [0, 2]]), [[0, 1, 2], [0, 1, 2], [0, 1, 2]]),
    "one and a tail of two": (candidates_of([[1], [2], [0]]), [[0, 1, 0], [0, 0, 1], [1, 0, 0]]),
    "as many as there are": (candidates_of([[1], [2, 0], [0, 1, 2]]), [[0, 1, 0], [0, 1, 2], [0, 1, 2]]),
}


class TestThreeTokens:
    @pytest.mark.parametrize("name", OVER_CANDIDATES)
    @pytest.mark.parametrize("support", SUPPORTS)
    def test_gradient_is_the_analytic_one(self, name, support):
        streams, groups = SUPPORTS[support]
        summary, found = trained(given_tokens(**streams), divergence(name))
        expected, values = np.zeros((3, 3)), []
        for q, before, group in zip(TEACHER, TOKENS[np.flatnonzero(SCORED) - 1], groups, strict=True):
            value, slope = analytic(name, student()[before], q, np.array(group))
            values.append(value)
            expected[before] += slope / 3
        np.testing.assert_allclose(found, expected, atol=2e-7)  # the teacher's scores travel in float32
        assert np.abs(expected).max() > 0.01
        assert summary.divergence_loss == pytest.approx(np.mean(values), abs=2e-7)
        assert (summary.counts.divergence, summary.clamped) == (3, 0)

    @pytest.mark.parametrize("name", OVER_CANDIDATES)
    def test_gradient_is_the_analytic_one_to_float64(self, name):
        p_logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
        ids = torch.tensor([[0, 1, 2]])
        mask = torch.tensor([[False, True, True, True]])
        model = TableModel()
        model.table = torch.nn.Parameter(p_logits)
        tokens = torch.tensor([[0, 1, 2, 0]])
        for asked in (None, torch.tensor([[1], [2], [0]])):
            out = token_logprobs(
                model, token_ids=tokens, needed=mask, temperature=1.0, candidates=Candidates(mask=mask, ids=asked)
            )
            q = torch.tensor(np.log(TEACHER))
            given_q = q if asked is None else q.gather(-1, asked)
            found = candidate_divergence(student=out.candidates, teacher_logprobs=given_q, config=divergence(name))
            (slopes,) = torch.autograd.grad(found.values.sum(), model.table)
            for i in range(3):
                group = ids[0] if asked is None else (ids[0] == asked[i]).long()
                value, slope = analytic(name, student()[i], TEACHER[i], group.numpy())
                assert float(found.values[i].detach()) == pytest.approx(value, rel=1e-12)
                np.testing.assert_allclose(slopes[i], slope, atol=1e-14, rtol=1e-12)

    def test_sampled_gradient_is_the_analytic_one(self):
        summary, found = trained(given_tokens(), divergence("sampled"))
        expected = np.zeros((3, 3))
        for q, at in zip(TEACHER, np.flatnonzero(SCORED), strict=True):
            p, y = student()[TOKENS[at - 1]], TOKENS[at]
            expected[TOKENS[at - 1]] += -(np.log(q[y]) - np.log(p[y])) * (np.eye(3)[y] - p) / 3
        np.testing.assert_allclose(found, expected, atol=2e-7)
        assert summary.clamped == 0

    def test_sampled_is_reverse_kl_in_the_mean(self):
        """Σ_y p(y) · gradient at sampled y = gradient of the whole reverse KL."""
        p, total = student()[0], np.zeros(3)
        weights = np.array([0, 1], np.float32)
        for y in range(3):
            sequence = given_tokens(
                pg_mask=np.zeros(2, bool),
                advantages=np.zeros(2),
                behaviour_logprobs=np.array([0, np.log(p[y])]),
                versions=np.zeros(2, np.int32),
                teacher_logprobs=np.array([np.nan, np.log(TEACHER[0, y])]),
                teacher_weights=weights,
            )
            sequence = TrainSequence(**{**_fields(sequence), "token_ids": np.array([0, y], np.int32)})
            total += p[y] * trained(sequence, divergence("sampled"))[1][0]
        np.testing.assert_allclose(total, analytic("reverse_kl", p, TEACHER[0], np.arange(3))[1], atol=2e-7)

    @pytest.mark.parametrize("name", ["sampled", *OVER_CANDIDATES])
    @pytest.mark.parametrize("mode", ["decoupled", "bypass"])
    def test_teacher_and_correction_weights_multiply(self, name, mode):
        """w = π_old/π_rollout = 1.5 at the middle one of three tokens; the first has teacher weight 0.5."""
        base = given_tokens(candidate_logprobs=np.log(TEACHER))
        behaviour = base.behaviour_logprobs.copy()
        behaviour[2] -= np.log(1.5)
        weights = np.array([0, 0.5, 1, 0, 1], np.float32)
        changed = given_tokens(
            candidate_logprobs=np.log(TEACHER), behaviour_logprobs=behaviour, teacher_weights=weights
        )
        clamp = CorrectionConfig(level="token", action="clamp", upper=2.0)
        # A divergence over candidates has no ratio, so that the whole weight stands in bypass mode too.
        loss = LossConfig(name="reinforce" if name == "sampled" else "ppo_clip", mode=mode)
        settings = {"correction": clamp, "loss": loss}
        plain, found = trained(base, divergence(name), **settings)[1], trained(changed, divergence(name), **settings)[1]
        for token, factor in ((1, 0.5), (2, 1.5), (4, 1.0)):
            before = TOKENS[token - 1]
            np.testing.assert_allclose(found[before], factor * plain[before], atol=1e-6)

    @pytest.mark.parametrize("name", ["sampled", *OVER_CANDIDATES])
    def test_k35_gradient_depends_on_the_teacher(self, name):
        """K35: perturbing the teacher changes the gradient, of every divergence."""
        other = np.roll(TEACHER, 1, axis=-1)
        sampled = np.full(5, np.nan)
        sampled[SCORED] = np.log(other[np.arange(3), TOKENS[SCORED]])
        one = trained(given_tokens(candidate_logprobs=np.log(TEACHER)), divergence(name))[1]
        two = trained(given_tokens(candidate_logprobs=np.log(other), teacher_logprobs=sampled), divergence(name))[1]
        assert np.abs(one - two).max() > 0.02


def _fields(sequence: TrainSequence) -> dict:
    return {name: getattr(sequence, name) for name in sequence.__struct_fields__}


class TestClamp:
    @pytest.mark.parametrize("name", OVER_CANDIDATES)
    def test_value_is_cut_and_the_gradient_keeps_its_direction(self, name):
        streams = {"candidate_logprobs": np.log(TEACHER)}
        befores = TOKENS[np.flatnonzero(SCORED) - 1]
        values = [analytic(name, student()[b], q, np.arange(3))[0] for b, q in zip(befores, TEACHER, strict=True)]
        clamp = float(np.median(values))
        summary, found = trained(given_tokens(**streams), divergence(name, clamp=clamp * 1.001))
        _, free = trained(given_tokens(**streams), divergence(name))
        assert summary.clamped == 1
        for before, value in zip(befores, values, strict=True):
            np.testing.assert_allclose(found[before], free[before] * min(1, clamp * 1.001 / value), atol=1e-6)
        assert np.abs(found[befores[int(np.argmax(values))]]).max() > 1e-3

    def test_sampled_gap_is_cut_before_it_is_summed(self):
        found = sampled_advantages(
            logprobs=torch.tensor([[-1.0, -2.0, -1.0, -1.0]], requires_grad=True),
            teacher_logprobs=torch.tensor([[-0.5, -3.0, -90.0, torch.nan]]),
            teacher_weights=torch.tensor([[1.0, 0.5, 1.0, 0.0]]),
            teacher_spans=torch.tensor([[0, 1, 2, -1]]),
            config=DivergenceConfig(discount=1.0),
        )
        assert not found.values.requires_grad
        np.testing.assert_allclose(found.values, [[0.5 - 1 - 5, 0.5 * (-1 - 5), -5, 0]])
        assert found.clamped.tolist() == [[False, False, True, False]]

    def test_default_is_each_token_by_itself(self):
        found = sampled_advantages(
            logprobs=torch.tensor([[-1.0, -2.0, -1.0, -1.0]]),
            teacher_logprobs=torch.tensor([[-0.5, -3.0, -90.0, torch.nan]]),
            teacher_weights=torch.tensor([[1.0, 0.5, 1.0, 0.0]]),
            teacher_spans=torch.tensor([[0, 1, 2, -1]]),
            config=DivergenceConfig(),
        )
        np.testing.assert_allclose(found.values, [[0.5, -0.5, -5, 0]])


class TestSpansAndDiscount:
    @settings(max_examples=60, deadline=None)
    @given(data=st.data(), discount=st.sampled_from([0.0, 0.5, 0.95, 1.0]), length=st.integers(1, 40))
    def test_equal_to_the_formula(self, data, discount, length):
        """Σ_j γ^j g_{s+j} over the spans that follow, by a double loop."""
        draw = np.random.default_rng(data.draw(st.integers(0, 10**6)))
        scored = draw.random(length) < 0.7
        starts = scored & ((draw.random(length) < 0.6) | (np.cumsum(scored) == 1))
        spans = np.where(scored, np.cumsum(starts) - 1, -1)
        gaps = draw.normal(0, 3, length)
        numbers = np.unique(spans[scored])
        per_span = [np.clip(gaps[spans == n].sum(), -5, 5) for n in numbers]
        expected = np.zeros(length)
        for i, n in enumerate(numbers):
            expected[spans == n] = sum(discount**j * g for j, g in enumerate(per_span[i:]))
        own = draw.normal(-2, 1, length)
        found = sampled_advantages(
            logprobs=torch.tensor(own)[None],
            teacher_logprobs=torch.tensor(np.where(scored, own + gaps, np.nan))[None],
            teacher_weights=torch.tensor(scored.astype(np.float64))[None],
            teacher_spans=torch.tensor(spans)[None],
            config=DivergenceConfig(discount=discount),
        )
        np.testing.assert_allclose(found.values[0], expected, atol=1e-9)

    def test_k39_every_token_of_a_span_has_the_gap_of_all(self):
        """K39: the student's tokens 1, 2 are one span; the disagreement is in the second of them alone."""
        spans = np.array([-1, 7, 7, -1, 9], np.int32)
        teacher = np.array([np.nan, -0.5, -2.5, np.nan, -1.0])
        own = np.array([0, -1.0, -1.0, 0, -1.0])
        sequence = given_tokens(teacher_spans=spans, teacher_logprobs=teacher)
        (micro,) = pack([sequence], tokens_per_microbatch=64)
        assert micro.teacher_spans.tolist() == [[-1, 0, 0, -1, 1]]
        found = sampled_advantages(
            logprobs=torch.tensor(own)[None],
            teacher_logprobs=micro.teacher_logprobs,
            teacher_weights=micro.teacher_weights,
            teacher_spans=micro.teacher_spans,
            config=DivergenceConfig(),
        )
        np.testing.assert_allclose(found.values, [[0, -1, -1, 0, 0]])  # (−3) − (−2), for both

    def test_spans_of_one_token_are_no_spans(self):
        numbers = np.array([-1, 4, 5, -1, 6], np.int32)
        for config in (divergence("sampled"), divergence("sampled", discount=0.9)):
            plain, alone = trained(given_tokens(), config), trained(given_tokens(teacher_spans=numbers), config)
            np.testing.assert_array_equal(plain[1], alone[1])

    def test_discount_sees_what_follows_in_the_segment_only(self):
        """Two sequences in one micro-batch: neither's advantage holds the other's gaps."""
        one, two = given_tokens(), TrainSequence(**{**_fields(given_tokens()), "trajectory_id": "u"})
        config = divergence("sampled", discount=1.0)
        goal = Objective(loss=LossConfig(name="reinforce"), correction=OFF, temperature=1.0, old={}, divergence=config)
        both = TableModel()
        compute_gradient(both, pack([one, two], tokens_per_microbatch=64), goal)  # type: ignore[arg-type]
        np.testing.assert_allclose(both.table.grad, trained(one, config)[1], atol=1e-12)
        assert np.abs(both.table.grad.numpy() - trained(one, divergence("sampled"))[1]).max() > 0.01


class TestTail:
    @settings(max_examples=60, deadline=None)
    @given(seed=st.integers(0, 10**6), vocabulary=st.integers(2, 30), name=st.sampled_from(OVER_CANDIDATES))
    def test_between_zero_and_the_whole(self, seed, vocabulary, name):
        """Merging what is no candidate never raises a divergence; with every token a candidate nothing is lost."""
        draw = np.random.default_rng(seed)
        k = int(draw.integers(1, vocabulary + 1))
        logits, teacher = torch.tensor(draw.normal(0, 2, (2, 4, vocabulary)))
        log_q = teacher.log_softmax(-1)
        ids = torch.tensor(np.argsort(draw.random((4, vocabulary)), axis=-1)[:, :k])
        model, mask = TableModel(logits.tolist()), torch.tensor([[False, True, True, True, True]])
        tokens = torch.tensor([[0, 1, 2, 3, 0]])  # contexts 0 … 3; the tokens themselves do not matter
        tokens[0, :] = tokens[0, :].clamp(max=vocabulary - 1)
        context = tokens[0, :4]

        def found(asked):
            out = token_logprobs(
                model, token_ids=tokens, needed=mask, temperature=1.0, candidates=Candidates(mask=mask, ids=asked)
            )
            q = log_q[context] if asked is None else log_q[context].gather(-1, asked)
            return candidate_divergence(student=out.candidates, teacher_logprobs=q, config=divergence(name)).values

        whole, part = found(None).detach(), found(ids).detach()
        assert (part > -1e-9).all()
        assert (part <= whole + 1e-5).all()  # the teacher's tail is held above its floor
        if k == vocabulary:
            torch.testing.assert_close(part, whole)

    @pytest.mark.parametrize("name", OVER_CANDIDATES)
    @pytest.mark.parametrize("gap", [10.0, 40.0, 80.0])
    def test_a_tail_of_next_to_nothing_has_a_finite_gradient(self, name, gap):
        """float32, the student sure of one token: 1 − Σ p would be 0, and its logarithm's gradient infinite."""
        logits = torch.tensor([[gap, 0.0, 0.0], [0.0, 0.0, 0.0]])
        model, mask = TableModel(), torch.tensor([[False, True]])
        model.table = torch.nn.Parameter(logits)
        for q in ([0.5], [1.0]):
            out = token_logprobs(
                model,
                token_ids=torch.tensor([[0, 1]]),
                needed=mask,
                temperature=1.0,
                candidates=Candidates(mask=mask, ids=torch.tensor([[0]])),
            )
            found = candidate_divergence(
                student=out.candidates, teacher_logprobs=torch.tensor([q]).log(), config=divergence(name, clamp=5.0)
            )
            (slope,) = torch.autograd.grad(found.values.sum(), model.table)
            assert torch.isfinite(slope).all()
            assert 0 <= float(found.values.detach()) + 1e-5 <= 5.0 + 1e-4
            if q == [0.5] and name == "forward_kl":  # 5 / D of q − p, whose tail is shared by two
                whole = 0.5 * np.log(0.5) + 0.5 * (np.log(0.5) + gap - np.log(2))
                scale = min(1.0, 5.0 / whole)
                np.testing.assert_allclose(slope[0], [0.5 * scale, -0.25 * scale, -0.25 * scale], rtol=1e-3)

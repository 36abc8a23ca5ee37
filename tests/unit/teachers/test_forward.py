"""The scoring process's model: batched, padded and cut into chunks it says what the plain model says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_qwen import VOCABULARY, toy_config
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3ForCausalLM

from agentrl.errors import ConfigError
from agentrl_teachers import forward
from agentrl_teachers.forward import ScoringModel
from agentrl_teachers.worker import answers, choose_batch
from agentrl_teachers.worker_messages import Refused, Score, Scored, frame, from_worker, to_worker

WINDOW = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(toy_config(positions=WINDOW)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> ScoringModel:
    return ScoringModel.load(folder, dtype="float32", threads=1)


def ids(length: int, *, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)


def request(number: int, length: int, **fields: object) -> Score:
    positions = np.arange(1, length, dtype=np.int32)
    return Score(**{"number": number, "token_ids": ids(length, seed=number), "positions": positions, **fields})  # type: ignore[arg-type]


def plain(model: ScoringModel, token_ids: np.ndarray) -> np.ndarray:
    """[T, V]: row t is the distribution of token t; row 0 is none."""
    with torch.no_grad():
        logits = model.model(input_ids=torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0]
    return np.concatenate([np.full((1, VOCABULARY), np.nan), logits.log_softmax(-1).numpy()[:-1]])


def test_a_batch_of_many_lengths_scores_as_each_alone(model: ScoringModel) -> None:
    """K6: position t speaks of token t; padding changes nothing."""
    requests = [request(number, length, top_k=3) for number, length in enumerate((2, 40, 17, WINDOW))]
    for asked, got in zip(requests, model.score(requests), strict=True):
        expected = plain(model, asked.token_ids)
        own = expected[np.arange(1, len(asked.token_ids)), asked.token_ids[1:]]
        assert got.number == asked.number
        assert np.abs(got.logprobs - own).max() < 1e-5
        assert np.array_equal(got.top1, expected[1:].argmax(1) == asked.token_ids[1:])
        assert np.abs(got.top_logprobs - np.sort(expected[1:], axis=1)[:, :-4:-1]).max() < 1e-5
        assert np.array_equal(got.top_ids[:, 0], expected[1:].argmax(1))


def test_named_positions_and_candidates(model: ScoringModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_CHUNK_LOGITS", 2 * VOCABULARY)  # three chunks
    positions = np.array([1, 7, 30, 31, 39], dtype=np.int32)
    candidates = np.array([[3, 4], [0, -1], [-1, -1], [VOCABULARY - 1, 5], [9, 9]], dtype=np.int32)
    some = request(0, 40, positions=positions, candidates=candidates)
    every = request(0, 40, positions=positions, vocabulary=True)
    expected = plain(model, some.token_ids)
    one, other = model.score([some, every])
    assert np.abs(one.logprobs - expected[positions, some.token_ids[positions]]).max() < 1e-5
    assert one.candidate_logprobs is not None
    assert other.candidate_logprobs is not None
    assert np.abs(other.candidate_logprobs - expected[positions]).max() < 1e-5
    wanted = np.where(candidates >= 0, np.take_along_axis(expected[positions], np.maximum(candidates, 0), 1), np.nan)
    assert np.array_equal(np.isnan(one.candidate_logprobs), candidates < 0)
    assert np.nanmax(np.abs(one.candidate_logprobs - wanted)) < 1e-5


def test_more_candidates_than_there_are_tokens(model: ScoringModel) -> None:
    (got,) = model.score([request(0, 4, top_k=VOCABULARY + 2)])
    assert (got.top_ids[:, VOCABULARY:] == -1).all()
    assert np.isnan(got.top_logprobs[:, VOCABULARY:]).all()
    assert np.isfinite(got.top_logprobs[:, :VOCABULARY]).all()


def test_half_precision_is_near(folder: Path, model: ScoringModel) -> None:
    half = ScoringModel.load(folder, dtype="bfloat16", threads=1)
    asked = request(0, 40)
    (one,), (other,) = model.score([asked]), half.score([asked])
    assert half.model.dtype == torch.bfloat16
    assert 0 < np.abs(one.logprobs - other.logprobs).max() < 0.3


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"token_ids": ids(1)}, "1 tokens cannot be scored"),
        ({"token_ids": ids(WINDOW + 1)}, f"in a window of {WINDOW}"),
        ({"token_ids": np.array([1, VOCABULARY], np.int32)}, "outside the vocabulary"),
        ({"positions": np.array([0], np.int32)}, "position is outside"),
        ({"positions": np.array([5], np.int32)}, "position is outside"),
        ({"candidates": np.array([[VOCABULARY]] * 4, np.int32)}, "candidate is outside"),
        ({"candidates": np.array([[1]], np.int32)}, "candidates [1, 1] for 4 positions"),
    ],
)
def test_what_cannot_be_scored_is_refused_alone(model: ScoringModel, fields: dict[str, np.ndarray], what: str) -> None:
    got = answers(model, [request(0, 5, **fields), request(1, 5)])
    refused, scored = sorted(got, key=lambda answer: answer.number)
    assert isinstance(refused, Refused)
    assert what in refused.what
    assert isinstance(scored, Scored)


def test_an_answer_that_cannot_travel_is_refused(model: ScoringModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the whole vocabulary a long segment's answer is larger than a message can hold."""
    asked = request(0, 5, vocabulary=True)
    size = 4 * 4 * VOCABULARY
    monkeypatch.setattr(forward, "_ARRAY_BYTES", size + 1)
    (got,) = answers(model, [asked])
    assert isinstance(got, Scored)
    monkeypatch.setattr(forward, "_ARRAY_BYTES", size)
    (refused,) = answers(model, [asked])
    assert isinstance(refused, Refused)
    assert "lower agent.max_tokens" in refused.what
    (other,) = answers(model, [request(0, 5)])
    assert isinstance(other, Scored)


def test_messages_travel_whole() -> None:
    asked = request(7, 5, candidates=np.zeros((4, 0), np.int32), top_k=2)
    got = to_worker(frame(asked)[8:])
    assert isinstance(got, Score)
    assert (got.number, got.top_k, got.vocabulary) == (7, 2, False)
    assert np.array_equal(got.token_ids, asked.token_ids)
    assert got.candidates is not None
    assert got.candidates.shape == (4, 0)
    empty = np.zeros(0, np.float32)
    wide = np.zeros((0, 3), np.float32)
    sent = Scored(number=1, logprobs=empty, top1=empty > 0, top_ids=wide.astype(np.int32), top_logprobs=wide)
    back = from_worker(frame(sent)[8:])
    assert isinstance(back, Scored)
    assert back.top_logprobs.shape == (0, 3)
    assert back.candidate_logprobs is None


def test_a_model_whose_logits_are_more_than_its_heads_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        final_logit_softcapping=0.1,
        initializer_range=0.5,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="changes its logits"):
        ScoringModel.load(tmp_path, dtype="float32", threads=1)


@given(lengths=st.lists(st.integers(2, 300), min_size=1, max_size=20), budget=st.integers(2, 1000))
def test_a_batch_has_the_oldest_and_little_padding(lengths: list[int], budget: int) -> None:
    chosen = choose_batch(lengths, budget=budget)
    assert chosen[0] == 0
    assert len(set(chosen)) == len(chosen)
    padded = max(lengths[index] for index in chosen) * len(chosen)
    if len(chosen) > 1:
        assert padded <= budget
        assert padded <= 1.25 * sum(lengths[index] for index in chosen)


def test_equal_lengths_fill_the_budget() -> None:
    assert choose_batch([10] * 9, budget=50) == [0, 1, 2, 3, 4]

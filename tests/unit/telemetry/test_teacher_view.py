"""Student and teacher side by side: gaps, preferred tokens, and what the pages are fed with."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from agentrl.telemetry.payload import table_payload, trajectory_payload
from agentrl.telemetry.teacher_view import preferred, sides
from agentrl.telemetry.tokens import TokenDecoder
from agentrl.telemetry.trajectories import TrajectoryStore
from agentrl.trajectory.columns import Candidates
from agentrl.trajectory.parquet import read_trajectories

NONE = None


@pytest.fixture(scope="module")
def taught_dir(tmp_path_factory: pytest.TempPathFactory, fake: ModuleType) -> Path:
    """Two teachers, the second of another tokenizer."""
    shape = fake.Shape(steps=2, groups=3, teachers=("big", "other"))
    made: Path = fake.make_run(tmp_path_factory.mktemp("runs") / "taught", shape)
    return made


def test_preferred_are_likelier_than_what_was_sampled_and_the_likeliest_first() -> None:
    logprobs = np.log(np.array([[0.1, 0.5, 0.2, 0.15], [0.9, 0.05, np.nan, 0.01]], np.float32))
    ids = np.array([[4, 5, 6, 7], [9, 4, -1, 8]], np.int32)
    found = preferred(Candidates(np.array([False, True, True]), logprobs, ids), [0, 4, 9], [NONE, np.log(0.1), -0.1054])
    assert list(found) == [1]
    assert [token for token, _ in found[1]] == [5, 6, 7]
    assert found[1][0][1] == pytest.approx(np.log(0.5))


def test_preferred_of_a_whole_vocabulary_and_the_sampled_token_is_none_of_them() -> None:
    """The sampled token's log-probability and its candidate's may differ in the last bit."""
    logprobs = np.log(np.array([[0.05, 0.6, 0.35]], np.float32))
    found = preferred(Candidates(np.array([False, True]), logprobs, None), [0, 2], [NONE, np.log(0.3499)])
    assert {at: [token for token, _ in chosen] for at, chosen in found.items()} == {1: [1]}
    assert preferred(Candidates(np.zeros(2, bool), np.zeros((0, 0), np.float32), None), [0, 2], [NONE, NONE]) == {}


def test_sides_of_single_tokens_and_of_spans() -> None:
    """K39: what was scored together disagrees by its sum; the distance is per token either way."""
    row = {"logprobs": [NONE, -1.0, -0.5, -2.0, NONE], "teacher_logprobs": [NONE, -3.0, -3.0, -1.5, NONE]}
    alone, together = sides(row), sides(row | {"teacher_spans": [NONE, 0, 0, 1, NONE]})
    assert alone is not None
    assert together is not None
    np.testing.assert_allclose(alone.gap, [np.nan, -2.0, -2.5, 0.5, np.nan])
    np.testing.assert_allclose(together.gap, [np.nan, -4.5, -4.5, 0.5, np.nan])
    assert alone.distance.mean() == together.distance.mean() == pytest.approx(4 / 3)
    assert sides({"logprobs": [NONE, -1.0], "teacher_logprobs": None}) is None
    nothing = sides({"logprobs": [NONE, -1.0], "teacher_logprobs": [NONE, NONE], "teacher_spans": [NONE, NONE]})
    assert nothing is not None
    assert nothing.distance.size == 0


@pytest.mark.parametrize(("name", "teacher"), [("s0002-g00-r1", "big"), ("s0002-g01-r1", "other")])
def test_the_page_is_fed_with_both_sides(taught_dir: Path, name: str, teacher: str) -> None:
    """Against the record's own reader, both segments of a compressed trajectory (K38)."""
    files = sorted((taught_dir / "trajectories").iterdir())
    truth = next(t for t, _ in read_trajectories(files) if t.trajectory_id == name)
    vocab: dict[int, str] = {}
    store, decoder = TrajectoryStore(taught_dir), TokenDecoder.of_run(taught_dir)
    payload = trajectory_payload(store.load([name])[name], decoder, vocab, set())
    assert payload["teacher"] == teacher
    assert len(payload["segments"]) == len(truth.scores) == 2
    gaps, agreed = [], []
    for shown, segment, scores in zip(payload["segments"], truth.segments, truth.scores, strict=True):
        agent = segment.agent_mask
        difference = scores.logprobs[agent] - segment.logprobs[agent]
        gaps.append(difference)
        if scores.spans is None:
            assert shown["teacher_gap"] == pytest.approx(difference.tolist(), abs=2e-4)
            assert scores.top1 is not None
            agreed.append(scores.top1[agent])
            assert shown["teacher_top1"] == agreed[-1].tolist()
            # The fake teacher's first choice has 0.7, so it is preferred wherever the sampled token is not the first.
            assert set(shown["preferred"]) <= set(np.flatnonzero(scores.mask).tolist())
            assert len(shown["preferred"]) >= int((~scores.top1 & agent).sum()) // 2 > 0
            assert all(token in vocab for chosen in shown["preferred"].values() for token, _ in chosen)
        else:
            numbers = scores.spans[agent]
            sums = [float(difference[numbers == number].sum()) for number in numbers]
            assert shown["teacher_gap"] == pytest.approx(sums, abs=5e-4)
            assert shown["teacher_spans"] == numbers.tolist()
            assert "preferred" not in shown
            assert "teacher_top1" not in shown
    assert payload["teacher_kl"] == pytest.approx(-np.concatenate(gaps).mean(), abs=1e-3)
    assert payload["teacher_agreement"] == (pytest.approx(np.concatenate(agreed).mean(), abs=1e-4) if agreed else None)


def test_the_table_has_each_trajectorys_distance(taught_dir: Path, run_dir: Path) -> None:
    """The mean over the scored tokens of all segments (K38), so that the farthest can be found by sorting."""
    store = TrajectoryStore(taught_dir)
    truth = {t.trajectory_id: t for t, _ in read_trajectories(sorted((taught_dir / "trajectories").iterdir()))}
    for summary, row in zip(store.summaries(), table_payload(store.summaries()), strict=True):
        t = truth[summary.trajectory_id]
        gaps = [(s.logprobs - k.logprobs)[k.mask] for s, k in zip(t.segments, t.scores, strict=False)]
        expected = float(np.concatenate(gaps).mean()) if gaps else None
        assert summary.teacher_kl == (None if expected is None else pytest.approx(expected, abs=1e-5))
        assert row[-1] == (None if expected is None else pytest.approx(expected, rel=1e-3))
    assert {summary.teacher_kl for summary in TrajectoryStore(run_dir).summaries()} == {None}


def test_without_a_teacher_there_is_nothing_of_it(run_dir: Path) -> None:
    store = TrajectoryStore(run_dir)
    payload = trajectory_payload(store.load(["s0006-g01-r1"])["s0006-g01-r1"], TokenDecoder(None), {}, set())
    assert (payload["teacher"], payload["teacher_kl"], payload["teacher_agreement"]) == (None, None, None)
    assert not {key for segment in payload["segments"] for key in segment if key.startswith(("teacher", "preferred"))}

"""Trajectory files as the pages see them, against the record's own reader."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType

import pytest

from agentrl.errors import RunFolderError
from agentrl.telemetry.payload import trajectory_payload
from agentrl.telemetry.tokens import TokenDecoder
from agentrl.telemetry.trajectories import Summary, TrajectoryStore, latest_with_mates
from agentrl.trajectory.parquet import read_trajectories


def test_index_agrees_with_the_record(run_dir: Path) -> None:
    """K33: tokens are counted over segments, agent tokens from the spans, each rollout once."""
    truth = {t.trajectory_id: t for t, _ in read_trajectories(sorted((run_dir / "trajectories").iterdir()))}
    found = TrajectoryStore(run_dir).summaries()
    assert len(found) == len(truth) == 6 * 4 * 4
    for summary in found:
        t = truth[summary.trajectory_id]
        assert (summary.tokens, summary.agent_tokens) == (t.tokens, t.agent_tokens)
        assert (summary.oldest_version, summary.segments) == (t.oldest_version, len(t.segments))
        assert (summary.reward, summary.turns, summary.task_id) == (t.reward, len(t.turns), t.task_id)
    broken = [summary for summary in found if summary.tokens == 0]
    assert {summary.outcome for summary in broken} == {"infrastructure: SandboxDeadError"}
    assert {summary.agent_share for summary in broken} == {None}


def test_new_files_are_picked_up_and_broken_ones_named(run_dir: Path, tmp_path: Path) -> None:
    live = tmp_path / "live"
    (live / "trajectories").mkdir(parents=True)
    store = TrajectoryStore(live)
    assert store.summaries() == []
    files = sorted((run_dir / "trajectories").iterdir())
    shutil.copy(files[0], live / "trajectories")
    assert len(store.summaries()) == 16
    (live / "trajectories" / "step_000009-torn.parquet").write_bytes(files[1].read_bytes()[:-100])
    assert len(store.summaries()) == 16
    assert len(store.problems) == 1
    assert store.problems[0].startswith("step_000009-torn.parquet: ")
    (live / "trajectories" / files[0].name).unlink()
    assert store.summaries() == []
    assert store.load(["s0001-g00-r0"]) == {}


def test_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run folder"):
        TrajectoryStore(tmp_path / "nowhere")


def summary(name: str, group: str, step: int, *, trained: bool) -> Summary:
    return Summary(
        trajectory_id=name,
        group_id=group,
        task_id="t",
        split="train",
        step=step,
        trained=trained,
        reward=1.0,
        outcome="solved",
        turns=1,
        tokens=10,
        agent_tokens=5,
        segments=1,
        oldest_version=0,
        ended_at=0.0,
    )


def test_latest_groups_come_whole_and_evaluations_leave_room() -> None:
    trained = [summary(f"t{s}-{i}", f"t{s}", s, trained=True) for s in range(9) for i in range(4)]
    evals = [summary(f"e{i}", f"e{i}", 99, trained=False) for i in range(50)]
    chosen = [s.trajectory_id for s in latest_with_mates([*trained, *evals], 12)]
    assert chosen == [f"t{s}-{i}" for s in (8, 7) for i in range(4)] + [f"e{i}" for i in range(4)]
    assert len(latest_with_mates(trained, 12)) == 12
    assert len(latest_with_mates(evals, 12)) == 12
    assert latest_with_mates([], 12) == []


def test_payload_streams_stand_on_agent_tokens(run_dir: Path) -> None:
    store, decoder = TrajectoryStore(run_dir), TokenDecoder.of_run(run_dir)
    files = sorted((run_dir / "trajectories").iterdir())
    truth = {t.trajectory_id: (t, record) for t, record in read_trajectories(files)}
    name = next(s.trajectory_id for s in reversed(store.summaries()) if s.trained and s.segments == 2)
    vocab: dict[int, str] = {}
    special: set[int] = set()
    payload = trajectory_payload(store.load([name])[name], decoder, vocab, special)
    trajectory, trained = truth[name]
    assert trained is not None
    assert [len(segment["ids"]) for segment in payload["segments"]] == [len(s) for s in trajectory.segments]
    for shown, segment, record in zip(payload["segments"], trajectory.segments, trained, strict=True):
        agent = segment.agent_mask
        assert shown["versions"] == segment.versions[agent].tolist()
        assert shown["logprobs"] == pytest.approx(segment.logprobs[agent].tolist(), rel=1e-4)
        assert shown["trained_mask"] == record.mask[agent].tolist()
        assert shown["weights"] == pytest.approx(record.weights[agent].tolist(), rel=1e-4)
        assert "teacher_logprobs" not in shown
        text = "".join(shown["cut"].get(i, vocab[token]) for i, token in enumerate(shown["ids"]))
        assert "Prices in \\xe2\\x82€" in text
    assert any(len(set(segment["versions"])) == 2 for segment in payload["segments"])
    assert {vocab[i] for i in special} >= {"<|im_start|>", "<|im_end|>"}


def test_payload_of_a_rollout_without_tokens(run_dir: Path) -> None:
    store = TrajectoryStore(run_dir)
    name = next(s.trajectory_id for s in store.summaries() if s.tokens == 0)
    payload = trajectory_payload(store.load([name])[name], TokenDecoder(None), {}, set())
    assert (payload["segments"], payload["reward"], payload["cause"]) == ([], None, "SandboxDeadError")


def test_fake_run_has_the_corners(run_dir: Path, fake: ModuleType) -> None:
    assert {s.segments for s in TrajectoryStore(run_dir).summaries()} == {0, 1, 2}
    assert fake.solve_rate(fake.Shape(), 12) - fake.solve_rate(fake.Shape(), 0) > 0.25

"""A real distillation, struck: the teacher is killed, nothing is trained without its scores, and the run goes on.

One run folder for the whole file; the teacher holds the weights that the student starts from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentrl.telemetry.metrics import read_metrics
from agentrl.trajectory import OutcomeKind, read_trajectories

pytestmark = [pytest.mark.vllm, pytest.mark.bubblewrap]


def test_a_killed_teacher_ends_the_run_with_the_way_on(taught: Any, strike: Any) -> None:
    with taught.sit() as sitting:
        sitting.until(r"^step 1/4")
        strike.kill(sitting.module("agentrl_teachers.worker").pid)
        assert sitting.wait(120) == 3
        assert sitting.leftovers(within_s=2) == []
    assert "teacher" in sitting.stderr
    assert "killed by signal 9" in sitting.stderr or "exit code -9" in sitting.stderr, sitting.stderr
    assert f"agentrl distill swe-gym --run-dir {taught.path} --resume" in sitting.stderr
    assert strike.fits(sitting.stderr), sitting.stderr


def test_it_goes_on_to_its_end_and_every_segment_has_its_scores(taught: Any) -> None:
    with taught.sit() as sitting:
        assert sitting.wait(240) == 0, sitting.stderr
        assert sitting.leftovers(within_s=2) == []
    rows = {row.step: row.values for row in read_metrics(taught.path / "metrics.jsonl")}
    assert sorted(rows) == [0, 1, 2, 3, 4]
    files = sorted((taught.path / "trajectories").glob("*-train.parquet"))
    assert len(files) == 4
    for file in files:
        for trajectory, trained in read_trajectories([file]):
            if trajectory.outcome.kind is OutcomeKind.INFRASTRUCTURE:
                assert trained is None
                continue
            assert trained is not None
            assert len(trajectory.scores) == len(trajectory.segments) == len(trained)
            for segment, scores, one in zip(trajectory.segments, trajectory.scores, trained, strict=True):
                assert scores.mask.tolist() == segment.agent_mask.tolist()
                assert not (one.mask & ~scores.mask).any()


def test_k6_a_teacher_of_the_same_weights_says_what_the_student_said(taught: Any) -> None:
    """The first step is sampled by the weights that the teacher holds: two programs, one model, per token."""
    differences = [
        np.abs(segment.logprobs - scores.logprobs)[scores.mask]
        for trajectory, _ in read_trajectories([taught.path / "trajectories" / "step_000001-train.parquet"])
        for segment, scores in zip(trajectory.segments, trajectory.scores, strict=True)
    ]
    found = np.concatenate(differences)
    assert len(found) > 100
    assert found.max() < 1e-4
    first = next(row.values for row in read_metrics(taught.path / "metrics.jsonl") if row.step == 1)
    assert abs(first["teacher/kl"]) < 1e-4
    assert abs(first["teacher/reverse_kl"]) < 1e-4
    assert abs(first["loss/divergence"]) < 1e-3
    assert first["teacher/unscored_fraction"] == 0


def test_a_server_of_our_own_scores_what_was_recorded(taught: Any, distilling: Any) -> None:
    """Another student learns from the run above, by the candidates of a vLLM server that is started for it."""
    words = ("--teacher", "vllm:tiny", "--from-run", str(taught.path), "--train.divergence.name", "reverse_kl")
    run = distilling(*words, "--steps", "2", "--rollout.groups", "4")
    with run.sit() as sitting:
        assert sitting.wait(300) == 0, sitting.stderr
        assert sitting.leftovers(within_s=2) == []
    usable = {
        trajectory.trajectory_id
        for trajectory, _ in read_trajectories(sorted((taught.path / "trajectories").glob("*-train.parquet")))
        if trajectory.outcome.kind is not OutcomeKind.INFRASTRUCTURE
    }
    assert f"learning from {len(usable)} rollouts" in "\n".join(sitting.lines)
    gaps: dict[bool, list[np.ndarray]] = {False: [], True: []}
    origins = []
    for file in sorted((run.path / "trajectories").glob("*-train.parquet")):
        for trajectory, trained in read_trajectories([file]):
            assert trained is not None
            origins += [event["trajectory"] for event in trajectory.events if event["kind"] == "recorded"]
            for segment, scores in zip(trajectory.segments, trajectory.scores, strict=True):
                assert scores.mask.tolist() == segment.agent_mask.tolist()
                first = bool((segment.versions[scores.mask] == 0).all())
                gaps[first].append(np.abs(segment.logprobs - scores.logprobs)[scores.mask])
    assert sorted(origins) == sorted(usable), "each once"
    assert np.concatenate(gaps[True]).max() < 1e-4  # sampled by the weights that the teacher holds
    assert np.concatenate(gaps[False]).max() > 1e-4  # and by what the other run made of them
    rows = {row.step: row.values for row in read_metrics(run.path / "metrics.jsonl")}
    assert "staleness/mean" not in rows[2]
    assert 0 < rows[2]["correction/ess"] <= 1
    assert abs(rows[1]["teacher/reverse_kl"]) < 0.05
    assert rows[1]["teacher/unscored_fraction"] == 0

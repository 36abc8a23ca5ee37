"""A real run with two teachers, each for a family of tasks: the student's own weights that are told the solution, and a
plain vLLM server that was started by its own entry point."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_vllm import plain_vllm

from agentrl.telemetry.metrics import read_metrics
from agentrl.trajectory import OutcomeKind, read_trajectories

pytestmark = [pytest.mark.vllm, pytest.mark.bubblewrap]

TINY = Path(str(resources.files("agentrl.policy") / "tiny"))


def differences(path: Path) -> dict[str, np.ndarray]:
    """|log π_student − log π_teacher| of all scored tokens by teacher; each task's teacher is its family's."""
    found: dict[str, list[np.ndarray]] = {}
    for trajectory, _ in read_trajectories([path]):
        if trajectory.outcome.kind is OutcomeKind.INFRASTRUCTURE:
            continue
        family = "settings" if trajectory.task_id.startswith("settings-") else "functions"
        assert len(trajectory.scores) == len(trajectory.segments)
        for segment, scores in zip(trajectory.segments, trajectory.scores, strict=True):
            assert scores.teacher == family
            found.setdefault(family, []).append(np.abs(segment.logprobs - scores.logprobs)[scores.mask])
    return {family: np.concatenate(parts) for family, parts in found.items()}


def test_each_family_has_its_teacher(distilling: Any, tmp_path: Path) -> None:
    with plain_vllm(TINY, tmp_path / "plain.log", arguments=["--max-model-len", "768"]) as (url, _):
        words = ("--teacher", "functions=self", "--teacher", f"settings={url}", "--route", "family")
        families = ('--environment.families=["functions", "settings"]', "--policy.max-model-len", "1024")
        run = distilling(*words, *families, "--steps", "1", "--rollout.groups", "4")
        with run.sit() as sitting:
            assert sitting.wait(300) == 0, sitting.stderr
            assert sitting.leftovers(within_s=2) == []
    said = "\n".join(sitting.lines)
    assert "teacher functions: it is told how a task is solved" in said
    assert "teacher settings: same tokenizer" in said
    found = differences(run.path / "trajectories" / "step_000001-train.parquet")
    assert found.keys() == {"functions", "settings"}
    assert all(len(part) > 50 for part in found.values())
    assert found["settings"].max() < 1e-4  # the server holds the weights that the student starts from
    assert found["functions"].max() > 0.1  # the same weights, told more
    (first,) = [row.values for row in read_metrics(run.path / "metrics.jsonl") if row.step == 1]
    assert abs(first["teacher/kl/settings"]) < 1e-4
    assert abs(first["teacher/kl/functions"]) > 1e-4
    assert first["teacher/unscored_fraction"] < 0.1
    assert np.isfinite(first["loss/divergence"])

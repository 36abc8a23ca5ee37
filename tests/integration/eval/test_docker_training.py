"""The demonstration's preset with Docker in place of bubblewrap: the same run, small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.sandbox.backend import docker_fault

ROOT = Path(__file__).parents[3]
STEPS = 2


@pytest.mark.vllm
@pytest.mark.docker
def test_the_demo_preset_trains_in_docker_sandboxes(tmp_path: Path) -> None:
    if fault := docker_fault():
        pytest.skip(str(fault))
    run = tmp_path / f"docker-{os.getpid()}"
    words = ["train", "swe-gym", "--preset", "demo", "--sandbox.backend", "docker", "--plain", "--run-dir", str(run)]
    words += ["--steps", str(STEPS), "--rollout.groups", "2", "--rollout.group-size", "4"]
    words += ["--rollout.concurrency", "8", "--sandbox.size", "10", "--train.updates-per-step", "1"]
    words += ["--eval.fresh-tasks", "4", "--eval.unseen-tasks", "0"]
    shown = subprocess.run(
        [sys.executable, "-m", "agentrl.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert shown.returncode == 0, shown.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert (run / "report.html").is_file()
    kinds = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    finished = [event["data"] for event in kinds if event["kind"] == "rollout.finished"]
    assert len(finished) == 8 * STEPS + 4 * 2
    assert all(data["outcome"] != "infrastructure" for data in finished)
    listing = ["docker", "ps", "--all", "--quiet", "--filter", f"label=agentrl.run={run.name}"]
    left = subprocess.run(listing, capture_output=True, text=True, timeout=30)
    assert (left.returncode, left.stdout) == (0, "")

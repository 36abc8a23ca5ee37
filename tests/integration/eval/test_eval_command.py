"""`agentrl eval` by the command line on real instances: the tiny policy in their sandboxes, and reference patches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import load_dataset

from agentrl.sandbox.backend import bubblewrap_fault

pytestmark = [pytest.mark.bubblewrap]

ROOT = Path(__file__).parents[3]
TASKS = 4


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    if fault := bubblewrap_fault():
        pytest.skip(str(fault))


def evaluate(run_dir: Path, *words: str, timeout_s: float = 400) -> dict[str, Any]:
    """The command's last line: its summary."""
    command = [sys.executable, "-m", "agentrl.cli.main", "eval", "swe-gym", "--preset", "mined", "--plain"]
    shown = subprocess.run(
        [*command, "--run-dir", str(run_dir), *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout.splitlines()[-1])


def test_reference_patches_resolve_their_instances(tmp_path: Path) -> None:
    summary = evaluate(tmp_path / "run", "--reference", "--tasks", "2")
    assert summary == {"tasks": 2, "resolved": 2} | {k: v for k, v in summary.items() if k not in ("tasks", "resolved")}
    lines = (tmp_path / "run" / "references.jsonl").read_text().splitlines()
    assert [json.loads(line)["verdict"] for line in lines] == ["resolved"] * 2


@pytest.mark.vllm
def test_real_instances_end_to_end(tmp_path: Path) -> None:
    """Prompt, sandboxes, token records, grading, predictions and summary of real instances."""
    run = tmp_path / "run"
    summary = evaluate(run, "--tasks", str(TASKS), "--agent.max-turns", "4")
    assert (summary["tasks"], summary["n"], summary["infrastructure_failures"]) == (TASKS, TASKS, 0)
    assert json.loads((run / "eval.json").read_text())["solve"] == summary["solve"]

    rows = [json.loads(line) for line in (ROOT / "tests/data/mined/instances.jsonl").read_text().splitlines()]
    known = {row["instance_id"]: row for row in rows}
    predictions = [json.loads(line) for line in (run / "predictions.jsonl").read_text().splitlines()]
    assert len({p["instance_id"] for p in predictions}) == TASKS
    for prediction in predictions:
        assert set(prediction) == {"instance_id", "model_name_or_path", "model_patch"}
        assert prediction["instance_id"] in known
        assert applies(prediction["model_patch"], known[prediction["instance_id"]], tmp_path)

    files = [str(path) for path in sorted((run / "trajectories").glob("*.parquet"))]
    table = load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert set(table["task_id"]) == {p["instance_id"] for p in predictions}
    for row in table:
        agent = [s for s in row["spans"] if s["kind"] == "agent"]
        assert agent
        sampled = {at for span in agent for at in range(span["start"], span["stop"])}
        assert {at for at, value in enumerate(row["logprobs"]) if value is not None} == sampled
        assert {row["versions"][at] for at in sampled} == {0}
        assert row["split"] == "fresh"
        assert row["reward"] is not None


def applies(patch: str, row: dict[str, Any], scratch: Path) -> bool:
    """Whether `git apply` takes the patch on the row's base commit; an empty one changes nothing."""
    if not patch:
        return True
    tree = scratch / row["instance_id"]
    bundle = ROOT / "tests/data/mined" / row["x_tree"]["bundle"]
    clone = ["git", "clone", "--quiet", "--single-branch", "-b", row["x_tree"]["ref"], str(bundle), str(tree)]
    subprocess.run(clone, check=True, timeout=60, capture_output=True)
    done = subprocess.run(["git", "apply", "--check"], input=patch.encode(), cwd=tree, timeout=60, capture_output=True)
    return done.returncode == 0

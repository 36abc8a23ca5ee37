"""`agentrl sandbox verify` on bubblewrap: planted bad tasks, and a verification that was broken off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from sandbox_command import COMMAND, sandbox

pytestmark = [pytest.mark.bubblewrap, pytest.mark.usefixtures("bubblewrap")]


def git(folder: Path, *words: str) -> str:
    identity = {f"GIT_{who}_{what}": "x@y" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["git", *words], cwd=folder, check=True, capture_output=True, text=True, timeout=60, env=os.environ | identity
    )
    return done.stdout.strip()


RANDOM = "import random\n" + "\n".join(
    f"def test_{n}():\n    assert random.SystemRandom().random() < 0.5\n" for n in range(24)
)


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """One good task and one of each kind of bad ones, over one small repository."""
    repository = tmp_path / "repository"
    (repository / "tests").mkdir(parents=True)
    (repository / "calc.py").write_text("def double(x):\n    return x + 2\n\n\ndef half(x):\n    return x / 2\n")
    tests = "from calc import double, half\n\ndef test_double():\n    assert double(5) == 10\n\n"
    tests += "def test_half():\n    assert half(4) == 2\n"
    (repository / "tests/test_calc.py").write_text(tests)
    (repository / "tests/test_luck.py").write_text(RANDOM)
    git(repository, "init", "-q", "-b", "main")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "base")
    git(repository, "bundle", "create", "-q", str(tmp_path / "me__calc.bundle"), "main")
    tree = {"bundle": "me__calc.bundle", "ref": "main", "tree_sha": git(repository, "rev-parse", "main^{tree}")}

    def change(old: str, new: str) -> str:
        source = repository / "calc.py"
        source.write_text(source.read_text().replace(old, new))
        patch = git(repository, "diff") + "\n"
        git(repository, "checkout", "-q", "calc.py")
        return patch

    fix = change("x + 2", "x * 2")
    broken, passing = "tests/test_calc.py::test_double", "tests/test_calc.py::test_half"
    base = {"repo": "me/calc", "base_commit": git(repository, "rev-parse", "main"), "problem_statement": "double adds"}
    base |= {"FAIL_TO_PASS": [broken], "PASS_TO_PASS": [passing], "patch": fix, "x_tree": tree}
    rows = [
        base | {"instance_id": "me__calc-good"},
        base | {"instance_id": "me__calc-unchanged", "FAIL_TO_PASS": [passing], "PASS_TO_PASS": []},
        base | {"instance_id": "me__calc-nofix", "patch": change("x / 2", "x / 2.0")},
        base | {"instance_id": "me__calc-luck", "PASS_TO_PASS": [f"tests/test_luck.py::test_{n}" for n in range(24)]},
        base | {"instance_id": "me__calc-hangs", "patch": change("def half", "while True:\n    pass\n\n\ndef half")},
        base | {"instance_id": "me__calc-treeless", "x_tree": tree | {"bundle": "gone.bundle"}},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_planted_bad_tasks_are_found(planted: Path) -> None:
    """K46."""
    words = ["verify", "swe-gym", "--data", "rows.jsonl", "--out", "out.jsonl", "--jobs", "2"]
    limits = ["--environment.test-timeout-s", "4", "--environment.fresh-fraction", "0"]
    done = sandbox(*words, *limits, cwd=planted)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [json.loads(line) for line in (planted / "out.jsonl").read_text().splitlines()]
    assert {line["task"].removeprefix("me__calc-"): line["verdict"] for line in lines} == {
        "good": "valid",
        "unchanged": "passes unchanged",
        "nofix": "reference fails",
        "luck": "flaky",
        "hangs": "timeout",
        "treeless": "error",
    }
    reasons = {line["task"].removeprefix("me__calc-"): line for line in lines}
    assert "gone.bundle" in reasons["treeless"]["reason"]
    assert "test_double" in reasons["nofix"]["reason"]
    assert all("test_luck" in name for name in reasons["luck"]["differ"])
    assert "6 of 6 tasks" in done.stdout
    assert "flaky: me__calc-luck" in done.stdout

    used = sandbox(*words, *limits, cwd=planted)
    assert used.returncode == 2
    assert "--resume" in used.stderr
    data = (planted / "out.jsonl").read_bytes()
    (planted / "out.jsonl").write_bytes(data[:-20])
    again = sandbox(*words, *limits, "--resume", cwd=planted)
    assert again.returncode == 1, again.stderr
    names = [json.loads(line)["task"] for line in (planted / "out.jsonl").read_text().splitlines()]
    assert sorted(names) == sorted(line["task"] for line in lines)
    assert "5 of 6 tasks have their verdict" in again.stderr


def test_a_verification_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    words = [*COMMAND, "verify", "swe-gym", "--backend", "bubblewrap", "--jobs", "1", "--out", "out.jsonl"]
    process = subprocess.Popen(
        [*words, "--tasks", "500"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stderr is not None
    assert "valid" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "--resume --out out.jsonl" in err
    done = len((tmp_path / "out.jsonl").read_text().splitlines())
    assert f"{done} of 500 tasks" in out
    again = subprocess.run(
        [*words, "--tasks", str(done + 1), "--resume"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == done + 1

"""The command line as a user meets it: real processes, exit codes, one-screen errors."""

from __future__ import annotations

import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

AGENTRL = [sys.executable, "-m", "agentrl.cli.main"]


def agentrl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*AGENTRL, *words], capture_output=True, text=True, timeout=60)


def test_help_answers_at_once() -> None:
    """`agentrl --help` takes under half a second of CPU, best of 5."""
    best = float("inf")
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        shown = agentrl("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert shown.returncode == 0
    for command in ("train", "sft", "eval", "report", "view", "doctor", "sandbox", "bench"):
        assert command in shown.stdout
    assert best < 0.5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "swe-gim"], ["no environment 'swe-gim'", "did you mean swe-gym"]),
        (["train", "swe-gym", "--preset", "dmeo"], ["no preset 'dmeo'", "demo"]),
        (["train", "swe-gym", "--rollout.gruops", "3"], ["unknown key `rollout.gruops`", "rollout.groups"]),
        (["train", "swe-gym", "--environment.datset", "x"], ["datset", "dataset"]),
        (["train", "swe-gym", "--environment.dataset", "/nowhere/rows.jsonl"], ["/nowhere/rows.jsonl"]),
        (["train", "swe-gym", "--config", "/nowhere.toml"], ["no configuration file"]),
        (["eval", "swe-gym", "--split", "frehs"], ["frehs", "fresh"]),
        (["eval", "swe-gym", "--eval.samples-per-task", "4"], ["eval.samples_per_task", "--samples N"]),
        (["eval", "swe-gym", "--train.optimizer.learning-rate", "1"], ["train.optimizer.learning_rate", "no effect"]),
        (["report", "/nowhere"], ["is no run folder"]),
        (["view", "/nowhere"], ["is no run folder"]),
        (["sandbox", "build", "--backend", "podman"], ["podman"]),
        (["bench", "schedules", "--only", "async-9"], ["async-9", "async-2"]),
        (["bench", "schedules", "--seed", "3"], ["--seeds"]),
        (["bench", "schedules", "--train.updates-per-step", "3"], ["what makes the comparison"]),
        (["bench", "rollout", "swe-gym"], ["--simulate-train"]),
        (["distill"], ["no teacher is given", "--teacher MODEL"]),
        (["distill", "swe-gim", "--teacher", "t"], ["no environment 'swe-gim'"]),
        (["distill", "--teacher", "t", "--environment.name", "swe-gim"], ["no environment 'swe-gim'"]),
    ],
)
def test_bad_input_is_one_screen_and_exit_2(words: list[str], says: list[str], tmp_path: Path) -> None:
    if words[0] in ("train", "eval"):
        words = [*words, "--run-dir", str(tmp_path / "run")]
    shown = agentrl(*words)
    assert shown.returncode == 2, shown.stderr
    assert "Traceback" not in shown.stderr
    assert len(shown.stderr.splitlines()) <= 24
    for part in says:
        assert part in shown.stderr


def test_unknown_command_and_missing_argument() -> None:
    assert agentrl("trian").returncode == 2
    assert agentrl("train").returncode == 2


def test_a_grammar_cannot_be_trained_through() -> None:
    shown = agentrl("train", "swe-gym", "--preset", "demo", "--agent.tools.calls", "required", "--dry-run")
    assert shown.returncode == 2
    assert "agent.tools.calls" in shown.stderr


def test_dry_run_prints_the_resolved_configuration() -> None:
    shown = agentrl("train", "swe-gym", "--preset", "demo", "--rollout.group-size", "5", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "group_size = 5" in shown.stdout
    assert 'backend = "bubblewrap"' in shown.stdout


def test_distillation_on_the_command_line_is_what_is_configured() -> None:
    words = ("--teacher", "functions=transformers:m=1", "--teacher", "settings=http://h:8", "--route", "family")
    families = '--environment.families=["functions", "settings"]'
    shown = agentrl("distill", "--preset", "distill", *words, "--reward-weight", "0.25", families, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    found = tomllib.loads(shown.stdout)
    assert found["environment"]["name"] == "swe-gym"
    assert found["distill"]["reward_weight"] == 0.25
    assert found["distill"]["route"] == "family"
    assert [(t["name"], t["kind"], t["model"]) for t in found["distill"]["teachers"]] == [
        ("functions", "transformers", "m=1"),
        ("settings", "auto", "http://h:8"),
    ]


def test_a_used_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").write_text("")
    shown = agentrl("train", "swe-gym", "--preset", "demo", "--run-dir", str(tmp_path))
    assert shown.returncode == 2
    assert "is used" in shown.stderr
    assert "--resume" in shown.stderr

"""Bad input through the real command line: one screen, no traceback, the remedy named, the right exit code."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentrl.cli.main import run
from agentrl.config import RunConfig
from agentrl.config.load import dump_toml, load_config
from agentrl.run.resume import fixed_settings
from agentrl.run.state import RunState

ROWS = Path(__file__).resolve().parents[2] / "data" / "swe_gym" / "rows.jsonl"


@dataclass(frozen=True)
class Shown:
    code: int
    out: str
    err: str

    def is_one_screen(self, *says: str) -> None:
        assert "Traceback" not in self.err
        assert sum(1 + len(line) // 120 for line in self.err.splitlines()) <= 24, self.err
        for part in says:
            assert part in self.err


@pytest.fixture
def agentrl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Shown]:
    """The command line in this process, for what ends before anything is started."""

    def call(*words: str) -> Shown:
        monkeypatch.setattr(sys, "argv", ["agentrl", *words])
        code = run()
        shown = capsys.readouterr()
        return Shown(code, shown.out, shown.err)

    return call


def process(*words: str, **env: str) -> Shown:
    """The command line in a process of its own."""
    shown = subprocess.run(
        [sys.executable, "-m", "agentrl.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **env},
    )
    return Shown(shown.returncode, shown.stdout, shown.stderr)


def a_run(path: Path, *overrides: str) -> Path:
    """A run folder that was started and left before its first checkpoint."""
    for name in ("trajectories", "checkpoints", "logs"):
        (path / name).mkdir(parents=True)
    (path / "config.toml").write_text(dump_toml(load_config(preset="demo", overrides=overrides, run_dir=str(path))))
    return path


# --- data sets ----------------------------------------------------------------------------------------------------


def rows_with(tmp_path: Path, change: Callable[[dict[str, object]], None]) -> Path:
    """A JSONL data set whose second row was changed."""
    lines = ROWS.read_text().splitlines()[:3]
    row = json.loads(lines[1])
    change(row)
    lines[1] = json.dumps(row)
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda row: row.pop("patch"), "field patch is missing"),
        (lambda row: row.update(problem_statement="  "), "field problem_statement is empty"),
        (lambda row: row.update(FAIL_TO_PASS="test_a"), "field FAIL_TO_PASS is text, but no JSON"),
        (lambda row: row.update(base_commit=7), "field base_commit is int, not text"),
    ],
)
def test_a_malformed_row_is_named_by_file_line_and_field(
    agentrl: Callable[..., Shown], tmp_path: Path, change: Callable[[dict[str, object]], None], says: str
) -> None:
    path = rows_with(tmp_path, change)
    shown = agentrl("train", "swe-gym", "--environment.dataset", str(path), "--run-dir", str(tmp_path / "run"))
    assert shown.code == 2
    shown.is_one_screen(says, f"{path}, line 2", "remedy:")
    assert not (tmp_path / "run").exists(), "nothing was begun"


def test_a_line_that_is_no_json(agentrl: Callable[..., Shown], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(ROWS.read_text().splitlines()[0] + "\n{not json\n")
    shown = agentrl("eval", "swe-gym", "--environment.dataset", str(path), "--run-dir", str(tmp_path / "run"))
    assert shown.code == 2
    shown.is_one_screen("no JSON", f"{path}, line 2", "remedy:")


# --- run folders --------------------------------------------------------------------------------------------------


def test_resume_without_a_run(agentrl: Callable[..., Shown], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (("--resume",), ("--resume", "--run-dir", str(tmp_path / "nowhere"))):
        shown = agentrl("train", "swe-gym", *words)
        assert shown.code == 2
        shown.is_one_screen("is no run folder", "remedy:")
    assert list(tmp_path.iterdir()) == []


def test_resume_takes_the_default_folder_and_its_own_configuration(
    agentrl: Callable[..., Shown], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a_run(RunConfig().run_dir, "--steps=7")
    shown = agentrl("train", "swe-gym", "--resume", "--dry-run")
    assert shown.code == 0, shown.err
    assert "steps = 7" in shown.out
    assert 'backend = "bubblewrap"' in shown.out
    shown = agentrl("train", "swe-gym", "--resume", "--dry-run", "--steps", "9")
    assert "steps = 9" in shown.out


@pytest.mark.parametrize("words", [("--preset", "demo"), ("--config", "mine.toml")])
def test_resume_with_another_configuration(
    agentrl: Callable[..., Shown], tmp_path: Path, words: tuple[str, str]
) -> None:
    path = a_run(tmp_path / "run")
    shown = agentrl("train", "swe-gym", "--resume", "--run-dir", str(path), *words)
    assert shown.code == 2
    shown.is_one_screen("--resume goes on with the run's own configuration", "--steps 40")


def test_an_edited_config_is_read_with_care(agentrl: Callable[..., Shown], tmp_path: Path) -> None:
    path = a_run(tmp_path / "run")
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(text.replace("group_size", "gruop_size"))
    shown = agentrl("train", "swe-gym", "--resume", "--run-dir", str(path))
    assert shown.code == 2
    shown.is_one_screen("unknown key `rollout.gruop_size`", "rollout.group_size", "config.toml")
    (path / "config.toml").write_text(text + "\n[[[")
    shown = agentrl("train", "swe-gym", "--resume", "--run-dir", str(path))
    assert shown.code == 2
    shown.is_one_screen("not TOML", "config.toml", "line")


def test_a_broken_buffer_is_found_before_anything_starts(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run")
    (path / "buffer.sqlite").write_bytes(b"no database, " * 1000)
    shown = process("train", "swe-gym", "--resume", "--run-dir", str(path), "--plain")
    assert shown.code == 2, shown.err
    shown.is_one_screen("the buffer is no database", "buffer.sqlite", "delete it")
    assert not (path / "logs" / "policy.log").exists()


def test_a_model_that_changes_over_a_resume(tmp_path: Path) -> None:
    """The weights come from the checkpoint, so another `policy.model` would have no effect (K52)."""
    path = a_run(tmp_path / "run")
    config = load_config(file=path / "config.toml")
    checkpoint = path / "checkpoints" / "step_000004"
    checkpoint.mkdir()
    state = RunState(step=4, version=4, settings=fixed_settings(config)).to_bytes()
    (checkpoint / "orchestrator.bin").write_bytes(state)
    marker = {"step": 4, "updates": 4, "score": None, "files": {"orchestrator.bin": len(state)}}
    (checkpoint / "complete.json").write_text(json.dumps(marker))
    before = (path / "config.toml").read_text()
    shown = process("train", "swe-gym", "--resume", "--run-dir", str(path), "--policy.model", "another/model")
    assert shown.code == 2, shown.err
    shown.is_one_screen("`policy.model` is 'another/model', the run has 'tiny'", "--run-dir")
    assert (path / "config.toml").read_text() == before


def test_a_folder_that_another_run_writes(tmp_path: Path) -> None:
    path = a_run(tmp_path / "run")
    with (path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = (path / "config.toml").read_bytes()
        shown = process("train", "swe-gym", "--resume", "--run-dir", str(path), "--steps", "3")
        assert (path / "config.toml").read_bytes() == before
    assert shown.code == 2
    shown.is_one_screen("another run is writing", "--run-dir")


def test_a_path_that_cannot_be_written(agentrl: Callable[..., Shown]) -> None:
    """/proc is read-only for everybody, root included."""
    shown = agentrl("train", "swe-gym", "--preset", "demo", "--run-dir", "/proc/run")
    assert shown.code == 2
    shown.is_one_screen("cannot write /proc/run", "remedy:")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts a small file system")
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_disk_without_room(agentrl: Callable[..., Shown], small_disk: Path) -> None:
    shown = agentrl("train", "swe-gym", "--preset", "demo", "--run-dir", str(small_disk / "run"))
    assert shown.code == 1
    shown.is_one_screen("8 MiB are free", "64 to start", "--run-dir")


# --- machines -----------------------------------------------------------------------------------------------------


def test_no_sandbox_backend(tmp_path: Path) -> None:
    """Neither program nor daemon is found; what would have started beside them has not been left behind."""
    path = tmp_path / "run"
    shown = process(
        "train",
        "swe-gym",
        *("--preset", "demo", "--sandbox.backend", "auto", "--run-dir", str(path), "--plain"),
        PATH=str(tmp_path),
        DOCKER_HOST=f"unix://{tmp_path}/no.sock",
    )
    assert shown.code == 1, shown.err
    shown.is_one_screen("no sandbox can be made here", "bwrap is not installed", "apt-get install", "--resume")


def test_a_taken_port(agentrl: Callable[..., Shown], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        shown = agentrl("view", str(a_run(tmp_path / "run")), "--port", port)
    assert shown.code == 2
    shown.is_one_screen(port, "--port")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policy.model", "/nowhere/model"], "there is no folder /nowhere/model"),
        (["--policy.max-model-len", "100000"], "positions"),
        (["--rollout.concurrency", "500"], "exceeds sandbox.size"),
        (["--rollout.top-k", "20"], "top_k"),
        (["--steps", "many"], "`steps`"),
        (["--steps"], "lacks its value"),
        (["fix", "it"], "unexpected argument 'fix'"),
    ],
)
def test_settings_that_cannot_be(agentrl: Callable[..., Shown], tmp_path: Path, words: list[str], says: str) -> None:
    shown = agentrl("train", "swe-gym", "--preset", "demo", "--run-dir", str(tmp_path / "run"), *words)
    assert shown.code == 2, shown.err
    shown.is_one_screen(says)
    assert not (tmp_path / "run").exists(), "the folder can be used once the command is mended"

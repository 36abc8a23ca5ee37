"""How a run's end is told: exit code, the way on, and an error that a full disk does not hide."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import AgentRLError, ConfigError, DiskFullError, PolicyDeadError
from agentrl.policy import Device, VllmInstall
from agentrl.run import command, services
from agentrl.run.command import train_command
from agentrl.run.evaluate_command import evaluate_command
from agentrl.run.folder import RunFolder
from agentrl.run.resume import Start
from agentrl.run.signals import Interrupted
from agentrl.run.state import RunState
from agentrl.telemetry import metrics
from agentrl.telemetry.metrics import read_events


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`agentrl train` whose loop is replaced by what a test says. The run folder's name has a space in it."""
    monkeypatch.setattr(command, "log_to_file", lambda _: None)
    monkeypatch.setattr(
        services, "find_vllm", lambda: VllmInstall(python=sys.executable, version="0", device=Device.CPU)
    )

    def call(ends: BaseException | None = None, *overrides: str, resume: bool = False) -> int:
        async def training(*_: Any, **__: Any) -> None:
            if ends is not None:
                raise ends

        monkeypatch.setattr(command, "_training", training)
        return train_command(
            environment="swe-gym",
            preset=None if resume else "demo",
            file=None,
            run_dir=tmp_path / "my run",
            resume=resume,
            dry_run=False,
            plain=True,
            overrides=overrides,
        )

    return call


def ends(folder: Path) -> list[tuple[str, str]]:
    events = [event.data for event in read_events(folder / "events.jsonl") if event.kind == "run.finished"]
    return [(data["outcome"], data["reason"]) for data in events]


def test_done(train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train() == 0
    assert ends(tmp_path / "my run") == [("done", "")]
    assert f"report: {tmp_path}/my run/report.html" in capsys.readouterr().out
    assert (tmp_path / "my run" / "report.html").is_file()


def test_interrupted(train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(Interrupted()) == 130
    assert ends(tmp_path / "my run") == [("interrupted", "")]
    told = capsys.readouterr().err
    assert told == (f"agentrl: interrupted; to go on: agentrl train swe-gym --run-dir '{tmp_path}/my run' --resume\n")


def test_an_error_keeps_its_type_and_gets_the_way_on(train: Callable[..., int], tmp_path: Path) -> None:
    with pytest.raises(PolicyDeadError) as caught:
        train(PolicyDeadError("it ended", where="request 7", remedy="read the log"))
    assert (caught.value.what, caught.value.where, caught.value.exit_code) == ("it ended", "request 7", 3)
    way_on = f"to go on: agentrl train swe-gym --run-dir '{tmp_path}/my run' --resume"
    assert caught.value.remedy == f"read the log; {way_on}"
    assert ends(tmp_path / "my run") == [("failed", "it ended")]


def test_a_fault_of_the_program_passes_as_itself_and_is_recorded(train: Callable[..., int], tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        train(ZeroDivisionError("oops"))
    assert ends(tmp_path / "my run") == [("failed", "ZeroDivisionError('oops')")]


def test_a_full_disk_does_not_hide_the_first_error(train: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise DiskFullError("no space left")

    monkeypatch.setattr(metrics.EventWriter, "write", full)
    with pytest.raises(PolicyDeadError, match="it ended"):
        train(PolicyDeadError("it ended"))


def test_a_finished_run_is_not_started_again(
    train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(None, "--steps=4") == 0
    before = (tmp_path / "my run" / "config.toml").read_text()
    monkeypatch.setattr(command, "find_start", lambda *_: Start(tmp_path, RunState(step=4, version=4)))
    assert train(AssertionError("nothing is started"), resume=True) == 0
    assert "all 4 steps are done; to train longer: agentrl train swe-gym" in capsys.readouterr().out
    assert train(AssertionError("nothing is started"), "--steps=2", resume=True) == 0
    assert (tmp_path / "my run" / "config.toml").read_text() == before
    assert train(None, "--steps=6", resume=True) == 0
    assert "steps = 6" in (tmp_path / "my run" / "config.toml").read_text()


def test_a_refused_resume_leaves_the_configuration(
    train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train() == 0
    before = (tmp_path / "my run" / "config.toml").read_text()

    def refuse(folder: RunFolder, _: Any) -> Start:
        raise AgentRLError(f"refused {folder.path.name}")

    monkeypatch.setattr(command, "find_start", refuse)
    with pytest.raises(AgentRLError, match="refused my run"):
        train(None, "--rollout.groups=99", resume=True)
    assert (tmp_path / "my run" / "config.toml").read_text() == before


def test_devices_that_are_not_there_are_refused_before_anything_is_written(
    train: Callable[..., int], tmp_path: Path
) -> None:
    """Else the mended command is refused, for its folder is used, and a resume finds the wrong devices."""
    absent = ("--placement.devices=[99999]", "--placement.pin=true")
    with pytest.raises(ConfigError, match="no device 99999"):
        train(None, *absent)
    assert not (tmp_path / "my run").exists()
    with pytest.raises(ConfigError, match="no device 99999"):
        evaluate_command(
            environment="swe-gym",
            model=None,
            split="fresh",
            tasks=1,
            samples=1,
            reference=False,
            preset="demo",
            file=None,
            run_dir=tmp_path / "my run",
            dry_run=False,
            plain=True,
            overrides=absent,
        )
    assert not (tmp_path / "my run").exists()
    assert train() == 0
    before = (tmp_path / "my run" / "config.toml").read_text()
    with pytest.raises(ConfigError, match="no device 99999"):
        train(None, *absent, resume=True)
    assert (tmp_path / "my run" / "config.toml").read_text() == before

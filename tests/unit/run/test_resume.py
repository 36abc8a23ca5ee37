"""Where a resumed run goes on (K49, K50, K51): the newest whole checkpoint, under the settings it depends on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import RunConfig
from agentrl.errors import ConfigError, RunFolderError
from agentrl.run.folder import RunFolder, open_run_folder
from agentrl.run.resume import Start, find_start, fixed_settings
from agentrl.run.state import RunState


def configured(**changes: Any) -> RunConfig:
    return RunConfig.model_validate({"environment": {"name": "swe-gym", "dataset": "generated"}, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return open_run_folder(tmp_path / "run", resume=False)


def checkpoint(folder: RunFolder, step: int, *, state: bytes | None = None) -> Path:
    """A complete checkpoint as far as its marker goes."""
    path = folder.checkpoints / f"step_{step:06d}"
    path.mkdir()
    found = RunState(step=step, version=step, settings=fixed_settings(configured()))
    (path / "orchestrator.bin").write_bytes(state if state is not None else found.to_bytes())
    (path / "model.safetensors").write_bytes(b"weights")
    files = {name.name: name.stat().st_size for name in path.iterdir()}
    marker = {"step": step, "updates": step, "score": None, "files": files}
    (path / "complete.json").write_text(json.dumps(marker))
    return path


def test_without_a_checkpoint_the_run_starts_anew(folder: RunFolder) -> None:
    assert find_start(folder, configured()) == Start()
    (folder.checkpoints / ".tmp-step_000000-77").mkdir()  # killed while it wrote the first
    assert find_start(folder, configured()) == Start()


def test_k50_the_newest_by_number(folder: RunFolder) -> None:
    for step in (2, 10, 4):
        checkpoint(folder, step)
    start = find_start(folder, configured())
    assert (start.checkpoint, start.state.step, start.torn) == (folder.checkpoints / "step_000010", 10, ())


@pytest.mark.parametrize("damage", ["cut", "gone", "marker", "no marker"])
def test_k50_a_torn_checkpoint_is_passed_over_and_named(folder: RunFolder, damage: str) -> None:
    checkpoint(folder, 2)
    torn = checkpoint(folder, 4)
    match damage:
        case "cut":
            (torn / "model.safetensors").write_bytes(b"weig")
        case "gone":
            (torn / "orchestrator.bin").unlink()
        case "marker":
            (torn / "complete.json").write_text('{"step": 4')
        case "no marker":
            (torn / "complete.json").unlink()
    start = find_start(folder, configured())
    assert start.checkpoint == folder.checkpoints / "step_000002"
    assert (start.state.step, start.torn) == (2, ("step_000004",))


def test_a_run_whose_every_checkpoint_is_torn_is_not_thrown_away(folder: RunFolder) -> None:
    (checkpoint(folder, 4) / "complete.json").unlink()
    with pytest.raises(RunFolderError, match="none of the 1 checkpoints is complete") as caught:
        find_start(folder, configured())
    assert "remove them" in caught.value.remedy


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"policy": {"model": "other"}}, "`policy.model` is 'other', the run has 'tiny'"),
        ({"seed": 3}, "`seed` is 3, the run has 0"),
        ({"environment": {"name": "swe-gym", "dataset": "rows.jsonl"}}, "`environment.dataset` is 'rows.jsonl'"),
        ({"environment": {"name": "swe-gym"}}, "`environment.dataset` is None, the run has 'generated'"),
        ({"environment": {"name": "other", "dataset": "generated"}}, "`environment.name` is 'other'"),
    ],
)
def test_what_weights_and_data_depend_on_may_not_change(folder: RunFolder, change: dict[str, Any], key: str) -> None:
    checkpoint(folder, 2)
    with pytest.raises(ConfigError) as caught:
        find_start(folder, configured(**change))
    assert key in caught.value.what
    assert "--run-dir" in caught.value.remedy


def test_all_else_may_change(folder: RunFolder) -> None:
    checkpoint(folder, 2)
    changed = configured(steps=400, rollout={"groups": 4}, train={"optimizer": {"learning_rate": 1e-5}})
    assert find_start(folder, changed).state.step == 2


def test_a_state_of_another_version_is_refused(folder: RunFolder) -> None:
    checkpoint(folder, 2, state=b'{"step": "two"}')
    with pytest.raises(RunFolderError, match="cannot be read") as caught:
        find_start(folder, configured())
    assert "version of agentrl" in caught.value.remedy


def test_the_state_survives_its_bytes() -> None:
    state = RunState(step=3, version=2, cursor={"position": 48}, dry=1, minutes=1.5, settings={"seed": 1})
    assert RunState.from_bytes(state.to_bytes()) == state

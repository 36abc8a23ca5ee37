"""The run folder: refused when used (K51), locked, and its errors name the remedy."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from agentrl.errors import DiskFullError, RunFolderError
from agentrl.run import folder as folders
from agentrl.run.folder import check_run_folder, open_run_folder


def test_a_new_folder_is_made(tmp_path: Path) -> None:
    folder = open_run_folder(tmp_path / "a" / "run", resume=False)
    assert folder.trajectories.is_dir()
    assert folder.checkpoints.is_dir()
    assert folder.logs.is_dir()
    folder.close()


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(RunFolderError, match="is used") as caught:
        open_run_folder(tmp_path, resume=False)
    assert "--resume" in caught.value.remedy
    assert caught.value.exit_code == 2


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run folder"):
        open_run_folder(tmp_path, resume=True)
    with pytest.raises(RunFolderError, match="no run folder"):
        check_run_folder(tmp_path / "missing")


def test_two_runs_never_write_one_folder(tmp_path: Path) -> None:
    first = open_run_folder(tmp_path / "run", resume=False)
    first.config.write_text("")
    with pytest.raises(RunFolderError, match="another run is writing"):
        open_run_folder(tmp_path / "run", resume=True)
    first.close()
    open_run_folder(tmp_path / "run", resume=True).close()


def test_a_file_or_unwritable_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError):
        open_run_folder(tmp_path / "file", resume=False)
    with pytest.raises(RunFolderError, match="cannot write"):
        open_run_folder(tmp_path / "file" / "below", resume=False)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, folders.MIN_FREE_BYTES - 1))
    with pytest.raises(DiskFullError) as caught:
        open_run_folder(tmp_path / "run", resume=False)
    assert caught.value.exit_code == 1
    assert "--run-dir" in caught.value.remedy

"""The run folder's disk fills up in the middle of a run: said once and clearly, and the run goes on afterwards."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import DiskFullError
from agentrl.run import folder as folders

World = Callable[..., Any]


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 8 MiB on which a run may start."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts a small file system")
    monkeypatch.setattr(folders, "MIN_FREE_BYTES", 2**20)
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def fill(path: Path) -> None:
    """Take every free byte of the file system that `path` will lie on."""
    with path.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(b"\0" * 4096)
            except OSError:
                return


@pytest.mark.parametrize(("place", "nth"), [("generate", 45), ("trained", 3), ("rows", 5), ("metrics", 4)])
def test_out_of_room_in_the_middle_of_a_run(world: World, small_disk: Path, place: str, nth: int) -> None:
    """In step 3: the buffer, trajectory files, metrics. Each says so as a full disk, and nothing is lost."""
    whole = world()
    whole.sit()
    filler = small_disk / "filler"

    def fill_in_step_3(what: str, count: int) -> None:
        if (what, count) == (place, nth):
            fill(filler)

    run = world(on_tick=fill_in_step_3)
    run.path = small_disk / "run"
    with pytest.raises(DiskFullError) as caught:
        run.sit()
    assert max(run.metrics()) in (2, 3)  # a short line may still fit into its page
    assert caught.value.exit_code == 1
    assert str(small_disk) in caught.value.where
    assert "free" in caught.value.remedy
    filler.unlink()
    run.on_tick = None
    run.sit()
    assert (run.metrics(), run.rows(), run.last_state()) == (whole.metrics(), whole.rows(), whole.last_state())

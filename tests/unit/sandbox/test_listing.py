"""What the listing says of bubblewrap sandboxes, read from control groups of both versions (over plain folders)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentrl.sandbox import listing
from agentrl.sandbox.cgroups import CgroupTree
from agentrl.sandbox.owner import Owner

HERE = Owner.current()
FIGURES = {
    1: {"memory.usage_in_bytes": "4096", "cpuacct.usage": "2500000000", "pids.current": "3"},
    2: {"memory.current": "4096", "cpu.stat": "nr_periods 0\nusage_usec 2500000\n", "pids.current": "3"},
}


@pytest.fixture(params=[1, 2])
def tree(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CgroupTree:
    """A tree with sandboxes of this process, of a dead one, and of another PID name space."""
    version: int = request.param
    names = ("memory", "pids", "cpu")
    tree = CgroupTree(version, {name: tmp_path / name if version == 1 else tmp_path for name in names})
    owners = {
        "demo-run-0a": (HERE.pid_namespace, HERE.pid, HERE.started),
        "old-0b": (HERE.pid_namespace, HERE.pid, HERE.started + 1),
        "far-0c": (1, 2, 3),
        "probe0d": (HERE.pid_namespace, HERE.pid, HERE.started),
    }
    for sandbox, (namespace, pid, started) in owners.items():
        for base in tree.bases.values():
            folder = base / f"agentrl-{namespace}-{pid}-{started}-{sandbox}"
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in FIGURES[version].items():
                (folder / file).write_text(text)
            (folder / "cgroup.procs").write_text(f"{os.getpid()}\n" if sandbox == "demo-run-0a" else "")
    (tree.bases["memory"] / "agentrl-someone-elses").mkdir()
    monkeypatch.setattr(CgroupTree, "find", lambda: tree)
    return tree


def test_k41_who_lives_and_who_is_dead_is_told_apart(tree: CgroupTree) -> None:
    found = {each.id: each for each in listing._in_cgroups()}
    assert {name: (each.state, each.owner_alive) for name, each in found.items()} == {
        "bwrap:demo-run-0a": ("running", True),
        "bwrap:old-0b": ("ended", False),
        "bwrap:far-0c": ("ended", None),
    }
    mine = found["bwrap:demo-run-0a"]
    assert (mine.run, mine.owner, mine.backend, mine.image) == ("demo-run", str(HERE), "bubblewrap", "")
    assert (mine.memory_bytes, mine.cpu_s, mine.processes) == (4096, 2.5, 3)
    assert 0 <= mine.age_s < 60


def test_figures_that_the_kernel_does_not_count_are_none(tree: CgroupTree) -> None:
    for base in tree.bases.values():
        for file in (*base.glob("*/memory.*"), *base.glob("*/cpu*"), *base.glob("*/pids.*")):
            file.unlink(missing_ok=True)
    (mine,) = [each for each in listing._in_cgroups() if each.state == "running"]
    assert (mine.memory_bytes, mine.cpu_s, mine.processes) == (None, None, None)

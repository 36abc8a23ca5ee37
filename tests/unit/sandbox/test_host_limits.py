"""Cgroup directories in both versions (over plain folders), owners, the reaper's judgement, the command
line."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.config import SandboxConfig
from agentrl.errors import NoSandboxBackendError, SandboxStartError
from agentrl.sandbox import backend as backend_module
from agentrl.sandbox import bubblewrap, cgroups
from agentrl.sandbox import owner as owner_module
from agentrl.sandbox.bubblewrap_command import bwrap_command
from agentrl.sandbox.cgroups import Cgroup, CgroupTree
from agentrl.sandbox.limits import ENVIRONMENT, Limits
from agentrl.sandbox.owner import Owner, start_ticks
from agentrl.sandbox.reaper import is_left_over

LIMITS = Limits(memory_bytes=1 << 28, pids=64, disk_bytes=1 << 25, shm_bytes=1 << 24, cpus=1.5)


def dead_owner() -> Owner:
    """An owner of this host whose process has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = start_ticks(child.pid)
    assert started is not None
    child.kill()
    child.communicate()
    return Owner(pid=child.pid, started=started, host=Owner.current().host)


def test_owner_is_judged_by_pid_start_time_and_host() -> None:
    here = Owner.current()
    assert here.pid == os.getpid()
    assert Owner.parse(str(here), here.host) == here
    assert Owner.parse("nonsense", here.host) is None
    assert not here.is_known_dead()
    assert Owner(here.pid, here.started + 1, here.host).is_known_dead()  # the pid was used again
    assert dead_owner().is_known_dead()
    assert not Owner(here.pid, here.started + 1, "another-boot:1").is_known_dead()


def test_a_living_process_of_another_user_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc is mounted with `hidepid` it does not show; a signal that may not be sent says that it is there."""
    me = Owner.current()
    monkeypatch.setattr(owner_module, "start_ticks", lambda pid: None)

    def answers(error: type[OSError]) -> None:
        def kill(pid: int, number: int) -> None:
            assert (pid, number) == (me.pid, 0)
            raise error

        monkeypatch.setattr(os, "kill", kill)

    answers(PermissionError)
    assert not me.is_known_dead()
    answers(ProcessLookupError)
    assert me.is_known_dead()


def test_k41_which_containers_are_left_over() -> None:
    here, dead, now = Owner.current(), dead_owner(), time.time()

    def labels(owner: Owner, **more: str) -> dict[str, str]:
        return {"agentrl.owner": str(owner), "agentrl.host": owner.host, **more}

    foreign = Owner(dead.pid, dead.started, "another-boot:1")
    assert not is_left_over(labels(here), running=True, now=now)
    assert not is_left_over(labels(here), running=False, now=now)  # its pool is about to look why it ended
    assert is_left_over(labels(dead), running=True, now=now)
    assert not is_left_over(labels(foreign), running=True, now=now)
    assert is_left_over(labels(foreign), running=False, now=now)
    late = {"agentrl.deadline": str(int(now) - 1)}
    assert is_left_over(labels(here, **late), running=True, now=now)
    assert is_left_over(labels(foreign, **late), running=True, now=now)
    assert not is_left_over({}, running=False, now=now)


def fake_tree(root: Path, version: int) -> CgroupTree:
    if version == 1:
        for name in ("memory", "pids", "cpu"):
            (root / name).mkdir()
            (root / name / "cgroup.procs").touch()
        tree = CgroupTree._version_1(root)
    else:
        (root / "cgroup.subtree_control").write_text("cpu memory pids\n")
        tree = CgroupTree._version_2(root)
    assert tree is not None
    return tree


@pytest.mark.parametrize("version", [1, 2])
def test_cgroup_settings(tmp_path: Path, version: int) -> None:
    tree = fake_tree(tmp_path, version)
    group = tree.create("run-1", LIMITS, owner=Owner.current())
    here = Owner.current()
    leaf = f"agentrl-{here.pid_namespace}-{here.pid}-{here.started}-run-1"
    written = {
        str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*") if leaf in str(p) and p.is_file()
    }
    if version == 1:
        assert written == {
            f"memory/{leaf}/memory.limit_in_bytes": str(1 << 28),
            f"pids/{leaf}/pids.max": "64",
            f"cpu/{leaf}/cpu.cfs_period_us": "100000",
            f"cpu/{leaf}/cpu.cfs_quota_us": "150000",
        }
        assert group.oom_file == tmp_path / "memory" / leaf / "memory.oom_control"
    else:
        assert written == {f"{leaf}/memory.max": str(1 << 28), f"{leaf}/pids.max": "64"}
        assert group.folders == (tmp_path / leaf,)
        assert group.oom_file == tmp_path / leaf / "memory.events"
    assert group.oom_kills() == 0
    group.oom_file.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\noom_group_kill 1\n")
    assert group.oom_kills() == 3


def test_cgroup_leftovers_are_those_of_the_dead(tmp_path: Path) -> None:
    tree = fake_tree(tmp_path, 1)
    dead = dead_owner()
    tree.create("a", LIMITS, owner=Owner.current())
    tree.create("run-with-dashes", LIMITS, owner=dead)
    other = Owner(dead.pid, dead.started, "boot:1")  # of another PID name space: not ours to judge
    tree.create("b", LIMITS, owner=other)
    (tmp_path / "memory" / "agentrl-someone-elses").mkdir()
    found = tree.leftovers()
    assert [folder.name for folder in found[0].folders] == [
        f"agentrl-{dead.pid_namespace}-{dead.pid}-{dead.started}-run-with-dashes"
    ] * 3
    assert len(found) == 1


def test_cgroups_of_empty_folders_are_removed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    group = Cgroup(folders=(tmp_path / "a", tmp_path / "gone"), oom_file=tmp_path / "none")
    assert group.remove_within(1.0)
    assert not (tmp_path / "a").exists()


def test_no_cgroups_where_nothing_can_be_written(tmp_path: Path) -> None:
    assert CgroupTree.find(tmp_path) is None
    (tmp_path / "cgroup.subtree_control").write_text("cpu\n")
    assert CgroupTree.find(tmp_path) is None


def test_version_2_is_looked_for_from_the_root_down_to_our_own_group(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("12:memory:/x\n0::/user.slice/user@7.service/app.scope\n")
    root = tmp_path / "cgroup"
    steps = [
        root,
        root / "user.slice",
        root / "user.slice/user@7.service",
        root / "user.slice/user@7.service/app.scope",
    ]
    assert cgroups._own_groups(root, membership) == steps
    membership.write_text("0::/\n")
    assert cgroups._own_groups(root, membership) == [root]
    assert cgroups._own_groups(root, tmp_path / "missing") == [root]


def test_a_delegated_group_of_version_2_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root allows no controller, the user's own service does; a group that cannot be entered is passed over."""
    own = tmp_path / "user.slice" / "user@7.service"
    own.mkdir(parents=True)
    for folder, enabled in ((tmp_path, ""), (own.parent, "memory pids"), (own, "cpu memory pids")):
        (folder / "cgroup.subtree_control").write_text(enabled)
    monkeypatch.setattr(cgroups, "_own_groups", lambda root: [tmp_path, own.parent, own])
    monkeypatch.setattr(cgroups, "_can_be_entered", lambda group: group.folders[0].parent == own)
    monkeypatch.setattr(cgroups, "_PROBE_TIMEOUT_S", 0.0)
    tree = CgroupTree.find(tmp_path)
    assert tree is not None
    assert (tree.version, set(tree.bases.values())) == (2, {own})


def test_limits_come_from_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits.of(SandboxConfig(memory_mb=100, pids=20, disk_mb=8, cpus=0.5))
    assert limits == Limits(memory_bytes=100 << 20, pids=20, disk_bytes=8 << 20, shm_bytes=8 << 20, cpus=0.5)
    assert Limits.of(SandboxConfig(disk_mb=1000)).shm_bytes == 64 << 20
    page = 4096
    common = ["--nproc=20:20", f"--fsize={(8 << 20) + page}:{(8 << 20) + page}", "--nofile=1024:4096"]
    common += ["--core=0:0", "--msgqueue=0:0"]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert limits.prlimit_arguments(address_space=True) == [*common, f"--as={100 << 20}:{100 << 20}"]
    assert limits.prlimit_arguments(address_space=False) == common


def test_a_limit_that_this_process_may_not_raise_stays_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (10, 600))
    assert LIMITS.prlimit_arguments(address_space=False) == [
        *("--nproc=64:64", "--fsize=600:600", "--nofile=600:600", "--core=0:0", "--msgqueue=0:0")
    ]


def test_the_bwrap_command_binds_the_image_read_only_and_nothing_else(tmp_path: Path) -> None:
    for name in ("usr", "etc", "proc", "tmp", "root", "testbed"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin").symlink_to("usr/bin")
    command = bwrap_command(tmp_path, LIMITS, info_fd=7, gate_fd=8, filter_fd=9, address_space=False)
    binds = {command[i + 2]: command[i + 1] for i, word in enumerate(command) if word == "--ro-bind"}
    hidden = {target for target, source in binds.items() if source == "/dev/null"}
    assert "/proc/kmsg" in hidden
    assert all(target.startswith("/proc/") for target in hidden)
    shown = {target: source for target, source in binds.items() if target not in hidden}
    assert shown == {"/usr": f"{tmp_path}/usr", "/etc": f"{tmp_path}/etc", "/proc/sys": "/proc/sys"}
    assert command[command.index("--seccomp") + 1] == "9"
    assert "--bind" not in command
    assert "--share-net" not in command
    for flag in (
        "--unshare-all",
        "--disable-userns",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        "--as-pid-1",
    ):
        assert flag in command
    names = {command[i + 1]: command[i + 2] for i, word in enumerate(command) if word == "--setenv"}
    assert names == dict(ENVIRONMENT)
    sizes = [command[i + 5] for i, word in enumerate(command) if word == "--size"]
    assert sizes == ["/dev/shm", "/tmp", "/testbed"]


def test_backend_choice_by_what_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    faults: dict[str, str | None] = {"docker": None, "bubblewrap": None}
    monkeypatch.setattr(backend_module, "docker_fault", lambda **_: faults["docker"])
    monkeypatch.setattr(backend_module, "bubblewrap_fault", lambda: faults["bubblewrap"])
    choose = backend_module.choose_backend
    assert choose(SandboxConfig()) == "docker"
    assert choose(SandboxConfig(backend="bubblewrap")) == "bubblewrap"
    faults["docker"] = "it sleeps"
    assert choose(SandboxConfig()) == "bubblewrap"
    with pytest.raises(NoSandboxBackendError, match="it sleeps") as caught:
        choose(SandboxConfig(backend="docker"))
    assert "start dockerd" in caught.value.remedy
    assert "bubblewrap" not in caught.value.remedy
    faults["bubblewrap"] = "not installed"
    with pytest.raises(NoSandboxBackendError, match="it sleeps; not installed") as caught:
        choose(SandboxConfig())
    assert "apt-get install bubblewrap" in caught.value.remedy


def test_a_server_whose_pid_is_never_told_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the gate opens it: without its pid the server would run outside its cgroup."""
    monkeypatch.setattr(bubblewrap, "_GATE_TIMEOUT_S", 0.3)
    ran = tmp_path / "ran"

    def silent(info_fd: int, gate_fd: int, filter_fd: int | None) -> list[str]:
        # The server is a child of its own, as bubblewrap's is.
        return ["bash", "-c", f"(read -r -u {gate_fd}; : > {ran}) & sleep 60"]

    with pytest.raises(SandboxStartError, match="did not tell the server's pid"):
        bubblewrap._spawn(silent, None, "silent", filter_program=None)
    time.sleep(0.5)
    assert not ran.exists()

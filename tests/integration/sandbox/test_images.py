"""The base image: it is built, holds what agents need, and its server rules a sandbox as PID 1."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ImageMissingError, MissingRequirementError
from agentrl.sandbox import images
from agentrl.sandbox.recipes import build

if shutil.which("bwrap") is None:
    pytest.skip("bubblewrap is not installed: apt-get install -y bubblewrap", allow_module_level=True)

pytestmark = pytest.mark.bubblewrap


class Inside:
    """The server as PID 1 under the least bubblewrap that isolates it."""

    def __init__(self, rootfs: Path) -> None:
        command = ["bwrap", "--unshare-all", "--as-pid-1", "--die-with-parent", "--new-session"]
        command += ["--uid", "1000", "--gid", "1000", "--cap-drop", "ALL", "--ro-bind", str(rootfs), "/"]
        command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/dev/shm"]
        command += ["--tmpfs", "/testbed", "--remount-ro", "/dev", "--chdir", "/testbed", "--clearenv"]
        command += ["/usr/bin/python3", "-I", "-B", "/opt/agentrl/server/launch.py"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._number = 0
        assert self._receive() == {"ready": True, "protocol": 1}

    def _receive(self, timeout_s: float = 60.0) -> dict[str, Any]:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], timeout_s)[0], "the server says nothing"
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def __call__(self, op: str, **fields: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self._number += 1
        self.process.stdin.write(json.dumps({"id": self._number, "op": op, **fields}).encode() + b"\n")
        self.process.stdin.flush()
        answer = self._receive()
        assert answer["id"] == self._number
        assert answer["ok"], answer
        return answer

    def run(self, command: str, timeout_s: float = 30.0) -> dict[str, Any]:
        return self("run", command=command, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def rootfs() -> Path:
    try:
        return images.ensure_rootfs("agentrl/base")
    except MissingRequirementError as error:
        raise pytest.skip.Exception(str(error)) from None


@pytest.fixture(scope="module")
def inside(rootfs: Path) -> Iterator[Inside]:
    sandbox = Inside(rootfs)
    yield sandbox
    assert sandbox.process.stdin is not None
    assert sandbox.process.stdout is not None
    sandbox.process.stdin.close()
    assert sandbox.process.wait(20) == 0, "the server does not end with its stdin"
    sandbox.process.stdout.close()


def test_a_second_call_builds_nothing(rootfs: Path) -> None:
    before = rootfs.stat()
    assert images.ensure_rootfs(f"agentrl/base:{images.image_hash()}") == rootfs
    assert (rootfs.stat().st_ino, rootfs.stat().st_ctime_ns) == (before.st_ino, before.st_ctime_ns)
    assert not list(rootfs.parent.parent.glob(".building-*"))


def test_what_agents_need_is_there(inside: Inside) -> None:
    answer = inside.run(
        "id -u; pwd; python -V; python -m pytest --version; pytest --version; which git patch rg less ps; "
        "cd /tmp && git init -q r && cd r && echo x > f && git add f && git commit -qm m; "
        "git log --oneline | wc -l"
    )
    assert answer["exit_code"] == 0, answer["output"]
    lines = answer["output"].split("\n")
    assert lines[:2] == ["1000", "/testbed"]
    assert lines[2].startswith("Python 3.11.")
    assert lines[3:5] == ["pytest 8.3.5", "pytest 8.3.5"]
    assert lines[-2] == "1"


def test_only_pytest_is_importable_of_the_tools_tree(inside: Inside) -> None:
    code = "import importlib.util as u; print([n for n in NAMES if u.find_spec(n)])"
    names = [
        "pytest",
        "pluggy",
        "cachetools",
        "openhands_aci",
        "charset_normalizer",
        "agentrl_sandbox_server",
    ]
    answer = inside.run(f'python -c "NAMES={names}; {code}"')
    assert answer["output"] == "['pytest', 'pluggy']\n"


def test_the_root_is_read_only_and_compiled(inside: Inside) -> None:
    answer = inside.run("touch /x /usr/x /opt/agentrl/x /dev/x; ls /opt/agentrl/server/__pycache__ | wc -l")
    assert answer["output"].count("Read-only file system") == 4
    assert int(answer["output"].split()[-1]) >= 10


def test_k40_reset_clears_fork_bombs_daemons_and_trees(inside: Inside) -> None:
    """Bounded, so that a failure of this test does not take the machine along."""
    bomb = "f() { [ $1 -gt 6 ] && { trap '' TERM INT; sleep 60; return; }; f $(($1+1)) & f $(($1+1)) & wait; }"
    answer = inside.run(
        f"mkdir -p a/b; chmod 0 a/b; echo x > /tmp/f; echo x > /dev/shm/f; setsid sleep 61 & {bomb}; f 0",
        timeout_s=2,
    )
    assert answer["timed_out"] is True
    assert inside("ping")["processes"] == 0, "a command's processes outlive its deadline"
    started = time.monotonic()
    inside("reset")
    assert time.monotonic() - started < 30  # not the 60 of what it kills
    assert inside("ping")["processes"] == 0
    assert inside.run("ls -A /testbed /tmp /dev/shm")["output"] == "/dev/shm:\n\n/testbed:\n\n/tmp:\n"


def test_agents_cannot_reach_the_server(inside: Inside) -> None:
    answer = inside.run(
        "kill -9 1; kill -TERM 1; kill -INT 1; "
        "for f in environ maps mem fd/0 fd/1 fd/2 fd/3 fd/4 fd/5 fd/6 fd/7 fd/8; do "
        "(echo '{}' >> /proc/1/$f) 2>/dev/null && echo wrote $f; cat /proc/1/$f 2>/dev/null && echo read $f; "
        "done; echo end"
    )
    assert answer["output"] == "end\n"
    assert inside("ping")["processes"] == 0


def test_k44_there_is_no_network(inside: Inside) -> None:
    assert inside.run("cat /proc/net/route | wc -l; ls /sys/class/net 2>&1")["output"].split()[0] in (
        "0",
        "1",
    )


def test_editor_and_tests_run_inside(inside: Inside) -> None:
    inside("reset")
    test = base64.b64encode(b"from a import f\ndef test_f(): assert f(1) == 2\n").decode()
    source = base64.b64encode(b"def f(x):\n    return x\n").decode()
    inside("write", files={"a.py": source, "tests/test_a.py": test})
    before = inside("tests", arguments=["-q"], canary=True, timeout_s=30)
    assert before["results"] == {"tests/test_a.py::test_f": "failed"}
    edit = inside("edit", command="str_replace", path="a.py", old_str="return x", new_str="return x + 1")
    assert edit["content"] == "def f(x):\n    return x + 1\n"
    after = inside("tests", arguments=["-q"], canary=True, timeout_s=30)
    assert after["results"] == {"tests/test_a.py::test_f": "passed"}
    assert (after["exit_code"], after["canary_failed"]) == (0, True)
    assert inside.run("python -m pytest -q")["exit_code"] == 0


def test_other_images_have_no_root_file_system() -> None:
    for image in ("python:3.12-slim", "agentrl/base:0000"):
        with pytest.raises(ImageMissingError) as caught:
            images.ensure_rootfs(image)
        assert image in caught.value.what
        assert "agentrl/base" in caught.value.remedy


def test_missing_mmdebstrap_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    for program in ("chmod", "rm"):
        (tmp_path / program).symlink_to(shutil.which(program) or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingRequirementError) as caught:
        images.ensure_rootfs("agentrl/base")
    assert "apt-get install -y mmdebstrap" in caught.value.remedy
    assert not [path for path in (tmp_path / "images").iterdir() if path.is_dir()]


def test_killed_builds_are_never_taken_as_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dead builder left is removed by the next one; one builder at a time fills a layer, others
    wait."""
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    stale = tmp_path / "images" / ".building-tools-dead-1"
    stale.mkdir(parents=True)
    (stale / "half").write_text("x")
    (stale / "half").chmod(0)
    built: list[int] = []

    def fill(work: Path) -> None:
        assert not stale.exists()
        built.append(1)
        time.sleep(0.2)
        (work / "done").write_text("whole")

    monkeypatch.setattr(build, "build_tools", fill)
    threads = [threading.Thread(target=images.ensure_tools) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert built == [1]
    assert (images.ensure_tools() / "done").read_text() == "whole"


def test_failed_builds_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "RECIPES", tmp_path)
    for name in ("pytest.txt", "editor.txt"):
        (tmp_path / name).write_text("no-such-thing-at-all @ file:///nowhere.whl\n")
    with pytest.raises(ImageMissingError) as caught:
        images.ensure_tools()
    assert "nowhere" in caught.value.what
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["lock"]


@pytest.mark.docker
def test_docker_holds_the_same_image() -> None:
    import docker

    try:
        client = docker.from_env(timeout=120)
        client.ping()
    except Exception as error:
        pytest.skip(f"no Docker daemon answers: {error}")
    try:
        tag = images.ensure_docker_image(client, "agentrl/base")
        assert tag == f"agentrl/base:{images.image_hash()}"
        output = client.containers.run(
            tag,
            ["sh", "-c", "id -u; pwd; python -m pytest --version; stat -c %u:%a /opt/agentrl/server/main.py"],
            network_mode="none",
            read_only=True,
            tmpfs={"/tmp": "size=16m,mode=1777"},
            remove=True,
        )
        assert output.decode().split("\n")[:4] == ["1000", "/testbed", "pytest 8.3.5", "0:644"]
        with pytest.raises(ImageMissingError):
            images.ensure_docker_image(client, "nobody/has-this:1")
    finally:
        client.close()


def test_owners_of_the_unpacked_files(rootfs: Path) -> None:
    assert os.stat(rootfs / "testbed").st_uid in (1000, os.getuid())
    assert (rootfs / "usr/local/bin/pytest").stat().st_mode & 0o111

"""What outlives a crash, and what happens when a part that is not ours goes away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import SandboxConfig
from agentrl.errors import DaemonUnreachableError, ImageMissingError, NoSandboxBackendError
from agentrl.sandbox import Pool, bubblewrap, choose_backend, open_pool, reap
from agentrl.sandbox.backend import bubblewrap_fault
from agentrl.sandbox.cgroups import CgroupTree
from agentrl.sandbox.owner import Owner, start_ticks
from agentrl.wire.protocols import Sandbox

POOL_IMAGE = "agentrl/base"

OWNER = """
import asyncio, sys
from agentrl.config import SandboxConfig
from agentrl.sandbox import open_pool

async def main():
    config = SandboxConfig(backend=sys.argv[1], size=2, starters=2, memory_mb=256, disk_mb=16)
    async with open_pool(config, run_id="crash-" + sys.argv[2]) as pool:
        async with asyncio.timeout(90):
            while pool.stats().idle < 2:
                await asyncio.sleep(0.01)
        async with pool.lease(config.image, timeout_s=60) as box:
            print("up", flush=True)
            await box.run("sleep 1234", timeout_s=2000)

asyncio.run(main())
"""


def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.02)


def cgroups_of(owner: Owner) -> list[Path]:
    """Of this very process: other runs on the machine have theirs, living and dead."""
    leaf = f"agentrl-{owner.pid_namespace}-{owner.pid}-{owner.started}-*"
    return [folder for pattern in (leaf, f"*/{leaf}") for folder in Path("/sys/fs/cgroup").glob(pattern)]


def first_line(process: subprocess.Popen[str], timeout_s: float = 150.0) -> str:
    """What `process` says first; empty where it ends or is silent for too long."""
    assert process.stdout is not None
    return process.stdout.readline() if select.select([process.stdout], [], [], timeout_s)[0] else ""


def containers_of(run: str) -> list[str]:
    command = ["docker", "ps", "-aq", "--filter", f"label=agentrl.run={run}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found |= {child} | descendants(child)
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_k41_nothing_outlives_its_owner(backend_name: str, how: signal.Signals) -> None:
    """kill -9: the sandboxes end by themselves and the reaper takes the rest. Ctrl-C: the owner leaves
    nothing."""
    run = f"crash-{how.name.lower()}-{os.getpid()}"
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, backend_name, run.removeprefix("crash-")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        started = start_ticks(owner.pid)
        assert started is not None
        named = Owner(owner.pid, started, Owner.current().host)
        if first_line(owner) != "up\n":
            owner.kill()
            pytest.fail(f"the owner does not come up: {owner.communicate(timeout=30)[1]}")
        below = {pid: start_ticks(pid) for pid in descendants(owner.pid)}
        if backend_name == "bubblewrap":
            assert len(below) >= 4  # per sandbox: bwrap and the server
        else:
            assert len(containers_of(run)) >= 2
        owner.send_signal(how)
        owner.wait(30)
    finally:
        owner.kill()
        owner.wait()
    until(lambda: not any(start_ticks(pid) == started for pid, started in below.items()))
    if how == signal.SIGKILL:
        report = reap(containers=backend_name == "docker")
        assert report.unreachable is None  # no count: another process's reaper may have been quicker
    until(lambda: cgroups_of(named) == [])  # a reaper of another run may be at them
    if backend_name == "docker":
        assert containers_of(run) == []


def test_a_reaper_spares_the_living(house: Any) -> None:
    async def main() -> None:
        async with house.pool.lease(house.config.image, timeout_s=60) as box:
            await asyncio.to_thread(reap, containers=house.pool.backend == "docker")
            assert (await box.run("echo fine", timeout_s=10)).output == "fine\n"

    house.runner.run(main())


class Proxy:
    """A Unix socket in front of the daemon's: closing it is the daemon's death as its clients see it."""

    def __init__(self, path: Path) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(64)
        self._ends: list[socket.socket] = []
        self._path = path
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                daemon = socket.socket(socket.AF_UNIX)
                daemon.connect("/var/run/docker.sock")
                self._ends += [client, daemon]
                for pair in ((client, daemon), (daemon, client)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def die(self) -> None:
        self._path.unlink(missing_ok=True)
        self._server.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(tmp_path / "docker.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path / 'docker.sock'}")
    yield proxy
    proxy.die()


async def struck(pool: Pool, proxy: Proxy) -> tuple[Sandbox, BaseException | None]:
    """A sandbox whose daemon dies during a command, and the error that this gives."""
    async with pool.lease(POOL_IMAGE, timeout_s=60) as box:
        task = asyncio.create_task(box.run("sleep 60", timeout_s=90))
        await asyncio.sleep(0.5)
        proxy.die()
        await asyncio.wait([task])
        return box, task.exception()


@pytest.mark.docker
def test_a_daemon_that_goes_away_is_told_apart_and_hangs_nothing(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """K42, K43: retryable, never scored; later leases fail with the reason instead of waiting for ever."""
    try:
        subprocess.run(["docker", "version"], capture_output=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("no Docker daemon answers")
    config = SandboxConfig(
        backend="docker", size=2, starters=1, memory_mb=256, disk_mb=16, channel="stdio", daemon_patience_s=1
    )
    run = f"proxy-{os.getpid()}"

    async def main() -> None:
        async with open_pool(config, run_id=run) as pool:
            box, error = await struck(pool, proxy)
            assert isinstance(error, DaemonUnreachableError)
            assert box.id in str(error)
            assert "start dockerd" in error.remedy
            with pytest.raises(DaemonUnreachableError, match="does not answer"):
                async with pool.lease(config.image, timeout_s=30):
                    pass

    began = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began < 40
    monkeypatch.delenv("DOCKER_HOST")
    # The containers saw the end of their stdin; their owner lives, so a deadline or its death would reap
    # them.
    for container in containers_of(run):
        subprocess.run(["docker", "rm", "-f", container], capture_output=True, check=True, timeout=20)


def test_auto_takes_docker_where_it_answers(backend_name: str) -> None:
    assert choose_backend(SandboxConfig(backend=backend_name)) == backend_name
    if backend_name == "docker":
        assert choose_backend(SandboxConfig()) == "docker"


@pytest.mark.bubblewrap
def test_without_cgroups_prlimit_holds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A process that asks for too much memory fails by itself; the log says what is not limited."""
    require_bubblewrap()
    monkeypatch.setattr(CgroupTree, "find", lambda: None)
    monkeypatch.setattr(bubblewrap, "host_oom_kills", lambda: 0)  # the host's count has other runs' kills in it
    config = SandboxConfig(backend="bubblewrap", size=1, starters=1, memory_mb=256, pids=40, disk_mb=16)

    async def main() -> None:
        async with open_pool(config, run_id="plain") as pool, pool.lease(POOL_IMAGE, timeout_s=60) as box:
            hog = await box.run("python3 -c 'x = bytearray(10**9)'", timeout_s=30)
            assert (hog.exit_code, hog.out_of_memory) == (1, False)
            assert "MemoryError" in hog.output
            assert (await box.run("ulimit -u; ulimit -c", timeout_s=10)).output == "40\n0\n"
            assert not (await box.run("kill -9 $$", timeout_s=10)).out_of_memory

    asyncio.run(main())
    assert [record.message for record in caplog.records if "limited by prlimit only" in record.message]


def require_bubblewrap() -> None:
    if (fault := bubblewrap_fault()) is not None:
        pytest.skip(fault)


@pytest.mark.bubblewrap
def test_auto_falls_back_and_explicit_names_do_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(NoSandboxBackendError, match="no Docker daemon answers") as caught:
        choose_backend(SandboxConfig(backend="docker"))
    assert "start dockerd" in caught.value.remedy
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoSandboxBackendError, match=r"no Docker daemon answers.*bwrap is not installed") as caught:
        choose_backend(SandboxConfig())
    assert "apt-get install bubblewrap" in caught.value.remedy
    assert "start dockerd" in caught.value.remedy


def test_an_image_that_is_not_here_is_named(backend_name: str) -> None:
    pull = {"pull": "never"} if backend_name == "docker" else {}
    config = SandboxConfig.model_validate({"backend": backend_name, "image": "nobody/nothing:1", **pull})

    async def main() -> None:
        async with open_pool(config, run_id="missing"):
            raise AssertionError("opened")

    with pytest.raises(ImageMissingError, match="nobody/nothing:1"):
        asyncio.run(main())

"""A Docker daemon of the test's own, killed and started again while a pool works on it (K42, K43)."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.config import SandboxConfig
from agentrl.errors import AgentRLError, Handling, SandboxError, handling
from agentrl.sandbox import Pool, open_pool
from agentrl.sandbox.docker import DockerBackend
from agentrl.sandbox.docker_client import connect, named
from agentrl.sandbox.images import BASE_IMAGE, ensure_docker_image

pytestmark = pytest.mark.docker


class Dockerd:
    """A daemon beside the machine's own: its own sockets, files and network name space."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"unix://{folder}/d.sock"
        self.options: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        (self.folder / "d.pid").unlink(missing_ok=True)
        (self.folder / "exec" / "containerd" / "containerd.pid").unlink(missing_ok=True)
        command = ["unshare", "--net", "dockerd", "--host", self.address, "--data-root", str(self.folder / "data")]
        command += ["--exec-root", str(self.folder / "exec"), "--pidfile", str(self.folder / "d.pid")]
        command += ["--bridge=none", "--iptables=false", "--log-level=warn", *self.options]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + 30
        while True:
            try:
                connect(2.0, self.address).close()
                return
            except SandboxError:
                if time.monotonic() > end or self._process.poll() is not None:
                    pytest.skip(f"no second daemon starts: {(self.folder / 'log').read_text()[-500:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def containers(self) -> list[str]:
        client = connect(5.0, self.address)
        try:
            return [found["Id"] for found in client.api.containers(all=True)]
        finally:
            client.close()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()  # asked to end, it may take its time
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if (point := line.split()[1]).startswith(f"{self.folder}/"):
                subprocess.run(["umount", "-l", point], check=False, timeout=10)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def one_dockerd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dockerd]:
    """A daemon with the base image; its disk serves all tests here."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None:
        pytest.skip("a second daemon needs root and the program dockerd")
    daemon = Dockerd(tmp_path_factory.mktemp("dockerd"))
    try:
        daemon.start()
        client = connect(60.0, daemon.address)
        ensure_docker_image(client, BASE_IMAGE)
        client.close()
        yield daemon
    finally:
        daemon.stop()


@pytest.fixture
def dockerd(request: pytest.FixtureRequest, one_dockerd: Dockerd) -> Dockerd:
    """The daemon, running with the options of the test."""
    options = getattr(request, "param", ())
    if options != one_dockerd.options:
        one_dockerd.kill()
        one_dockerd.options = options
        one_dockerd.start()
    return one_dockerd


def config_of(*daemons: Dockerd, **settings: object) -> SandboxConfig:
    fixed = {"backend": "docker", "hosts": [daemon.address for daemon in daemons], "memory_mb": 256, "disk_mb": 16}
    return SandboxConfig.model_validate({"size": 4, "starters": 2, **fixed, **settings})


async def episode(pool: Pool, number: int, failures: list[AgentRLError]) -> str:
    """Some commands that take about a second; tried again like a rollout after what the machine did wrong."""
    for _ in range(4):
        try:
            async with pool.lease(BASE_IMAGE, timeout_s=60, label=f"episode {number}") as box:
                await box.write_files({"number": str(number).encode()})
                for _ in range(4):
                    assert (await box.run("sleep 0.25; ls", timeout_s=30)).output == "number\n"
                return (await box.run("cat number", timeout_s=30)).output
        except AgentRLError as error:
            failures.append(error)
    raise AssertionError(f"episode {number} never ended: {failures}")


async def held(pool: Pool, failures: list[AgentRLError]) -> None:
    """One command that is in progress whenever the daemon is struck."""
    try:
        async with pool.lease(BASE_IMAGE, timeout_s=60, label="held") as box:
            await box.run("sleep 60", timeout_s=90)
    except AgentRLError as error:
        failures.append(error)


async def outage(pool: Pool, daemon: Dockerd, *, after: int, away_s: float) -> None:
    """SIGKILL the daemon once `after` leases were made, and start it again."""
    end = time.monotonic() + 30
    while pool.stats().leases < after:
        assert time.monotonic() < end
        await asyncio.sleep(0.02)
    await asyncio.to_thread(daemon.kill)
    await asyncio.sleep(away_s)
    await asyncio.to_thread(daemon.start)


def test_k42_a_daemon_killed_and_started_again_spoils_no_episode(dockerd: Dockerd) -> None:
    """Without live-restore the sandboxes die with the old daemon: their episodes are tried again, nothing is left."""
    failures: list[AgentRLError] = []

    async def main() -> list[str]:
        # Little reuse, so that sandboxes are to be started and removed while the daemon is away.
        async with open_pool(config_of(dockerd, reuse=2), run_id="outage") as pool:
            strike = asyncio.create_task(outage(pool, dockerd, after=6, away_s=2.0))
            victim = asyncio.create_task(held(pool, failures))
            results = await asyncio.gather(*(episode(pool, number, failures) for number in range(12)))
            await strike
            await victim
            async with pool.lease(BASE_IMAGE, timeout_s=30) as box:
                assert (await box.run("echo fine", timeout_s=10)).output == "fine\n"
            return results

    assert asyncio.run(main()) == [str(number) for number in range(12)]
    assert failures
    assert {handling(error) for error in failures} == {Handling(retry=True, graded=False, counted=False)}
    assert dockerd.containers() == []


@pytest.mark.parametrize("dockerd", [("--live-restore",)], indirect=True)
def test_k42_with_live_restore_no_command_notices(dockerd: Dockerd) -> None:
    """The conversation goes past the daemon: what runs while it is away, and across its restart, ends as ever."""

    async def main() -> None:
        async with open_pool(config_of(dockerd, size=2), run_id="restore") as pool:
            async with pool.lease(BASE_IMAGE, timeout_s=60) as box, pool.lease(BASE_IMAGE, timeout_s=60) as other:
                ids = {box.id, other.id}
                across = asyncio.create_task(box.run("sleep 5; echo across", timeout_s=60))
                await asyncio.sleep(0.3)
                await asyncio.to_thread(dockerd.kill)
                assert (await other.run("echo away", timeout_s=10)).output == "away\n"
                await asyncio.to_thread(dockerd.start)
                assert (await across).output == "across\n"
            async with pool.lease(BASE_IMAGE, timeout_s=60) as box:
                assert (await box.run("echo after", timeout_s=10)).output == "after\n"
                assert box.id in ids
            assert pool.stats().failures == 0

    asyncio.run(main())
    assert dockerd.containers() == []


def test_hosts_share_the_sandboxes_and_one_that_is_away_is_left_out(dockerd: Dockerd) -> None:
    """The machine's own daemon beside the test's."""
    config = config_of(dockerd).model_copy(update={"hosts": (named(""), dockerd.address)})
    backend = DockerBackend(config, run_id="hosts")

    async def main() -> None:
        try:
            await backend.prepare(BASE_IMAGE)
            machines = [await backend.start(BASE_IMAGE, timeout_s=60) for _ in range(4)]
            assert sorted(host.free for host in backend.hosts) == [0, 0]
            assert len(dockerd.containers()) == 2
            for machine in machines:
                await machine.close()
            assert [host.free for host in backend.hosts] == [2, 2]
            await asyncio.to_thread(dockerd.kill)
            machines = [await backend.start(BASE_IMAGE, timeout_s=60) for _ in range(2)]
            assert [host.away is None for host in backend.hosts] == [True, False]
            assert backend.free_room() == 0
            with pytest.raises(SandboxError, match="had room"):
                await backend.start(BASE_IMAGE, timeout_s=0.2)
            await asyncio.to_thread(dockerd.start)
            machines.append(await backend.start(BASE_IMAGE, timeout_s=30))
            assert len(dockerd.containers()) == 1
        finally:
            await backend.close()

    asyncio.run(main())
    assert dockerd.containers() == []

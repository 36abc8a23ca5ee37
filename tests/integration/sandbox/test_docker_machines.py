"""How a container's server is reached, what a container is made of, and what the listing says of it."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import SandboxConfig
from agentrl.errors import SandboxStartError
from agentrl.sandbox import docker_host, open_pool
from agentrl.sandbox.backend import docker_fault
from agentrl.sandbox.docker_channel import Door, runtime_folder
from agentrl.sandbox.docker_client import connect, is_local, named
from agentrl.sandbox.listing import SandboxInfo, Summary, list_sandboxes, summary
from agentrl.sandbox.owner import Owner

pytestmark = pytest.mark.docker


@pytest.fixture(autouse=True, scope="module")
def _local_daemon() -> None:
    if fault := docker_fault():
        pytest.skip(fault)
    if not is_local(""):
        pytest.skip("the daemon is not on this machine")


def config_of(**settings: Any) -> SandboxConfig:
    fixed = {"backend": "docker", "size": 1, "starters": 1, "memory_mb": 256, "disk_mb": 16}
    return SandboxConfig.model_validate({**fixed, **settings})


def say(config: SandboxConfig, command: str) -> tuple[str, list[SandboxInfo], dict[str, Any]]:
    """What `command` says in a sandbox, what the listing says meanwhile of this process's, and Docker's own view."""
    client = connect(10.0)

    async def main() -> tuple[str, list[SandboxInfo], dict[str, Any]]:
        async with open_pool(config, run_id="machines") as pool, pool.lease(config.image, timeout_s=60) as box:
            said = (await box.run(command, timeout_s=20)).output
            mine = [each for each in await asyncio.to_thread(list_sandboxes) if each.id == box.id]
            inspected = await asyncio.to_thread(client.api.inspect_container, box.id.removeprefix("docker:"))
            return said, mine, inspected

    try:
        return asyncio.run(main())
    finally:
        client.close()


def doors() -> list[Path]:
    """Of this process."""
    me = Owner.current()
    return list(runtime_folder().glob(f"{me.pid_namespace}-{me.pid}-{me.started}-*"))


def test_auto_takes_the_socket_and_leaves_nothing_of_it() -> None:
    said, mine, inspected = say(config_of(), "ls -A /run/agentrl | wc -l; cat /proc/1/fd/0 2>&1 | head -c 80; env")
    assert said.startswith("0\n") or "Permission denied" in said
    assert "AGENTRL" not in said
    assert not inspected["Config"]["OpenStdin"]
    (mount,) = [each for each in inspected["Mounts"] if each["Destination"] == "/run/agentrl"]
    assert mount["RW"] is False
    assert doors() == []
    (info,) = mine
    assert (info.backend, info.run, info.image, info.state) == ("docker", "machines", "agentrl/base", "running")
    assert (info.owner, info.owner_alive) == (str(Owner.current()), True)
    assert info.owner.startswith(f"{os.getpid()}:")
    assert info.memory_bytes is not None
    assert 1 << 20 < info.memory_bytes < 256 << 20
    assert info.processes is not None
    assert info.processes >= 1
    assert 0 <= info.age_s < 120


def test_a_container_is_hardened() -> None:
    _, _, inspected = say(config_of(pids=77, cpus=0.5), "true")
    host = inspected["HostConfig"]
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert "no-new-privileges" in host["SecurityOpt"]
    assert (host["NetworkMode"], host["IpcMode"], host["Privileged"]) == ("none", "private", False)
    assert host["Memory"] == host["MemorySwap"] == 256 << 20
    assert (host["PidsLimit"], host["NanoCpus"]) == (77, 500_000_000)
    assert host["LogConfig"]["Type"] == "none"
    limits = {each["Name"]: each["Hard"] for each in host["Ulimits"]}
    assert limits["core"] == 0
    assert limits["nofile"] <= 4096
    assert 16 << 20 <= limits["fsize"] <= 17 << 20
    assert set(host["Tmpfs"]) == {"/testbed", "/tmp"}
    assert inspected["Config"]["User"] == "1000:1000"
    assert inspected["Config"]["Healthcheck"] == {"Test": ["NONE"]}


class FarDoor(Door):
    """A door whose folder the daemon does not see: it is in another mount name space."""

    def __init__(self, owner: Owner) -> None:
        super().__init__(owner)
        self._near, self.folder = self.folder, Path("/nowhere", self.folder.name)

    def close(self) -> None:
        if hasattr(self, "_near"):
            self.folder = self._near
        super().close()


class WrongDoor(Door):
    """A door to which the server does not find: a policy forbids it, or the folder's files are not ours."""

    @property
    def address(self) -> str:
        return "/run/agentrl/other"


@pytest.mark.parametrize("door", [FarDoor, WrongDoor])
def test_where_the_socket_cannot_be_reached_auto_takes_stdio(
    door: type[Door], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(docker_host, "Door", door)
    with caplog.at_level(logging.INFO):
        said, _, inspected = say(config_of(size=2, starters=2), "echo fine")
    assert said == "fine\n"
    assert inspected["Config"]["OpenStdin"]
    assert len([record for record in caplog.records if "over stdin and stdout" in record.message]) == 1
    assert doors() == []


def test_an_explicit_socket_says_why_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_host, "Door", WrongDoor)
    with pytest.raises(SandboxStartError, match="cannot be reached") as caught:
        say(config_of(channel="socket"), "true")
    assert "No such file" in caught.value.what
    assert "sandbox.channel=stdio" in caught.value.remedy
    assert doors() == []


def test_the_summary_names_daemon_images_and_disk() -> None:
    found: Summary = summary((named(""), "unix:///nowhere.sock"))
    daemon, nowhere = found.hosts
    assert daemon.fault is None
    assert any(image.name.startswith("agentrl/base:") and image.origin == "built" for image in daemon.images)
    assert daemon.disk_used is not None
    assert 0 < daemon.disk_used < 1
    assert nowhere.fault is not None
    assert found.cache_bytes > 1 << 20

"""Placement over several Docker daemons, held against played ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from agentrl.config import SandboxConfig
from agentrl.errors import ConfigError, DaemonUnreachableError, ImageMissingError, SandboxStartError
from agentrl.sandbox import docker as docker_module
from agentrl.sandbox import docker_host as docker_host_module
from agentrl.sandbox.docker import DockerBackend
from agentrl.sandbox.docker_container import Plan, create
from agentrl.sandbox.docker_host import DockerHost
from agentrl.sandbox.docker_images import Prepared
from agentrl.sandbox.foreign import Equipment
from agentrl.sandbox.limits import Limits

OWN, FOREIGN = "agentrl/base", "swe/task-1"


class PlayedHost:
    """A daemon with `room`, whose starts take their room, and which can be away, broken, or lack images."""

    def __init__(self, address: str, config: SandboxConfig, *, run_id: str, pool_id: str, room: int) -> None:
        self.address, self.room = address, room
        self.away: DaemonUnreachableError | None = None
        self.fault: Exception | None = None
        self.failures = self.used = 0
        self.images: set[str] = set()
        self.pulls: list[str] = []
        self.lacks: set[str] = set()
        self.back: Callable[[], None] = lambda: None

    @property
    def free(self) -> int:
        return 0 if self.away else self.room - self.used

    def has(self, image: str) -> bool:
        return image in self.images

    def on_return(self, call: Callable[[], None]) -> None:
        self.back = call

    async def prepare(self, image: str) -> None:
        if isinstance(self.fault, DaemonUnreachableError):
            self.away = self.fault
            raise self.fault
        if image in self.lacks:
            raise ImageMissingError(f"no {image}", where=self.address)
        if image not in self.images:
            self.pulls.append(image)
        self.images.add(image)

    async def start(self, image: str, *, timeout_s: float) -> str:
        await self.prepare(image)
        if self.fault is not None:
            self.failures += 1
            raise self.fault
        self.used += 1
        return self.address

    async def close(self, timeout_s: float) -> None:
        """Nothing to close."""


def drive(body: Callable[[DockerBackend, Any], Awaitable[None]], **settings: Any) -> None:
    config = SandboxConfig.model_validate({"backend": "docker", "hosts": ["tcp://a", "tcp://b"], "size": 6, **settings})

    async def main() -> None:
        backend = DockerBackend(config, run_id="x")
        async with asyncio.timeout(5):
            await body(backend, backend.hosts)
            await backend.close()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_module, "DockerHost", PlayedHost)


def real_host() -> DockerHost:
    """One that has asked nothing of its daemon, which is not there."""
    config = SandboxConfig(backend="docker")
    return DockerHost("unix:///nowhere/docker.sock", config, run_id="x", pool_id="y", room=2)


def test_a_removal_does_not_wait_for_a_daemon_that_is_known_to_be_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of them waits in turn, and the process cannot end before the last."""
    host = real_host()
    asked: list[str] = []
    monkeypatch.setattr(docker_host_module, "remove_container", lambda client, name: asked.append(name))
    monkeypatch.setattr(host._daemon, "clients", lambda: pytest.fail("asked"))
    host._daemon.away = DaemonUnreachableError("gone")
    assert host._remove("box") is host.away
    assert asked == []


def test_a_foreign_image_is_looked_at_anew_after_a_start_that_failed() -> None:
    """Its volumes may have been removed: the daemon then makes empty ones of their names."""
    host = real_host()
    own = Equipment(command=("serve",), volumes={}, environment={})
    host._prepared["own"] = Prepared("own", "sha256:1", own)
    host._prepared["foreign"] = Prepared("foreign", "sha256:2", replace(own, volumes={"agentrl-seed-x": "/seed"}))
    host._doubt("own")
    host._doubt("foreign")
    assert (host.has("own"), host.has("foreign")) == (True, False)


def test_containers_are_made_of_the_image_that_was_prepared_not_of_its_name() -> None:
    """The name may be given to another image, whose work tree the seed volume does not hold."""
    asked: list[tuple[str, Any]] = []

    class Client:
        api = property(lambda self: self)

        def create_host_config(self, **options: Any) -> dict[str, Any]:
            return options

        def create_container(self, image: str, command: list[str], **options: Any) -> dict[str, str]:
            asked.append((image, options["host_config"]["mounts"][0]["Source"]))
            return {"Id": "c1"}

    seeded = Equipment(command=("serve",), volumes={"agentrl-seed-1": "/seed"}, environment={})
    limits = Limits.of(SandboxConfig())
    client: Any = Client()
    assert create(client, Plan("box", Prepared("swe/task:latest", "sha256:1", seeded), limits, {}, None)) == "c1"
    assert asked == [("sha256:1", "agentrl-seed-1")]


def test_room_is_shared_and_the_freest_is_taken() -> None:
    async def body(backend: DockerBackend, hosts: Any) -> None:
        await backend.prepare(OWN)
        assert [host.room for host in hosts] == [3, 3]
        assert [host.pulls for host in hosts] == [[OWN], [OWN]]
        hosts[0].used = 2
        assert [await backend.start(OWN, timeout_s=1) for _ in range(2)] == ["tcp://b", "tcp://b"]
        assert backend.free_room() == 2

    drive(body)


def test_an_image_that_must_be_pulled_keeps_to_its_host_while_that_has_room() -> None:
    async def body(backend: DockerBackend, hosts: Any) -> None:
        hosts[0].used = 1
        await backend.prepare(FOREIGN)
        assert [host.pulls for host in hosts] == [[], [FOREIGN]]
        await backend.prepare(FOREIGN)
        assert [await backend.start(FOREIGN, timeout_s=1) for _ in range(4)] == ["tcp://b"] * 3 + ["tcp://a"]
        assert [host.pulls for host in hosts] == [[FOREIGN], [FOREIGN]]

    drive(body)


def test_a_daemon_that_is_away_is_left_out_until_it_is_back() -> None:
    """K43."""

    async def body(backend: DockerBackend, hosts: Any) -> None:
        await backend.prepare(OWN)
        hosts[0].fault = DaemonUnreachableError("gone")
        assert await backend.start(OWN, timeout_s=1) == "tcp://b"
        assert hosts[0].away
        assert backend.free_room() == 2
        hosts[1].fault = DaemonUnreachableError("gone too")
        with pytest.raises(DaemonUnreachableError):
            await backend.start(OWN, timeout_s=1)
        assert backend.free_room() is None  # starts go on, to say so
        with pytest.raises(DaemonUnreachableError):
            await backend.start(OWN, timeout_s=1)
        hosts[0].fault = hosts[0].away = None
        hosts[0].images.clear()
        hosts[0].back()
        await asyncio.sleep(0.01)
        assert hosts[0].pulls == [OWN, OWN]
        assert await backend.start(OWN, timeout_s=1) == "tcp://a"

    drive(body)


def test_a_daemon_whose_starts_fail_comes_last() -> None:
    async def body(backend: DockerBackend, hosts: Any) -> None:
        hosts[1].used, hosts[0].fault = 1, SandboxStartError("refused")
        with pytest.raises(SandboxStartError):
            await backend.start(OWN, timeout_s=1)
        assert [await backend.start(OWN, timeout_s=1) for _ in range(2)] == ["tcp://b", "tcp://b"]

    drive(body)


def test_an_image_that_one_daemon_lacks_is_started_on_the_other() -> None:
    async def body(backend: DockerBackend, hosts: Any) -> None:
        hosts[0].lacks = {FOREIGN}
        assert [await backend.start(FOREIGN, timeout_s=1) for _ in range(3)] == ["tcp://b"] * 3
        with pytest.raises(SandboxStartError, match="have no room"):  # not: the image is missing
            await backend.start(FOREIGN, timeout_s=1)
        hosts[1].used, hosts[1].lacks = 0, {FOREIGN}
        hosts[1].images.clear()
        with pytest.raises(ImageMissingError):
            await backend.start(FOREIGN, timeout_s=1)

    drive(body)


def test_without_room_a_start_waits_within_its_time() -> None:
    async def body(backend: DockerBackend, hosts: Any) -> None:
        hosts[0].used = hosts[1].used = 3
        with pytest.raises(SandboxStartError, match="had room within"):
            await backend.start(OWN, timeout_s=0.1)
        start = asyncio.create_task(backend.start(OWN, timeout_s=3))
        await asyncio.sleep(0.02)
        hosts[1].used = 2
        assert str(await start) == "tcp://b"

    drive(body)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"backend": "bubblewrap", "hosts": ["tcp://a"]}, "sandbox.hosts has no effect"),
        ({"backend": "bubblewrap", "channel": "stdio"}, "sandbox.channel has no effect"),
        ({"host_size": 3}, "no effect without sandbox.hosts"),
        ({"hosts": ["tcp://a", "tcp://a"]}, "twice"),
        ({"hosts": ["tcp://a", "tcp://b"], "host_size": 2, "size": 5}, "exceeds what 2 hosts"),
    ],
)
def test_settings_without_effect_or_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    from agentrl.config.load import build

    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        build(SandboxConfig, settings, where="test")

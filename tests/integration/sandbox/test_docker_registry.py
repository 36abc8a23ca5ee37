"""Pulls from a registry of the test's own, by the machine's Docker daemon, and the eviction of what was pulled."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import secrets
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import docker
import docker.errors
import pytest

from agentrl.config import SandboxConfig
from agentrl.errors import ImageMissingError
from agentrl.sandbox import docker_images, foreign
from agentrl.sandbox.backend import docker_fault
from agentrl.sandbox.docker_client import connect
from agentrl.sandbox.docker_disk import KEEP_S, UseRecords, make_room
from agentrl.sandbox.docker_host import DockerHost

pytestmark = pytest.mark.docker


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Registry:
    """One tiny image under any name that begins with `task`; the first `failing` questions for it end in 503."""

    def __init__(self) -> None:
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as tar:
            tar.addfile(tarfile.TarInfo(f"file-{secrets.token_hex(8)}"))
        layer = content.getvalue()
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {},
                "rootfs": {"type": "layers", "diff_ids": [digest(layer)]},
            }
        ).encode()
        kind = "application/vnd.docker"
        about = {"mediaType": f"{kind}.container.image.v1+json", "size": len(config), "digest": digest(config)}
        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": f"{kind}.distribution.manifest.v2+json",
                "config": about,
                "layers": [{"mediaType": f"{kind}.image.rootfs.diff.tar", "size": len(layer), "digest": digest(layer)}],
            }
        ).encode()
        self.blobs = {digest(layer): layer, digest(config): config}
        self.failing = 0
        self.asked: list[str] = []
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name, _, reference = self.path.removeprefix("/v2/").rpartition("/")
                if self.path == "/v2/":
                    self.answer(200, b"{}")
                elif name.endswith("/blobs") and reference in registry.blobs:
                    self.answer(200, registry.blobs[reference])
                elif name.endswith("/manifests") and name.startswith("task"):
                    registry.asked.append(reference)
                    if len(registry.asked) <= registry.failing:
                        self.answer(503, b"try later")
                    else:
                        self.answer(200, manifest, f"{kind}.distribution.manifest.v2+json")
                else:
                    error = {"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}
                    self.answer(404, json.dumps(error).encode())

            do_HEAD = do_GET

            def answer(self, status: int, data: bytes, kind: str = "application/json") -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Docker-Content-Digest", digest(data))
                self.send_header("Docker-Distribution-API-Version", "registry/2.0")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data)

            def log_message(self, format: str, *arguments: object) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Registry]:
    if fault := docker_fault():
        pytest.skip(fault)
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    monkeypatch.setattr(docker_images, "_FIRST_PAUSE_S", 0.05)
    equipment = foreign.Equipment(command=(), volumes={}, environment={})
    monkeypatch.setattr(foreign, "equip", lambda client, image, **more: equipment)
    registry = Registry()
    yield registry
    registry.server.shutdown()
    registry.server.server_close()


@pytest.fixture
def client(registry: Registry) -> Iterator[docker.DockerClient]:
    client = connect(30.0)
    yield client
    for image in client.api.images():
        for name in image.get("RepoTags") or ():
            if name.startswith(f"{registry.address}/"):
                client.api.remove_image(name)
    client.close()


def test_concurrent_requests_pull_once_and_again_after_failures(
    registry: Registry, client: docker.DockerClient
) -> None:
    """K43."""
    registry.failing = 2
    name = f"{registry.address}/task-1"
    host = DockerHost("", SandboxConfig(backend="docker"), run_id="pull", pool_id="pull", room=1)

    async def main() -> None:
        try:
            prepared = await asyncio.gather(*(host.prepare(name) for _ in range(8)))
            assert len({each.image_id for each in prepared}) == 1
        finally:
            await host.close(10.0)

    asyncio.run(main())
    assert client.images.get(name).id
    # Two failures, and of the pull that succeeds a question by tag (and one by digest, as the daemon likes).
    assert registry.asked.count("latest") <= registry.failing + 2


def test_a_name_that_the_registry_does_not_know_fails_at_once(registry: Registry) -> None:
    name = f"{registry.address}/nobody/nothing:1"
    host = DockerHost("", SandboxConfig(backend="docker"), run_id="pull", pool_id="pull", room=1)

    async def main() -> None:
        try:
            await host.prepare(name)
        finally:
            await host.close(10.0)

    began = time.monotonic()
    with pytest.raises(ImageMissingError, match=r"not found|manifest unknown") as caught:
        asyncio.run(main())
    assert time.monotonic() - began < 20
    assert name in caught.value.where


def test_what_we_pulled_is_evicted_and_what_the_user_pulled_stays(
    registry: Registry, client: docker.DockerClient
) -> None:
    mine, users = f"{registry.address}/task-mine:1", f"{registry.address}/task-users:1"
    client.api.pull(f"{registry.address}/task-users", tag="1")
    host = DockerHost("", SandboxConfig(backend="docker", disk_watermark=1.0), run_id="pull", pool_id="p", room=1)

    async def main() -> None:
        try:
            await host.prepare(users)
            await host.prepare(mine)
        finally:
            await host.close(10.0)

    asyncio.run(main())
    records = UseRecords(str(client.info()["ID"]))
    for file in records._folder.iterdir():
        os.utime(file, (time.time() - KEEP_S - 1,) * 2)
    (ours,) = [image for image in client.api.images() if mine in (image["RepoTags"] or ())]
    others = {image["Id"]: image for image in client.api.images() if image["Id"] != ours["Id"]}
    full = iter([0.99, 0.1])
    seen: Any = OnlyOurs(client, registry)
    assert make_room(seen, records, used=lambda: next(full), watermark=0.5) == [mine]
    with pytest.raises(docker.errors.ImageNotFound):
        client.images.get(mine)
    assert client.images.get(users).id
    assert {image["Id"] for image in client.api.images()} >= others.keys()


class OnlyOurs:
    """The client, without the images of other tests and people: an eviction must not reach them from a test."""

    def __init__(self, client: docker.DockerClient, registry: Registry) -> None:
        self._api, self._registry = client.api, registry
        self.api = self

    def images(self) -> list[dict[str, object]]:
        return [i for i in self._api.images() if any(self._registry.address in name for name in i["RepoTags"] or ())]

    def containers(self, *, all: bool) -> object:
        return self._api.containers(all=all)

    def remove_image(self, name: str) -> None:
        self._api.remove_image(name)

    def volumes(self, *, filters: dict[str, object]) -> dict[str, object]:
        return {"Volumes": []}

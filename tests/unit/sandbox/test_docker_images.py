"""Pulls and the disk of a Docker daemon, held against a daemon that is played here."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker.errors
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config import SandboxConfig
from agentrl.errors import DaemonUnreachableError, ImageMissingError, ImageUnfitError, SandboxError, SandboxStartError
from agentrl.sandbox import docker_disk, docker_images, foreign
from agentrl.sandbox.docker_client import LABEL_IMAGE
from agentrl.sandbox.docker_disk import KEEP_S, ImageUse, UseRecords, eviction_order, images_of, make_room
from agentrl.sandbox.docker_images import ImageStore, Prepared, PullError
from agentrl.sandbox.images import BASE_IMAGE, ensure_docker_image, image_hash
from agentrl.sandbox.limits import Limits

NAME = "xingyaoww/sweb.eval.x86_64.moto-1"
FULL = f"{NAME}:latest"


def refusal(status: int, explanation: str) -> docker.errors.APIError:
    response = requests.Response()
    response.status_code = status
    return docker.errors.APIError(explanation, response=response, explanation=explanation)


class PlayedDaemon:
    """Images by id, containers by the id of their image, and what pulls do: a list of errors or event lists."""

    def __init__(self) -> None:
        self.images_: dict[str, dict[str, Any]] = {}
        self.containers_: list[str] = []
        self.script: list[Exception | list[dict[str, Any]]] = []
        self.pulls: list[tuple[str, str]] = []
        self.equipped: list[tuple[str, str]] = []
        self.equip_fault: Exception | None = None
        self.alive = True
        self.disk = 0.5
        self.api = self

    def add(self, id: str, *tags: str, size: int = 10, labels: tuple[str, ...] = ()) -> None:
        kept = dict.fromkeys(labels, "x")
        self.images_[id] = {"Id": id, "RepoTags": list(tags), "Labels": kept, "Size": size, "Created": 0.0}

    def ping(self) -> bool:
        if not self.alive:
            raise requests.ConnectionError("refused")
        return True

    def inspect_image(self, name: str) -> dict[str, Any]:
        wanted = name if ":" in name else f"{name}:latest"
        for image in self.images_.values():
            if wanted in image["RepoTags"]:
                return image
        raise docker.errors.ImageNotFound("no such image")

    def pull(self, repository: str, *, tag: str, stream: bool, decode: bool) -> Iterator[dict[str, Any]]:
        self.pulls.append((repository, tag))
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        yield from step
        if not any("error" in event for event in step):
            self.add("sha256:pulled", f"{repository}:{tag}")

    def images(self) -> list[dict[str, Any]]:
        return [image for image in self.images_.values() if image["RepoTags"]]

    def containers(self, *, all: bool) -> list[dict[str, Any]]:
        return [{"ImageID": id} for id in self.containers_]

    def volumes(self, *, filters: dict[str, Any]) -> dict[str, Any]:
        return {"Volumes": None}

    def remove_image(self, name: str) -> None:
        for image in self.images_.values():
            if name in image["RepoTags"]:
                if image["Id"] in self.containers_:
                    raise refusal(409, "in use")
                image["RepoTags"].remove(name)
                self.disk -= image["Size"] / 100
                return
        raise docker.errors.ImageNotFound("no such image")


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PlayedDaemon:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    monkeypatch.setattr(docker_images, "_FIRST_PAUSE_S", 0.001)
    played = PlayedDaemon()

    def equip(client: Any, image: str, *, name: str, **more: Any) -> foreign.Equipment:
        played.equipped.append((image, name))
        if played.equip_fault is not None:
            raise played.equip_fault
        return foreign.Equipment(command=("serve",), volumes={}, environment={})

    monkeypatch.setattr(foreign, "equip", equip)
    return played


def store(daemon: PlayedDaemon, pull: Any = "missing") -> ImageStore:
    seen: Any = daemon
    return ImageStore(seen, "", limits=Limits.of(SandboxConfig()), pull=pull)


def have(images: ImageStore) -> tuple[Prepared, list[str]]:
    """What the store prepared, and the ids that it said were pulled."""
    pulled: list[str] = []
    return images.prepare(NAME, on_pulled=pulled.append), pulled


# --- pulls


def test_what_is_there_is_not_pulled(daemon: PlayedDaemon) -> None:
    daemon.add("sha256:there", FULL)
    prepared, pulled = have(store(daemon, "never"))
    assert (prepared.image_id, prepared.equipment.command, pulled) == ("sha256:there", ("serve",), [])
    assert daemon.equipped == [("sha256:there", NAME)]  # by its id: the name may mean another image soon


def test_what_was_pulled_is_known_for_ours_before_anything_else_can_fail(daemon: PlayedDaemon) -> None:
    daemon.script, daemon.equip_fault = [[{"status": "Pull complete"}]], ImageUnfitError("no bash")
    pulled: list[str] = []
    with pytest.raises(ImageUnfitError):
        store(daemon).prepare(NAME, on_pulled=pulled.append)
    assert pulled == ["sha256:pulled"]


def test_passing_faults_are_tried_again(daemon: PlayedDaemon) -> None:
    """K43."""
    daemon.script = [
        refusal(500, "Get https://registry/v2/: dial tcp: lookup registry: no such host"),
        [{"status": "Downloading", "progressDetail": {"current": 7}}, {"error": "unexpected EOF"}],
        refusal(429, "toomanyrequests: you have reached your pull rate limit"),
        requests.exceptions.ChunkedEncodingError("cut off"),
        [{"status": "Pull complete"}],
    ]
    prepared, pulled = have(store(daemon))
    assert (prepared.image_id, pulled) == ("sha256:pulled", ["sha256:pulled"])
    assert daemon.pulls == [(NAME, "latest")] * 5


@pytest.mark.parametrize(
    "fault",
    [
        refusal(404, "manifest for moto-1:latest not found: manifest unknown"),
        refusal(404, "pull access denied for moto-1, repository does not exist or may require 'docker login'"),
        refusal(500, "Head https://registry/v2/moto: unauthorized: authentication required"),
        refusal(400, "invalid reference format"),
        [{"error": "no matching manifest for linux/amd64 in the manifest list entries"}],
    ],
)
def test_refusals_are_final_and_in_the_registrys_words(daemon: PlayedDaemon, fault: Any) -> None:
    daemon.script = [fault]
    with pytest.raises(ImageMissingError) as caught:
        have(store(daemon))
    assert len(daemon.pulls) == 1
    words = fault[0]["error"] if isinstance(fault, list) else fault.explanation
    assert words in caught.value.what
    assert NAME in caught.value.where
    assert caught.value.remedy


def test_tries_that_bring_nothing_end(daemon: PlayedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_images, "SILENCE_S", 0.05)
    daemon.script = [refusal(500, "dial tcp: i/o timeout")] * 1000
    with pytest.raises(ImageMissingError, match="i/o timeout"):
        have(store(daemon))
    assert len(daemon.pulls) > 2


def test_a_pull_while_the_daemon_dies_is_the_daemons_fault(daemon: PlayedDaemon) -> None:
    daemon.script, daemon.alive = [requests.exceptions.ChunkedEncodingError("cut off")], False
    with pytest.raises(DaemonUnreachableError):
        have(store(daemon))


def test_never_means_never(daemon: PlayedDaemon) -> None:
    with pytest.raises(ImageMissingError, match=r"sandbox\.pull is never"):
        have(store(daemon, "never"))
    assert daemon.pulls == []


def test_a_stopped_store_gives_up(daemon: PlayedDaemon) -> None:
    daemon.script = [refusal(500, "dial tcp")] * 5
    images = store(daemon)
    images.stop()
    with pytest.raises(ImageMissingError):
        have(images)
    assert len(daemon.pulls) == 1


@given(st.text(), st.none() | st.integers(100, 599))
def test_whatever_a_registry_says_has_a_verdict(words: str, status: int | None) -> None:
    assert PullError(words, status=status).is_final in (True, False)


# --- the disk


def test_only_what_is_ours_and_unused_may_go(daemon: PlayedDaemon) -> None:
    """The longest unused first; base images of other sources before everything."""
    records = UseRecords("A:B")
    base = f"{BASE_IMAGE}:{image_hash()}"
    daemon.add("sha256:base", base, labels=(LABEL_IMAGE,))
    daemon.add("sha256:old-base", f"{BASE_IMAGE}:0123456789abcdef", labels=(LABEL_IMAGE,))
    daemon.add("sha256:recipe", "agentrl/pallets__flask-2.3:1", labels=(LABEL_IMAGE,))
    daemon.add(
        "sha256:derived", "my-own:1", labels=(LABEL_IMAGE,)
    )  # the label is inherited by what a user builds upon ours
    daemon.add("sha256:theirs", "python:3.12")
    for name in ("first", "second", "running", "recent"):
        daemon.add(f"sha256:{name}", f"swe/{name}:latest")
        records.note(f"sha256:{name}", pulled_as=f"docker.io/swe/{name}")
    daemon.add("sha256:first", "swe/first:latest", "kept-by-the-user:1")
    now = time.time()
    for name, age_s in {"recipe": 9000, "first": 8000, "second": 5000, "running": 9000, "old-base": 700}.items():
        records.note(f"sha256:{name}")
        os.utime(records._file(f"sha256:{name}"), (now - age_s, now - age_s))
    daemon.containers_ = ["sha256:running"]
    seen: Any = daemon
    found = images_of(seen, records)
    assert {image.id.removeprefix("sha256:"): image.origin for image in found} == {
        **dict.fromkeys(("base", "old-base", "recipe"), "built"),
        **dict.fromkeys(("first", "second", "running", "recent"), "pulled"),
        **dict.fromkeys(("derived", "theirs"), "other"),
    }
    order = [image.names for image in eviction_order(found, now=now)]
    assert order == [
        (f"{BASE_IMAGE}:0123456789abcdef",),
        ("agentrl/pallets__flask-2.3:1",),
        ("swe/first:latest",),
        ("swe/second:latest",),
    ]


def test_room_is_made_until_the_watermark_and_no_further(daemon: PlayedDaemon) -> None:
    records = UseRecords("A:B")
    for number in range(5):
        daemon.add(f"sha256:{number}", f"swe/{number}:latest", size=10)
        records.note(f"sha256:{number}", pulled_as=f"swe/{number}")
        long_ago = time.time() - KEEP_S - 100 + number
        os.utime(records._file(f"sha256:{number}"), (long_ago, long_ago))
    daemon.containers_ = ["sha256:1"]
    daemon.disk = 0.95

    seen: Any = daemon

    def room(watermark: float) -> list[str]:
        return make_room(seen, records, used=lambda: daemon.disk, watermark=watermark)

    assert room(1.0) == []
    assert room(0.96) == []
    assert room(0.80) == ["swe/0:latest", "swe/2:latest"]
    assert records.read("sha256:0") == (None, None)
    assert records.read("sha256:3")[1] == "swe/3"
    assert room(0.10) == ["swe/3:latest", "swe/4:latest"]  # what runs stays, however full it is
    assert make_room(seen, records, used=lambda: None, watermark=0.5) == []


def test_a_cache_that_cannot_be_written_costs_no_start(daemon: PlayedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_CACHE", "/proc/nowhere")
    records = UseRecords("A:B")
    records.note("sha256:x", pulled_as="swe/x")
    assert records.read("sha256:x") == (None, None)


def test_a_torn_record_is_no_pull(daemon: PlayedDaemon) -> None:
    records = UseRecords("A:B")
    records.note("sha256:x", pulled_as="swe/x")
    records._file("sha256:x").write_text('{"pulled_as": ')
    used_at, pulled_as = records.read("sha256:x")
    assert used_at is not None
    assert pulled_as is None


@given(st.integers(0, 100_000))
def test_eviction_never_takes_what_is_not_ours(seed: int) -> None:
    dice = random.Random(seed)
    images = [
        ImageUse(
            id=f"sha256:{number}",
            names=(f"swe/{number}:latest",) if dice.random() < 0.5 else (),
            all_names=(f"swe/{number}:latest",),
            size_bytes=1,
            origin="pulled",
            used_at=dice.choice([None, dice.random() * 5000]),
            created_at=dice.random() * 5000,
            containers=dice.choice([0, 0, 1]),
        )
        for number in range(10)
    ]
    order = eviction_order(images, now=5000.0)
    assert all(image.names and image.containers == 0 for image in order)
    assert all(image.used_at is None or image.used_at <= 5000 - KEEP_S for image in order)
    keys = [image.created_at if image.used_at is None else image.used_at for image in order]
    assert keys == sorted(keys)


def test_how_full_the_disk_is_is_what_df_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Client:
        def info(self) -> dict[str, str]:
            return {"DockerRootDir": str(tmp_path)}

    client: Any = Client()
    found = docker_disk.used_fraction(client, local=True)
    status = os.statvfs(tmp_path)
    used = status.f_blocks - status.f_bfree
    assert found == pytest.approx(used / (used + status.f_bavail), abs=0.01)


class Looker:
    """A daemon of another machine, on which a container of the base image looks at the disk."""

    def __init__(self, *, says: bytes, exists: bool = True) -> None:
        self.says, self.exists = says, exists
        self.id = "c1"
        self.waited_s: list[float] = []
        self.removed: list[str] = []
        self.containers = self.api = self

    def info(self) -> dict[str, str]:
        return {"DockerRootDir": "/nowhere"}

    def create(self, image: str, command: list[str], **options: Any) -> Looker:
        if not self.exists:
            raise docker.errors.ImageNotFound("no such image")
        assert options["network_mode"] == "none"
        return self

    def start(self) -> None: ...

    def wait(self, *, timeout: float) -> None:
        self.waited_s.append(timeout)
        if not self.says:
            raise requests.ReadTimeout("too slow")

    def logs(self, *, stdout: bool, stderr: bool) -> bytes:
        return self.says

    def remove_container(self, id: str, **options: Any) -> None:
        self.removed.append(id)


def test_a_look_at_a_remote_disk_pulls_nothing_and_ends() -> None:
    """The SDK's `run` would fetch `agentrl/base` from a public registry, and wait for the container for ever."""
    good: Any = Looker(says=b"30 70\n")
    assert docker_disk.used_fraction(good, local=False) == pytest.approx(0.3)
    assert (good.removed, good.waited_s) == (["c1"], [docker_disk._LOOK_S])
    missing: Any = Looker(says=b"30 70", exists=False)
    assert docker_disk.used_fraction(missing, local=False) is None
    stuck: Any = Looker(says=b"")
    assert docker_disk.used_fraction(stuck, local=False) is None
    assert stuck.removed == ["c1"]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (refusal(500, "no space left on device"), SandboxStartError),
        (docker.errors.BuildError("COPY failed", build_log=[]), SandboxStartError),
        (requests.ConnectionError("refused"), DaemonUnreachableError),
        (docker.errors.DockerException("Error while fetching server API version"), DaemonUnreachableError),
    ],
)
def test_a_daemon_that_refuses_an_image_is_not_taken_for_one_that_is_away(
    fault: Exception, kind: type[SandboxError]
) -> None:
    """Else nothing at all is started there, and the same step is tried for as long as the patience lasts."""

    class Client:
        images = property(lambda self: self)

        def get(self, tag: str) -> None:
            raise fault

    client: Any = Client()
    with pytest.raises(kind, match=re.escape(str(fault))) as caught:
        ensure_docker_image(client, BASE_IMAGE)
    assert type(caught.value) is kind

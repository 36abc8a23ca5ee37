"""The disk of one Docker daemon: which images are ours to remove, when each was last used, and making room.

Ours are images that agentrl built (they carry its label) and images that it pulled (it wrote that down). What the
user made or pulled is never touched, and neither is what any container, running or not, is made of.

Records lie in the cache folder, per daemon, one small file an image: the file's time is the last use, so that several
processes need no lock. Blocking, for worker threads.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import docker
import docker.errors
import docker.types
import requests

from agentrl.sandbox.docker_client import CONFLICT, LABEL_IMAGE, NOT_FOUND, owner_labels, remove_container
from agentrl.sandbox.foreign import stale_volumes
from agentrl.sandbox.images import BASE_IMAGE, OWN_PREFIX, cache_root, image_hash
from agentrl.sandbox.owner import Owner

log = logging.getLogger("agentrl.sandbox")

KEEP_S = 600.0
"""An image used so lately is not removed: another process may be about to start it."""
_LOOK_S = 30.0
_STATVFS = "import os; s = os.statvfs('/'); print(s.f_frsize * (s.f_blocks - s.f_bfree), s.f_frsize * s.f_bavail)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageUse:
    """One image as the daemon has it and we remember it. `names`: those that are ours to remove."""

    id: str
    names: tuple[str, ...]
    all_names: tuple[str, ...]
    size_bytes: int
    origin: str  # built | pulled | other
    used_at: float | None
    created_at: float
    containers: int

    @property
    def is_old_base(self) -> bool:
        """A base image of other sources than those at hand: nothing asks for it by this program any more."""
        return any(name.startswith(f"{BASE_IMAGE}:") for name in self.names) and not self.is_base

    @property
    def is_base(self) -> bool:
        return f"{BASE_IMAGE}:{image_hash()}" in self.all_names


class UseRecords:
    """What was pulled onto one daemon, and when images were last used there."""

    def __init__(self, daemon_id: str) -> None:
        self._folder = cache_root() / "docker" / (re.sub(r"[^A-Za-z0-9]+", "-", daemon_id) or "unnamed")

    def note(self, image_id: str, *, pulled_as: str | None = None) -> None:
        """It is used now; `pulled_as`: we have just pulled it under that name. A cache that cannot be written costs
        only that a pulled image is never removed by itself."""
        file = self._file(image_id)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if pulled_as is not None:
                work = file.with_suffix(f".{os.getpid()}")
                name = pulled_as.removeprefix("docker.io/").removeprefix("library/")  # as the daemon lists it
                work.write_text(json.dumps({"pulled_as": name}))
                work.rename(file)
            else:
                file.touch()
        except OSError as error:
            log.warning("the use of image %s cannot be written down: %s", image_id[:19], error)

    def forget(self, image_id: str) -> None:
        self._file(image_id).unlink(missing_ok=True)

    def read(self, image_id: str) -> tuple[float | None, str | None]:
        """When it was last used (seconds since the epoch), and under which name we pulled it."""
        file = self._file(image_id)
        try:
            used_at, text = file.stat().st_mtime, file.read_text()
        except OSError:
            return None, None
        try:
            name = json.loads(text)["pulled_as"] if text else None
        except (ValueError, KeyError, TypeError):
            name = None
        return used_at, name if isinstance(name, str) else None

    def _file(self, image_id: str) -> Path:
        return self._folder / re.sub(r"[^A-Za-z0-9]+", "-", image_id)


def images_of(client: docker.DockerClient, records: UseRecords) -> list[ImageUse]:
    """Every image of the daemon."""
    containers = Counter(found["ImageID"] for found in client.api.containers(all=True))
    uses = []
    for found in client.api.images():
        used_at, pulled_as = records.read(found["Id"])
        names = tuple(name for name in found.get("RepoTags") or () if name != "<none>:<none>")
        known = (*names, *(found.get("RepoDigests") or ()))
        built = LABEL_IMAGE in (found.get("Labels") or {})  # which images built upon ours inherit: so names count too
        if built:
            ours = tuple(name for name in names if name.startswith(OWN_PREFIX))
        else:
            ours = tuple(name for name in known if pulled_as is not None and name in (pulled_as, f"{pulled_as}:latest"))
        uses.append(
            ImageUse(
                id=found["Id"],
                names=ours,
                all_names=names,
                size_bytes=int(found.get("Size") or 0),
                origin=("built" if built else "pulled") if ours else "other",
                used_at=used_at,
                created_at=float(found.get("Created") or 0),
                containers=containers[found["Id"]],
            )
        )
    return uses


def eviction_order(images: list[ImageUse], *, now: float) -> list[ImageUse]:
    """What may be removed, first what is missed least: base images of other sources, then the longest unused."""

    def may_go(image: ImageUse) -> bool:
        recent = image.used_at is not None and now - image.used_at < KEEP_S
        return bool(image.names) and image.containers == 0 and not image.is_base and not recent

    def missed(image: ImageUse) -> tuple[bool, float]:
        return (not image.is_old_base, image.used_at if image.used_at is not None else image.created_at)

    return sorted(filter(may_go, images), key=missed)


def make_room(
    client: docker.DockerClient, records: UseRecords, *, used: Callable[[], float | None], watermark: float
) -> list[str]:
    """While more than `watermark` of the disk is used, remove our images in `eviction_order`; the names removed.

    `used` gives the fraction, None where it cannot be known: then nothing is removed."""
    fraction = used()
    if watermark >= 1 or fraction is None or fraction <= watermark:
        return []
    removed: list[str] = []
    for image in eviction_order(images_of(client, records), now=time.time()):
        gone = [name for name in image.names if _remove_image(client, name)]
        if not gone:
            continue
        removed += gone
        records.forget(image.id)
        log.info("removed image %s: the daemon's disk is %.0f %% full", ", ".join(gone), 100 * fraction)
        remove_volumes(client)
        fraction = used()
        if fraction is None or fraction <= watermark:
            return removed
    log.warning(
        "the Docker daemon's disk is %.0f %% full (sandbox.disk-watermark is %.0f %%), and no further image is "
        "agentrl's to remove",
        100 * fraction,
        100 * watermark,
    )
    return removed


def _remove_image(client: docker.DockerClient, name: str) -> bool:
    """Whether it went. A container made of it meanwhile keeps it."""
    try:
        client.api.remove_image(name)
    except docker.errors.APIError as error:
        if error.status_code in (NOT_FOUND, CONFLICT):
            return False
        raise
    return True


def remove_volumes(client: docker.DockerClient) -> int:
    """Remove the volumes of ours whose image is gone and that no container uses; how many."""
    return sum(_remove_volume(client, name) for name in stale_volumes(client))


def _remove_volume(client: docker.DockerClient, name: str) -> bool:
    try:
        client.api.remove_volume(name)
    except docker.errors.APIError as error:
        if error.status_code in (NOT_FOUND, CONFLICT):
            return False
        raise
    return True


def used_fraction(client: docker.DockerClient, *, local: bool) -> float | None:
    """How full the disk of the daemon's images is, as `df` counts it.

    From its folder where we see the same files (`local`), else by a short-lived container of the base image, whose
    root lies on that disk; None where neither can be had."""
    figures = disk_bytes(client, local=local)
    return None if figures is None else figures[0] / max(1, sum(figures))


def disk_bytes(client: docker.DockerClient, *, local: bool) -> tuple[int, int] | None:
    """Bytes used and available on that disk, as in `used_fraction`."""
    root = str(client.info().get("DockerRootDir") or "")
    if local and os.path.isdir(root):
        found = shutil.disk_usage(root)
        return found.used, found.free
    try:
        container = client.containers.create(  # not `run`, which pulls what is not there
            f"{BASE_IMAGE}:{image_hash()}",
            ["/usr/bin/python3", "-I", "-c", _STATVFS],
            network_mode="none",
            read_only=True,
            cap_drop=["ALL"],
            labels=owner_labels(Owner.current()),
            log_config=docker.types.LogConfig(type="json-file"),
        )
    except docker.errors.ImageNotFound:
        return None
    try:
        container.start()
        container.wait(timeout=_LOOK_S)
        said = container.logs(stdout=True, stderr=False)
    except requests.ReadTimeout:  # a loaded machine
        return None
    finally:
        remove_container(client, container.id)
    fields = bytes(said).split()
    return (int(fields[0]), int(fields[1])) if len(fields) == 2 and all(map(bytes.isdigit, fields)) else None

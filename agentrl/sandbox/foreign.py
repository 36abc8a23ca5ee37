"""Foreign images (SWE-Gym, SWE-bench, SWE-smith, anything that was not built here) as sandboxes on Docker.

Such an image has its repository with all of its history at /testbed, a conda environment that only a login shell
finds, and neither our server nor a Python that could run it. It gets two named volumes, mounted read-only:

    agentrl-tools-<hash>      /opt/agentrl        server, plug-in, editor, and an interpreter of their own
    agentrl-seed-<image id>   /opt/agentrl-seed   its work tree with the history cut, its commands' environment

Each is filled by a helper container on the daemon itself (no host folder is mounted: the daemon may be remote), with
no network, and holds a marker once it is whole. The helper bears its volume's name, so the daemon lets only one fill
it at a time, whoever asks from wherever.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import docker.errors
import docker.types

from agentrl.errors import DeadlineError, ImageUnfitError, SandboxStartError
from agentrl.sandbox.docker_client import (
    CONFLICT,
    DAEMON_ERRORS,
    LABEL_HOST,
    LABEL_OWNER,
    NOT_FOUND,
    gave_no_answer,
    owner_labels,
    remove_container,
    unreachable,
)
from agentrl.sandbox.images import BASE_IMAGE, ensure_docker_image
from agentrl.sandbox.limits import ENVIRONMENT, WORKDIR, Limits
from agentrl.sandbox.owner import Owner

LABEL_VOLUME = "agentrl.volume"
"""On a volume: `tools` or `seed`."""
LABEL_VOLUME_IMAGE = "agentrl.volume-image"
"""On a volume: the id of the image that it was made for (seed) or from (tools)."""
TOOLS = "/opt/agentrl"
SEED = "/opt/agentrl-seed"

_FORMAT = "1"
"""Raise it when what a seed holds changes."""
_PYTHON = (
    f"{TOOLS}/python/lib/ld-linux.so",
    *("--library-path", f"{TOOLS}/python/lib", f"{TOOLS}/python/bin/python3"),
    *("-I", "-B", "-X", "utf8", f"{TOOLS}/server/launch.py"),
)
_UNSET = MappingProxyType({"LD_PRELOAD": "", "LD_AUDIT": "", "LD_LIBRARY_PATH": ""})
"""What an image's own settings would do to our interpreter."""
_LABEL_TOKEN = "agentrl.helper"
_held: set[str] = set()
"""What the helpers that this process waits for carry as that label."""
_TOOLS_TIMEOUT_S = 300.0
_SEED_TIMEOUT_S = 900.0
_POLL_S = 0.1
_HELPER_MEMORY = 4 << 30
_SPARE_MEMORY = 64 << 20
_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Equipment:
    """How a container of a foreign image is started.

    `command`: the server's command line. `volumes`: named volume → mount point, to be mounted read-only and without
    copying (`nocopy`). `environment`: of the server's process; what commands see lies in the seed volume. `masked`:
    folders that the image declares as volumes, which a daemon would make writable and put on its disk without bound.
    """

    command: tuple[str, ...]
    volumes: Mapping[str, str]
    environment: Mapping[str, str]
    masked: tuple[str, ...] = ()


def equip(
    client: Any,
    image: str,
    *,
    limits: Limits,
    name: str = "",
    address: str = "",
    stop: threading.Event | None = None,
) -> Equipment:
    """Make `image`, which the daemon of `client` (a docker.DockerClient) has, ready for sandboxes of `limits`.
    `name` and `address`: what errors call the image and the daemon. Once `stop` is set it is given up.

    Blocks: about a second where both volumes are there, else as long as the tree takes to copy. May be called at any
    time and at once from several processes; the volumes are the memory of it.

    Raises `ImageUnfitError` for an image that can be no sandbox (no bash, no git, a tree larger than the limits),
    `SandboxStartError`, `DaemonUnreachableError` or `DeadlineError` for what may pass; and as `ensure_docker_image`.
    """
    base = ensure_docker_image(client, BASE_IMAGE)
    name, stop = name or image, stop or threading.Event()
    try:
        masked = _declared_volumes(client, image, name)
        tools = _ensure_tools(client, base, stop)
        seed = _ensure_seed(client, image, name, tools, limits, stop)
    except DAEMON_ERRORS as error:
        if gave_no_answer(error):
            raise unreachable(error, address) from error
        raise SandboxStartError(
            f"the daemon refused a step: {str(error)[:300]}", where=f"preparing the image {name}"
        ) from error
    return Equipment(
        command=(*_PYTHON, "--foreign", SEED),
        volumes=MappingProxyType({tools: TOOLS, seed: SEED}),
        environment=MappingProxyType({**ENVIRONMENT, **_UNSET}),
        masked=masked,
    )


def _declared_volumes(client: Any, image: str, name: str) -> tuple[str, ...]:
    """The image's VOLUME folders, but for those where a sandbox has mounts of its own."""
    declared = (client.api.inspect_image(image).get("Config") or {}).get("Volumes") or {}
    if within := sorted(folder for folder in declared if folder.startswith(f"{WORKDIR}/")):
        raise ImageUnfitError(
            f"the image {name} declares a volume in its work tree, {within[0]}",
            where=f"preparing the image {name}",
            remedy="build it anew without that VOLUME line",
        )
    return tuple(sorted(folder for folder in declared if folder not in (WORKDIR, "/tmp")))


def seed_volume(image_id: str) -> str:
    """The name of the volume with the work tree of the image `image_id` (`sha256:…`)."""
    return f"agentrl-seed-{image_id.removeprefix('sha256:')[:32]}-{_FORMAT}"


def stale_volumes(client: Any) -> list[str]:
    """The volumes of ours on a daemon whose image is gone: for a reaper to remove (one in use is refused by the
    daemon with 409)."""
    images = {found["Id"] for found in client.api.images()}
    volumes = client.api.volumes(filters={"label": LABEL_VOLUME})["Volumes"] or []
    return [each["Name"] for each in volumes if (each["Labels"] or {}).get(LABEL_VOLUME_IMAGE) not in images]


# --- the two volumes ----------------------------------------------------------------------------------------


def _ensure_tools(client: Any, base: str, stop: threading.Event) -> str:
    volume = f"agentrl-tools-{base.rpartition(':')[2]}"
    base_id = client.api.inspect_image(base)["Id"]
    _create_volume(client, volume, "tools", base_id)
    helper = _Helper(
        image=base,
        command=("/usr/bin/python3", "-I", "-B", f"{TOOLS}/server/launch.py", "fill-tools", "/mnt"),
        volumes={volume: {"bind": "/mnt", "mode": "rw,nocopy"}},
        capabilities=(),
        timeout_s=_TOOLS_TIMEOUT_S,
    )
    _read(helper.run(client, volume, stop), base)
    return volume


def _ensure_seed(client: Any, image: str, name: str, tools: str, limits: Limits, stop: threading.Event) -> str:
    inspected = client.api.inspect_image(image)
    volume = seed_volume(inspected["Id"])
    _create_volume(client, volume, "seed", inspected["Id"])
    pairs = (each.partition("=") for each in (inspected.get("Config") or {}).get("Env") or [])
    own = {variable: value for variable, _, value in pairs}
    options = ("--limit-bytes", str(limits.disk_bytes), "--environment", json.dumps(own))
    helper = _Helper(
        image=image,
        command=(*_PYTHON, "fill-seed", SEED, *options),
        volumes={volume: {"bind": SEED, "mode": "rw,nocopy"}, tools: {"bind": TOOLS, "mode": "ro,nocopy"}},
        capabilities=("CHOWN", "DAC_OVERRIDE", "FOWNER"),
        timeout_s=_SEED_TIMEOUT_S,
    )
    said = _read(helper.run(client, volume, stop), name)
    _check_size(name, int(said["bytes"]), limits)
    return volume


def _check_size(image: str, size: int, limits: Limits) -> None:
    size_mb = -(-size // _MB)
    if size > limits.disk_bytes:
        raise ImageUnfitError(
            f"the work tree of the image {image} has {size_mb} MB, a sandbox has room for "
            f"{limits.disk_bytes // _MB} MB",
            where=f"image {image}",
            remedy=f"raise sandbox.disk-mb beyond {size_mb}",
        )
    if size + _SPARE_MEMORY > limits.memory_bytes:
        raise ImageUnfitError(
            f"the work tree of the image {image} has {size_mb} MB, which lie in a sandbox's memory of "
            f"{limits.memory_bytes // _MB} MB",
            where=f"image {image}",
            remedy=f"raise sandbox.memory-mb well beyond {size_mb}",
        )


def _create_volume(client: Any, name: str, kind: str, image_id: str) -> None:
    client.api.create_volume(name, labels={LABEL_VOLUME: kind, LABEL_VOLUME_IMAGE: image_id})


def _read(said: str, image: str) -> dict[str, Any]:
    """The helper's last line, which an image may have written as well as we."""
    lines = said.strip().splitlines() or [""]
    try:
        answer = json.loads(lines[-1])
        done = answer["ok"] is True and isinstance(answer.get("bytes", 0), int)
        what = str(answer.get("what", "its answer makes no sense"))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise SandboxStartError(
            f"preparing the image {image} ended early: {said.strip()[-500:] or 'it said nothing'}",
            where=f"image {image}",
        ) from None
    if not done:
        raise ImageUnfitError(
            f"the image {image} can be no sandbox: {what[:600]}",
            where=f"image {image}",
            remedy="see docs/sandboxes.md for what an image must have",
        )
    return dict(answer)


# --- helper containers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Helper:
    """A container that does one thing as root, without network, and ends."""

    image: str
    command: Sequence[str]
    volumes: Mapping[str, Mapping[str, str]]
    capabilities: Sequence[str]
    timeout_s: float

    def run(self, client: Any, name: str, stop: threading.Event) -> str:
        """What it wrote to its stdout, or, where that is nothing, to its stderr. Waits while another of the name
        runs. Raises DeadlineError, and SandboxStartError once `stop` is set."""
        end = time.monotonic() + 2 * self.timeout_s
        token = secrets.token_hex(8)
        _held.add(token)
        try:
            container = self._create(client, name, token)
            while container is None:
                _pause(name, self.image, stop, end, 2 * self.timeout_s)
                _remove_left_over(client, name)
                container = self._create(client, name, token)
            try:
                client.api.start(container)
                self._wait(client, container, name, stop)
                said = _logs(client, container, stdout=True)
                return said if said.strip() else _logs(client, container, stdout=False)
            finally:
                remove_container(client, container)
        finally:
            _held.discard(token)

    def _wait(self, client: Any, container: str, name: str, stop: threading.Event) -> None:
        end = time.monotonic() + self.timeout_s
        while client.api.inspect_container(container)["State"]["Status"] in ("created", "running"):
            _pause(name, self.image, stop, end, self.timeout_s)

    def _create(self, client: Any, name: str, token: str) -> str | None:
        """None where the daemon has a container of that name."""
        host_config = client.api.create_host_config(
            binds={volume: dict(bind) for volume, bind in self.volumes.items()},
            read_only=True,
            tmpfs={"/tmp": "rw,exec,nosuid,nodev,size=512m,mode=1777"},
            cap_drop=["ALL"],
            cap_add=list(self.capabilities),
            security_opt=["no-new-privileges"],
            network_mode="none",
            mem_limit=_HELPER_MEMORY,
            pids_limit=256,
            log_config=docker.types.LogConfig(type="json-file", config={"max-size": "1m", "max-file": "1"}),
        )
        try:
            created = client.api.create_container(
                self.image,
                list(self.command),
                name=name,
                user="0:0",
                working_dir="/",
                environment=dict(_UNSET),
                entrypoint="",
                healthcheck={"test": ["NONE"]},
                host_config=host_config,
                use_config_proxy=False,  # the host's proxy, perhaps with its password, is nothing for an image
                labels={**owner_labels(Owner.current(), lifetime_s=2 * self.timeout_s), _LABEL_TOKEN: token},
            )
        except docker.errors.APIError as error:
            if error.status_code == CONFLICT:
                return None
            raise
        return str(created["Id"])


def _remove_left_over(client: Any, name: str) -> None:
    """Remove the helper `name` if nobody will: its owner is dead, or it is one of ours whose daemon went away before
    it was removed (or before its id came back)."""
    from agentrl.sandbox.reaper import is_left_over

    try:
        found = client.api.inspect_container(name)
    except docker.errors.APIError as error:
        if error.status_code == NOT_FOUND:
            return
        raise
    labels = found["Config"].get("Labels") or {}
    running = found["State"]["Status"] in ("created", "running")
    owner = Owner.current()
    ours = (labels.get(LABEL_OWNER), labels.get(LABEL_HOST)) == (str(owner), owner.host)
    forgotten = ours and labels.get(_LABEL_TOKEN) not in _held
    if forgotten or is_left_over(labels, running=running, now=time.time()):
        remove_container(client, found["Id"])


def _logs(client: Any, container: str, *, stdout: bool) -> str:
    said = client.api.logs(container, stdout=stdout, stderr=not stdout, tail=20)
    return bytes(said).decode("utf-8", "replace")


def _pause(name: str, image: str, stop: threading.Event, end: float, timeout_s: float) -> None:
    if time.monotonic() > end:
        raise _late(name, image, timeout_s)
    if stop.wait(_POLL_S):
        raise SandboxStartError(f"preparing the image {image} was given up", where=f"container {name}")


def _late(name: str, image: str, timeout_s: float) -> DeadlineError:
    return DeadlineError(
        f"preparing the image {image} did not end within {timeout_s:g} s",
        where=f"container {name}",
        remedy="see what it does: docker logs",
    )

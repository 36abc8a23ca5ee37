"""What lives on this machine's daemons and in its control groups, for the commands that print it.

Reads only; nothing here ends or changes a sandbox. Blocking, with a deadline on every question.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentrl.errors import DaemonUnreachableError
from agentrl.sandbox.backend import BackendName
from agentrl.sandbox.cgroups import CgroupTree
from agentrl.sandbox.images import cache_root
from agentrl.sandbox.owner import Owner

_TIMEOUT_S = 10.0
_ASKERS = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """One sandbox, of whatever run and owner.

    `id` is the one of errors and logs (`docker:…`, `bwrap:…`). `host` is the daemon's address, empty under
    bubblewrap. `owner` is `<pid>:<start ticks>`; `owner_alive` is None where that cannot be judged from here.
    `state` is running | created | exited | … Figures that cannot be had are None: `memory_bytes` in use,
    `cpu_s` used since its start, `processes` alive in it.
    """

    id: str
    backend: BackendName
    host: str
    run: str
    image: str
    owner: str
    owner_alive: bool | None
    state: str
    age_s: float
    memory_bytes: int | None = None
    cpu_s: float | None = None
    processes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInfo:
    """An image that agentrl built or pulled, or that one of its sandboxes is of.

    `origin` is built | pulled | other (the user's own, never removed by us). `used_at` is seconds since the epoch of
    the last start that is known, None where none is.
    """

    name: str
    id: str
    size_bytes: int
    origin: str
    used_at: float | None
    sandboxes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    """One Docker daemon. `fault` says why it cannot be asked (everything else is empty then). `disk_used` is the
    used fraction of the disk that holds its images, None where that cannot be seen from here."""

    host: str
    fault: str | None
    version: str = ""
    sandboxes: int = 0
    images: tuple[ImageInfo, ...] = ()
    disk_used: float | None = None
    disk_total_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The daemons, how many bubblewrap sandboxes live, and the image cache's folder with its bytes."""

    hosts: tuple[HostInfo, ...]
    bubblewrap_sandboxes: int
    cache: str
    cache_bytes: int


def list_sandboxes(hosts: tuple[str, ...] = ()) -> list[SandboxInfo]:
    """Every sandbox of this machine's control groups and of the daemons `hosts` (empty: the one that DOCKER_HOST or
    the default names), oldest first. A daemon that does not answer is left out: `summary` says why."""
    found = _in_cgroups()
    for address in hosts or ("",):
        with contextlib.suppress(DaemonUnreachableError):
            found += _asked(address, _containers)
    return sorted(found, key=lambda sandbox: -sandbox.age_s)


def summary(hosts: tuple[str, ...] = ()) -> Summary:
    """The daemons, images, disks and caches."""
    daemons = []
    for address in hosts or ("",):
        try:
            daemons.append(_asked(address, _host))
        except DaemonUnreachableError as error:
            daemons.append(HostInfo(host=error.where, fault=error.what))
    cache = cache_root()
    return Summary(
        hosts=tuple(daemons),
        bubblewrap_sandboxes=len(_in_cgroups()),
        cache=str(cache),
        cache_bytes=_tree_bytes(cache),
    )


# --- Docker -------------------------------------------------------------------------------------------------


def _asked(address: str, question: Callable[[Any, str], T]) -> T:
    """What `question(client, address)` gives. Raises `DaemonUnreachableError` for whatever the daemon does wrong."""
    from agentrl.sandbox.docker_client import DAEMON_ERRORS, connect, unreachable  # the SDK takes 0.2 s to import

    client = connect(_TIMEOUT_S, address)
    try:
        return question(client, address)
    except DAEMON_ERRORS as error:
        raise unreachable(error, address) from error
    finally:
        client.close()


def _containers(client: Any, address: str) -> list[SandboxInfo]:
    from agentrl.sandbox import docker_client as names

    found = client.api.containers(all=True, filters={"label": names.LABEL_OWNER})
    with ThreadPoolExecutor(_ASKERS, thread_name_prefix="agentrl-stats") as pool:
        figures = list(pool.map(lambda each: _container_figures(client, each), found))
    sandboxes = []
    for each, (memory, cpu_s, processes) in zip(found, figures, strict=True):
        labels = each.get("Labels") or {}
        owner = labels.get(names.LABEL_OWNER, "")
        sandboxes.append(
            SandboxInfo(
                id=f"docker:{each['Id'][:12]}",
                backend="docker",
                host=names.named(address),
                run=labels.get(names.LABEL_RUN, ""),
                image=labels.get(names.LABEL_IMAGE, each.get("Image", "")),
                owner=owner,
                owner_alive=_lives(Owner.parse(owner, labels.get(names.LABEL_HOST, ""))),
                state=str(each.get("State", "")),
                age_s=max(0.0, time.time() - float(each.get("Created") or 0)),
                memory_bytes=memory,
                cpu_s=cpu_s,
                processes=processes,
            )
        )
    return sandboxes


def _container_figures(client: Any, container: Mapping[str, Any]) -> tuple[int | None, float | None, int | None]:
    """Memory in use, CPU seconds, processes; None each where the daemon has no figure (the container has ended)."""
    import docker.errors

    if container.get("State") != "running":
        return None, None, None
    try:
        stats = client.api.stats(container["Id"], stream=False, one_shot=True)
    except docker.errors.APIError:  # it has gone meanwhile
        return None, None, None
    cpu_ns = stats.get("cpu_stats", {}).get("cpu_usage", {}).get("total_usage")
    return (
        stats.get("memory_stats", {}).get("usage"),
        None if cpu_ns is None else cpu_ns / 1e9,
        stats.get("pids_stats", {}).get("current"),
    )


def _host(client: Any, address: str) -> HostInfo:
    from agentrl.sandbox import docker_disk
    from agentrl.sandbox.docker_client import LABEL_OWNER, is_local, named

    info = client.info()
    records = docker_disk.UseRecords(str(info.get("ID") or named(address)))
    images = [
        ImageInfo(
            name=", ".join(image.all_names) or image.id.removeprefix("sha256:")[:12],
            id=image.id,
            size_bytes=image.size_bytes,
            origin=image.origin,
            used_at=image.used_at,
            sandboxes=image.containers,
        )
        for image in docker_disk.images_of(client, records)
        if image.origin != "other" or image.used_at is not None
    ]
    disk = docker_disk.disk_bytes(client, local=is_local(address))
    return HostInfo(
        host=named(address),
        fault=None,
        version=str(info.get("ServerVersion") or ""),
        sandboxes=len(client.api.containers(filters={"label": LABEL_OWNER})),
        images=tuple(sorted(images, key=lambda image: -(image.used_at or 0.0))),
        disk_used=None if disk is None else disk[0] / max(1, sum(disk)),
        disk_total_bytes=None if disk is None else sum(disk),
    )


# --- bubblewrap ---------------------------------------------------------------------------------------------


def _in_cgroups() -> list[SandboxInfo]:
    """The bubblewrap sandboxes that have control groups; those of a user without any cannot be told from here."""
    tree = CgroupTree.find()
    found = []
    for each in tree.sandboxes() if tree is not None else []:
        memory = each.folders.get("memory")
        pids = _text(memory / "cgroup.procs").split() if memory is not None else []
        if memory is None or (not pids and each.sandbox.startswith("probe")):  # of a `find` at this moment
            continue
        with contextlib.suppress(OSError):  # gone meanwhile
            found.append(
                SandboxInfo(
                    id=f"bwrap:{each.sandbox}",
                    backend="bubblewrap",
                    host="",
                    run=each.sandbox.rpartition("-")[0],
                    image=_image_of(pids[0]) if pids else "",
                    owner=str(each.owner),
                    owner_alive=_lives(each.owner),
                    state="running" if pids else "ended",
                    age_s=max(0.0, time.time() - memory.stat().st_mtime),
                    memory_bytes=_first_number(memory / "memory.current", memory / "memory.usage_in_bytes"),
                    cpu_s=_cpu_s(each.folders.get("cpu", memory)),
                    processes=_first_number(each.folders.get("pids", memory) / "pids.current"),
                )
            )
    return found


def _cpu_s(folder: Path) -> float | None:
    """CPU seconds of a control group, of either version; None where the kernel counts none."""
    nanoseconds = _first_number(folder / "cpuacct.usage")
    if nanoseconds is not None:
        return nanoseconds / 1e9
    usage = re.search(r"^usage_usec (\d+)", _text(folder / "cpu.stat"), re.M)
    return None if usage is None else int(usage[1]) / 1e6


def _image_of(pid: str) -> str:
    """The folder of the image cache that a process's root is made of."""
    match = re.search(r"/images/([^/ ]+)/rootfs", _text(Path(f"/proc/{pid}/mountinfo")))
    return "" if match is None else match[1]


# --- small things -------------------------------------------------------------------------------------------


def _lives(owner: Owner | None) -> bool | None:
    """None where that cannot be judged from here."""
    if owner is None or owner.host != Owner.current().host:
        return None
    return not owner.is_known_dead()


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _first_number(*files: Path) -> int | None:
    """What the first of the files says that holds a number alone."""
    texts = (_text(file).strip() for file in files)
    return next((int(text) for text in texts if text.isdigit()), None)


def _tree_bytes(folder: Path) -> int:
    """Bytes on the disk below `folder`; files that several layers share count once."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found = os.lstat(os.path.join(parent, name))
                if (found.st_dev, found.st_ino) not in seen:
                    seen.add((found.st_dev, found.st_ino))
                    total += found.st_blocks * 512
    return total

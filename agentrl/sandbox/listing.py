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
        sandboxes.append(
            SandboxInfo(
                id=f"docker:{each['Id'][:12]}",
                backend="docker",
                host=names.named(address),
                run=labels.get(names.LABEL_RUN, ""),
                image=labels.get(names.LABEL_IMAGE, each.get("Image", "")),
                owner=labels.get(names.LABEL_OWNER, ""),
                owner_alive=_lives(labels.get(names.LABEL_OWNER, ""), labels.get(names.LABEL_HOST, "")),
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
    if tree is None:
        return []
    here = Owner.current()
    found = []
    for folder in tree.bases["memory"].glob("agentrl-*-*-*-*"):
        _, namespace, pid, started, name = folder.name.split("-", 4)
        files = {key: base / folder.name for key, base in tree.bases.items()}
        pids = _text(folder / "cgroup.procs").split()
        if not pids and name.startswith("probe"):
            continue
        host = here.host if namespace == here.pid_namespace else ""
        run, _, _ = name.rpartition("-")
        cpu = files.get("cpu", folder)
        cpu_ns = _number(cpu / "cpuacct.usage")
        if cpu_ns is None and (usage := re.search(r"^usage_usec (\d+)", _text(cpu / "cpu.stat"), re.M)):
            cpu_ns = 1000 * int(usage[1])
        memory = _number(folder / "memory.current")
        with contextlib.suppress(OSError):
            found.append(
                SandboxInfo(
                    id=f"bwrap:{name}",
                    backend="bubblewrap",
                    host="",
                    run=run,
                    image=_image_of(pids),
                    owner=f"{pid}:{started}",
                    owner_alive=_lives(f"{pid}:{started}", host),
                    state="running" if pids else "ended",
                    age_s=max(0.0, time.time() - folder.stat().st_mtime),
                    memory_bytes=memory if memory is not None else _number(folder / "memory.usage_in_bytes"),
                    cpu_s=None if cpu_ns is None else cpu_ns / 1e9,
                    processes=_number(files["pids"] / "pids.current"),
                )
            )
    return found


def _image_of(pids: list[str]) -> str:
    """The folder of the image cache that a process's root is made of."""
    for pid in pids[:1]:
        if match := re.search(r"/images/([^/ ]+)/rootfs", _text(Path(f"/proc/{pid}/mountinfo"))):
            return match[1]
    return ""


# --- small things -------------------------------------------------------------------------------------------


def _lives(owner: str, host: str) -> bool | None:
    named = Owner.parse(owner, host)
    if named is None or host != Owner.current().host:
        return None
    return not named.is_known_dead()


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


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

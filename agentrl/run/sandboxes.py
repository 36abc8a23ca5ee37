"""`agentrl sandbox {ps,stats,reap,build}`: what lives on this machine, what it takes, and making and removing it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrl.config import SandboxConfig
from agentrl.config.load import build
from agentrl.errors import ConfigError
from agentrl.run.debug_text import printable
from agentrl.sandbox import choose_backend, reap
from agentrl.sandbox.backend import docker_fault
from agentrl.sandbox.images import BASE_IMAGE, OWN_PREFIX, ensure_docker_image, ensure_rootfs, recipe_names
from agentrl.sandbox.listing import HostInfo, SandboxInfo, list_sandboxes, summary

_BUILD_TIMEOUT_S = 120.0
_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def list_images(recipes: Path | None) -> list[str]:
    """Names of the images that are built here: the base image, and those of shipped recipes and of `recipes`."""
    return [BASE_IMAGE, *(f"{OWN_PREFIX}{name}" for name in sorted(recipe_names(recipes)))]


def build_images(names: Sequence[str], backend: str, recipes: Path | None) -> Iterator[str]:
    """Build images (none named: the base image) for a backend; what each is called there, one after the other.
    `recipes` is a folder of further recipes.

    Raises ConfigError (a name that is none lists those there are), ImageMissingError, SandboxError.
    """
    config = build(SandboxConfig, {"backend": backend, "recipes": recipes}, where="--backend, --recipes")
    wanted = [name if name.startswith(OWN_PREFIX) else f"{OWN_PREFIX}{name}" for name in names] or [BASE_IMAGE]
    known = list_images(recipes)
    if wrong := [name for name in wanted if name.partition(":")[0] not in known]:
        raise ConfigError(f"no image {wrong[0]} is built here", where="NAME", remedy=f"known: {', '.join(known)}")
    if choose_backend(config) == "bubblewrap":
        yield from (str(ensure_rootfs(name, recipes=recipes)) for name in wanted)
        return
    from agentrl.sandbox.docker_client import connect  # Docker's SDK takes 0.2 s to import

    client = connect(_BUILD_TIMEOUT_S)
    try:
        for name in wanted:
            yield ensure_docker_image(client, name, recipes=recipes)
    finally:
        client.close()


def reap_all(hosts: tuple[str, ...] = ()) -> str:
    """Remove what dead runs left behind, here and on the Docker daemons `hosts`; one line that says what."""
    found = reap(hosts=hosts)
    removed = (
        f"removed {found.containers} containers, {found.cgroups} control groups, {found.folders} folders of runs that "
        f"are gone, and {found.volumes} volumes of images that are gone"
    )
    return removed + (f"; containers could not be looked at: {found.unreachable}" if found.unreachable else "")


# --- looking ------------------------------------------------------------------------------------------------------


def show_sandboxes(hosts: tuple[str, ...]) -> int:
    """Print every sandbox of this machine and its daemons, oldest first; the exit code."""
    found = list_sandboxes(hosts)
    silent = [fault for host in hosts if (fault := docker_fault(hosts=(host,)))]
    for fault in silent:
        print(fault, file=sys.stderr)
    if not found:
        print("no sandbox lives here")
        return 3 if silent else 0
    heads = ("ID", "BACKEND", "RUN", "IMAGE", "STATE", "AGE", "OWNER", "MEMORY", "PROCESSES")
    for line in table([heads, *(_row(each) for each in found)]):
        print(printable(line))
    return 3 if silent else 0


def _row(each: SandboxInfo) -> tuple[str, ...]:
    pid = each.owner.partition(":")[0]
    owner = {True: pid, False: f"{pid} (dead)", None: f"{pid} (elsewhere)"}[each.owner_alive]
    backend = f"{each.backend} {each.host}".strip()
    processes = "?" if each.processes is None else str(each.processes)
    return (
        each.id, backend, each.run, each.image, each.state, span(each.age_s), owner, size(each.memory_bytes), processes
    )  # fmt: skip


def show_stats(hosts: tuple[str, ...]) -> int:
    """Print daemons, images, disks and caches; the exit code."""
    found = summary(hosts)
    for host in found.hosts:
        for line in _host_lines(host):
            print(printable(line))
    print(f"bubblewrap: {found.bubblewrap_sandboxes} sandboxes")
    print(f"cache {found.cache}: {size(found.cache_bytes)}")
    return 0


def _host_lines(host: HostInfo) -> list[str]:
    if host.fault is not None:
        return [f"docker {host.host}: {host.fault}"]
    used = "" if host.disk_used is None else f", disk {host.disk_used:.0%} used of {size(host.disk_total_bytes)}"
    rows = [
        (image.name, image.origin, size(image.size_bytes), _used(image.used_at), str(image.sandboxes))
        for image in sorted(host.images, key=lambda image: -(image.used_at or 0))
    ]
    head = f"docker {host.host} ({host.version}): {host.sandboxes} sandboxes, {len(host.images)} images{used}"
    return [head, *(f"  {line}" for line in table([("IMAGE", "ORIGIN", "SIZE", "LAST USED", "SANDBOXES"), *rows]))]


def _used(moment: float | None) -> str:
    return "?" if moment is None else f"{span(max(0.0, time.time() - moment))} ago"


def size(count: int | None) -> str:
    """Bytes for a person: `12 MB`, `3.4 GB`."""
    if count is None:
        return "?"
    if count >= 10**9:
        return f"{count / 10**9:.1f} GB"
    return f"{count / 10**6:.0f} MB" if count >= 10**6 else f"{count / 10**3:.0f} kB"


def span(seconds: float) -> str:
    """A span of time in its largest unit."""
    for unit, length in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return "0 s"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows in columns as wide as their widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

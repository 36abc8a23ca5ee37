"""Sandbox images: what a sandbox's root file system holds, and how it is built, once, without a registry.

Three layers, each in the cache under the hash of all that went into it, so that an edit re-runs only what it
must:

    base-<hash>    base.tar, rootfs/      Debian packages by mmdebstrap (about a minute)
    tools-<hash>   pytest/, editor/       pinned wheels by pip (seconds)
    image-<hash>   rootfs/                base's files (hard links) + /opt/agentrl (seconds)

Invariant: a folder of one of these names is complete. Each is built beside it under a temporary name while a
lock file is held, and renamed; what a killed build left behind is removed by the next builder, never taken as
done.

The root file system is meant to be mounted read-only: the layers share files. Building as root needs nothing
else; anyone else needs unprivileged user namespaces, `newuidmap` and a range in /etc/subuid (for mmdebstrap),
and bubblewrap.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.errors import DaemonUnreachableError, DeadlineError, ImageMissingError
from agentrl.sandbox.recipes import build

BASE_IMAGE = "agentrl/base"

_LAYOUT = "1"
"""Raise it when the way the layers are put together changes."""
_LOCK_TIMEOUT_S = 1200.0
_IMAGE_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}


# --- names --------------------------------------------------------------------------------------------------


def cache_root() -> Path:
    """The folder of everything agentrl can rebuild: $AGENTRL_CACHE or ~/.cache/agentrl."""
    configured = os.environ.get("AGENTRL_CACHE")
    return Path(configured).absolute() if configured else Path.home() / ".cache" / "agentrl"


def image_hash() -> str:
    """16 hex digits over the recipe, the package list, the pins and the server's sources: the base image's
    tag."""
    fixed = (_LAYOUT, build.PATH_FILE, build.PYTEST_SCRIPT)
    return _digest(_base_hash(), _tools_hash(), *fixed, *build.server_sources())


def _base_hash() -> str:
    return _digest(_LAYOUT, build.RECIPES / "base.sh", build.RECIPES / "base.packages.txt")


def _tools_hash() -> str:
    return _digest(_LAYOUT, build.RECIPES / "pytest.txt", build.RECIPES / "editor.txt")


def _digest(*parts: str | Path) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode()
        name = part.name if isinstance(part, Path) else ""
        total.update(f"{name}:{len(data)}:".encode() + data)
    return total.hexdigest()[:16]


def _require_base(image: str) -> None:
    """`agentrl/base`, or the same with the tag of the sources at hand; anything else cannot be built here."""
    if image in (BASE_IMAGE, f"{BASE_IMAGE}:{image_hash()}"):
        return
    if image.startswith(f"{BASE_IMAGE}:"):
        remedy = f"name it {BASE_IMAGE}: the tag is chosen by content and is now {image_hash()}"
    else:
        remedy = f"use sandbox.image={BASE_IMAGE}, or sandbox.backend=docker with that image loaded in the daemon"
    raise ImageMissingError(f"there is no root file system for the image {image}", where=image, remedy=remedy)


# --- what callers ask for -----------------------------------------------------------------------------------


def ensure_rootfs(image: str) -> Path:
    """The unpacked root file system of `image`, built if need be (about a minute the first time), to be
    mounted read-only.

    Raises ImageMissingError for an image that only a Docker daemon can have or where the build failed,
    MissingRequirementError where a program is lacking, DeadlineError where another process builds for too
    long.
    """
    _require_base(image)
    return _ensure(f"image-{image_hash()}", _build_image) / "rootfs"


def ensure_tools() -> Path:
    """A folder with `pytest/` and `editor/`: the pinned packages of the tools tree, without the server."""
    return _ensure(f"tools-{_tools_hash()}", build.build_tools)


def ensure_docker_image(client: Any, image: str) -> str:
    """The tag under which the daemon of `client` (a docker.DockerClient) holds `image`.

    The base image is imported where it is missing; any other image must be there already. Raises
    ImageMissingError, DaemonUnreachableError, and whatever `ensure_rootfs` raises.
    """
    import docker.errors
    import requests.exceptions

    base = image == BASE_IMAGE or image.startswith(f"{BASE_IMAGE}:")
    if base:
        _require_base(image)
    tag = f"{BASE_IMAGE}:{image_hash()}" if base else image
    try:
        if _daemon_has(client, tag):
            return tag
        if not base:
            raise ImageMissingError(
                f"the Docker daemon has no image {image}", where=image, remedy=f"docker pull {image}"
            )
        rootfs = ensure_rootfs(BASE_IMAGE)
        with _lock():
            if not _daemon_has(client, tag):
                _import_into_daemon(client, tag, rootfs)
    except (docker.errors.APIError, requests.exceptions.RequestException) as error:
        raise DaemonUnreachableError(
            f"the Docker daemon failed to provide {tag}: {error}",
            where=tag,
            remedy="check `docker version`; sandbox.backend=bubblewrap needs no daemon",
        ) from error
    return tag


def _daemon_has(client: Any, tag: str) -> bool:
    import docker.errors

    try:
        client.images.get(tag)
    except docker.errors.ImageNotFound:
        return False
    return True


def _import_into_daemon(client: Any, tag: str, rootfs: Path) -> None:
    """Import base.tar with the tools tree appended. Not the unpacked files: a build by a user who is not root
    lost their owners, the tar has not."""
    work = _temporary("docker")
    try:
        archive = work / "image.tar"
        shutil.copyfile(_layer(f"base-{_base_hash()}") / "base.tar", archive)
        with tarfile.open(archive, "a") as tar:
            # The folders' own entries are in base.tar; the daemon takes no path twice.
            added = [*sorted((rootfs / build.TOOLS_ROOT).iterdir()), rootfs / build.PATH_FILE]
            for path in (*added, rootfs / build.PYTEST_COMMAND):
                tar.add(path, arcname=f"./{path.relative_to(rootfs)}", filter=_owned_by_root)
        repository, _, name = tag.partition(":")
        changes = [f"ENV {key}={value}" for key, value in _IMAGE_ENVIRONMENT.items()]
        changes += ["USER 1000:1000", "WORKDIR /testbed", f"LABEL agentrl.image={name}"]
        client.api.import_image(src=str(archive), repository=repository, tag=name, changes=changes)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


# --- the cache ----------------------------------------------------------------------------------------------


def _layer(name: str) -> Path:
    return cache_root() / "images" / name


def _ensure(name: str, fill: Callable[[Path], None]) -> Path:
    """The layer's folder; where it is missing `fill` fills a temporary one that is then renamed to it."""
    done = _layer(name)
    if done.is_dir():
        return done
    with _lock():
        return _ensure_locked(name, fill)


def _ensure_locked(name: str, fill: Callable[[Path], None]) -> Path:
    done = _layer(name)
    if not done.is_dir():
        work = _temporary(name)
        try:
            fill(work)
            work.rename(done)
        except BaseException:
            build.remove_tree(work)
            raise
    return done


def _temporary(name: str) -> Path:
    """A new folder beside the layers. Only the holder of the lock makes one."""
    work = _layer(f".building-{name}-{os.getpid()}")
    work.mkdir(parents=True)
    return work


@contextmanager
def _lock() -> Iterator[None]:
    """One builder at a time per cache. The kernel frees the lock of a process that died."""
    folder = _layer("")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "lock", "w")  # noqa: SIM115 - closed below, after the wait
    except OSError as error:
        raise ImageMissingError(
            f"the image cache cannot be written: {error}",
            where=str(folder),
            remedy="set AGENTRL_CACHE to a folder that this user may write",
        ) from error
    with file:
        end = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise DeadlineError(
                        f"another process has been building an image for {_LOCK_TIMEOUT_S:.0f} s",
                        where=str(folder / "lock"),
                        remedy="end that process; the lock goes with it",
                    ) from None
                time.sleep(0.2)
        for stale in folder.glob(".building-*"):
            build.remove_tree(stale)
        yield


def _build_image(work: Path) -> None:
    """The image layer from the other two, built where they are missing. Runs with the lock held."""
    base = _ensure_locked(f"base-{_base_hash()}", build.build_base)
    tools = _ensure_locked(f"tools-{_tools_hash()}", build.build_tools)
    build.build_image(work, base=base, tools=tools)


def main() -> None:
    """Build the base image's root file system and print where it lies, and its tag."""
    print(f"{BASE_IMAGE}:{image_hash()} {ensure_rootfs(BASE_IMAGE)}")


if __name__ == "__main__":
    main()

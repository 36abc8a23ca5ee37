"""Sandbox images: what a sandbox's root file system holds, and how it is built, once, without a registry.

Layers, each in the cache (`agentrl.sandbox.layers`) under the hash of all that went into it, so that an edit re-runs
only what it must:

    base-<hash>                base.tar, rootfs/      Debian packages by mmdebstrap (about a minute)
    tools-<hash>               pytest/, editor/       pinned wheels by pip (seconds)
    image-<hash>               rootfs/                base's files (hard links) + /opt/agentrl: `agentrl/base`
    recipe-<name>-<hash>       files/                 a recipe's pinned packages by pip (seconds to two minutes)
    image-<name>-<hash>        rootfs/                the two above (hard links): `agentrl/<name>`

The root file system is meant to be mounted read-only: the layers share files. Building as root needs nothing
else; anyone else needs unprivileged user namespaces, `newuidmap` and a range in /etc/subuid (for mmdebstrap),
and bubblewrap.
"""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import shutil
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import DaemonUnreachableError, ImageMissingError, SandboxStartError
from agentrl.sandbox.layers import building, cache_root, ensure, ensure_locked, layer_path, prune, temporary
from agentrl.sandbox.recipes import build, packages
from agentrl.sandbox.recipes.recipe import Recipe, load_recipe, recipe_files

__all__ = [
    "BASE_IMAGE",
    "OWN_PREFIX",
    "cache_root",
    "ensure_docker_image",
    "ensure_rootfs",
    "ensure_tools",
    "image_hash",
    "recipe_names",
]

BASE_IMAGE = "agentrl/base"
OWN_PREFIX = "agentrl/"
"""Of the images that are built here; any other comes from elsewhere."""

log = logging.getLogger("agentrl.sandbox")

_LAYER_LAYOUT, _IMAGE_LAYOUT = "1", "2"
"""To be raised when the way is changed in which layers are filled, or put together."""
_IMAGE_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
_DOCKER_BUILD_TIMEOUT_S = 900


# --- names --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Image:
    """An image that is built here: `agentrl/base`, or the one of a recipe. `hash` is its tag."""

    name: str
    hash: str
    recipe: Recipe | None

    @property
    def tag(self) -> str:
        return f"{OWN_PREFIX}{self.name}:{self.hash}"

    @property
    def layer(self) -> str:
        return f"image-{self.hash}" if self.recipe is None else f"image-{self.name}-{self.hash}"


def recipe_names(folder: Path | None = None) -> frozenset[str]:
    """The names of the shipped recipes and those in `folder`; `agentrl/<name>` is the image of one. A recipe may say
    that its image cannot be had: building it then raises ImageMissingError with the reason."""
    return frozenset(recipe_files(folder))


def image_hash() -> str:
    """16 hex digits over the recipe, the package list, the pins and the server's sources: the base image's
    tag."""
    fixed = (_IMAGE_LAYOUT, build.PATH_FILE, build.PYTEST_SCRIPT, build.HOSTS)
    return _digest(_base_hash(), _tools_hash(), *fixed, *build.server_sources())


def _base_hash() -> str:
    return _digest(_LAYER_LAYOUT, build.RECIPES / "base.sh", build.RECIPES / "base.packages.txt")


def _tools_hash() -> str:
    return _digest(_LAYER_LAYOUT, build.RECIPES / "pytest.txt", build.RECIPES / "editor.txt")


def _recipe_hash(recipe: Recipe) -> str:
    return _digest(_LAYER_LAYOUT, _base_hash(), recipe.text, packages.machine())


def _digest(*parts: str | Path) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode()
        name = part.name if isinstance(part, Path) else ""
        total.update(f"{name}:{len(data)}:".encode() + data)
    return total.hexdigest()[:16]


def _find(image: str, recipes: Path | None) -> _Image:
    """What `image` means: `agentrl/NAME`, or the same with the tag of the sources at hand. Anything else cannot be
    built here."""
    name, _, tag = image.removeprefix(OWN_PREFIX).partition(":")
    if not image.startswith(OWN_PREFIX):
        raise ImageMissingError(
            f"there is no root file system for the image {image}",
            where=image,
            remedy=f"give the task's tree as a git bundle, which runs in {BASE_IMAGE} or the image of a recipe; or use "
            "sandbox.backend=docker, which can have any image",
        )
    if name == BASE_IMAGE.removeprefix(OWN_PREFIX):
        found = _Image(name, image_hash(), None)
    else:
        files = recipe_files(recipes)
        if name not in files:
            raise ImageMissingError(
                f"there is no recipe for the image {image}",
                where=image,
                remedy=f"use {BASE_IMAGE}, write a recipe into the folder sandbox.recipes, or use one of "
                f"{', '.join(sorted(OWN_PREFIX + each for each in files))}",
            )
        recipe = load_recipe(files[name])
        if recipe.unavailable is not None:
            raise ImageMissingError(
                f"the image {image} cannot be built: {recipe.unavailable}",
                where=f"recipe {name}",
                remedy="use the published image of the task, with sandbox.backend=docker, where it can be pulled",
            )
        found = _Image(name, _digest(image_hash(), _recipe_hash(recipe)), recipe)
    if tag not in ("", found.hash):
        raise ImageMissingError(
            f"there is no image {image}",
            where=image,
            remedy=f"name it {OWN_PREFIX}{name}: the tag is chosen by content and is now {found.hash}",
        )
    return found


# --- what callers ask for -----------------------------------------------------------------------------------


def ensure_rootfs(image: str, *, recipes: Path | None = None) -> Path:
    """The unpacked root file system of `image`, built if need be (about a minute the first time), to be
    mounted read-only. It stays while this process lives. `recipes`: a folder of further recipes.

    Raises ImageMissingError for an image that only a Docker daemon can have, one without a recipe, one whose recipe
    says that it cannot be had, and where the build failed (naming the package); ConfigError for a recipe that cannot
    be read, MissingRequirementError where a program is lacking, DeadlineError where another process builds for too
    long.
    """
    return _ensure_image(_find(image, recipes)) / "rootfs"


def ensure_tools() -> Path:
    """A folder with `pytest/` and `editor/`: the pinned packages of the tools tree, without the server."""
    return ensure(f"tools-{_tools_hash()}", build.build_tools)


def ensure_docker_image(client: Any, image: str, *, recipes: Path | None = None) -> str:
    """The tag under which the daemon of `client` (a docker.DockerClient) holds `image`.

    `agentrl/…` is brought there where it is missing; any other image must be there already. Raises ImageMissingError,
    DaemonUnreachableError where the daemon gives no answer, SandboxStartError where it refuses a step (its disk is
    full), and whatever `ensure_rootfs` raises.
    """
    from agentrl.sandbox.docker_client import DAEMON_ERRORS, gave_no_answer  # the SDK takes 0.2 s to import

    own = _find(image, recipes) if image.startswith(OWN_PREFIX) else None
    tag = image if own is None else own.tag
    try:
        if _daemon_has(client, tag):
            return tag
        if own is None:
            raise ImageMissingError(
                f"the Docker daemon has no image {image}", where=image, remedy=f"docker pull {image}"
            )
        base = _find(BASE_IMAGE, None)
        _ensure_image(base)
        with building():
            below = ensure_locked(f"base-{_base_hash()}", build.build_base)
            if not _daemon_has(client, base.tag):
                _import_base(client, base, below)
            if own.recipe is not None and not _daemon_has(client, tag):
                _build_on_base(client, own, base, ensure_locked(*_recipe_layer(own.recipe)))
    except DAEMON_ERRORS as error:
        kind = DaemonUnreachableError if gave_no_answer(error) else SandboxStartError
        raise kind(
            f"the Docker daemon failed to provide {tag}: {str(error)[:500]}",
            where=tag,
            remedy="check `docker version` and the daemon's disk; sandbox.backend=bubblewrap needs no daemon",
        ) from error
    return tag


# --- layers -------------------------------------------------------------------------------------------------


def _ensure_image(image: _Image) -> Path:
    return ensure(image.layer, functools.partial(_build_image, image=image))


def _build_image(work: Path, image: _Image) -> None:
    """The image's layer from the others, built where they are missing. Runs with the lock held."""
    base = ensure_locked(f"base-{_base_hash()}", build.build_base)
    tools = ensure_locked(f"tools-{_tools_hash()}", build.build_tools)
    if image.recipe is None:
        build.build_image(work, base=base, tools=tools)
    else:
        under = _find(BASE_IMAGE, None)
        below = ensure_locked(under.layer, functools.partial(_build_image, image=under))
        build.link_tree(below / "rootfs", work / "rootfs")
        build.link_tree(ensure_locked(*_recipe_layer(image.recipe)) / "files", work / "rootfs")
    for name in prune(keep={f"base-{_base_hash()}", f"tools-{_tools_hash()}", f"image-{image_hash()}"}):
        log.info("removed the layer %s, which nothing has used for a week", name)


def _recipe_layer(recipe: Recipe) -> tuple[str, Callable[[Path], None]]:
    """Name of the layer of the recipe's packages, and what fills it."""
    base = layer_path(f"base-{_base_hash()}")
    name = f"recipe-{recipe.name}-{_recipe_hash(recipe)}"
    return name, functools.partial(packages.build_packages, recipe=recipe, base=base)


# --- Docker -------------------------------------------------------------------------------------------------


def _daemon_has(client: Any, tag: str) -> bool:
    import docker.errors

    try:
        client.images.get(tag)
    except docker.errors.ImageNotFound:
        return False
    return True


def _import_base(client: Any, image: _Image, base_layer: Path) -> None:
    """Import base.tar with the tools tree appended. Not the unpacked files: a build by a user who is not root
    lost their owners, the tar has not."""
    work = temporary("docker")
    rootfs = layer_path(image.layer) / "rootfs"
    try:
        archive = work / "image.tar"
        shutil.copyfile(base_layer / "base.tar", archive)
        with tarfile.open(archive, "a") as tar:
            # The folders' own entries are in base.tar; the daemon takes no path twice.
            added = [*sorted((rootfs / build.TOOLS_ROOT).iterdir()), rootfs / build.PATH_FILE]
            for path in (*added, rootfs / build.PYTEST_COMMAND):
                tar.add(path, arcname=f"./{path.relative_to(rootfs)}", filter=_owned_by_root)
        repository, _, name = image.tag.partition(":")
        changes = [f"ENV {key}={value}" for key, value in _IMAGE_ENVIRONMENT.items()]
        changes += ["USER 1000:1000", "WORKDIR /testbed", f"LABEL agentrl.image={name}"]
        client.api.import_image(src=str(archive), repository=repository, tag=name, changes=changes)
    finally:
        build.remove_tree(work)


def _build_on_base(client: Any, image: _Image, base: _Image, recipe_layer: Path) -> None:
    """One layer on the base image, whose own the daemon keeps once for all recipes."""
    work = temporary("docker")
    dockerfile = f"FROM {base.tag}\nCOPY files/ /\nLABEL agentrl.image={image.hash}\n".encode()
    try:
        context = work / "context.tar"
        with tarfile.open(context, "w") as tar:
            entry = tarfile.TarInfo("Dockerfile")
            entry.size = len(dockerfile)
            tar.addfile(entry, io.BytesIO(dockerfile))
            tar.add(recipe_layer / "files", arcname="files", filter=_owned_by_root)
        with context.open("rb") as file:
            client.images.build(
                fileobj=file,
                custom_context=True,
                tag=image.tag,
                network_mode="none",
                rm=True,
                forcerm=True,
                timeout=_DOCKER_BUILD_TIMEOUT_S,
            )
    finally:
        build.remove_tree(work)


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def main() -> None:
    """Build the images of the recipes that the command line names, or the base image; print tags and folders."""
    for name in sys.argv[1:] or [BASE_IMAGE]:
        image = _find(name if name.startswith(OWN_PREFIX) else OWN_PREFIX + name, None)
        print(f"{image.tag} {ensure_rootfs(image.tag)}", flush=True)

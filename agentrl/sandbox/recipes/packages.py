"""The layer of a task image: the pinned packages of a recipe, as files to be laid over the base image.

    files/usr/local/lib/python3.11/dist-packages/    packages, compiled; the project's own metadata and path
    files/usr/local/bin/                             commands

That folder comes before the base's pinned pytest on the path of the image's Python, so a recipe's own pytest is the
one that runs. Wheels are fetched by this machine's pip for the image's Python and this machine's processor; what is
published as source only is built here, by a program of the package's, which is why a recipe's pins are to be trusted.
"""

from __future__ import annotations

import platform
import re
import shutil
from pathlib import Path

from agentrl.errors import ImageMissingError
from agentrl.sandbox.limits import WORKDIR
from agentrl.sandbox.recipes.build import (
    COMMANDS,
    PACKAGES,
    PYTHON_VERSION,
    compile_tree,
    link_tree,
    remove_tree,
    run_pip,
    run_step,
    write_file,
)
from agentrl.sandbox.recipes.recipe import Pin, Recipe, normalised

_NEWEST_GLIBC = 36  # 2.36: of the base image
_OLDEST_GLIBC = 17
_INSTALL_TIMEOUT_S = 900.0
_COMPILE_TIMEOUT_S = 900.0
_SCRIPT = """#!/usr/bin/python3
import sys
from {module} import {first}
if __name__ == "__main__":
    sys.exit({object}())
"""


def machine() -> str:
    """The processor's name in the names of wheels."""
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(platform.machine().lower(), platform.machine())


def wheel_options(processor: str) -> list[str]:
    """pip's options for wheels that run in the base image on `processor`."""
    tags = [f"manylinux_2_{minor}_{processor}" for minor in range(_NEWEST_GLIBC, _OLDEST_GLIBC - 1, -1)]
    tags += [
        f"manylinux2014_{processor}",
        f"manylinux2010_{processor}",
        f"manylinux1_{processor}",
        f"linux_{processor}",
    ]
    options = ["--only-binary=:all:", "--python-version", PYTHON_VERSION, "--implementation", "cp"]
    return options + [word for tag in tags for word in ("--platform", tag)]


def build_packages(work: Path, recipe: Recipe, *, base: Path) -> None:
    """Fill work/files. `base`: the base layer, for its Python. Raises ImageMissingError naming what cannot be had."""
    packages = work / "files" / PACKAGES
    packages.mkdir(parents=True)
    try:
        _install(work, packages, recipe)
    except ImageMissingError as error:
        raise ImageMissingError(
            error.what, where=f"recipe {recipe.name}", remedy="correct the pin, or check that the package index answers"
        ) from error
    _move_commands(packages / "bin", work / "files" / COMMANDS)
    _disarm(packages, recipe)
    _add_project(work / "files", recipe)
    _compile(work, packages, base)
    run_step(["chmod", "-R", "u+rwX,go+rX", str(work / "files")], timeout_s=60, what="making the packages readable")


def _install(work: Path, packages: Path, recipe: Recipe) -> None:
    wheels = [pin for pin in recipe.pins if normalised(pin.name) not in recipe.sdists]
    if wheels:
        what = f"fetching the pinned packages of {recipe.name}"
        _pip(["install", "--no-compile", "--target", str(packages), *wheel_options(machine())], wheels, work, what)
    for pin in recipe.pins:
        if normalised(pin.name) in recipe.sdists:
            _build_sdist(work, packages, pin)


def _build_sdist(work: Path, packages: Path, pin: Pin) -> None:
    """Build the wheel of one source distribution and add it. Pure Python only: the compiler and the libraries here
    are not the image's."""
    out = work / "wheels"
    what = f"building {pin.name}=={pin.version} from its source"
    # Its Requires-Python was met by whoever pinned it; this machine's Python does not matter.
    any_python = "--ignore-requires-python"
    _pip(["wheel", any_python, "--wheel-dir", str(out), f"--no-binary={pin.name}"], [pin], work, what)
    (wheel,) = out.glob("*.whl")
    if not wheel.name.endswith("-none-any.whl"):
        raise ImageMissingError(f"{what} gave {wheel.name}, which holds compiled code", where=pin.line)
    unpacked = work / "unpacked"
    unpack = ["install", any_python, "--no-compile", "--no-index", "--target", str(unpacked), str(wheel)]
    run_pip(unpack, timeout_s=_INSTALL_TIMEOUT_S, what=f"unpacking {wheel.name}")
    shutil.copytree(unpacked, packages, dirs_exist_ok=True, symlinks=True)
    for each in (out, unpacked):
        remove_tree(each)


def _pip(arguments: list[str], pins: list[Pin], work: Path, what: str) -> None:
    """Run pip on exactly these pins; they give hashes all or none (`recipe`)."""
    requirements = work / "requirements.txt"
    requirements.write_text("".join(f"{pin.line}\n" for pin in pins))
    hashes = ["--require-hashes"] if pins[0].hashes else []
    try:
        run_pip([*arguments, *hashes, "-r", str(requirements)], timeout_s=_INSTALL_TIMEOUT_S, what=what)
    finally:
        requirements.unlink()


def _move_commands(source: Path, target: Path) -> None:
    """pip's commands name this machine's Python in their first line."""
    if not source.is_dir():
        return
    for script in sorted(source.iterdir()):
        text = script.read_bytes()
        if re.match(rb"#!.*python", text):
            text = b"#!/usr/bin/python3\n" + text.partition(b"\n")[2]
        target.mkdir(parents=True, exist_ok=True)
        (target / script.name).write_bytes(text)
        (target / script.name).chmod(0o755)
    remove_tree(source)


def _disarm(packages: Path, recipe: Recipe) -> None:
    """Take the plug-ins that the recipe names out of pytest's sight; they can still be imported."""
    for info in packages.glob("*.dist-info"):
        points = info / "entry_points.txt"
        if normalised(info.name.partition("-")[0]) in recipe.no_plugins and points.is_file():
            kept = re.sub(r"(?ms)^\[pytest11\].*?(?=^\[|\Z)", "", points.read_text())
            write_file(points, kept, 0o644)


def _add_project(files: Path, recipe: Recipe) -> None:
    """What an editable install of the work tree would leave: its folders on the path, behind everything else (so that
    nothing in them shadows the standard library), its metadata, its commands."""
    if recipe.paths:
        folders = [str(Path(WORKDIR, each)) for each in recipe.paths]
        # By code, not as plain lines: these are dropped where the folder is missing when Python starts.
        write_file(files / PACKAGES / "agentrl-project.pth", f"import sys; sys.path.extend({folders!r})\n", 0o644)
    if recipe.distribution is None:
        return
    name, version = recipe.distribution
    info = files / PACKAGES / f"{re.sub(r'[-_.]+', '_', name)}-{version.replace('-', '_')}.dist-info"
    write_file(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", 0o644)
    write_file(info / "INSTALLER", "agentrl\n", 0o644)
    groups = sorted({point.group for point in recipe.entry_points})
    lines = []
    for group in groups:
        lines += [f"[{group}]", *(f"{each.name} = {each.value}" for each in recipe.entry_points if each.group == group)]
    if lines:
        write_file(info / "entry_points.txt", "\n".join(lines) + "\n", 0o644)
    for point in recipe.entry_points:
        module, _, name_in_module = point.value.partition(":")
        if point.group == "console_scripts" and name_in_module:
            first = name_in_module.partition(".")[0]
            script = _SCRIPT.format(module=module, first=first, object=name_in_module)
            write_file(files / COMMANDS / point.name, script, 0o755)


def _compile(work: Path, packages: Path, base: Path) -> None:
    """With the base's own Python, at the place where the packages will lie."""
    scratch = work / "scratch"
    link_tree(base / "rootfs", scratch)
    place = scratch / PACKAGES
    remove_tree(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    packages.rename(place)
    compile_tree(scratch, PACKAGES, timeout_s=_COMPILE_TIMEOUT_S)
    place.rename(packages)
    remove_tree(scratch)

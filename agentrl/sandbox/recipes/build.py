"""How each layer of the base image is made: what `agentrl.sandbox.images` runs to fill an empty folder.

Every step is a program with a deadline, in a session of its own that is dead when the step returns or raises.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import DeadlineError, ImageMissingError, MissingRequirementError

RECIPES = Path(__file__).parent
SERVER_SOURCES = RECIPES.parent / "server"
TOOLS_ROOT = "opt/agentrl"
PATH_FILE = "usr/local/lib/python3.11/dist-packages/agentrl.pth"
"""Puts the pinned pytest on the path of the image's Python."""
PYTEST_COMMAND = "usr/local/bin/pytest"
PYTEST_SCRIPT = """#!/usr/bin/python3
import sys
from pytest import console_main
if __name__ == "__main__":
    sys.exit(console_main())
"""

_BOOTSTRAP_TIMEOUT_S = 900.0
_PIP_TIMEOUT_S = 300.0
_LOCAL_TIMEOUT_S = 180.0


def build_base(work: Path) -> None:
    """work/base.tar from Debian packages, and work/rootfs unpacked from it."""
    _require_program("mmdebstrap", "mmdebstrap")
    scratch = work / "scratch"
    scratch.mkdir()
    scratch.chmod(0o755)  # mmdebstrap's sandboxed downloader must reach into it
    command = ["sh", str(RECIPES / "base.sh"), str(RECIPES / "base.packages.txt"), str(work / "base.tar")]
    if os.geteuid() == 0:
        # In a mount namespace of its own a killed build cannot leave /proc or /dev mounted in the cache.
        command = ["unshare", "--mount", "--propagation", "private", *command]
    what = "building the base root file system"
    _run(command, timeout_s=_BOOTSTRAP_TIMEOUT_S, what=what, environment={"TMPDIR": str(scratch)})
    remove_tree(scratch)
    rootfs = work / "rootfs"
    rootfs.mkdir()
    # Device nodes need privileges and each backend mounts its own /dev.
    unpack = ["tar", "-x", "-f", str(work / "base.tar"), "-C", str(rootfs), "--exclude=./dev/*"]
    _run(unpack, timeout_s=_LOCAL_TIMEOUT_S, what="unpacking the base root file system")


def build_tools(work: Path) -> None:
    """work/pytest and work/editor from the pinned wheels. pip checks each wheel's hash."""
    for name in ("pytest", "editor"):
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        command += ["--target", str(work / name), "--ignore-requires-python", "--require-hashes"]
        # Pure wheels only: one tree serves every processor, and another Python than the host's.
        command += ["--only-binary=:all:", "--platform", "any", "--python-version", "3.11"]
        command += ["--implementation", "py", "--abi", "none", "--disable-pip-version-check", "--no-input"]
        command += ["-r", str(RECIPES / f"{name}.txt")]
        _run(command, timeout_s=_PIP_TIMEOUT_S, what=f"fetching the pinned packages of {name}.txt")
        shutil.rmtree(work / name / "bin", ignore_errors=True)


def build_image(work: Path, *, base: Path, tools: Path) -> None:
    """work/rootfs: the files of the layer `base` (hard links) with the tools tree added."""
    rootfs = work / "rootfs"
    link = ["cp", "--archive", "--link", str(base / "rootfs"), str(rootfs)]
    _run(link, timeout_s=_LOCAL_TIMEOUT_S, what="linking the base's files")
    tree = rootfs / TOOLS_ROOT
    for name in ("pytest", "editor"):
        shutil.copytree(tools / name, tree / name)
    (tree / "server").mkdir()
    for source in server_sources():
        shutil.copyfile(source, tree / "server" / source.name)
    _write(rootfs / PATH_FILE, f"/{TOOLS_ROOT}/pytest\n", 0o644)
    _write(rootfs / PYTEST_COMMAND, PYTEST_SCRIPT, 0o755)
    _compile(rootfs)


def server_sources() -> list[Path]:
    """The files of the server that runs inside."""
    return sorted(SERVER_SOURCES.glob("*.py"))


def _write(path: Path, text: str, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def _compile(rootfs: Path) -> None:
    """Compile the tools tree with the image's own Python: the root is read-only later, so nothing could cache
    it."""
    python = ["/usr/bin/python3", "-I", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash"]
    tree = f"/{TOOLS_ROOT}"
    if os.geteuid() == 0:
        command = ["chroot", str(rootfs), *python, tree]
    else:
        _require_program("bwrap", "bubblewrap")
        binds = ["--ro-bind", str(rootfs), "/", "--bind", str(rootfs / TOOLS_ROOT), tree, "--proc", "/proc"]
        command = ["bwrap", "--unshare-all", "--die-with-parent", *binds, *python, tree]
    _run(command, timeout_s=_LOCAL_TIMEOUT_S, what="compiling the tools tree")


# --- programs -----------------------------------------------------------------------------------------------


def remove_tree(path: Path) -> None:
    """Remove a half-built tree whatever its folders' modes, without crossing into anything mounted in it."""
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf", "--one-file-system"]):
        subprocess.run([*command, "--", str(path)], check=False, capture_output=True, timeout=_LOCAL_TIMEOUT_S)


def _require_program(program: str, package: str) -> None:
    if shutil.which(program) is None:
        raise MissingRequirementError(
            f"building a sandbox image needs the program {program}",
            where="PATH",
            remedy=f"apt-get update && apt-get install -y {package}",
        )


def _run(command: Sequence[str], *, timeout_s: float, what: str, environment: dict[str, str] | None = None) -> None:
    """Run a build step. Raises ImageMissingError with the end of what the step said, or DeadlineError."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            f"{what} did not end within {timeout_s:.0f} s",
            where=" ".join(command[:4]),
            remedy="check that the package sources answer, then try again",
        ) from None
    finally:
        _end_group(process)
    if process.returncode != 0:
        said = output.decode("utf-8", "replace").strip()[-1500:]
        raise ImageMissingError(
            f"{what} failed with exit code {process.returncode}:\n{said}",
            where=" ".join(command[:4]),
            remedy="check that the package sources answer, then try again",
        )


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a step's process group: asked first, so that mmdebstrap cleans up, then killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        try:
            os.killpg(process.pid, number)
            process.wait(10.0)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue

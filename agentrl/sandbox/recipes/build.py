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
PYTHON_VERSION = "3.11"
"""The image's."""
PACKAGES = f"usr/local/lib/python{PYTHON_VERSION}/dist-packages"
COMMANDS = "usr/local/bin"
PATH_FILE = f"{PACKAGES}/agentrl.pth"
"""Puts the pinned pytest on the path of the image's Python."""
PYTEST_COMMAND = f"{COMMANDS}/pytest"
HOSTS_FILE = "etc/hosts"
HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost ip6-localhost ip6-loopback\n"
"""For bubblewrap: Docker puts a file of its own over it."""
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
    require_program("mmdebstrap", "mmdebstrap")
    scratch = work / "scratch"
    scratch.mkdir()
    scratch.chmod(0o755)  # mmdebstrap's sandboxed downloader must reach into it
    command = ["sh", str(RECIPES / "base.sh"), str(RECIPES / "base.packages.txt"), str(work / "base.tar")]
    if os.geteuid() == 0:
        # In a mount namespace of its own a killed build cannot leave /proc or /dev mounted in the cache.
        command = ["unshare", "--mount", "--propagation", "private", *command]
    what = "building the base root file system"
    run_step(command, timeout_s=_BOOTSTRAP_TIMEOUT_S, what=what, environment={"TMPDIR": str(scratch)})
    remove_tree(scratch)
    rootfs = work / "rootfs"
    rootfs.mkdir()
    # Device nodes need privileges and each backend mounts its own /dev.
    unpack = ["tar", "-x", "-f", str(work / "base.tar"), "-C", str(rootfs), "--exclude=./dev/*"]
    run_step(unpack, timeout_s=_LOCAL_TIMEOUT_S, what="unpacking the base root file system")


def build_tools(work: Path) -> None:
    """work/pytest and work/editor from the pinned wheels. pip checks each wheel's hash."""
    for name in ("pytest", "editor"):
        arguments = ["install", "--no-compile", "--target", str(work / name)]
        arguments += ["--ignore-requires-python", "--require-hashes"]
        # Pure wheels only: one tree serves every processor, and another Python than the host's.
        arguments += ["--only-binary=:all:", "--platform", "any", "--python-version", PYTHON_VERSION]
        arguments += ["--implementation", "py", "--abi", "none", "-r", str(RECIPES / f"{name}.txt")]
        run_pip(arguments, timeout_s=_PIP_TIMEOUT_S, what=f"fetching the pinned packages of {name}.txt")
        shutil.rmtree(work / name / "bin", ignore_errors=True)


def build_image(work: Path, *, base: Path, tools: Path) -> None:
    """work/rootfs: the files of the layer `base` (hard links) with the tools tree added."""
    rootfs = work / "rootfs"
    link_tree(base / "rootfs", rootfs)
    tree = rootfs / TOOLS_ROOT
    for name in ("pytest", "editor"):
        shutil.copytree(tools / name, tree / name)
    (tree / "server").mkdir()
    for source in server_sources():
        shutil.copyfile(source, tree / "server" / source.name)
    write_file(rootfs / PATH_FILE, f"/{TOOLS_ROOT}/pytest\n", 0o644)
    write_file(rootfs / PYTEST_COMMAND, PYTEST_SCRIPT, 0o755)
    write_file(rootfs / HOSTS_FILE, HOSTS, 0o644)
    compile_tree(rootfs, TOOLS_ROOT)


def link_tree(source: Path, target: Path) -> None:
    """Make `target` hold what `source` holds, as hard links, in place of files that are there already."""
    target.mkdir(exist_ok=True)
    link = ["cp", "--archive", "--link", "--force", f"{source}/.", str(target)]
    run_step(link, timeout_s=_LOCAL_TIMEOUT_S, what=f"linking the files of {source.parent.name}")


def server_sources() -> list[Path]:
    """The files of the server that runs inside."""
    return sorted(SERVER_SOURCES.glob("*.py"))


def write_file(path: Path, text: str, mode: int) -> None:
    """Write it anew: another layer's file may be linked there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(mode)


def compile_tree(rootfs: Path, folder: str, *, timeout_s: float = _LOCAL_TIMEOUT_S) -> None:
    """Compile what lies under `folder` of `rootfs` with the image's own Python: the root is read-only later, so
    nothing could cache it. What does not compile (templates, code for other versions) stays as it is."""
    code = (
        "import compileall, py_compile; "
        f"compileall.compile_dir('/{folder}', quiet=2, "
        "invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
    )
    python = ["/usr/bin/python3", "-I", "-c", code]
    if os.geteuid() == 0:
        command = ["chroot", str(rootfs), *python]
    else:
        require_program("bwrap", "bubblewrap")
        binds = ["--ro-bind", str(rootfs), "/", "--bind", str(rootfs / folder), f"/{folder}", "--proc", "/proc"]
        command = ["bwrap", "--unshare-all", "--die-with-parent", *binds, *python]
    run_step(command, timeout_s=timeout_s, what=f"compiling /{folder}")


# --- programs -----------------------------------------------------------------------------------------------


def remove_tree(path: Path) -> None:
    """Remove a half-built tree whatever its folders' modes, without crossing into anything mounted in it."""
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf", "--one-file-system"]):
        subprocess.run([*command, "--", str(path)], check=False, capture_output=True, timeout=_LOCAL_TIMEOUT_S)


def require_program(program: str, package: str) -> None:
    if shutil.which(program) is None:
        raise MissingRequirementError(
            f"building a sandbox image needs the program {program}",
            where="PATH",
            remedy=f"apt-get update && apt-get install -y {package}",
        )


def run_pip(arguments: Sequence[str], *, timeout_s: float, what: str) -> None:
    """Run a command of this machine's pip on just the packages named, without questions. Raises as `run_step`."""
    command = [sys.executable, "-m", "pip", arguments[0], "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", *arguments[1:]]
    run_step(command, timeout_s=timeout_s, what=what)


def run_step(command: Sequence[str], *, timeout_s: float, what: str, environment: dict[str, str] | None = None) -> None:
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
        said = _reason(output.decode("utf-8", "replace"))
        raise ImageMissingError(
            f"{what} failed with exit code {process.returncode}:\n{said}",
            where=" ".join(command[:4]),
            remedy="check that the package sources answer, then try again",
        )


def _reason(output: str) -> str:
    """What of a failed step's output to show: from pip the errors without the warnings before them."""
    text = output.strip()
    start = text.find("ERROR: ")
    return (text if start < 0 else text[start:])[-1500:]


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

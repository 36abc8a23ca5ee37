"""SWE-ReX beside us: its server inside containers of the same image, its client in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
from sandbox_containers import Containers, read_cpu_s
from sandbox_load import TIMEOUT_S, Load, System
from sandbox_report import REX_EXECUTE, REX_SESSION

from agentrl.sandbox.images import cache_root
from agentrl.sandbox.limits import Limits

PACKAGES = ("swe-rex==1.4.0", "aiohttp")  # its remote client needs the second and does not say so
_REX_IMAGE = "agentrl-benchmark/swe-rex"
_PIP_TIMEOUT_S = 600
_REX_PORT = "8000/tcp"


class SweRex:
    """SWE-ReX: its server in containers with a bridge and a published port each, its client in a process beside us."""

    def __init__(self, client: docker.DockerClient, base: str, limits: Limits, run_id: str) -> None:
        self._packages = packages_folder()
        self._pool = Containers(_swerex_image(client, base, self._packages), limits, f"{run_id}-rex")
        self._process: asyncio.subprocess.Process | None = None
        self._cpu_files: list[Path] | None = None

    def ways(self) -> list[System]:
        """A command in a bash session, and a command in a process of its own."""
        return [_RexWay(self, REX_SESSION, "session"), _RexWay(self, REX_EXECUTE, "execute")]

    async def open(self, count: int) -> float:
        """Start `count` containers and wait until each serves; seconds."""
        token = secrets.token_hex(8)
        began = time.perf_counter()
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(self._packages)}
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", str(Path(__file__).with_name("sandbox_swerex_client.py"))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            limit=64 * 1024 * 1024,
            start_new_session=True,  # a Ctrl-C is ours to handle
        )

        def start() -> int:
            ports = {_REX_PORT: ("127.0.0.1", None)}
            container = self._pool.start(["swerex-remote", "--auth-token", token], ports=ports)
            container.reload()
            return int(container.ports[_REX_PORT][0]["HostPort"])

        ports = await self._pool.start_many(count, start)
        await self.ask(op="connect", ports=ports, token=token)
        took = time.perf_counter() - began
        self._cpu_files = await asyncio.to_thread(self._pool.cpu_files)
        return took

    async def prepare(self, command: str) -> None:
        """Run `command` once in every container."""
        await self.ask(op="prepare", command=command)

    async def ask(self, **request: Any) -> dict[str, Any]:
        """One question to the client's process. Raises where that has ended."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("SWE-ReX's client is not open")
        process.stdin.write(json.dumps(request).encode() + b"\n")
        async with asyncio.timeout(TIMEOUT_S * 2):
            line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"SWE-ReX's client ended: {await process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def inside_cpu_s(self) -> float | None:
        return read_cpu_s(self._cpu_files)

    async def close(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
        await self._pool.close()


@dataclass(slots=True)
class _RexWay:
    """SWE-ReX by one of its two ways to run a command."""

    rex: SweRex
    name: str
    way: str
    share: float = 0.5

    async def load(self, command: str, *, count: int, seconds: float) -> Load:
        said = await self.rex.ask(op="load", way=self.way, count=count, seconds=seconds, command=command)
        return Load(seconds=said["seconds"], client_cpu_s=said["cpu_s"], latencies_s=said["latencies_s"])

    async def inside_cpu_s(self) -> float | None:
        return await self.rex.inside_cpu_s()


def packages_folder() -> Path:
    """SWE-ReX's packages for this Python, which is the image's version too; fetched once per cache."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    name = "-".join(PACKAGES).replace("=", "")
    folder = cache_root() / "benchmarks" / f"{name}-py{version}"
    if not folder.exists():
        building = folder.with_name(f"{folder.name}.{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        command += ["--only-binary=:all:", "--target", str(building), *PACKAGES]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S)
        if done.returncode != 0:
            raise RuntimeError(f"SWE-ReX cannot be fetched (leave it out by --without-swe-rex): {done.stderr[-500:]}")
        shutil.rmtree(building / "bin", ignore_errors=True)
        building.rename(folder)
    return folder


_REX_DOCKERFILE = """\
FROM {base}
COPY packages /opt/swerex
COPY swerex-remote /usr/local/bin/swerex-remote
RUN python3 -m compileall -q /opt/swerex || true
"""
_REX_SCRIPT = """\
#!/usr/bin/python3
import sys
sys.path.insert(0, "/opt/swerex")
from swerex.server import main
main()
"""


def _swerex_image(client: docker.DockerClient, base: str, packages: Path) -> str:
    """The tag of the base image with SWE-ReX laid in, as its users do for images of their own."""
    if sys.version_info[:2] != (3, 11):
        raise RuntimeError("SWE-ReX's packages are laid into an image with Python 3.11: run this with Python 3.11")
    tag = f"{_REX_IMAGE}:{hashlib.sha256(f'{base}{packages}{_REX_SCRIPT}'.encode()).hexdigest()[:16]}"
    with contextlib.suppress(docker.errors.ImageNotFound):
        client.images.get(tag)
        return tag
    for outdated in client.images.list(_REX_IMAGE):
        with contextlib.suppress(docker.errors.APIError):  # still in use
            client.images.remove(outdated.id)
    folder = packages.with_name(f"context.{os.getpid()}")
    try:
        shutil.copytree(packages, folder / "packages")
        (folder / "Dockerfile").write_text(_REX_DOCKERFILE.format(base=base))
        (folder / "swerex-remote").write_text(_REX_SCRIPT)
        (folder / "swerex-remote").chmod(0o755)
        client.images.build(path=str(folder), tag=tag, rm=True, forcerm=True, network_mode="none")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return tag

"""Containers without our server: `docker exec` per command, and a fresh container per episode."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker
import docker.types
from sandbox_load import COMMANDS_PER_EPISODE, STARTERS, TIMEOUT_S, Load, in_turn
from sandbox_report import DOCKER_EXEC, FRESH_CONTAINER

from agentrl.config import SandboxConfig
from agentrl.sandbox.docker_client import LABEL_RUN, connect, owner_labels, remove_container
from agentrl.sandbox.images import ensure_docker_image
from agentrl.sandbox.limits import ENVIRONMENT, SANDBOX_UID, WORKDIR, Limits
from agentrl.sandbox.owner import Owner

_LEFT_BEHIND_S = 3600.0
_CGROUPS = Path("/sys/fs/cgroup")


class Containers:
    """Containers without our server, hardened as ours are; all removed by `close`, or later by the reaper."""

    def __init__(self, image: str, limits: Limits, run_id: str) -> None:
        self._image = image
        self._client = connect(TIMEOUT_S)
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="benchmark-docker")
        self._run_id = run_id
        tmpfs = f"rw,exec,nosuid,nodev,size={limits.disk_bytes},uid={SANDBOX_UID},gid={SANDBOX_UID}"
        self._options: dict[str, Any] = {
            "detach": True,
            "read_only": True,
            "tmpfs": {WORKDIR: f"{tmpfs},mode=0755", "/tmp": f"{tmpfs},mode=1777"},
            "shm_size": limits.shm_bytes,
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "mem_limit": limits.memory_bytes,
            "memswap_limit": limits.memory_bytes,
            "pids_limit": limits.pids,
            "nano_cpus": round(limits.cpus * 1e9),
            "log_config": docker.types.LogConfig(type="none"),
            "user": f"{SANDBOX_UID}:{SANDBOX_UID}",
            "working_dir": WORKDIR,
            "entrypoint": "",
            "environment": dict(ENVIRONMENT),
            "labels": {**owner_labels(Owner.current(), lifetime_s=_LEFT_BEHIND_S), LABEL_RUN: run_id},
        }

    def start(self, command: Sequence[str], **options: Any) -> Any:
        """`docker run --detach`; with no network unless `options` give one. Blocking."""
        network = {} if "ports" in options else {"network_mode": "none"}
        return self._client.containers.run(self._image, list(command), **{**self._options, **network, **options})

    async def start_many(self, count: int, start: Callable[[], Any]) -> list[Any]:
        """`count` containers by `start`, as many at once as our pool starts."""
        slots = asyncio.Semaphore(STARTERS)

        async def one() -> Any:
            async with slots:
                return await self.in_thread(start)

        return list(await asyncio.gather(*(one() for _ in range(count))))

    async def in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run blocking `work` in a thread of ours."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    def exec(self, container: Any, command: str) -> None:
        """`docker exec` through the SDK, as programs use it: create, start, read all, inspect. Blocking."""
        code, output = container.exec_run(["/bin/bash", "-c", command])
        if code != 0:
            raise RuntimeError(f"exit code {code}: {output[:200]!r}")

    async def threads_load(self, pieces: Sequence[Callable[[], None]], seconds: float) -> Load:
        """Each of `pieces` over and over in a thread of its own until `seconds` are over."""
        latencies: list[float] = []

        def repeat(piece: Callable[[], None], end: float) -> None:
            while (began := time.perf_counter()) < end and not self._stop.is_set():
                piece()
                latencies.append(time.perf_counter() - began)

        def worker(piece: Callable[[], None]) -> Callable[[float], Any]:
            return lambda end: self.in_thread(repeat, piece, end)

        done = await in_turn([worker(piece) for piece in pieces], seconds)
        done.latencies_s = latencies
        return done

    def cpu_files(self) -> list[Path] | None:
        """As `cpu_files`, of the containers that run now. Blocking."""
        return cpu_files(f"{LABEL_RUN}={self._run_id}")

    async def close(self) -> None:
        """Stop the loops and remove every container. Bounded by the SDK's own timeout."""
        self._stop.set()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        with ThreadPoolExecutor(STARTERS) as removers:
            for container in self._client.containers.list(all=True, filters={"label": f"{LABEL_RUN}={self._run_id}"}):
                removers.submit(remove_container, self._client, container.id)
        self._client.close()


def cpu_files(label: str) -> list[Path] | None:
    """The files that count the CPU time of the running containers with `label`; None where these cannot be seen."""
    client = connect(TIMEOUT_S)
    try:
        pids = [int(each.attrs["State"]["Pid"]) for each in client.containers.list(filters={"label": label})]
    finally:
        client.close()
    found = [file for pid in pids if (file := _cpu_file(pid)) is not None]
    return found if len(found) == len(pids) else None


def _cpu_file(pid: int) -> Path | None:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for folder, name in ((controllers, "cpuacct.usage"), ("", "cpu.stat")):
                file = _CGROUPS / folder / path[1:] / name
                if path != "/" and file.exists():
                    return file
    return None


def read_cpu_s(files: Sequence[Path] | None) -> float | None:
    """The sum of what `files` say, in seconds; None where one is gone."""
    if files is None:
        return None
    try:
        return sum(_read_cpu_s(file) for file in files)
    except OSError:
        return None


def _read_cpu_s(file: Path) -> float:
    text = file.read_text().split()
    return int(text[0]) / 1e9 if file.name == "cpuacct.usage" else int(text[text.index("usage_usec") + 1]) / 1e6


class DockerExec:
    """`docker exec` per command into containers that sleep."""

    name = DOCKER_EXEC
    share = 1.0

    def __init__(self, image: str, limits: Limits, run_id: str) -> None:
        self._pool = Containers(image, limits, f"{run_id}-exec")
        self._containers: list[Any] = []
        self._cpu_files: list[Path] | None = None

    async def open(self, count: int) -> float:
        """Start `count` containers; seconds."""
        began = time.perf_counter()
        self._containers = await self._pool.start_many(count, lambda: self._pool.start(["sleep", "infinity"]))
        took = time.perf_counter() - began
        self._cpu_files = await asyncio.to_thread(self._pool.cpu_files)
        return took

    async def prepare(self, command: str) -> None:
        await asyncio.gather(*(self._pool.in_thread(self._pool.exec, each, command) for each in self._containers))

    async def load(self, command: str, *, count: int, seconds: float) -> Load:
        pieces = [lambda c=each: self._pool.exec(c, command) for each in self._containers[:count]]
        await asyncio.gather(*(self._pool.in_thread(piece) for piece in pieces))
        return await self._pool.threads_load(pieces, seconds)

    async def inside_cpu_s(self) -> float | None:
        return read_cpu_s(self._cpu_files)

    async def close(self) -> None:
        await self._pool.close()


class FreshContainers:
    """A container per episode: `docker run`, ten times `docker exec`, `docker rm --force`."""

    name = FRESH_CONTAINER

    def __init__(self, image: str, limits: Limits, run_id: str) -> None:
        self._pool = Containers(image, limits, f"{run_id}-fresh")

    async def turnover(self, command: str, *, count: int, seconds: float) -> Load:
        leases: list[float] = []

        def episode() -> None:
            began = time.perf_counter()
            container = self._pool.start(["sleep", "infinity"])
            leases.append(time.perf_counter() - began)
            for _ in range(COMMANDS_PER_EPISODE):
                self._pool.exec(container, command)
            container.remove(force=True, v=True)

        done = await self._pool.threads_load([episode] * count, seconds)
        done.leases_s = leases
        return done

    async def inside_cpu_s(self) -> float | None:
        return None  # the containers are gone when it would be read

    async def close(self) -> None:
        await self._pool.close()


def base_image(client: docker.DockerClient) -> str:
    """The tag under which the daemon has the base image that our sandboxes use."""
    return ensure_docker_image(client, SandboxConfig().image)

"""Servers side by side with a small script in vLLM's place: names, seeds, devices, and all or none."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import PolicyConfig
from agentrl.errors import ConfigError, PolicyStartError
from agentrl.policy import Device, VllmInstall, VllmServer, open_replicas
from agentrl.policy.command import serve_arguments, serve_environment
from agentrl.policy.replicas import replica_seed

CPU = VllmInstall(python=sys.executable, version="0", device=Device.CPU)
CUDA = VllmInstall(python=sys.executable, version="0", device=Device.CUDA)

# Serves /health on --port; writes its arguments, environment and affinity beside itself, by seed. The server of a seed
# named in `broken` ends at once.
SCRIPT = """
import http.server, json, os, pathlib, sys, threading
value = lambda flag: sys.argv[sys.argv.index(flag) + 1]
here = pathlib.Path(__file__).parent
if (here / "broken").exists() and (here / "broken").read_text() == value("--seed"):
    sys.exit("the reason")
thread = threading.Thread(target=lambda: affinity.append(sorted(os.sched_getaffinity(0))))
affinity = [sorted(os.sched_getaffinity(0))]
thread.start(); thread.join()
told = {"arguments": sys.argv[1:], "environment": dict(os.environ), "affinity": affinity, "pid": os.getpid()}
(here / ("told-" + value("--seed"))).write_text(json.dumps(told))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(value("--port"))), Handler).serve_forever()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "serve.py").write_text(SCRIPT)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


async def opened(
    folder: Path, devices: list[int | None], *, install: VllmInstall = CPU, sleep_mode: bool = False
) -> list[VllmServer]:
    return await open_replicas(
        PolicyConfig(model=str(folder / "model"), start_timeout_s=60),
        devices=devices,
        log_dir=folder / "logs",
        seed=5,
        sleep_mode=sleep_mode,
        install=install,
        launcher=("-P", str(folder / "serve.py")),
    )


def told(folder: Path, index: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"told-{replica_seed(5, index)}").read_text())
    return found


def gone(pid: int, *, timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_each_has_its_log_its_seed_and_its_core(folder: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]

    async def run() -> None:
        servers = await opened(folder, list(cores))
        try:
            assert [server.log_path.name for server in servers] == ["policy-0.log", "policy-1.log"][: len(cores)]
            assert len({server.port for server in servers}) == len(cores)
            for index, core in enumerate(cores):
                assert told(folder, index)["affinity"] == [[core], [core]]
                assert os.sched_getaffinity(servers[index].pid) == {core}
                assert told(folder, index)["environment"]["OMP_NUM_THREADS"] == "1"
        finally:
            for server in servers:
                server.stop()

    asyncio.run(run())


def test_one_server_alone_is_not_numbered_and_may_be_unbound(folder: Path) -> None:
    async def run() -> None:
        [server] = await opened(folder, [None])
        try:
            assert server.log_path.name == "policy.log"
            assert told(folder, 0)["affinity"][0] == sorted(os.sched_getaffinity(0))
            assert not server.sleeps
        finally:
            server.stop()

    asyncio.run(run())


def test_on_cuda_a_device_is_a_visible_device_and_servers_may_sleep(folder: Path) -> None:
    async def run() -> None:
        [server] = await opened(folder, [3], install=CUDA, sleep_mode=True)
        try:
            assert server.sleeps
            assert told(folder, 0)["environment"]["CUDA_VISIBLE_DEVICES"] == "3"
            assert "--enable-sleep-mode" in told(folder, 0)["arguments"]
            assert told(folder, 0)["affinity"][0] == sorted(os.sched_getaffinity(0))
        finally:
            server.stop()

    asyncio.run(run())


def test_one_that_does_not_start_ends_all(folder: Path) -> None:
    """K20: the error is that server's own, and nothing is left running."""
    (folder / "broken").write_text(str(replica_seed(5, 1)))
    with pytest.raises(PolicyStartError, match="exit code 1") as caught:
        asyncio.run(opened(folder, [None, None]))
    assert "policy-1.log" in caught.value.where
    assert "the reason" in caught.value.where
    if (folder / f"told-{replica_seed(5, 0)}").exists():
        assert gone(told(folder, 0)["pid"])


def test_no_two_servers_on_one_device(folder: Path) -> None:
    with pytest.raises(ConfigError, match="would share a device: 0, 0") as caught:
        asyncio.run(opened(folder, [0, 0]))
    assert caught.value.where == "placement.devices"


def test_a_core_that_is_not_ours_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="may not use core 4095"):
        asyncio.run(opened(folder, [4095]))


def test_seeds_differ_and_the_first_is_the_runs() -> None:
    assert replica_seed(5, 0) == 5
    seeds = [replica_seed(seed, index) for seed in range(20) for index in range(1, 8)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_bound_server_takes_nothing_along_that_places_threads() -> None:
    given = {"OMP_PLACES": "{0}", "OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "4", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
    free = serve_environment(PolicyConfig(), model="m", install=CPU, environ=given)
    bound = serve_environment(PolicyConfig(), model="m", install=CPU, device=1, environ=given)
    assert given.items() <= free.items()
    assert bound["OMP_NUM_THREADS"] == "1"
    assert not {"OMP_PLACES", "OMP_PROC_BIND", "VLLM_CPU_OMP_THREADS_BIND"} & set(bound)


def test_a_cpu_has_no_memory_to_give_to_a_trainer() -> None:
    for install, there in ((CPU, False), (CUDA, True)):
        found = serve_arguments(PolicyConfig(), model="m", host="h", port=1, seed=0, install=install, sleep_mode=True)
        assert ("--enable-sleep-mode" in found) is there

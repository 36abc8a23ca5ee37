"""`VllmServer` and its supervisor with a small script in vLLM's place: start, death, stop, and nothing left
behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.config import PolicyConfig
from agentrl.errors import PolicyStartError
from agentrl.policy import Device, VllmInstall, VllmServer

INSTALL = VllmInstall(python=sys.executable, version="0", device=Device.CPU)

# Serves /health on --port, with a child that ignores SIGTERM, as an engine that outlives its API server.
SCRIPT = """
import http.server, os, pathlib, signal, subprocess, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
here = pathlib.Path(__file__).parent
taken = here / "taken"
if taken.exists():
    taken.unlink()
    sys.exit("OSError: [Errno 98] Address already in use")
if (here / "broken").exists():
    sys.exit("the reason")
code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"
engine = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
engine.stdout.readline()
(here / "engine.pid").write_text(str(engine.pid))
(here / "env").write_text(repr(dict(os.environ)))
(pathlib.Path(os.environ["VLLM_RPC_BASE_PATH"]) / "socket").touch()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "serve.py").write_text(SCRIPT)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 256}')
    return tmp_path


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder, here and in processes that are started here. However a server ended, its sockets are
    gone from it: vLLM itself leaves some at every end."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    assert list(folder.iterdir()) == []


def names_in(temporary: Path) -> list[str]:
    return [path.name for path in temporary.glob("*/*")]


async def start(folder: Path, *, port: int | None = None, timeout_s: float = 60.0) -> VllmServer:
    config = PolicyConfig(model=str(folder / "model"), max_model_len=256, start_timeout_s=timeout_s)
    launcher = ("-P", str(folder / "serve.py"))
    log = folder / "logs" / "policy.log"
    return await VllmServer.start(config, log_path=log, port=port, install=INSTALL, launcher=launcher)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_gone(pids: list[int], *, timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def pids_of(server: VllmServer, folder: Path) -> list[int]:
    return [server.pid, server.api_pid, int((folder / "engine.pid").read_text())]


def test_stop_ends_every_process(folder: Path, temporary: Path) -> None:
    async def run() -> None:
        server = await start(folder)
        pids = pids_of(server, folder)
        assert names_in(temporary) == ["socket"]
        assert all(alive(pid) for pid in pids)
        assert len({os.getpgid(pid) for pid in pids}) == 1
        assert os.getsid(server.pid) != os.getsid(0)
        assert server.ended() is None
        end = server.stop()
        assert end.exit_code == 0
        assert all_gone(pids)
        assert server.stop() == end

    asyncio.run(run())


def test_a_killed_api_process_is_seen_and_takes_all_with_it(folder: Path) -> None:
    """The engine outlives a killed API server; not here."""

    async def run() -> None:
        server = await start(folder)
        pids = pids_of(server, folder)
        waiters = [asyncio.ensure_future(server.wait_dead()) for _ in range(3)]
        await asyncio.sleep(0.05)
        os.kill(server.api_pid, signal.SIGKILL)
        ends = await asyncio.wait_for(asyncio.gather(*waiters), timeout=20.0)
        assert [end.exit_code for end in ends] == [-9] * 3
        assert all_gone(pids)

    asyncio.run(run())


def test_a_killed_supervisor_takes_all_with_it(folder: Path) -> None:
    async def run() -> None:
        server = await start(folder)
        pids = pids_of(server, folder)
        os.kill(server.pid, signal.SIGKILL)
        end = await asyncio.wait_for(server.wait_dead(), timeout=20.0)
        assert end.exit_code is None
        assert all_gone(pids)

    asyncio.run(run())


def test_a_killed_orchestrator_leaves_nothing(folder: Path) -> None:
    """kill -9 of the process that started the server."""
    program = (
        "import asyncio, sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
        "import test_policy_server as t; s = asyncio.run(t.start(Path(sys.argv[2])));"
        "print(*t.pids_of(s, Path(sys.argv[2])), flush=True); time.sleep(600)"
    )
    here = str(Path(__file__).parent)
    parent = subprocess.Popen([sys.executable, "-c", program, here, str(folder)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 3
    assert all(alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    assert all_gone(pids)


def test_a_server_that_ends_at_start_says_why(folder: Path) -> None:
    (folder / "broken").touch()
    with pytest.raises(PolicyStartError, match="ended with exit code 1") as caught:
        asyncio.run(start(folder))
    assert "the reason" in caught.value.where
    assert "policy.log" in caught.value.where
    assert caught.value.remedy


def test_a_server_that_does_not_answer_is_given_up_and_killed(folder: Path) -> None:
    script = folder / "serve.py"
    script.write_text(SCRIPT.replace("send_response(200)", "send_response(503)"))
    with pytest.raises(PolicyStartError, match="did not answer in time"):
        asyncio.run(start(folder, timeout_s=4.0))
    assert all_gone([int((folder / "engine.pid").read_text())])


def test_a_given_port_that_is_taken_is_an_error_with_a_remedy(folder: Path) -> None:
    """K28."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PolicyStartError, match=f"port {port} is taken") as caught:
            asyncio.run(start(folder, port=port))
    assert "free the port" in caught.value.remedy


def test_a_lost_race_for_the_kernels_port_is_run_again(folder: Path) -> None:
    """K28: somebody took the port between our asking and the server's binding."""
    (folder / "taken").touch()

    async def run() -> None:
        server = await start(folder)
        assert server.ended() is None
        server.stop()

    asyncio.run(run())
    assert not (folder / "taken").exists()


def test_the_environment_is_an_allow_list(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K48: credentials stay with us; a folder needs no hub."""
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")

    async def run() -> None:
        (await start(folder)).stop()

    asyncio.run(run())
    seen = (folder / "env").read_text()
    assert "secret" not in seen
    assert "'VLLM_SERVER_DEV_MODE': '1'" in seen
    assert "'HF_HUB_OFFLINE': '1'" in seen
    assert "'OMP_NUM_THREADS'" in seen

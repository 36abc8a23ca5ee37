"""The in-sandbox server as a plain subprocess over temporary trees: not PID 1, no isolation."""

from __future__ import annotations

import base64
import json
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import agentrl.sandbox
from agentrl.errors import InfrastructureError
from agentrl.sandbox.images import ensure_tools

LAUNCH = Path(agentrl.sandbox.__file__).parent / "server" / "launch.py"


class ServerClient:
    """One server and the conversation with it. `call` returns the answer, which must be ok; `ask` whatever
    came."""

    def __init__(self, folder: Path, tools: Path, *more: str, launch: Path = LAUNCH) -> None:
        self.work, self.scratch = folder / "work", folder / "tmp"
        self.work.mkdir(parents=True)
        self.scratch.mkdir()
        command = [sys.executable, "-I", "-S", "-B", str(launch), "--work", str(self.work)]
        command += ["--writable", str(self.scratch), "--tools", str(tools), *more]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "HOME": str(self.scratch),
                "TMPDIR": str(self.scratch),
            },
        )
        self._number = 0
        assert self.receive() == {"ready": True, "protocol": 1}

    def receive(self, timeout_s: float = 30.0) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise TimeoutError("the server says nothing")
        line = self.process.stdout.readline()
        assert line, f"the server ended: {self.process.wait(5)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def send_line(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        self.send_line(json.dumps({"id": self._number, "op": op, **fields}).encode())
        answer = self.receive()
        assert answer["id"] == self._number
        return answer

    def call(self, op: str, **fields: Any) -> dict[str, Any]:
        answer = self.ask(op, **fields)
        assert answer["ok"], answer
        return answer

    def run(self, command: str, **fields: Any) -> dict[str, Any]:
        return self.call("run", command=command, **{"timeout_s": 20, **fields})

    def tests(self, *arguments: str, **fields: Any) -> dict[str, Any]:
        return self.call("tests", arguments=list(arguments), **{"timeout_s": 20, **fields})

    def edit(self, command: str, path: str, **fields: Any) -> dict[str, Any]:
        return self.call("edit", command=command, path=path, timeout_s=20, **fields)

    def write(self, files: Mapping[str, str | bytes]) -> None:
        encoded = {
            name: base64.b64encode(data.encode() if isinstance(data, str) else data).decode()
            for name, data in files.items()
        }
        self.call("write", files=encoded)

    def close(self) -> int:
        """End of stdin; the server's exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            return self.process.wait(15)
        finally:
            self.process.kill()
            self.process.stdout.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """So that AGENTRL_REQUIRE=index makes a failure of a skip for want of the tools tree."""
    for item in items:
        if "server_tools" in getattr(item, "fixturenames", ()):
            item.add_marker("index")


@pytest.fixture(scope="session")
def server_tools() -> Path:
    """pytest and the editor as pinned for the image; fetched once per cache."""
    try:
        return ensure_tools()
    except InfrastructureError as error:
        raise pytest.skip.Exception(f"the pinned packages of the tools tree cannot be had: {error}") from None


@pytest.fixture(scope="session")
def server_client() -> type[ServerClient]:
    """The class, as tests cannot import a conftest."""
    return ServerClient


@pytest.fixture(scope="session")
def server_process(tmp_path_factory: pytest.TempPathFactory, server_tools: Path) -> Iterator[ServerClient]:
    client = ServerClient(tmp_path_factory.mktemp("server"), server_tools)
    yield client
    client.close()


@pytest.fixture
def server(server_process: ServerClient) -> ServerClient:
    """A server that has just been reset."""
    server_process.call("reset")
    return server_process


@pytest.fixture
def new_server(tmp_path: Path, server_tools: Path) -> Iterator[ServerClient]:
    """A server of the test's own, to be ended by it."""
    client = ServerClient(tmp_path / "own", server_tools)
    yield client
    if client.process.poll() is None:
        client.close()

"""The viewer's server: strict ids, closed policy, loopback names only."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from pathlib import Path
from types import ModuleType
from urllib.parse import quote

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from agentrl.errors import RunFolderError, UsageError
from agentrl.telemetry.viewer import make_app, serve


def fetch(run_dir: Path, path: str, host: str | None = None) -> tuple[int, str, dict[str, str]]:
    async def go() -> tuple[int, str, dict[str, str]]:
        async with TestClient(TestServer(make_app(run_dir))) as client:
            headers = {"Host": host} if host else {}
            url = URL(str(client.make_url("/")) + path.removeprefix("/"), encoded=True)
            async with ClientSession() as session, session.get(url, headers=headers) as answer:
                return answer.status, await answer.text(), dict(answer.headers)

    return asyncio.run(go())


def test_index_lists_every_trajectory(run_dir: Path) -> None:
    status, text, headers = fetch(run_dir, "/")
    assert status == 200
    table = json.loads(re.search(r'id="table">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert len(table) == 96
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'")


def test_a_trajectory_and_its_group(run_dir: Path) -> None:
    status, text, _ = fetch(run_dir, "/trajectory/s0006-g01-r1")
    assert status == 200
    page = json.loads(re.search(r'id="page">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    mates = json.loads(re.search(r'id="mates">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert page["id"] == "s0006-g01-r1"
    assert len(page["segments"]) == 2
    assert [mate[0] for mate in mates] == [f"s0006-g01-r{i}" for i in range(4)]


@pytest.mark.parametrize(
    "path",
    [
        "/trajectory/nobody",
        "/trajectory/..%2f..%2fconfig.toml",
        "/trajectory/%2e%2e/%2e%2e/config.toml",
        "/trajectory/" + quote("<script>alert(1)</script>", safe=""),
        "/assets/..%2fviewer.py",
        "/assets/%2e%2e%2fpage.py",
        "/config.toml",
    ],
)
def test_what_is_no_id_is_not_found(run_dir: Path, path: str) -> None:
    status, text, headers = fetch(run_dir, path)
    assert status == 404
    assert "steps" not in text
    assert "<script>" not in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]


@pytest.mark.parametrize(("host", "status"), [("evil.example", 403), ("localhost:1", 200), ("[::1]:8080", 200)])
def test_answers_to_loopback_names_only(run_dir: Path, host: str, status: int) -> None:
    assert fetch(run_dir, "/", host)[0] == status


def test_pages_name_nothing_outside(hostile_dir: Path, fake: ModuleType) -> None:
    for path in ("/", "/trajectory/s0002-g01-r1"):
        _, text, _ = fetch(hostile_dir, path)
        assert fake.ATTACK not in text
        assert "<img" not in text
        sources = re.findall(r'(?:src|href)="([^"]*)"', text)
        assert all(source == "data:," or source.startswith("/") for source in sources)


def test_bad_input_is_typed(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError):
        serve(tmp_path / "nowhere")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="cannot listen") as caught:
            serve(run_dir, port=taken.getsockname()[1])
    assert "port" in caught.value.remedy

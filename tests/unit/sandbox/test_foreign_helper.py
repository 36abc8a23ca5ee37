"""The helper containers that fill volumes: one at a time on a daemon, and never waited for in vain."""

from __future__ import annotations

import threading
import time
from typing import Any

import docker.errors
import pytest
import requests

from agentrl.errors import DeadlineError, SandboxStartError
from agentrl.sandbox import foreign
from agentrl.sandbox.docker_client import LABEL_DEADLINE, LABEL_HOST, LABEL_OWNER
from agentrl.sandbox.owner import Owner

NAME = "agentrl-seed-x"


def refusal(status: int) -> docker.errors.APIError:
    response = requests.Response()
    response.status_code = status
    return docker.errors.APIError("refused", response=response)


class PlayedDaemon:
    """Containers by name. A started one ends `lasts` looks later; `answer_is_lost` is how the next creation ends."""

    def __init__(self) -> None:
        self.containers: dict[str, dict[str, Any]] = {}
        self.lasts = 1
        self.answer_is_lost = False
        self.api = self

    def create_host_config(self, **options: Any) -> dict[str, Any]:
        return options

    def create_container(self, image: str, command: list[str], *, name: str, labels: Any, **options: Any) -> Any:
        if name in self.containers:
            raise refusal(409)
        self.containers[name] = {"Id": name, "Labels": labels, "Status": "created", "looks": 0}
        if self.answer_is_lost:
            self.answer_is_lost = False
            raise requests.ConnectionError("gone")
        return {"Id": name}

    def start(self, id: str) -> None:
        self.containers[id]["Status"] = "running"

    def inspect_container(self, id: str) -> dict[str, Any]:
        if id not in self.containers:
            raise refusal(404)
        found = self.containers[id]
        found["looks"] += 1
        if found["Status"] == "running" and found["looks"] > self.lasts:
            found["Status"] = "exited"
        return {"Id": id, "Config": {"Labels": found["Labels"]}, "State": {"Status": found["Status"]}}

    def logs(self, id: str, *, stdout: bool, stderr: bool, tail: int) -> bytes:
        return b'{"ok": true}' if stdout else b""

    def remove_container(self, id: str, **options: Any) -> None:
        if self.containers.pop(id, None) is None:
            raise refusal(404)


def helper(timeout_s: float = 5.0) -> foreign._Helper:
    return foreign._Helper(image="x", command=("fill",), volumes={}, capabilities=(), timeout_s=timeout_s)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "_POLL_S", 0.01)


def test_it_says_what_it_said_and_is_gone() -> None:
    daemon: Any = PlayedDaemon()
    assert helper().run(daemon, NAME, threading.Event()) == '{"ok": true}'
    assert daemon.containers == {}
    assert not foreign._held


def test_one_that_this_process_lost_is_not_waited_for() -> None:
    """K43: the daemon died before it gave the container's id, and came back with the container."""
    daemon: Any = PlayedDaemon()
    daemon.answer_is_lost = True
    with pytest.raises(requests.ConnectionError):
        helper().run(daemon, NAME, threading.Event())
    assert NAME in daemon.containers
    began = time.monotonic()
    assert helper().run(daemon, NAME, threading.Event()) == '{"ok": true}'
    assert time.monotonic() - began < 2
    assert daemon.containers == {}


def test_one_that_somebody_waits_for_is_left_to_him() -> None:
    """Another thread of this process, or another process that lives."""
    daemon: Any = PlayedDaemon()
    daemon.lasts = 20
    done: list[str] = []
    threads = [
        threading.Thread(target=lambda: done.append(helper().run(daemon, NAME, threading.Event()))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert done == ['{"ok": true}'] * 2
    init = Owner(pid=1, started=0, host="another machine")
    labels = {LABEL_OWNER: str(init), LABEL_HOST: init.host, LABEL_DEADLINE: str(int(time.time() + 60))}
    daemon.containers[NAME] = {"Id": NAME, "Labels": labels, "Status": "running", "looks": -10_000}
    with pytest.raises(DeadlineError):
        helper(timeout_s=0.1).run(daemon, NAME, threading.Event())
    assert NAME in daemon.containers


def test_a_pool_that_closes_waits_for_none() -> None:
    daemon: Any = PlayedDaemon()
    daemon.lasts = 1_000_000
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    began = time.monotonic()
    with pytest.raises(SandboxStartError, match="given up"):
        helper(timeout_s=60.0).run(daemon, NAME, stop)
    assert time.monotonic() - began < 5
    assert daemon.containers == {}

"""The door through which a container's server comes, and what is read from its stderr meanwhile."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.sandbox import docker_channel
from agentrl.sandbox.channel import DockerStderr, StderrTail
from agentrl.sandbox.docker_channel import Door, reap_folders, runtime_folder
from agentrl.sandbox.docker_container import attach
from agentrl.sandbox.owner import Owner


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    monkeypatch.setattr(docker_channel, "runtime_folder", lambda: folder / "agentrl")
    return folder / "agentrl"


def test_one_comes_in_and_the_door_is_gone(runtime: Path) -> None:
    door = Door(Owner.current())
    path = door.folder / "socket"
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    assert stat.S_IMODE(door.folder.stat().st_mode) == 0o711
    assert stat.S_IMODE(path.stat().st_mode) == 0o666

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(str(path))
            with await door.accept() as ours:
                door.close()
                door.close()
                server.sendall(b"ready")
                assert await asyncio.get_running_loop().sock_recv(ours, 10) == b"ready"

    asyncio.run(main())
    assert list(runtime.iterdir()) == []


def test_a_cancellation_that_meets_a_connection_is_just_a_cancellation(runtime: Path) -> None:
    door = Door(Owner.current())
    problems: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        task = asyncio.create_task(door.accept())
        await asyncio.sleep(0)
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(str(door.folder / "socket"))
            asyncio.get_running_loop().call_soon(task.cancel)
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(5):
                await asyncio.sleep(0)

    asyncio.run(main())
    door.close()
    assert problems == []


def test_a_runtime_folder_that_others_could_enter_is_refused(runtime: Path) -> None:
    runtime.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="no folder of ours alone"):
        Door(Owner.current())
    runtime.rmdir()
    runtime.symlink_to(runtime.parent)
    with pytest.raises(PermissionError):
        Door(Owner.current())


def test_paths_stay_within_what_an_address_may_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    short = tmp_path.parent.parent  # /tmp/pytest-of-…
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short))
    assert runtime_folder() == short / "agentrl"
    deep = tmp_path / ("x" * 60)
    deep.mkdir(parents=True)
    for unusable in (str(deep), "relative", "/nowhere/at/all", ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        assert runtime_folder() == Path(f"/tmp/agentrl-{os.getuid()}")
    longest = Path("/" + "r" * 39, "agentrl", f"{2**32}-{2**22}-{2**40}-{'0' * 8}", "socket")
    assert len(str(longest)) < 108


def test_k41_the_doors_of_the_dead_are_removed(runtime: Path) -> None:
    me = Owner.current()
    alive = Door(me)
    for leaf in (f"{me.pid_namespace}-{me.pid}-{me.started + 1}-dead", "1-2-3-elsewhere", "unrelated"):
        (runtime / leaf).mkdir()
        (runtime / leaf / "socket").touch()
    assert reap_folders() == 1
    assert sorted(folder.name for folder in runtime.iterdir()) == sorted(
        [alive.folder.name, "1-2-3-elsewhere", "unrelated"]
    )
    alive.close()


def test_attaching_leaves_no_descriptor_to_the_collector() -> None:
    """The SDK's socket is part of a cycle: a busy pool would have as many open as it made starts since the last
    collection."""
    theirs, daemon = socket.socketpair()

    class Client:
        api = property(lambda self: self)

        def attach_socket(self, container: str, *, params: dict[str, int]) -> socket.SocketIO:
            assert params == {"stdin": 0, "stdout": 0, "stderr": 1, "stream": 1}
            return socket.SocketIO(theirs, "rw")

    client: Any = Client()
    with daemon, attach(client, "box", address="", stdio=False) as ours:
        assert theirs.fileno() == -1
        daemon.sendall(b"words")
        assert ours.recv(10) == b"words"


def test_what_another_user_made_in_our_name_is_left_alone(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = Owner.current()
    dead = runtime / f"{me.pid_namespace}-{me.pid}-{me.started + 1}-dead"
    dead.mkdir(parents=True)
    theirs = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: theirs)
    assert reap_folders() == 0
    assert dead.is_dir()


FRAMES = st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40)), max_size=12)


@given(FRAMES, st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_stderr_is_told_from_the_rest_however_the_stream_is_cut(
    frames: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(bytes([kind, 0, 0, 0]) + len(data).to_bytes(4, "big") + data for kind, data in frames)
    tail = StderrTail()
    reader = DockerStderr(tail)
    while stream:
        size = cuts[len(stream) % len(cuts)]
        reader.data_received(stream[:size])
        stream = stream[size:]
    assert bytes(tail._data) == b"".join(data for kind, data in frames if kind == 2)

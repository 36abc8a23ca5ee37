"""The server's `write`, `read` and `unpack`."""

from __future__ import annotations

import base64
import io
import os
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    ServerClient = Any


def _tar(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> str:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # type: ignore[call-overload]
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return base64.b64encode(buffer.getvalue()).decode()


def _member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = kind, link, mode
    member.uid = member.gid = 4242
    return member


def _read(server: ServerClient, path: str, **fields: Any) -> bytes | None:
    data = server.call("read", path=path, **fields)["data"]
    return None if data is None else base64.b64decode(data)


def test_write_and_read(server: ServerClient) -> None:
    data = bytes(range(256)) * 10
    server.write({"new/folder/a.bin": data, f"{server.scratch}/abs.txt": "x"})
    assert _read(server, "new/folder/a.bin") == data
    assert _read(server, f"{server.scratch}/abs.txt") == b"x"
    assert _read(server, "new/folder/a.bin", limit_bytes=5) == data[:5]
    assert _read(server, "nothing") is None
    assert _read(server, "new") is None
    assert server.ask("write", files={"new": ""})["ok"] is False


def test_write_keeps_the_mode_and_replaces_links(server: ServerClient) -> None:
    server.write({"run.sh": "old", "other": "keep"})
    os.chmod(server.work / "run.sh", 0o755)
    (server.work / "link").symlink_to("other")
    os.mkfifo(server.work / "pipe")
    server.write({"run.sh": "new", "link": "own", "pipe": "file"})
    assert os.stat(server.work / "run.sh").st_mode & 0o777 == 0o755
    assert (server.work / "other").read_text() == "keep"
    assert not (server.work / "link").is_symlink()
    assert (server.work / "pipe").read_text() == "file"


def test_read_of_devices_and_pipes_is_nothing(server: ServerClient) -> None:
    (server.work / "zero").symlink_to("/dev/zero")
    os.mkfifo(server.work / "pipe")
    assert _read(server, "zero") is None
    assert _read(server, "pipe") is None


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_unpack_replaces_the_work_tree(server: ServerClient, mode: str) -> None:
    server.write({"old.py": "x"})
    archive = _tar(
        (_member("pkg", tarfile.DIRTYPE, mode=0o000), b""),
        (_member("pkg/run.sh", mode=0o4755), b"#!/bin/sh\n"),
        (_member("./pkg/b.py", mode=0o666), b"b"),
        (_member("pkg/link", tarfile.SYMTYPE, "../pkg/b.py"), b""),
        (_member("pkg/hard", tarfile.LNKTYPE, "pkg/b.py"), b""),
        mode=mode,
    )
    server.call("unpack", tar=archive)
    assert sorted(os.listdir(server.work)) == ["pkg"]
    assert (server.work / "pkg/link").read_bytes() == (server.work / "pkg/hard").read_bytes() == b"b"
    assert os.stat(server.work / "pkg/run.sh").st_mode & 0o7777 == 0o755
    assert os.stat(server.work / "pkg/b.py").st_mode & 0o7777 == 0o644
    assert os.stat(server.work / "pkg/b.py").st_uid == os.getuid()


@pytest.mark.parametrize(
    "member",
    [
        _member("/etc/x"),
        _member("../x"),
        _member("a/../../x"),
        _member("link", tarfile.SYMTYPE, "/etc/passwd"),
        _member("a/link", tarfile.SYMTYPE, "../../x"),
        _member("hard", tarfile.LNKTYPE, "../x"),
        _member("device", tarfile.CHRTYPE),
        _member("pipe", tarfile.FIFOTYPE),
    ],
)
def test_unpack_refuses_what_leaves_the_tree(server: ServerClient, member: tarfile.TarInfo) -> None:
    server.write({"old.py": "x"})
    answer = server.ask("unpack", tar=_tar((_member("ok.py"), b"x"), (member, b"")))
    assert answer["ok"] is False
    assert member.name in answer["error"]["message"]
    assert sorted(os.listdir(server.work)) == ["old.py"]

"""Work trees as tars: byte for byte what `tarfile` writes."""

from __future__ import annotations

import io
import tarfile

import pytest

from agentrl_envs.swe_gym.archives import normalised, pack


def by_tarfile(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, text in sorted(files.items()):
            data = text.encode()
            info = tarfile.TarInfo(path)
            info.size = len(data)
            tar.addfile(normalised(info), io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"a.py": "x = 1\n"},
        {"a/b.py": "", "c.py": "q" * 512, "d.py": "q" * 513},
        {"ü.py": "ä", "x" * 101 + ".py": "y", "folder/" * 30 + "z.py": "z" * 30_000},
    ],
    ids=["empty", "one", "blocks", "odd names"],
)
def test_a_tree_is_packed_as_tarfile_does(files: dict[str, str]) -> None:
    assert pack(files) == by_tarfile(files)

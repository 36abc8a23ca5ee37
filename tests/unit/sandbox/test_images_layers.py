"""The cache of layers: filled once, kept while used, removed when nobody has asked for long (K43: no leak on disk)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentrl.sandbox import layers


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENTRL_CACHE", str(tmp_path))
    return tmp_path / "images"


def fill(work: Path) -> None:
    (work / "done").write_text("whole")


def make_old(layer: Path) -> None:
    then = time.time() - layers.UNUSED_S - 60
    os.utime(layer, (then, then))


def make_layer(name: str) -> Path:
    with layers.building():
        return layers.ensure_locked(name, fill)


def prune(*keep: str) -> list[str]:
    with layers.building():
        return layers.prune(keep)


def test_only_old_unused_layers_are_removed(cache: Path) -> None:
    for name in ("image-old", "image-new", "recipe-x-old", "base-kept"):
        make_layer(name)
    (cache / "strange-old").mkdir()
    for name in ("image-old", "recipe-x-old", "base-kept", "strange-old"):
        make_old(cache / name)
    assert prune("base-kept") == ["image-old", "recipe-x-old"]
    assert sorted(path.name for path in cache.iterdir()) == ["base-kept", "image-new", "lock", "strange-old"]


def test_a_layer_in_use_is_never_removed(cache: Path) -> None:
    used = layers.ensure("image-used", fill)
    make_old(used)
    assert prune() == []
    assert (used / "done").read_text() == "whole"


def test_another_process_keeps_what_it_uses(cache: Path) -> None:
    make_layer("image-theirs")
    code = (
        "from agentrl.sandbox import layers; import sys; "
        "layers.ensure('image-theirs', None); print('held', flush=True); sys.stdin.read()"
    )
    user = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert user.stdin is not None
    assert user.stdout is not None
    try:
        assert user.stdout.readline() == b"held\n"
        make_old(cache / "image-theirs")
        assert prune() == []
    finally:
        user.stdin.close()
        user.wait(20)
        user.stdout.close()
    assert prune() == ["image-theirs"]


def test_asking_makes_it_young_again(cache: Path) -> None:
    make_old(make_layer("image-asked"))
    make_layer("image-asked")
    assert prune() == []


def test_a_layer_removed_behind_our_back_is_built_anew(cache: Path) -> None:
    first = layers.ensure("image-gone", fill)
    (first / "done").unlink()
    first.rmdir()
    assert (layers.ensure("image-gone", fill) / "done").read_text() == "whole"
    make_old(first)
    assert prune() == [], "the new folder is not held"


def test_asking_again_opens_nothing_more(cache: Path) -> None:
    layers.ensure("image-again", fill)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        layers.ensure("image-again", fill)
    assert len(os.listdir("/proc/self/fd")) == before

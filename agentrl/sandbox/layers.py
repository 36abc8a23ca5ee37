"""The cache of layers that sandbox images are made of: folders, each under the hash of all that went into it.

Invariants: a folder of a layer's name is complete (it is filled under a temporary name while a lock file is held,
and renamed; what a killed builder left is removed by the next one, never taken as done). A layer that a process uses
is never removed: whoever asks for one holds a shared lock on its folder until the process ends, and `prune` takes
away only what it can lock alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import DeadlineError, ImageMissingError
from agentrl.sandbox.recipes import build

log = logging.getLogger("agentrl.sandbox")

UNUSED_S = 7 * 24 * 3600.0
"""A layer that nobody asked for in so long is removed when another is built."""
_LOCK_TIMEOUT_S = 1200.0
_KINDS = ("base-", "tools-", "image-", "recipe-")

_held: dict[Path, int] = {}
"""Layer → the descriptor whose shared lock keeps it, for as long as this process lives."""
_held_lock = threading.Lock()


def cache_root() -> Path:
    """The folder of everything agentrl can rebuild: $AGENTRL_CACHE or ~/.cache/agentrl."""
    configured = os.environ.get("AGENTRL_CACHE")
    return Path(configured).absolute() if configured else Path.home() / ".cache" / "agentrl"


def layer_path(name: str) -> Path:
    """Where the layer `name` lies, or would."""
    return cache_root() / "images" / name


def ensure(name: str, fill: Callable[[Path], None]) -> Path:
    """The layer's folder, kept until this process ends; where it is missing `fill` fills a temporary one that is then
    renamed to it. `fill` runs with the lock held."""
    done = _hold(name)
    while done is None:
        with building():
            ensure_locked(name, fill)
        done = _hold(name)
    return done


def ensure_locked(name: str, fill: Callable[[Path], None]) -> Path:
    """The same for who holds the lock already; not kept."""
    done = layer_path(name)
    if done.is_dir():
        _touch(done)
        return done
    log.info("building the layer %s", done)
    work = temporary(name)
    try:
        fill(work)
        work.rename(done)
    except BaseException:
        build.remove_tree(work)
        raise
    return done


def temporary(name: str) -> Path:
    """A new folder beside the layers. Only the holder of the lock makes one."""
    work = layer_path(f".building-{name}-{os.getpid()}")
    work.mkdir(parents=True)
    return work


@contextmanager
def building() -> Iterator[None]:
    """One builder at a time per cache. The kernel frees the lock of a process that died."""
    folder = layer_path("")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "lock", "w")  # noqa: SIM115 - closed below, after the wait
    except OSError as error:
        raise ImageMissingError(
            f"the image cache cannot be written: {error}",
            where=str(folder),
            remedy="set AGENTRL_CACHE to a folder that this user may write",
        ) from error
    with file:
        end = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise DeadlineError(
                        f"another process has been building an image for {_LOCK_TIMEOUT_S:.0f} s",
                        where=str(folder / "lock"),
                        remedy="end that process; the lock goes with it",
                    ) from None
                time.sleep(0.2)
        for stale in folder.glob(".building-*"):
            build.remove_tree(stale)
        yield


def prune(keep: Collection[str]) -> list[str]:
    """Remove the layers that nobody uses, that nobody asked for within `UNUSED_S` and that `keep` does not name; their
    names. Only the holder of the lock calls it."""
    removed = []
    for layer in sorted(layer_path("").iterdir()):
        if layer.name.startswith(_KINDS) and layer.name not in keep and _is_old(layer) and _take_away(layer):
            removed.append(layer.name)
    return removed


# --- who uses what ------------------------------------------------------------------------------------------


def _hold(name: str) -> Path | None:
    """The layer with a shared lock of this process on it; None where it is not there."""
    layer = layer_path(name)
    with _held_lock:
        if layer not in _held or not _is_same(layer, _held[layer]):
            try:
                folder = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            fcntl.flock(folder, fcntl.LOCK_SH)  # at most as long as `_take_away` renames
            if not _is_same(layer, folder):
                os.close(folder)
                return None
            if layer in _held:
                os.close(_held[layer])
            _held[layer] = folder
    _touch(layer)
    return layer


def _is_same(layer: Path, descriptor: int) -> bool:
    """Whether `layer` is still the folder that is open as `descriptor`."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(layer), os.fstat(descriptor))
    return False


def _touch(layer: Path) -> None:
    with contextlib.suppress(PermissionError):  # another user's cache: that user's prune sees the lock all the same
        os.utime(layer)


def _is_old(layer: Path) -> bool:
    return time.time() - layer.stat().st_mtime > UNUSED_S


def _take_away(layer: Path) -> bool:
    """Remove the layer unless a process holds it."""
    folder = os.open(layer, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_old(layer):  # somebody came and went
            return False
        gone = layer_path(f".building-old-{layer.name}-{os.getpid()}")
        layer.rename(gone)
    except BlockingIOError:
        return False
    finally:
        os.close(folder)
    build.remove_tree(gone)
    return True

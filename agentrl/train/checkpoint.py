"""Checkpoints: whole or not there.

    <folder>/step_000010/            a Hugging Face model folder: config, weights, tokenizer files
    <folder>/step_000010/trainer.pt          optimizer and random states
    <folder>/step_000010/orchestrator.bin    the orchestrator's own state, opaque
    <folder>/step_000010/complete.json       written last: step, updates, score, size of every file
    <folder>/best -> step_000010     the checkpoint with the highest score

Life: written under `.tmp-…`, synced, marked complete, renamed. A folder without the marker, or whose files have
other sizes than it says, is torn: it is skipped with a notice, never loaded. Order is numeric. The newest `keep`
stay, and the best besides.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from agentrl.errors import RunFolderError
from agentrl.train.storage import full_disk_named, sync_file

log = logging.getLogger("agentrl.train")

_NAME = re.compile(r"step_(\d+)")
_MARKER = "complete.json"
_TRAINER = "trainer.pt"
_STATE = "orchestrator.bin"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. `score` is None where it was saved without one."""

    path: Path
    step: int
    updates: int
    score: float | None

    @property
    def state(self) -> bytes:
        """The orchestrator's state."""
        return (self.path / _STATE).read_bytes()


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`. Raises `RunFolderError` saying what is torn."""

    def torn(why: str) -> RunFolderError:
        return RunFolderError(
            f"checkpoint is incomplete: {why}",
            where=str(path),
            remedy="resume from another one, or remove it",
        )

    try:
        marker = json.loads((path / _MARKER).read_text())
        sizes, step, updates, score = (marker[key] for key in ("files", "step", "updates", "score"))
    except (OSError, ValueError, KeyError) as error:
        raise torn(f"no readable {_MARKER} ({error})") from error
    for name, size in sizes.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            raise torn(f"{name} has {found} bytes, not {size}")
    return Checkpoint(path=path, step=step, updates=updates, score=score)


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Complete checkpoints, oldest first by step *number*. Torn ones are skipped with a notice in the log."""
    found: list[Checkpoint] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if not _NAME.fullmatch(path.name) or path.is_symlink():
            continue
        try:
            found.append(read_checkpoint(path))
        except RunFolderError as error:
            log.warning("skipped: %s", error)
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The complete checkpoint with the highest step; None where there is none."""
    found = list_checkpoints(folder)
    return found[-1] if found else None


def best_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint that `best` points to; None where there is none."""
    link = folder / "best"
    return read_checkpoint(link.resolve()) if link.exists() else None


def read_tokenizer(folder: Path) -> dict[str, bytes]:
    """The tokenizer's files in a model folder, by name. A trainer keeps them: the folder may be a checkpoint, which
    is removed once there are newer ones."""
    return {name: (folder / name).read_bytes() for name in _TOKENIZER_FILES if (folder / name).is_file()}


def write_checkpoint(
    *,
    folder: Path,
    step: int,
    updates: int,
    model: PreTrainedModel,
    tokenizer: Mapping[str, bytes],
    trainer_state: dict[str, Any],
    state: bytes,
    score: float | None,
    keep: int,
) -> tuple[Checkpoint, bool]:
    """Write a checkpoint, with the files of `tokenizer`, and prune old ones; True where it is the best now. Raises
    `DiskFullError`."""
    final = folder / f"step_{step:06d}"
    partial = folder / f".tmp-{final.name}-{os.getpid()}"
    try:
        with full_disk_named(folder, purpose=f"the checkpoint of step {step}"):
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(".tmp-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            model.save_pretrained(partial)
            for name, content in tokenizer.items():
                (partial / name).write_bytes(content)
            torch.save(trainer_state, partial / _TRAINER)
            (partial / _STATE).write_bytes(state)
            _mark_complete(partial, step=step, updates=updates, score=score)
            _move_into_place(partial, final)
            checkpoint = Checkpoint(path=final, step=step, updates=updates, score=score)
            is_best = _note_best(folder, checkpoint)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _prune(folder, keep=keep)
    return checkpoint, is_best


def _mark_complete(partial: Path, *, step: int, updates: int, score: float | None) -> None:
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    for name in files:
        sync_file(partial / name)
    marker = {"step": step, "updates": updates, "score": score, "files": files}
    (partial / _MARKER).write_text(json.dumps(marker, indent=1))
    sync_file(partial / _MARKER)
    sync_file(partial)


def _move_into_place(partial: Path, final: Path) -> None:
    """Rename; a checkpoint of the same step (written before a resume went back) gives way first."""
    if final.exists():
        aside = final.with_name(f".tmp-old-{final.name}")
        os.replace(final, aside)
        os.replace(partial, final)
        shutil.rmtree(aside)
    else:
        os.replace(partial, final)
    sync_file(final.parent)


def _whole_best(folder: Path) -> Checkpoint | None:
    """The best checkpoint, None where it is torn: a torn one is beaten by any and kept by nobody."""
    try:
        return best_checkpoint(folder)
    except RunFolderError as error:
        log.warning("passed over: %s", error)
        return None


def _note_best(folder: Path, checkpoint: Checkpoint) -> bool:
    """Point `best` at `checkpoint` where its score beats the present best's; the first of equals stays."""
    if checkpoint.score is None:
        return False
    link = folder / "best"
    present = _whole_best(folder)
    beaten = present is not None and present.path != checkpoint.path and (present.score or 0.0) >= checkpoint.score
    if beaten:
        return False
    fresh = folder / ".tmp-best"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(checkpoint.path.name)
    os.replace(fresh, link)
    return True


def _prune(folder: Path, *, keep: int) -> None:
    best = _whole_best(folder)
    for old in list_checkpoints(folder)[:-keep]:
        if best is None or old.path.resolve() != best.path:
            shutil.rmtree(old.path)


# --- random state ---------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """torch's, Python's and numpy's generators, as plain values that `torch.load(weights_only=True)`
    reads."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
        "numpy": [kind, torch.from_numpy(np.array(keys, dtype=np.int64)), position, has_gauss, cached],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Put the generators back where `random_state` found them."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def read_trainer_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `write_checkpoint` was given as `trainer_state`; tensors on the CPU."""
    return torch.load(checkpoint.path / _TRAINER, map_location="cpu", weights_only=True)

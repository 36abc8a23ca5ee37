"""Checkpoints on disk: whole or absent, in numeric order, the best kept; a full disk has a name."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import DiskFullError, RunFolderError
from agentrl.train import checkpoint as module
from agentrl.train.checkpoint import (
    best_checkpoint,
    latest_checkpoint,
    list_checkpoints,
    random_state,
    read_checkpoint,
    read_tokenizer,
    read_trainer_state,
    restore_random_state,
    write_checkpoint,
)


@pytest.fixture(scope="session")
def write(toy_model):
    model = toy_model()

    def save(folder: Path, step: int, *, score: float | None = None, keep: int = 2, tokenizer: Path | None = None):
        return write_checkpoint(
            folder=folder,
            step=step,
            updates=step * 2,
            model=model,
            tokenizer=read_tokenizer(tokenizer or folder / "none"),
            trainer_state={"random": random_state()},
            state=f"state {step}".encode(),
            score=score,
            keep=keep,
        )

    return save


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_k50_order_is_numeric(write, tmp_path):
    """K50: step 1000000 stands after step 999999, though its name sorts before."""
    for step in (999_999, 1_000_000, 9):
        write(tmp_path, step, keep=5)
    assert [c.step for c in list_checkpoints(tmp_path)] == [9, 999_999, 1_000_000]
    found = latest_checkpoint(tmp_path)
    assert (found.step, found.updates, found.state) == (1_000_000, 2_000_000, b"state 1000000")
    assert latest_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize("damage", ["no marker", "broken marker", "file missing", "file cut", "half-written folder"])
def test_k50_torn_checkpoints_are_skipped_with_a_notice(write, tmp_path, caplog, damage):
    write(tmp_path, 1)
    write(tmp_path, 2)
    torn = tmp_path / "step_000002"
    if damage == "no marker":
        (torn / "complete.json").unlink()
    elif damage == "broken marker":
        (torn / "complete.json").write_text('{"step": 2')
    elif damage == "file missing":
        (torn / "trainer.pt").unlink()
    elif damage == "file cut":
        whole = (torn / "model.safetensors").read_bytes()
        (torn / "model.safetensors").write_bytes(whole[:-1])
    else:
        torn.rename(tmp_path / ".tmp-step_000002-1")
    with caplog.at_level(logging.WARNING, logger="agentrl.train"):
        assert latest_checkpoint(tmp_path).step == 1
    if damage != "half-written folder":
        assert "step_000002" in caplog.text
        with pytest.raises(RunFolderError, match="incomplete"):
            read_checkpoint(torn)
    write(tmp_path, 2)  # going on writes over it
    assert latest_checkpoint(tmp_path).step == 2
    assert not [n for n in names(tmp_path) if n.startswith(".tmp")]


def test_the_newest_and_the_best_are_kept(write, tmp_path):
    found = [write(tmp_path, s, score=v)[1] for s, v in ((1, 0.3), (2, 0.6), (3, 0.6), (4, 0.5), (5, None))]
    assert found == [True, True, False, False, False]
    assert names(tmp_path) == ["best", "step_000002", "step_000004", "step_000005"]
    assert best_checkpoint(tmp_path).step == 2
    assert write(tmp_path, 6, score=0.7)[1]
    assert names(tmp_path) == ["best", "step_000005", "step_000006"]


@settings(max_examples=12, deadline=None)
@given(
    scores=st.lists(st.none() | st.sampled_from([0.0, 0.1, 0.5]), min_size=1, max_size=6),
    keep=st.integers(1, 3),
)
def test_what_is_kept_is_the_newest_and_the_first_best(write, tmp_path_factory, scores, keep):
    folder = tmp_path_factory.mktemp("kept")
    for step, score in enumerate(scores, start=1):
        write(folder, step, score=score, keep=keep)
    expected = set(range(1, len(scores) + 1)[-keep:])
    scored = [s for s in scores if s is not None]
    if scored:
        expected.add(scores.index(max(scored)) + 1)
    assert {c.step for c in list_checkpoints(folder)} == expected


def test_k50_a_torn_best_is_beaten_and_saving_goes_on(write, tmp_path):
    """K50: a run that resumed before a torn best checkpoint can save again, and finds a new best."""
    write(tmp_path, 2, score=0.5)
    write(tmp_path, 4, score=0.9)
    (tmp_path / "step_000004" / "model.safetensors").unlink()
    _, is_best = write(tmp_path, 3, score=0.4, keep=5)
    assert is_best
    assert best_checkpoint(tmp_path).step == 3


def test_tokenizer_files_come_along(write, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("x")
    (source / "notes.txt").write_text("not a tokenizer's")
    written, _ = write(tmp_path / "out", 1, tokenizer=source)
    assert (written.path / "chat_template.jinja").read_text() == "x"
    assert (written.path / "tokenizer.json").exists()
    assert not (written.path / "notes.txt").exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_names_the_folder_and_leaves_the_old_checkpoint(write, tmp_path, monkeypatch, error):
    write(tmp_path, 1)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(module.torch, "save", fail)
    with pytest.raises(DiskFullError, match="step 2") as caught:
        write(tmp_path, 2)
    assert caught.value.where == str(tmp_path)
    assert names(tmp_path) == ["step_000001"]


def test_other_errors_stay_what_they_are(write, tmp_path, monkeypatch):
    def fail(*_: object) -> None:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(module.torch, "save", fail)
    with pytest.raises(PermissionError):
        write(tmp_path, 1)


def test_random_state_survives_the_file(write, tmp_path):
    import random

    import numpy as np

    written, _ = write(tmp_path, 1)
    draw = lambda: (random.random(), float(np.random.rand()), float(torch.rand(())))  # noqa: E731
    expected = draw()
    restore_random_state(read_trainer_state(written)["random"])
    assert draw() == expected

"""Which CUDA device a rank takes; torch's side of it is a stand-in, for there may be no such device here."""

from __future__ import annotations

import pytest
import torch

from agentrl.errors import ConfigError
from agentrl.train.worker import bind_to_device


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was set, on a machine where torch sees two CUDA devices."""
    found: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


@pytest.mark.parametrize(
    ("visible", "device", "ordinal"), [(None, 1, 1), ("0,1", 1, 1), ("2,5", 5, 1), ("5, 2", 5, 0), ("1,0", 0, 1)]
)
def test_a_placements_device_is_the_one_of_that_name(
    chosen: list[int], monkeypatch: pytest.MonkeyPatch, visible: str | None, device: int, ordinal: int
) -> None:
    """Placement and server name devices as CUDA_VISIBLE_DEVICES does, torch counts what it lists."""
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    bind_to_device(device, rank=0, ranks=1)
    assert chosen == [ordinal]


def test_ranks_without_a_device_take_one_each(chosen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    bind_to_device(None, rank=1, ranks=2)
    bind_to_device(None, rank=0, ranks=1)
    assert chosen == [1]


@pytest.mark.parametrize("visible", [None, "2,5"])
def test_a_device_that_is_not_there(chosen: list[int], monkeypatch: pytest.MonkeyPatch, visible: str | None) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match="no CUDA device 7"):
        bind_to_device(7, rank=0, ranks=1)
    assert chosen == []

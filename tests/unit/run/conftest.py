"""Toy runs (`toy_world`) for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_parts import Crash, ToyEnvironment, ToyPool, ToyTeacher, ToyTrainer, number
from toy_world import SETTINGS, AuditedScheduler, World

from agentrl.run import loop


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Worlds, each in a folder of its own, with schedulers that are audited."""
    monkeypatch.setattr(loop, "Scheduler", AuditedScheduler)
    count = iter(range(10_000))

    def make(**fields: Any) -> World:
        return World(tmp_path / f"run{next(count)}", **fields)

    return make


@pytest.fixture(scope="session")
def toy() -> Any:
    """The module's names, as tests cannot import a conftest."""

    class Names:
        crash = Crash
        settings = SETTINGS
        Environment = ToyEnvironment
        number = staticmethod(number)
        Pool = ToyPool
        Teacher = ToyTeacher
        Trainer = ToyTrainer

    return Names

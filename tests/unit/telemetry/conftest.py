"""Fake run folders, made once."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import fake_run
import pytest


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """The module `fake_run`."""
    return fake_run


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory, fake: ModuleType) -> Path:
    """A run of six steps."""
    return fake.make_run(tmp_path_factory.mktemp("runs") / "demo", fake.Shape(steps=6))


@pytest.fixture(scope="session")
def hostile_dir(tmp_path_factory: pytest.TempPathFactory, fake: ModuleType) -> Path:
    """A run whose every text carries markup."""
    return fake.make_run(tmp_path_factory.mktemp("runs") / "hostile", fake.Shape(steps=2, hostile=True))

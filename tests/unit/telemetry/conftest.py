"""Fake run folders, made once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load_fake_run() -> ModuleType:
    """The generator beside this file: test folders are no packages, so it is loaded by its path."""
    name = "agentrl_tests_fake_run"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("fake_run.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """The module `fake_run`."""
    return _load_fake_run()


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory, fake: ModuleType) -> Path:
    """A run of six steps."""
    return fake.make_run(tmp_path_factory.mktemp("runs") / "demo", fake.Shape(steps=6))


@pytest.fixture(scope="session")
def hostile_dir(tmp_path_factory: pytest.TempPathFactory, fake: ModuleType) -> Path:
    """A run whose every text carries markup."""
    return fake.make_run(tmp_path_factory.mktemp("runs") / "hostile", fake.Shape(steps=2, hostile=True))

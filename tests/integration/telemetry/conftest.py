"""The fake run folders of the unit tests, and the browser."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from types import ModuleType

import fake_run
import pytest

Dump = Callable[[str], str]
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=5000 --window-size=1400,1000"
)


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """The module `fake_run`."""
    return fake_run


@pytest.fixture(scope="session")
def dump_dom(tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """The document of an address as the browser holds it once its scripts ran."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or ""
    if not program:
        pytest.skip("chromium is not installed (apt-get install --no-install-recommends chromium)")

    def dump(url: str) -> str:
        profile = tmp_path_factory.mktemp("profile")
        command = [program, *_FLAGS.split(), f"--user-data-dir={profile}", "--dump-dom", url]
        return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout

    return dump

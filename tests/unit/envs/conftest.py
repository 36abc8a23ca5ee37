"""Stand-in sandboxes, and the data of the tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
from local_sandbox import LocalSandbox


@pytest.fixture
def new_sandbox(tmp_path: Path) -> Callable[[], LocalSandbox]:
    """Makes fresh stand-in sandboxes."""
    made: list[LocalSandbox] = []

    def make() -> LocalSandbox:
        made.append(LocalSandbox(tmp_path / f"sandbox-{len(made)}"))
        return made[-1]

    return make


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """`tests/data`."""
    return Path(__file__).parents[2] / "data"

"""The canary: a test that must fail, in a real file of an ordinary name among the tests asked for.

Code under test that makes tests pass has to make this one pass too, and cannot tell it from the others.

Python 3.6 and pytest 3 or later: this also runs in an image's own Python.
"""

import secrets
import sys
from pathlib import Path
from typing import Any, Callable, Sequence, Tuple

import pytest
from _pytest import runner

_ORDINARY = (
    "basic border bytes cache chain clock common copies default empty entry errors fields filter format groups "
    "header index inner items keys limits lines lookup merge names nested order output pages parse paths plain "
    "prefix quotes ranges reader round rules scope simple slices sorted spaces stages steps strings suffix table "
    "tokens totals types units update values widths window words writer"
)
_WORDS = _ORDINARY.split()
_PATHS_SINCE = 7
"""The version of pytest whose nodes have a `path` (before: only a `py.path.local`)."""


def run_canary(session: Any, base: Path, arguments: Sequence[str], announce: Callable[[Any], None]) -> None:
    """Run it through pytest's own protocol; `announce(item)` before. `base`: the folder pytest was started in."""
    folder, parent = _among(session, base, arguments)
    _tear_down(session)  # an interrupted run leaves its fixtures up
    file, name = _new_file(folder), "test_" + _two_words()
    path_before = list(sys.path)
    item = None
    try:
        file.write_text(_failing_test(name))
        item = _function(_module(parent, file), name)
        announce(item)
        session.items.append(item)
        runner.runtestprotocol(item, log=False, nextitem=None)
    finally:
        session.items[:] = [each for each in session.items if each is not item]
        sys.path[:] = path_before
        for made in [file, *folder.glob(f"__pycache__/{file.stem}.*")]:
            if made.exists():
                made.unlink()


def _among(session: Any, base: Path, arguments: Sequence[str]) -> Tuple[Path, Any]:
    """The folder of the first test file that was asked for, else of the first test; and the collector there."""
    given = [base / each.partition("::")[0] for each in arguments if not each.startswith("-")]
    files = [path for path in given if path.is_file()] or [_path(item) for item in session.items[:1]]
    folder = files[0].parent if files else base
    for item in session.items:
        module = item.getparent(pytest.Module)
        if module is not None and _path(module).parent == folder and isinstance(module.parent, pytest.Collector):
            return folder, module.parent
    return folder, session


def _path(node: Any) -> Path:
    path = getattr(node, "path", None)
    return path if isinstance(path, Path) else Path(str(node.fspath))


def _tear_down(session: Any) -> None:
    state = session._setupstate
    if hasattr(state, "teardown_all"):
        state.teardown_all()
    else:
        state.teardown_exact(None)


def _module(parent: Any, file: Path) -> Any:
    if int(pytest.__version__.split(".")[0]) >= _PATHS_SINCE:
        return pytest.Module.from_parent(parent, path=file)
    import py  # type: ignore[import-untyped]

    local = py.path.local(str(file))
    if hasattr(pytest.Module, "from_parent"):
        return pytest.Module.from_parent(parent, fspath=local)
    return pytest.Module(local, parent)


def _function(module: Any, name: str) -> Any:
    if hasattr(pytest.Function, "from_parent"):
        return pytest.Function.from_parent(module, name=name)
    return pytest.Function(name, parent=module)


def _two_words() -> str:
    return f"{secrets.choice(_WORDS)}_{secrets.choice(_WORDS)}"


def _new_file(folder: Path) -> Path:
    """A test file of an ordinary name that is neither there nor imported."""
    while True:
        file = folder / f"test_{_two_words()}.py"
        if not file.exists() and file.stem not in sys.modules:
            return file


def _failing_test(name: str) -> str:
    values = [secrets.randbelow(1000) for _ in range(4)]
    wrong = sum(values) + 1 + secrets.randbelow(9)
    return f"def {name}():\n    values = {values}\n    assert sum(values) == {wrong}\n"

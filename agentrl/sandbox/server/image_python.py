"""Tests in an image's own Python: a new process of it with our plugin.

    server: fork → become `python launch.py pytest FD FD` (`start`)
    the image's Python: site → shield (`make_way`) → launch.py → `main` → pytest

What is to be run comes through a descriptor, results go back through another; neither is open in what tests start.

Python 3.6 and pytest 3 or later, but for `start`.
"""

import contextlib
import importlib
import json
import os
import shutil
import sys
from typing import Any, Dict, List, Optional

_REQUEST_FD = 4
_PATH_BEFORE = "AGENTRL_PYTHONPATH"
"""The PYTHONPATH that the tests are to see. It may lead to the work tree, so the interpreter starts without it."""
_WORK = "AGENTRL_WORK"
_NO_PROGRAM = 127


def start(tools: str, work: str, request: Dict[str, Any], side: int) -> int:
    """In a fork of the server whose environment and folder are the tests': become the image's Python.

    Returns only where that cannot be done, with the exit code of a program that is not there.
    """
    python = shutil.which("python") or shutil.which("python3")
    if python is None:
        print(f"There is no Python on this image's PATH ({os.environ.get('PATH', '')}).", file=sys.stderr)
        return _NO_PROGRAM
    given = os.memfd_create("request", 0)
    with open(given, "wb", closefd=False) as file:
        file.write(json.dumps(request).encode())
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, _REQUEST_FD)
    if given != _REQUEST_FD:
        os.close(given)
    os.set_inheritable(side, True)
    before = os.environ.get("PYTHONPATH")
    if before is not None:
        os.environ[_PATH_BEFORE] = before
    os.environ[_WORK] = work
    os.environ["PYTHONPATH"] = os.path.join(tools, "shield")
    launcher = os.path.join(tools, "server", "launch.py")
    os.execv(python, [python, launcher, "pytest", str(side), str(_REQUEST_FD)])
    return _NO_PROGRAM


def make_way(shield: str) -> None:
    """Called by the shield: load what reports, then leave path, environment and modules as if it had never been."""
    work = os.path.realpath(os.environ.pop(_WORK, os.getcwd()))
    before = os.environ.pop(_PATH_BEFORE, None)
    os.environ.pop("PYTHONPATH", None)
    if before is not None:
        os.environ["PYTHONPATH"] = before
    path: List[str] = [os.path.abspath(each) for each in (before or "").split(os.pathsep) if each]
    path += [each for each in sys.path if os.path.abspath(each or os.curdir) != shield]
    sys.path[:] = [each for each in path if not _is_below(each, work)]
    try:
        _load_pytest()
    except ImportError:
        # Not outside the work tree. Where pytest itself is what is tested it is inside; else `main` says so.
        sys.path[:] = path
        with contextlib.suppress(ImportError):
            _load_pytest()
    sys.path[:] = path
    sys.path_importer_cache.pop(shield, None)
    sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise


def _is_below(path: str, folder: str) -> bool:
    return os.path.commonpath([os.path.realpath(path or os.curdir), folder]) == folder


def _load_pytest() -> Any:
    config = importlib.import_module("_pytest.config")
    for name in config.default_plugins:
        importlib.import_module("_pytest." + name)
    return importlib.import_module(".reporting", __package__)


def main(arguments: List[str]) -> None:
    """Run the session that the second descriptor holds and report to the first."""
    report, given = (int(each) for each in arguments)
    os.set_inheritable(report, False)
    with open(given, "rb") as file:
        request = json.loads(file.read().decode())
    key: str = request["key"]
    limit: Optional[float] = request["test_timeout_s"]
    reporting = _load_pytest()
    script = os.path.join(os.path.dirname(importlib.import_module("pytest").__file__ or ""), "__main__.py")
    del sys.path[0]  # the server's folder
    reporting.look_started(script, os.getcwd(), request["arguments"])
    sys.exit(
        reporting.run_session(request["arguments"], fd=report, key=key, canary=request["canary"], test_timeout_s=limit)
    )

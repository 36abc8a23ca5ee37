"""Start the server: `python3 -I -B /opt/agentrl/server/launch.py [--work /testbed] [--tools /opt/agentrl] …`.

With a word first (`fill-tools`, `fill-seed`, `pytest`) the program of that name is started instead.

Loads this folder as the package `agentrl_sandbox_server`, wherever it lies and without putting it on
`sys.path`: nothing of ours may shadow, or be importable by, the code that is tested in forks of this process.

Python 3.6 or later: this also runs in an image's own Python.
"""

import importlib
import importlib.util
import os
import sys
from typing import Any

_NAME = "agentrl_sandbox_server"
_PROGRAMS = {"fill-tools": "portable", "fill-seed": "equipping", "pytest": "image_python"}


def load(name: str) -> Any:
    """The module `name` of this folder, the folder being loaded as a package first."""
    if _NAME not in sys.modules:
        folder = os.path.dirname(os.path.abspath(__file__))
        spec = importlib.util.spec_from_file_location(
            _NAME, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )
        if spec is None or spec.loader is None:
            raise ImportError(folder + " holds no server")
        package = importlib.util.module_from_spec(spec)
        sys.modules[_NAME] = package
        spec.loader.exec_module(package)
    return importlib.import_module(_NAME + "." + name)


def launch() -> None:
    program = _PROGRAMS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    if program is None:
        load("main").main(sys.argv[1:])
    else:
        load(program).main(sys.argv[2:])


if __name__ == "__main__":
    launch()

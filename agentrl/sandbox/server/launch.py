"""Start the server: `python3 -I -B /opt/agentrl/server/launch.py [--work /testbed] [--tools /opt/agentrl] …`.

Loads this folder as the package `agentrl_sandbox_server`, wherever it lies and without putting it on
`sys.path`: nothing of ours may shadow, or be importable by, the code that is tested in forks of this process.
"""

import importlib
import importlib.util
import os
import sys

_NAME = "agentrl_sandbox_server"


def launch() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.util.spec_from_file_location(
        _NAME, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} holds no server")
    package = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = package
    spec.loader.exec_module(package)
    importlib.import_module(f"{_NAME}.main").main(sys.argv[1:])


launch()

"""`sitecustomize` of an image's own Python where it runs tests for us: the first code of a site that is imported.

It notes what pytest is while nothing of the work tree has been imported, then makes way for a `sitecustomize` that
the image (or the work tree) has itself. Lies in a folder of its own, as `sitecustomize.py`, beside the server's.

Python 3.6 or later.
"""

import importlib.util
import os
import traceback


def _prepare() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    launcher = os.path.join(os.path.dirname(here), "server", "launch.py")
    spec = importlib.util.spec_from_file_location("agentrl_launch", launcher)
    if spec is None or spec.loader is None:
        raise ImportError(launcher)
    launch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(launch)
    launch.load("image_python").make_way(here)


try:
    _prepare()
except Exception:
    traceback.print_exc()

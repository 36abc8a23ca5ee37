"""The seed: an image's own work tree, kept outside the root file system, copied to where sandboxes work.

`tree/` holds the files, `environment.json` what the image's commands find in their environment, `complete.json`
says that both are whole (see `equipping`).
"""

import os
import subprocess

from .files import FileError

TREE = "tree"
COMPLETE = "complete.json"
_COPY_TIMEOUT_S = 300.0


def plant(seed: str, work: str) -> None:
    """Copy the seed's tree into the empty `work`: modes, times and links stay, so that compiled files stay valid.

    Raises FileError where that fails, a full work tree above all.
    """
    tree = os.path.join(seed, TREE)
    if not os.path.isfile(os.path.join(seed, COMPLETE)):
        raise FileError(f"{seed} holds no complete work tree")
    try:
        done = subprocess.run(
            ["cp", "-a", "--", f"{tree}/.", work],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
            timeout=_COPY_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FileError(f"the work tree cannot be copied from {tree}: {error}") from None
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip()[-500:]
        raise FileError(f"the work tree cannot be copied from {tree}: {said}")

"""What the server is told when it starts."""

import json
import os
from typing import NamedTuple

DEFAULT_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "SHELL": "/bin/bash",  # bash looks it up in the list of users otherwise, at every start
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "PIP_PROGRESS_BAR": "off",
    "TQDM_DISABLE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
ENVIRONMENT_FILE = "environment.json"
CHANNEL = "AGENTRL_CHANNEL"
"""In the server's own environment: the socket where the host waits for it."""
CHANNEL_REFUSED = 71
"""What the server ends with where it cannot reach that."""
_PRIVATE_PREFIX = "AGENTRL_"


class Settings(NamedTuple):
    """`work`: the work tree. `writable`: the other writable mounts, the first of them for our own scratch
    files; a reset empties all of them. `tools`: the folder with `pytest/` and `editor/`. `environment`: of
    every command. `seed`: the folder with what the work tree holds at first (`seed.py`); None: nothing."""

    work: str
    writable: tuple[str, ...]
    tools: str
    environment: dict[str, str]
    seed: str | None = None

    @property
    def resident(self) -> bool:
        """Whether pytest runs in forks of this process; else in the Python that commands find, which is not ours."""
        return self.seed is None

    @property
    def scratch(self) -> str:
        """Our own files (the editor's history): outside the work tree, emptied by a reset, the agent's
        user's."""
        return os.path.join(self.writable[0], ".agentrl")


def parse(arguments: list[str], environ: dict[str, str]) -> Settings:
    """`--work DIR`, `--tools DIR`, `--writable DIR` (repeated), `--foreign SEED`. Raises ValueError for anything
    else.

    `--foreign`: the image is not ours. Its work tree and the environment of its commands are in the folder SEED, and
    tests run in its own Python. Else commands have this process's environment.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    work, tools, writable, seed = "/testbed", os.path.dirname(here), [], None
    pairs = iter(arguments)
    for name in pairs:
        value = next(pairs, None)
        if value is None:
            raise ValueError(f"{name} needs a value")
        if name == "--work":
            work = value
        elif name == "--tools":
            tools = value
        elif name == "--writable":
            writable.append(value)
        elif name == "--foreign":
            seed = value
        else:
            raise ValueError(f"unknown argument {name}")
    own = {key: value for key, value in environ.items() if not key.startswith(_PRIVATE_PREFIX)}
    if seed is not None:
        with open(os.path.join(seed, ENVIRONMENT_FILE), encoding="ascii") as file:
            own = dict(json.load(file))
    mounts = tuple(writable) or ("/tmp", "/dev/shm", "/dev/mqueue")
    environment = {**DEFAULT_ENVIRONMENT, **own}
    return Settings(work=work, writable=mounts, tools=tools, environment=environment, seed=seed)

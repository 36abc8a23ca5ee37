"""What the server is told when it starts."""

import os
from typing import NamedTuple

DEFAULT_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "PIP_PROGRESS_BAR": "off",
    "TQDM_DISABLE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_PRIVATE_PREFIX = "AGENTRL_"


class Settings(NamedTuple):
    """`work`: the work tree. `writable`: the other writable mounts, the first of them for our own scratch
    files; a reset empties all of them. `tools`: the folder with `pytest/` and `editor/`. `environment`: of
    every command."""

    work: str
    writable: tuple[str, ...]
    tools: str
    environment: dict[str, str]

    @property
    def scratch(self) -> str:
        """Our own files (the editor's history): outside the work tree, emptied by a reset, the agent's
        user's."""
        return os.path.join(self.writable[0], ".agentrl")


def parse(arguments: list[str], environ: dict[str, str]) -> Settings:
    """`--work DIR`, `--tools DIR`, `--writable DIR` (repeated). Raises ValueError for anything else."""
    here = os.path.dirname(os.path.abspath(__file__))
    work, tools, writable = "/testbed", os.path.dirname(here), []
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
        else:
            raise ValueError(f"unknown argument {name}")
    own = {key: value for key, value in environ.items() if not key.startswith(_PRIVATE_PREFIX)}
    mounts = tuple(writable) or ("/tmp", "/dev/shm", "/dev/mqueue")
    return Settings(work=work, writable=mounts, tools=tools, environment={**DEFAULT_ENVIRONMENT, **own})

"""What every part that talks to a Docker daemon shares: the client, the labels of what is ours, typed errors.

An address is what DOCKER_HOST would hold (`unix:///…`, `tcp://…`); the empty one means the environment's own, or
this machine's default. Works with API 1.41 (Docker 20.10) and later. Importing this takes 0.2 s (the SDK).
"""

from __future__ import annotations

import os
import time

import docker
import docker.errors
import requests
import urllib3.exceptions

from agentrl.errors import DaemonUnreachableError
from agentrl.sandbox.limits import MAX_AGE_S
from agentrl.sandbox.owner import Owner

LABEL_OWNER = "agentrl.owner"
LABEL_HOST = "agentrl.host"
LABEL_RUN = "agentrl.run"
LABEL_POOL = "agentrl.pool"
LABEL_DEADLINE = "agentrl.deadline"
LABEL_IMAGE = "agentrl.image"
"""On a container: the image's name as it was asked for. On an image: agentrl built it."""

DEFAULT_ADDRESS = "unix:///var/run/docker.sock"
NOT_FOUND, CONFLICT = 404, 409
_CONNECTIONS = 64

DAEMON_ERRORS = (
    docker.errors.DockerException,
    requests.RequestException,
    urllib3.exceptions.HTTPError,
    ConnectionError,
    TimeoutError,
)
"""Whatever the SDK raises: an answer of the daemon (`APIError`), or that there was none."""


def named(address: str) -> str:
    """The address itself, also where it is the empty one."""
    return address or os.environ.get("DOCKER_HOST") or DEFAULT_ADDRESS


def is_local(address: str) -> bool:
    """Whether the daemon is spoken to over a Unix socket. It may still see other files than we do."""
    return named(address).startswith("unix://")


def connect(timeout_s: float, address: str = "") -> docker.DockerClient:
    """A client of the daemon. Raises `DaemonUnreachableError`."""
    environment = {**os.environ, "DOCKER_HOST": named(address)}
    try:
        return docker.from_env(timeout=timeout_s, max_pool_size=_CONNECTIONS, environment=environment)
    except DAEMON_ERRORS as error:
        raise unreachable(error, address) from error


def unreachable(error: Exception, address: str) -> DaemonUnreachableError:
    """The typed error for a daemon that gave no answer."""
    return DaemonUnreachableError(
        f"the Docker daemon does not answer ({str(error)[:200]})",
        where=named(address),
        remedy="start dockerd (scripts/start_docker.sh); after a kill -9 remove its stale pid files first",
    )


def gave_no_answer(error: BaseException) -> bool:
    """Whether `error` means that the daemon said nothing at all (rather than that it refused)."""
    return isinstance(error, DAEMON_ERRORS) and not isinstance(error, docker.errors.APIError | docker.errors.BuildError)


def owner_labels(owner: Owner, *, lifetime_s: float = MAX_AGE_S) -> dict[str, str]:
    """What a container must carry so that the reaper knows whose it is, and when its time is over."""
    return {
        LABEL_OWNER: str(owner),
        LABEL_HOST: owner.host,
        LABEL_DEADLINE: str(int(time.time() + lifetime_s)),
    }


def remove_container(client: docker.DockerClient, container: str) -> bool:
    """Remove it with its volumes, running or not; False where it was gone (or going) already."""
    try:
        client.api.remove_container(container, force=True, v=True)
    except docker.errors.APIError as error:
        if error.status_code in (NOT_FOUND, CONFLICT):
            return False
        raise
    return True

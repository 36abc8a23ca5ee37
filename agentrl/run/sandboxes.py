"""`agentrl sandbox …`: images and clearing up."""

from __future__ import annotations

from agentrl.config import SandboxConfig
from agentrl.config.load import build
from agentrl.sandbox import choose_backend, reap
from agentrl.sandbox.images import ensure_docker_image, ensure_rootfs


def build_image(backend: str) -> str:
    """Build the base image for a backend; what it is called there. Raises ConfigError, SandboxError."""
    config = build(SandboxConfig, {"backend": backend}, where="--backend")
    if choose_backend(config) == "bubblewrap":
        return str(ensure_rootfs(config.image))
    import docker

    client = docker.from_env(timeout=120)
    try:
        return ensure_docker_image(client, config.image)
    finally:
        client.close()


def reap_all() -> str:
    """Remove what dead runs left behind; one line that says what."""
    found = reap()
    removed = f"removed {found.containers} containers and {found.cgroups} control groups of runs that are gone"
    return removed + (f"; containers could not be looked at: {found.unreachable}" if found.unreachable else "")

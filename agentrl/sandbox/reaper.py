"""Removes what dead owners left: containers by their labels, cgroups and socket folders by their names, volumes of
images that are gone.

A container is left over where its owner is surely dead (a process of this host that lives no more), where its
deadline has passed, or where it has ended and belongs to another host's owner, who cannot be asked.
Bubblewrap sandboxes die with their owner by themselves; their cgroup directories (and, should one have
survived, the processes in them) do not. Nothing else is ever left: the sandboxes' file systems live in
memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.errors import DaemonUnreachableError
from agentrl.sandbox.cgroups import CgroupTree
from agentrl.sandbox.docker_channel import reap_folders
from agentrl.sandbox.owner import Owner

log = logging.getLogger("agentrl.sandbox")

_DAEMON_TIMEOUT_S = 10.0
_CGROUP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ReapReport:
    """What was removed. `unreachable` says why containers and volumes could not be looked at, on some daemon at least
    (None: they were, or not asked)."""

    containers: int = 0
    cgroups: int = 0
    unreachable: str | None = None
    volumes: int = 0
    folders: int = 0


def is_left_over(labels: Mapping[str, str], *, running: bool, now: float) -> bool:
    """Whether a container with these labels has nobody who will remove it. `now` in seconds since the
    epoch."""
    from agentrl.sandbox.docker_client import LABEL_DEADLINE, LABEL_HOST, LABEL_OWNER

    deadline = labels.get(LABEL_DEADLINE, "")
    if deadline.isdigit() and now > int(deadline):
        return True
    host = labels.get(LABEL_HOST, "")
    owner = Owner.parse(labels.get(LABEL_OWNER, ""), host)
    if owner is None:
        return False
    if owner.is_known_dead():
        return True
    return not running and host != Owner.current().host


def reap(*, containers: bool = True, hosts: tuple[str, ...] = ()) -> ReapReport:
    """Remove what dead owners left; safe beside living ones and other reapers. Blocks; never raises for a
    daemon that does not answer, but says so in the report. `containers=False` leaves Docker alone; `hosts` are the
    daemons' addresses (empty: the one of DOCKER_HOST, or this machine's)."""
    cgroups, folders = _reap_cgroups(), reap_folders()
    removed = volumes = 0
    faults = []
    for address in (hosts or ("",)) if containers else ():
        try:
            more_containers, more_volumes = _reap_daemon(address)
        except DaemonUnreachableError as error:
            faults.append(error.what)
        else:
            removed, volumes = removed + more_containers, volumes + more_volumes
    return ReapReport(
        containers=removed,
        cgroups=cgroups,
        unreachable="; ".join(faults) or None,
        volumes=volumes,
        folders=folders,
    )


def _reap_daemon(address: str) -> tuple[int, int]:
    """Containers and volumes removed on one daemon."""
    from agentrl.sandbox.docker_client import DAEMON_ERRORS, LABEL_OWNER, connect, remove_container
    from agentrl.sandbox.docker_disk import remove_volumes

    client = connect(_DAEMON_TIMEOUT_S, address)
    removed = 0
    try:
        for found in client.api.containers(all=True, filters={"label": LABEL_OWNER}):
            running = found.get("State") in ("running", "created", "paused", "restarting")
            if is_left_over(found.get("Labels") or {}, running=running, now=time.time()):
                removed += remove_container(client, found["Id"])
        volumes = remove_volumes(client)
    except DAEMON_ERRORS as error:
        raise DaemonUnreachableError(
            f"the Docker daemon failed while containers were reaped ({str(error)[:200]})", where="reap"
        ) from error
    finally:
        client.close()
    if removed:
        log.info("reaped %d containers of dead owners", removed)
    return removed, volumes


def _reap_cgroups() -> int:
    tree = CgroupTree.find()
    if tree is None:
        return 0
    removed = 0
    for group in tree.leftovers():
        if group.remove_within(_CGROUP_TIMEOUT_S):
            removed += 1
        else:
            log.warning("the cgroup of a dead owner stays: %s", group.folders[0])
    return removed

"""Which device serves and which trains. Pure: devices are numbers here, the rooms bind their processes to them.

A device is a CPU core, or a CUDA device where vLLM's CUDA build is installed. `sync` is colocated: server i and
rank i take turns on device i. `async` is disaggregated: every server and every rank has a device of its own, servers
first. A teacher that is started here has one of its own in either, after all others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import PlacementConfig, RunConfig
from agentrl.errors import ConfigError

_CUDA_DEVICES = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of each policy server, of each trainer rank and of each teacher that is started here (None: not
    bound), and how many devices there are to divide throughput by."""

    replicas: tuple[int | None, ...]
    ranks: tuple[int | None, ...]
    devices: int
    colocated: bool
    teachers: tuple[int | None, ...] = ()


def place(config: RunConfig, *, available: Sequence[int], bind: bool, train: bool = True) -> Placement:
    """Spread servers and (where `train`) ranks over `available` devices.

    `bind` False leaves it to the operating system, and all devices count. Raises `ConfigError` where there are too
    few devices, none of that name, or where devices are named and not bound.
    """
    wanted, colocated = config.placement, config.rollout.schedule == "sync"
    ranks = wanted.ranks if train else 0
    teachers = len(config.distill.started_here) if train else 0
    others = max(wanted.replicas, ranks) if colocated else wanted.replicas + ranks
    needed = others + teachers
    if wanted.devices and not bind:
        raise ConfigError(
            "placement.devices has no effect where no process is bound to a core",
            where="placement.devices, placement.pin",
            remedy="placement.pin=true, or leave placement.devices out",
        )
    devices = _chosen(wanted, available)
    if not bind:
        return Placement((None,) * wanted.replicas, (None,) * ranks, len(devices), colocated, (None,) * teachers)
    if needed > len(devices):
        who = f"{wanted.replicas} policy server(s)" + (f" and {ranks} trainer rank(s)" if train else "")
        who += f" and {teachers} teacher(s)" if teachers else ""
        remedies = ["lower them" if train else "lower it", "name more placement.devices"]
        remedies += ["ask a teacher that runs elsewhere (--teacher URL)"] if teachers else []
        remedies += [] if colocated or not train else ["use rollout.schedule=sync (servers and ranks share devices)"]
        raise ConfigError(
            f"{who} need {needed} devices{f' in schedule `{config.rollout.schedule}`' if train else ''}; there are "
            f"{len(devices)}: {', '.join(map(str, devices))}",
            where="placement.replicas, placement.ranks" if train else "placement.replicas",
            remedy=f"{', '.join(remedies)}, or on a CPU placement.pin=false",
        )
    first = 0 if colocated else wanted.replicas
    return Placement(
        replicas=tuple(devices[: wanted.replicas]),
        ranks=tuple(devices[first : first + ranks]),
        devices=needed,
        colocated=colocated,
        teachers=tuple(devices[others:needed]),
    )


def _chosen(wanted: PlacementConfig, available: Sequence[int]) -> list[int]:
    missing = sorted(set(wanted.devices) - set(available))
    if missing:
        raise ConfigError(
            f"there is no device {', '.join(map(str, missing))} for this process; there are "
            f"{', '.join(map(str, available)) or 'none'}",
            where="placement.devices",
            remedy="name devices that are there, or leave the setting out",
        )
    return list(wanted.devices or available)


def available_devices(*, cuda: bool) -> list[int]:
    """The CPU cores, or the CUDA devices, that this process may use."""
    if not cuda:
        return sorted(os.sched_getaffinity(0))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [int(name) for name in visible.split(",") if name.strip().isdigit()]
    return list(range(len(list(_CUDA_DEVICES.iterdir())))) if _CUDA_DEVICES.is_dir() else []

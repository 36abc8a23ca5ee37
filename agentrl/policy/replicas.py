"""The policy servers of a run: started side by side, each on its own device, all or none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from agentrl.config import PolicyConfig
from agentrl.errors import ConfigError, first_error
from agentrl.policy.command import LAUNCHER
from agentrl.policy.requirement import VllmInstall, find_vllm
from agentrl.policy.server import VllmServer


async def open_replicas(
    config: PolicyConfig,
    *,
    devices: Sequence[int | None],
    log_dir: Path,
    seed: int = 0,
    sleep_mode: bool = False,
    install: VllmInstall | None = None,
    launcher: Sequence[str] = LAUNCHER,
) -> list[VllmServer]:
    """One server per entry of `devices` (None: not bound), in that order; whoever asked ends them.

    Each has its own stream of random numbers, from `seed`. `sleep_mode`: they share their devices with a trainer
    (`PolicyRouter.sleep`). The log is `policy.log` of one server, `policy-0.log` … of several. Raises what
    `VllmServer.start` raises, with every other server ended.
    """
    bound = [device for device in devices if device is not None]
    if len(set(bound)) < len(bound):
        raise ConfigError(
            f"two policy servers would share a device: {', '.join(map(str, devices))}",
            where="placement.devices",
            remedy="give each server a device of its own, or lower placement.replicas",
        )
    found = install or await asyncio.to_thread(find_vllm)
    started: list[VllmServer] = []

    async def start(index: int, device: int | None) -> VllmServer:
        server = await VllmServer.start(
            config,
            log_path=log_dir / ("policy.log" if len(devices) == 1 else f"policy-{index}.log"),
            seed=replica_seed(seed, index),
            install=found,
            launcher=launcher,
            device=device,
            sleep_mode=sleep_mode,
        )
        started.append(server)
        return server

    try:
        async with asyncio.TaskGroup() as tasks:
            starts = [tasks.create_task(start(index, device)) for index, device in enumerate(devices)]
    except BaseException as error:
        for server in started:
            await asyncio.to_thread(server.stop, grace_s=0.0)
        if isinstance(error, BaseExceptionGroup):
            raise first_error(error) from None
        raise
    return [one.result() for one in starts]


def replica_seed(seed: int, index: int) -> int:
    """The sampling seed of server `index`: `seed` itself for the first, streams that never meet for the others."""
    return seed if index == 0 else int(np.random.SeedSequence((seed, index)).generate_state(1)[0] >> 1)

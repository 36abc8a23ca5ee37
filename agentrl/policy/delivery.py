"""Weights into a running server: pause → start → update → finish → resume, then the probe.

Requests in flight are kept: they stand still while the weights change, their cached keys and values are
dropped (a pause clears the cache) and computed again under the new weights, so that tokens after the cut
are the new policy's on the whole prefix. Their tokens carry two versions.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from agentrl.errors import AgentRLError, WeightDeliveryError
from agentrl.policy.client import VllmClient
from agentrl.wire import Delivery, WeightManifest

_RESUME_TIMEOUT_S = 30.0


async def _uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end even where our own task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=_RESUME_TIMEOUT_S)
        raise


@asynccontextmanager
async def weight_update(client: VllmClient, *, version: int, timeout_s: float) -> AsyncIterator[None]:
    """The server stands still and takes weights inside this block; afterwards it goes on, whatever happened.

    A block that ends well labels the weights `version`; one that fails closes the exchange without a label,
    so that the next one can open it.
    """

    async def close_and_resume(*, opened: bool) -> None:
        try:
            if opened:
                await client.control("/finish_weight_update", timeout_s=_RESUME_TIMEOUT_S)
        except AgentRLError:
            pass  # a failed update closed the exchange itself; what matters is the resume below
        finally:
            await client.control("/resume", timeout_s=_RESUME_TIMEOUT_S)

    opened = False
    try:
        await client.control("/pause?mode=keep", timeout_s=timeout_s)
        opened = True
        await client.control("/start_weight_update", timeout_s=timeout_s)
        yield
        await client.control("/finish_weight_update", {"weight_version": str(version)}, timeout_s=timeout_s)
        opened = False
    finally:
        await _uncancelled(close_and_resume(opened=opened))


def _check_file(manifest: WeightManifest) -> None:
    """Refuse, before anything is paused, a file that is not what was published."""
    try:
        size = os.path.getsize(manifest.path)
    except OSError as error:
        raise _error(f"the published weights cannot be read: {error}", manifest) from error
    if size != manifest.num_bytes:
        raise _error(f"the weights' file has {size} bytes, published were {manifest.num_bytes}", manifest)


def _error(what: str, manifest: WeightManifest) -> WeightDeliveryError:
    return WeightDeliveryError(
        what,
        where=f"delivery of version {manifest.version}, {manifest.path}",
        remedy="start the run again with --resume; if it comes back, read the server's log",
    )


async def deliver(client: VllmClient, manifest: WeightManifest, *, tolerance: float, timeout_s: float) -> Delivery:
    """Give the server the published weights and prove that it holds them.

    The proof: the server's version is the manifest's, and the probe's log-probabilities differ from the
    trainer's by at most `tolerance` nats. Raises `WeightDeliveryError` otherwise, saying by how much.
    """
    _check_file(manifest)
    started = time.monotonic()
    update = {"path": manifest.path, "tensors": manifest.tensors, "num_bytes": manifest.num_bytes}
    try:
        async with weight_update(client, version=manifest.version, timeout_s=timeout_s):
            await client.control("/update_weights", {"update_info": update}, timeout_s=timeout_s)
    except AgentRLError as error:
        raise _error(f"the server did not take the weights: {error.what}", manifest) from error
    paused_s = time.monotonic() - started
    difference = await probe(client, manifest, tolerance=tolerance, timeout_s=timeout_s)
    return Delivery(
        version=manifest.version,
        paused_s=paused_s,
        total_s=time.monotonic() - started,
        probe_max_abs=difference,
    )


async def probe(client: VllmClient, manifest: WeightManifest, *, tolerance: float, timeout_s: float) -> float:
    """Largest difference in nats between the server's and the manifest's probe; raises
    `WeightDeliveryError`.
    """
    held = await client.version(timeout_s=timeout_s)
    if held != manifest.version:
        raise _error(f"the server holds version {held}, delivered was {manifest.version}", manifest)
    probe_ids = manifest.probe_token_ids.tolist()
    found = await client.prompt_logprobs(probe_ids, timeout_s=timeout_s, request_id=f"probe-{manifest.version}")
    difference = float(np.abs(found - manifest.probe_logprobs).max())
    if not difference <= tolerance:  # also where it is NaN
        raise _error(
            f"the server's log-probabilities of the probe differ by {difference:.3g} nats from the trainer's "
            f"(tolerance {tolerance:g}): it does not hold the published weights",
            manifest,
        )
    return difference

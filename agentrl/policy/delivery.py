"""Weights into running servers: pause → start → update → finish → resume, then the probe.

All servers stand still together, so that no trajectory of a run is sampled by a newer policy than another one that
started later. Requests in flight are kept: they stand still while the weights change, and their tokens carry two
versions. Their cached keys and values are dropped (a pause clears the cache) and computed again under the new
weights, so that tokens after the cut are the new policy's on the whole prefix; or they are kept as they are
(`keep_cache`), and then the caller sees to it that no new request reads them (`VllmClient.cache_salt`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np

from agentrl.errors import AgentRLError, PolicyDeadError, WeightDeliveryError
from agentrl.policy.client import VllmClient
from agentrl.wire import Delivery, WeightManifest

_RESUME_TIMEOUT_S = 30.0
_T = TypeVar("_T")


async def all_of(calls: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Run calls side by side, each to its end (all have deadlines), then raise the first error in their order."""
    ends = await asyncio.gather(*calls, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException):
            raise end
    return [end for end in ends if not isinstance(end, BaseException)]


async def _uncancelled(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end even where our own task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=_RESUME_TIMEOUT_S)
        raise


@asynccontextmanager
async def weight_update(
    clients: Sequence[VllmClient], *, version: int, timeout_s: float, keep_cache: bool = False
) -> AsyncIterator[None]:
    """The servers stand still and take weights inside this block; afterwards all go on, whatever happened.

    A block that ends well labels the weights `version`; one that fails closes the exchanges without a label,
    so that the next one can open them.
    """

    async def close(client: VllmClient, *, opened: bool) -> None:
        try:
            if opened:
                await client.control("/finish_weight_update", timeout_s=_RESUME_TIMEOUT_S)
        except AgentRLError:
            pass  # a failed update closed the exchange itself; what matters is the resume below
        finally:
            await client.control("/resume", timeout_s=_RESUME_TIMEOUT_S)

    async def close_all(*, opened: bool) -> None:
        await all_of(close(client, opened=opened) for client in clients)

    pause = "/pause?mode=keep" + ("&clear_cache=false" if keep_cache else "")
    label = {"weight_version": str(version)}
    opened = False
    try:
        await all_of(client.control(pause, timeout_s=timeout_s) for client in clients)
        opened = True
        await all_of(client.control("/start_weight_update", timeout_s=timeout_s) for client in clients)
        yield
        await all_of(client.control("/finish_weight_update", label, timeout_s=timeout_s) for client in clients)
        opened = False
    finally:
        await _uncancelled(close_all(opened=opened))


def check_file(manifest: WeightManifest) -> None:
    """Refuse, before anything is paused, a file that is not what was published."""
    try:
        size = os.path.getsize(manifest.path)
    except OSError as error:
        raise _error(f"the published weights cannot be read: {error}", manifest) from error
    if size != manifest.num_bytes:
        raise _error(f"the weights' file has {size} bytes, published were {manifest.num_bytes}", manifest)


def _error(what: str, manifest: WeightManifest, *, at: str = "") -> WeightDeliveryError:
    return WeightDeliveryError(
        what,
        where=", ".join(filter(None, [f"delivery of version {manifest.version}", manifest.path, at])),
        remedy="start the run again with --resume; if it comes back, read the server's log",
    )


async def exchange(
    clients: Sequence[VllmClient],
    manifest: WeightManifest,
    *,
    timeout_s: float,
    keep_cache: bool = False,
    beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> float:
    """Give every server the published weights; returns for how many seconds the servers stood still.

    `beside` is run while they stand still, beside the exchange. Raises `WeightDeliveryError` where one does not take
    them, `PolicyDeadError` where one is gone.
    """
    update = {"path": manifest.path, "tensors": manifest.tensors, "num_bytes": manifest.num_bytes}

    async def give(client: VllmClient) -> None:
        try:
            await client.control("/update_weights", {"update_info": update}, timeout_s=timeout_s)
        except PolicyDeadError:
            raise
        except AgentRLError as error:
            raise _error(f"the server did not take the weights: {error.what}", manifest, at=client.url) from error

    began = time.monotonic()
    try:
        async with weight_update(clients, version=manifest.version, timeout_s=timeout_s, keep_cache=keep_cache):
            await all_of([*(give(client) for client in clients), *([beside()] if beside else [])])
    except (PolicyDeadError, WeightDeliveryError):
        raise
    except AgentRLError as error:
        raise _error(f"the server did not take the weights: {error.what}", manifest, at=error.where) from error
    return time.monotonic() - began


async def deliver(client: VllmClient, manifest: WeightManifest, *, tolerance: float, timeout_s: float) -> Delivery:
    """Give one server the published weights and prove that it holds them; several: `PolicyRouter.deliver`.

    The proof: the server's version is the manifest's, and the probe's log-probabilities differ from the
    trainer's by at most `tolerance` nats. Raises `WeightDeliveryError` otherwise, saying by how much.
    """
    check_file(manifest)
    began = time.monotonic()
    paused_s = await exchange([client], manifest, timeout_s=timeout_s)
    difference = await probe(client, manifest, tolerance=tolerance, timeout_s=timeout_s)
    return Delivery(
        version=manifest.version,
        paused_s=paused_s,
        total_s=time.monotonic() - began,
        probe_max_abs=difference,
    )


async def probe(client: VllmClient, manifest: WeightManifest, *, tolerance: float, timeout_s: float) -> float:
    """Largest difference in nats between the server's and the manifest's probe; raises
    `WeightDeliveryError`.
    """
    held = await client.version(timeout_s=timeout_s)
    if held != manifest.version:
        raise _error(f"the server holds version {held}, delivered was {manifest.version}", manifest, at=client.url)
    probe_ids = manifest.probe_token_ids.tolist()
    found = await client.prompt_logprobs(probe_ids, timeout_s=timeout_s, request_id=f"probe-{manifest.version}")
    difference = float(np.abs(found - manifest.probe_logprobs).max())
    if not difference <= tolerance:  # also where it is NaN
        raise _error(
            f"the server's log-probabilities of the probe differ by {difference:.3g} nats from the trainer's "
            f"(tolerance {tolerance:g}): it does not hold the published weights",
            manifest,
            at=client.url,
        )
    return difference

"""Delivery against the stand-in: order of the calls, the probe, and that the server never stays paused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import policy_contract
import policy_stand_in
import pytest

from agentrl.errors import PolicyRequestError, WeightDeliveryError
from agentrl.policy import VllmClient, deliver
from agentrl.policy.delivery import weight_update
from agentrl.wire import SamplingParams, WeightManifest

EXCHANGE = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


def manifest(path: Path, *, version: int = 7, num_bytes: int | None = None) -> WeightManifest:
    path.write_bytes(b"weights")
    return WeightManifest(
        version=version,
        path=str(path),
        tensors=1,
        num_bytes=7 if num_bytes is None else num_bytes,
        probe_token_ids=np.array([1, 2, 3], dtype=np.int32),
        probe_logprobs=np.full(2, policy_stand_in.LOGPROB, dtype=np.float32),
    )


def test_delivers_labels_and_proves(tmp_path: Path) -> None:
    async def run() -> None:
        async with policy_stand_in.serving() as server, VllmClient(server.url, max_model_len=128) as client:
            done = await deliver(client, manifest(tmp_path / "w"), tolerance=1e-3, timeout_s=10)
            assert server.calls == EXCHANGE
            assert (done.version, server.label) == (7, "7")
            assert done.probe_max_abs < 1e-6
            assert 0 < done.paused_s <= done.total_s

    asyncio.run(run())


def test_a_probe_that_differs_says_by_how_much(tmp_path: Path) -> None:
    """K25: weights that never arrived look like staleness; the probe's log-probability tells."""

    async def run() -> None:
        async with policy_stand_in.serving() as server, VllmClient(server.url, max_model_len=128) as client:
            server.probe_shift = -0.25
            with pytest.raises(WeightDeliveryError, match=r"differ by 0\.25 nats .*tolerance 0\.001") as caught:
                await deliver(client, manifest(tmp_path / "w"), tolerance=1e-3, timeout_s=10)
            assert "version 7" in caught.value.where

    asyncio.run(run())


def test_a_version_that_did_not_change_is_an_error(tmp_path: Path) -> None:
    """K25."""

    async def run() -> None:
        async with policy_stand_in.serving() as server, VllmClient(server.url, max_model_len=128) as client:
            server.ignore_label = True
            with pytest.raises(WeightDeliveryError, match="holds version 0, delivered was 7"):
                await deliver(client, manifest(tmp_path / "w"), tolerance=1e-3, timeout_s=10)

    asyncio.run(run())


def test_a_file_that_is_not_the_published_one_is_refused_before_the_pause(tmp_path: Path) -> None:
    async def run() -> None:
        async with policy_stand_in.serving() as server, VllmClient(server.url, max_model_len=128) as client:
            with pytest.raises(WeightDeliveryError, match="has 7 bytes, published were 9"):
                await deliver(client, manifest(tmp_path / "w", num_bytes=9), tolerance=1e-3, timeout_s=10)
            gone = manifest(tmp_path / "w")
            (tmp_path / "w").unlink()
            with pytest.raises(WeightDeliveryError, match="cannot be read"):
                await deliver(client, gone, tolerance=1e-3, timeout_s=10)
            assert server.calls == []

    asyncio.run(run())


@pytest.mark.parametrize("at", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
def test_the_server_goes_on_wherever_the_update_fails(at: str) -> None:
    """K21: each step failing, the server is resumed, keeps its label, and the next exchange can open."""

    async def run() -> None:
        async with policy_stand_in.serving() as server, VllmClient(server.url, max_model_len=128) as client:
            if at == "/start_weight_update":
                server.open = True  # an exchange that somebody left open
            update = {
                "path": "/nonexistent" if at == "/update_weights" else "w",
                "tensors": 1,
                "num_bytes": 1,
            }

            async def exchange() -> None:
                async with weight_update([client], version=7, timeout_s=10):
                    await client.control("/update_weights", {"update_info": update})
                    if at == "/finish_weight_update":
                        server.open = False

            with pytest.raises(PolicyRequestError, match="500"):
                await exchange()
            assert server.going.is_set()
            assert server.label == "0"
            async with weight_update([client], version=8, timeout_s=10):
                pass
            assert server.label == "8"

    asyncio.run(run())


def test_a_cancelled_delivery_resumes() -> None:
    """K21: cancelled in the middle, the server is resumed before the cancellation goes on."""

    async def run() -> None:
        async with policy_stand_in.serving() as server, VllmClient(server.url, max_model_len=128) as client:

            async def hang() -> None:
                async with weight_update([client], version=7, timeout_s=10):
                    await asyncio.sleep(60)

            task = asyncio.ensure_future(hang())

            async def opened() -> bool:
                return server.calls == EXCHANGE[:2]

            assert await policy_contract.wait_until(opened, timeout_s=10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert server.going.is_set()
            assert (server.open, server.label) == (False, "0")

    asyncio.run(run())


def test_a_request_over_a_delivery_carries_two_versions(tmp_path: Path) -> None:
    async def run() -> None:
        async with policy_stand_in.serving() as server, VllmClient(server.url, max_model_len=128) as client:
            task = asyncio.ensure_future(
                client.generate([5], SamplingParams(max_tokens=100), request_id="r", timeout_s=30)
            )
            await asyncio.sleep(0.05)
            await deliver(client, manifest(tmp_path / "w"), tolerance=1e-3, timeout_s=10)
            versions = (await task).versions
            assert sorted(set(versions.tolist())) == [0, 7]
            assert (np.diff(versions) >= 0).all()

    asyncio.run(run())

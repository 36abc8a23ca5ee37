"""The real sandbox and the real policy server keep the contract of the benchmarks' stand-ins."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import stand_in_contract as contract
from real_pool import with_pool

from agentrl.policy import PolicyRouter, VllmClient
from agentrl.sandbox.images import BASE_IMAGE
from agentrl.wire import SandboxPool


@pytest.mark.bubblewrap
def test_the_sandbox_keeps_the_contract() -> None:
    async def work(pool: SandboxPool) -> None:
        for check in contract.SANDBOX_CHECKS:
            async with pool.lease(BASE_IMAGE, timeout_s=60) as box:
                await check(box)

    with_pool(work)


@pytest.mark.vllm
@pytest.mark.parametrize("check", contract.POLICY_CHECKS, ids=lambda check: check.__name__)
def test_the_policy_keeps_the_contract(policy_server: Any, check: contract.PolicyCheck) -> None:
    async def run() -> None:
        url, window = policy_server.server.url, policy_server.max_model_len
        async with VllmClient(url, max_model_len=window, server=policy_server.server) as client:
            await client.label_version(policy_server.next_version())
            await check(PolicyRouter([client]), policy_server.vocabulary)

    asyncio.run(run())

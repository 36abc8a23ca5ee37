"""The real vLLM server: the client's contract, exact log-probabilities, deliveries, and death.

The oracle is a float32 recompute with transformers: equal to 1e-4 nats per token.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import policy_contract as contract
import pytest
import torch
from policy_oracle import PROBE, PROMPT, TOLERANCE, Trainer
from safetensors.torch import save_file

from agentrl.config import PolicyConfig
from agentrl.errors import PolicyDeadError, PolicyStartError, WeightDeliveryError
from agentrl.policy import VllmClient, VllmServer, deliver
from agentrl.wire import SamplingParams, WeightManifest

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def trainer(policy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(policy_model, tmp_path_factory.mktemp("weights"))


def client_of(shared: Any, *, window: int | None = None) -> VllmClient:
    return VllmClient(shared.server.url, max_model_len=window or shared.max_model_len, server=shared.server)


async def give(client: VllmClient, manifest: WeightManifest) -> float:
    return (await deliver(client, manifest, tolerance=1e-3, timeout_s=60)).probe_max_abs


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Any, policy_server: Any) -> None:
    async def run() -> None:
        async with client_of(policy_server, window=contract.WINDOW) as client:
            await client.label_version(policy_server.version)
            await check(client, policy_server.vocabulary)

    asyncio.run(run())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_behaviour_logprobs_equal_the_trainers(policy_server: Any, trainer: Trainer, temperature: float) -> None:
    """K8, K9: of the whole distribution (the folder's top_k 20, top_p, penalty have no effect), after
    temperature.
    """

    async def run() -> None:
        trainer.randomize(100)
        params = SamplingParams(max_tokens=80, temperature=temperature)
        async with client_of(policy_server) as client:
            assert await give(client, trainer.publish(policy_server.next_version())) < TOLERANCE
            prompts = [PROMPT[: 40 + i] for i in range(8)]
            got = await asyncio.gather(
                *(
                    client.generate(p, params, request_id=f"t{temperature}-{i}", timeout_s=60)
                    for i, p in enumerate(prompts)
                )
            )
        ratios = []
        for prompt, one in zip(prompts, got, strict=True):
            assert len(one.token_ids) == 80
            expected = trainer.recompute(prompt, one, temperature=temperature)
            assert np.abs(one.logprobs - expected).max() < TOLERANCE
            ratios.append(np.exp(expected - one.logprobs).mean())
        assert np.mean(ratios) == pytest.approx(1.0, abs=1e-5)

    asyncio.run(run())


def test_tokens_outside_the_folders_top_k_are_sampled(policy_server: Any, trainer: Trainer) -> None:
    """K8: with top_k 20 from generation_config.json no token below rank 20 could appear."""

    async def run() -> None:
        trainer.randomize(101)
        async with client_of(policy_server) as client:
            await give(client, trainer.publish(policy_server.next_version()))
            got = await client.generate(PROMPT[:20], SamplingParams(max_tokens=200), request_id="k8", timeout_s=60)
        ids = [*PROMPT[:20], *got.token_ids.tolist()]
        with torch.no_grad():
            logits = trainer.model(torch.tensor([ids])).logits[0, 19:-1]
        ranks = (logits > logits.gather(1, torch.tensor(ids[20:])[:, None])).sum(1)
        assert int((ranks >= 20).sum()) > 5

    asyncio.run(run())


def test_ten_deliveries_each_arrive_whole(policy_server: Any, trainer: Trainer) -> None:
    """K25, K26: after each of ten deliveries of other weights, on a prompt whose prefix is warm,
    log-probabilities are the new weights' and every token carries the new version."""

    async def run() -> None:
        params = SamplingParams(max_tokens=16)
        async with client_of(policy_server) as client:
            for step in range(10):
                trainer.randomize(200 + step)
                version = policy_server.next_version()
                assert await give(client, trainer.publish(version)) < TOLERANCE
                first = await client.generate(PROMPT, params, request_id=f"a{step}", timeout_s=60)
                warm = await client.generate(PROMPT, params, request_id=f"b{step}", timeout_s=60)
                assert first.cached_tokens == 0
                assert warm.cached_tokens >= 256
                for one in (first, warm):
                    assert one.versions.tolist() == [version] * 16
                    assert np.abs(one.logprobs - trainer.recompute(PROMPT, one)).max() < TOLERANCE

    asyncio.run(run())


def test_scores_equal_the_trainers(policy_server: Any, trainer: Trainer) -> None:
    async def run() -> None:
        trainer.randomize(300)
        async with client_of(policy_server) as client:
            await give(client, trainer.publish(policy_server.next_version()))
            scored = await client.prompt_logprobs(PROMPT, timeout_s=60)
        assert np.abs(scored - trainer.logprobs(PROMPT)).max() < TOLERANCE

    asyncio.run(run())


def test_a_request_in_flight_goes_on_under_the_new_weights(policy_server: Any, trainer: Trainer) -> None:
    """Tokens before the cut are the old weights', those after it the new weights' on the whole prefix."""

    async def run() -> None:
        trainer.randomize(400)
        old, new = policy_server.next_version(), policy_server.next_version()
        async with client_of(policy_server) as client:
            await give(client, trainer.publish(old))
            params = SamplingParams(max_tokens=700)
            before = (await client.stats()).generation_tokens
            prompts = (PROMPT[:50], PROMPT[50:150])
            tasks = [
                asyncio.ensure_future(client.generate(prompt, params, request_id=f"f{i}", timeout_s=120))
                for i, prompt in enumerate(prompts)
            ]

            async def well_under_way() -> bool:
                return (await client.stats()).generation_tokens - before >= 100

            assert await contract.wait_until(well_under_way, timeout_s=30)
            under_old = trainer.state()
            trainer.randomize(401)
            await give(client, trainer.publish(new))
            got = await asyncio.gather(*tasks)
        by_new = [trainer.recompute(prompt, one) for prompt, one in zip(prompts, got, strict=True)]
        trainer.model.load_state_dict(under_old, strict=False)
        by_old = [trainer.recompute(prompt, one) for prompt, one in zip(prompts, got, strict=True)]
        for one, new_logprobs, old_logprobs in zip(got, by_new, by_old, strict=True):
            cut = int((one.versions == old).sum())
            assert 0 < cut < 700
            assert one.versions.tolist() == [old] * cut + [new] * (700 - cut)
            assert np.abs(one.logprobs[:cut] - old_logprobs[:cut]).max() < TOLERANCE
            assert np.abs(one.logprobs[cut:] - new_logprobs[cut:]).max() < TOLERANCE

    asyncio.run(run())


def test_other_weights_than_published_are_noticed(policy_server: Any, trainer: Trainer) -> None:
    """K25: the file holds other weights than the probe was computed with."""

    async def run() -> None:
        trainer.randomize(500)
        manifest = trainer.publish(policy_server.next_version())
        trainer.randomize(501)
        lying = msgspec.structs.replace(manifest, probe_logprobs=trainer.logprobs(PROBE.tolist()))
        async with client_of(policy_server) as client:
            with pytest.raises(WeightDeliveryError, match=r"differ by [0-9.]+ nats"):
                await give(client, lying)

    asyncio.run(run())


def spoiled(trainer: Trainer, good: WeightManifest, fault: str) -> WeightManifest:
    """A published file with a fault that its size does not show."""
    path, tensors = Path(good.path), good.tensors
    if fault == "garbage":
        path.write_bytes(b"\0" * path.stat().st_size)
    elif fault == "count":
        tensors += 1
    else:
        weights = trainer.state()
        weights.pop("model.layers.1.mlp.down_proj.weight")
        save_file(weights, path)
        tensors -= 1
    return msgspec.structs.replace(good, tensors=tensors, num_bytes=path.stat().st_size)


@pytest.mark.parametrize("fault", ["garbage", "count", "missing tensor"])
def test_a_bad_file_leaves_a_serving_server(policy_server: Any, trainer: Trainer, fault: str) -> None:
    """K21, K25: refused with the reason; a file that cannot be read leaves the old weights; the next
    delivery works.
    """

    async def run() -> None:
        trainer.randomize(600)
        held = policy_server.next_version()
        async with client_of(policy_server) as client:
            await give(client, trainer.publish(held))
            manifest = spoiled(trainer, trainer.publish(policy_server.next_version()), fault)
            with pytest.raises(WeightDeliveryError, match="did not take the weights"):
                await give(client, manifest)
            assert await client.version() == held
            if fault != "missing tensor":
                got = await client.generate(PROMPT, SamplingParams(max_tokens=8), request_id="bad", timeout_s=60)
                assert np.abs(got.logprobs - trainer.recompute(PROMPT, got)).max() < TOLERANCE
            assert await give(client, trainer.publish(policy_server.next_version())) < TOLERANCE

    asyncio.run(run())


def test_a_seeded_request_prefilled_in_pieces_does_not_end_the_engine(policy_server: Any) -> None:
    """Other clients may send a seed; the CPU build would end the engine at the second piece."""

    async def run() -> None:
        sampling = {"max_tokens": 4, "temperature": 1.0, "seed": 7}
        body = {"model": "policy", "token_ids": PROMPT * 2, "sampling_params": sampling}
        url = f"{policy_server.server.url}/inference/v1/generate"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
            assert answer.status == 200
        assert policy_server.server.ended() is None

    asyncio.run(run())


def test_a_taken_port(policy_server: Any, policy_config: PolicyConfig, tmp_path: Path) -> None:
    """K28: a port that somebody holds is named, with the remedy, before a model is loaded."""
    port = policy_server.server.port
    with pytest.raises(PolicyStartError, match=f"port {port} is taken") as caught:
        asyncio.run(VllmServer.start(policy_config, log_path=tmp_path / "policy.log", port=port))
    assert "free the port" in caught.value.remedy


def group_members(group: int) -> list[int]:
    """Living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(pgrp) == group and state != "Z":
                found.append(int(entry.name))
    return found


def held_shared_memory(pids: list[int]) -> set[str]:
    """Names under /dev/shm that these processes map."""
    names = set()
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/dev/shm/" in line and not line.endswith("(deleted)"):
                names.add("/dev/shm/" + line.split("/dev/shm/", 1)[1])
    return names


def gone_within(group: int, *, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not group_members(group):
            return True
        time.sleep(0.05)
    return False


def test_kill_9_of_the_api_process(policy_config: PolicyConfig, tmp_path: Path) -> None:
    """Noticed at once, told to who waits for an answer, and no process or shared memory left."""

    async def run() -> None:
        server = await VllmServer.start(policy_config, log_path=tmp_path / "policy.log")
        members = group_members(server.pid)
        assert len(members) >= 3
        shared = held_shared_memory(members)
        async with VllmClient(server.url, max_model_len=1024, server=server) as client:
            await client.label_version(0)
            await client.generate([5, 6], SamplingParams(max_tokens=2), request_id="warm", timeout_s=60)
            long = SamplingParams(max_tokens=1000)
            running = asyncio.ensure_future(client.generate([5, 6], long, request_id="last", timeout_s=60))
            waiter = asyncio.ensure_future(server.wait_dead())
            await asyncio.sleep(0.3)
            killed = time.monotonic()
            os.kill(server.api_pid, signal.SIGKILL)
            with pytest.raises(PolicyDeadError, match="exit code -9"):
                await running
            end = await waiter
            assert time.monotonic() - killed < 10.0
            assert end.exit_code == -9
            with pytest.raises(PolicyDeadError, match="exit code -9"):
                await client.generate([5, 6], long, request_id="later", timeout_s=60)
        assert gone_within(server.pid, timeout_s=10.0)
        assert not [name for name in shared if os.path.exists(name)]  # noqa: ASYNC240 (nothing waits for the loop)

    asyncio.run(run())


@pytest.fixture
def orchestrator(policy_config: PolicyConfig, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that starts a server, prints its group, and sleeps."""
    code = (
        "import asyncio, sys, time; from pathlib import Path\n"
        "from agentrl.config import PolicyConfig; from agentrl.policy import VllmServer\n"
        "config = PolicyConfig.model_validate_json(sys.argv[1])\n"
        "server = asyncio.run(VllmServer.start(config, log_path=Path(sys.argv[2])))\n"
        "print(server.pid, flush=True); time.sleep(600)\n"
    )
    arguments = [sys.executable, "-c", code, policy_config.model_dump_json(), str(tmp_path / "policy.log")]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def test_kill_9_of_the_orchestrator(orchestrator: subprocess.Popen[str]) -> None:
    """Nothing of vLLM outlives the process that started it."""
    assert orchestrator.stdout is not None
    group = int(orchestrator.stdout.readline())
    members = group_members(group)
    assert len(members) >= 3
    shared = held_shared_memory(members)
    orchestrator.kill()
    orchestrator.wait()
    assert gone_within(group, timeout_s=10.0)
    assert not [name for name in shared if Path(name).exists()]

"""Two real vLLM servers behind one router: bound to their cores, balanced, and in step with deliveries."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import policy_contract as contract
import pytest
from policy_oracle import PROMPT, TOLERANCE, Trainer

from agentrl.config import PolicyConfig
from agentrl.errors import WeightDeliveryError
from agentrl.policy import PolicyRouter, VllmClient, VllmServer, open_replicas
from agentrl.wire import Delivery, Generation, SamplingParams, WeightManifest

pytestmark = pytest.mark.vllm
KV = Literal["recompute", "keep"]


@dataclass
class Pair:
    """The servers, their cores (None: this machine has only one), and the last policy version used."""

    servers: list[VllmServer]
    cores: list[int | None]
    version: int = field(default=0)

    def next_version(self) -> int:
        self.version += 1
        return self.version

    @asynccontextmanager
    async def router(self, kv: KV = "recompute") -> AsyncIterator[PolicyRouter]:
        async with AsyncExitStack() as stack:
            clients = [VllmClient(s.url, max_model_len=1024, server=s) for s in self.servers]
            for client in clients:
                await stack.enter_async_context(client)
            yield PolicyRouter(clients, kv_on_delivery=kv)


@pytest.fixture(scope="module")
def pair(policy_config: PolicyConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two servers, each on a core of its own (20 to 120 s to start, 3 GB)."""
    allowed = sorted(os.sched_getaffinity(0))
    cores: list[int | None] = [*allowed[:2]] if len(allowed) > 1 else [None, None]
    servers = asyncio.run(open_replicas(policy_config, devices=cores, log_dir=tmp_path_factory.mktemp("logs"), seed=3))
    try:
        yield Pair(servers, cores)
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="module")
def trainer(policy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(policy_model, tmp_path_factory.mktemp("weights"))


async def give(router: PolicyRouter, manifest: WeightManifest) -> Delivery:
    return await router.deliver(manifest, tolerance=1e-3, timeout_s=60)


async def ask(policy: Any, name: str, prompt: list[int], tokens: int) -> Generation:
    got: Generation = await policy.generate(prompt, SamplingParams(max_tokens=tokens), request_id=name, timeout_s=120)
    return got


async def sampled(router: PolicyRouter, tokens: int, *, since: list[int]) -> None:
    """Wait until each server has sampled so many more tokens."""

    async def there() -> bool:
        now = [stats.generation_tokens for stats in await router.stats()]
        return all(b - a >= tokens for a, b in zip(since, now, strict=True))

    assert await contract.wait_until(there, timeout_s=60)


def tasks_of(group: int) -> dict[str, str]:
    """Every thread of a process group's processes → the cores that it may run on."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(pgrp) != group or state == "Z":
                    continue
                for task in (entry / "task").iterdir():
                    lines = (task / "status").read_text().splitlines()
                    [cores] = [line.split()[1] for line in lines if line.startswith("Cpus_allowed_list:")]
                    found[f"{entry.name}/{task.name}"] = cores
            except FileNotFoundError:
                continue
    return found


def busy_ticks(group: int) -> list[int]:
    """Clock ticks that each thread of a process group has run, most first."""
    stats = (Path(f"/proc/{name.partition('/')[0]}/task/{name.partition('/')[2]}/stat") for name in tasks_of(group))
    fields = [path.read_text().rpartition(")")[2].split() for path in stats]
    return sorted((int(found[11]) + int(found[12]) for found in fields), reverse=True)


def test_every_thread_of_a_server_is_on_its_core_and_one_computes(pair: Pair) -> None:
    if None in pair.cores:
        pytest.skip("one core: nothing to bind to")

    async def run() -> None:
        async with pair.router() as router:
            await router.label_version(pair.next_version())
            before = [busy_ticks(server.pid) for server in pair.servers]
            with router.session("a") as a, router.session("b") as b:
                await asyncio.gather(ask(a, "a", PROMPT[:40], 400), ask(b, "b", PROMPT[:40], 400))
        for server, core, earlier in zip(pair.servers, pair.cores, before, strict=True):
            threads = tasks_of(server.pid)
            assert len(threads) > 10
            assert set(threads.values()) == {str(core)}
            spent = sum(busy_ticks(server.pid)) - sum(earlier)
            most = busy_ticks(server.pid)[0] - earlier[0]
            assert most > 0.6 * spent, (most, spent)

    asyncio.run(run())


def test_sticky_and_balanced(pair: Pair) -> None:
    """A second turn finds its prefix in the cache of its own server; sessions and tokens are shared out evenly."""

    async def run() -> None:
        async with pair.router() as router:
            await router.label_version(pair.next_version())
            before = [stats.generation_tokens for stats in await router.stats()]
            rooms = [stats.kv_tokens for stats in await router.stats()]
            assert all(room is not None and room > 1024 and room % 32 == 0 for room in rooms)

            async def episode(number: int) -> tuple[int, str]:
                prompt = [7 + number, *PROMPT[:150]]
                with router.session(f"t{number}") as policy:
                    first = await ask(policy, f"t{number}.0", prompt, 40)
                    longer = [*prompt, *first.token_ids.tolist(), 5, 6]
                    second = await ask(policy, f"t{number}.1", longer, 20)
                    return second.cached_tokens, policy.url or ""

            router.take_in_flight()
            ends = await asyncio.gather(*(episode(number) for number in range(8)))
            assert all(cached >= 160 for cached, _ in ends)
            assert sorted([url for _, url in ends].count(server.url) for server in pair.servers) == [4, 4]
            after = [stats.generation_tokens for stats in await router.stats()]
            assert [b - a for a, b in zip(before, after, strict=True)] == [240, 240]
            assert all(1 < mean <= 4 for mean in router.take_in_flight())
            assert (router.kv_tokens(), router.in_flight()) == ([0, 0], [0, 0])

    asyncio.run(run())


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_a_request_in_flight_over_a_delivery_carries_two_versions(pair: Pair, trainer: Trainer, kv: KV) -> None:
    """At both servers. Recomputed keys give exactly the new weights' log-probabilities after the cut, kept ones do
    not; no delivery counts as a preemption for want of room."""

    async def run() -> None:
        old, new = pair.next_version(), pair.next_version()
        async with pair.router(kv) as router:
            trainer.randomize(40 + old)
            await give(router, trainer.publish(old))
            at_old = trainer.state()
            stats = await router.stats()
            prompts = [PROMPT[:60], PROMPT[60:140]]
            with router.session("a") as a, router.session("b") as b:
                tasks = [
                    asyncio.create_task(ask(policy, f"{kv}-{i}", prompts[i], 500)) for i, policy in enumerate((a, b))
                ]
                await sampled(router, 60, since=[one.generation_tokens for one in stats])
                trainer.randomize(40 + new)
                done = await give(router, trainer.publish(new))
                ends = await asyncio.gather(*tasks)
            assert done.probe_max_abs < TOLERANCE
            assert [one.preemptions for one in await router.stats()] == [one.preemptions for one in stats]
        by_new = [trainer.recompute(prompt, got) for prompt, got in zip(prompts, ends, strict=True)]
        trainer.model.load_state_dict(at_old, strict=False)
        by_old = [trainer.recompute(prompt, got) for prompt, got in zip(prompts, ends, strict=True)]
        for got, with_new, with_old in zip(ends, by_new, by_old, strict=True):
            cut = int((got.versions == old).sum())
            assert 0 < cut < 500
            assert got.versions.tolist() == [old] * cut + [new] * (500 - cut)
            assert np.abs(got.logprobs[:cut] - with_old[:cut]).max() < TOLERANCE
            after = float(np.abs(got.logprobs[cut:] - with_new[cut:]).max())
            assert after < TOLERANCE if kv == "recompute" else after > 0.05

    asyncio.run(run())


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_a_new_request_never_reads_old_keys(pair: Pair, trainer: Trainer, kv: KV) -> None:
    """K26: on a prompt whose prefix was warm before the delivery. A request that is given the old salt shows what
    would happen otherwise."""

    async def run() -> None:
        async with pair.router(kv) as router:
            trainer.randomize(80)
            await give(router, trainer.publish(pair.next_version()))
            with router.session("warm") as a, router.session("warm too") as b:
                await asyncio.gather(ask(a, "w0", PROMPT, 8), ask(b, "w1", PROMPT, 8))
                warm = await ask(a, "w2", PROMPT, 8)
                assert warm.cached_tokens >= 256
            salts = [client.cache_salt for client in router.clients]
            trainer.randomize(81)
            version = pair.next_version()
            await give(router, trainer.publish(version))
            with router.session("x") as a, router.session("y") as b:
                ends = await asyncio.gather(ask(a, "n0", PROMPT, 16), ask(b, "n1", PROMPT, 16))
            for got in ends:
                assert got.cached_tokens == 0
                assert got.versions.tolist() == [version] * 16
                assert np.abs(got.logprobs - trainer.recompute(PROMPT, got)).max() < TOLERANCE
            if kv == "keep":
                router.clients[0].cache_salt = salts[0]
                with router.session("z") as policy:
                    wrong = await ask(policy, "n2", PROMPT, 16)
                assert wrong.cached_tokens >= 256
                assert np.abs(wrong.logprobs - trainer.recompute(PROMPT, wrong)).max() > 0.05

    asyncio.run(run())


def test_requests_dropped_around_a_delivery_do_no_harm(pair: Pair, trainer: Trainer) -> None:
    """K22: closed just before, during and just after; the engines live and hold the new weights."""

    async def run() -> None:
        trainer.randomize(90)
        async with pair.router() as router, AsyncExitStack() as stack:
            await give(router, trainer.publish(pair.next_version()))
            sessions = [stack.enter_context(router.session(f"s{i}")) for i in range(24)]
            since = [stats.generation_tokens for stats in await router.stats()]
            tasks = [asyncio.create_task(ask(p, f"d{i}", PROMPT[: 30 + i], 900)) for i, p in enumerate(sessions)]
            await sampled(router, 60, since=since)
            for task in tasks[:8]:
                task.cancel()
            delivering = asyncio.create_task(give(router, trainer.publish(pair.next_version())))
            await asyncio.sleep(0.03)
            for task in tasks[8:16]:
                task.cancel()
            await delivering
            for task in tasks[16:]:
                task.cancel()
            assert await give(router, trainer.publish(pair.next_version()))
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ends)

            async def idle() -> bool:
                return all(stats.running + stats.waiting == 0 for stats in await router.stats())

            assert await contract.wait_until(idle, timeout_s=20)
            with router.session("last") as policy:
                got = await ask(policy, "last", PROMPT, 8)
            assert np.abs(got.logprobs - trainer.recompute(PROMPT, got)).max() < TOLERANCE
        assert all(server.ended() is None for server in pair.servers)

    asyncio.run(run())


def test_weights_that_one_server_refuses_leave_both_serving(pair: Pair, trainer: Trainer) -> None:
    """K21: both are resumed, and take the next ones."""

    async def run() -> None:
        async with pair.router() as router:
            trainer.randomize(95)
            await give(router, trainer.publish(pair.next_version()))
            bad = trainer.publish(pair.next_version())
            with pytest.raises(WeightDeliveryError, match="did not take the weights"):
                await give(router, msgspec.structs.replace(bad, tensors=bad.tensors + 1))
            with router.session("a") as a, router.session("b") as b:
                await asyncio.gather(ask(a, "a", PROMPT[:20], 4), ask(b, "b", PROMPT[:20], 4))
            assert (await give(router, trainer.publish(pair.next_version()))).probe_max_abs < TOLERANCE

    asyncio.run(run())

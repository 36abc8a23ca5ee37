"""The router over stand-in servers: sticky, balanced, counted, and in step with deliveries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import policy_contract
import policy_stand_in
import pytest

from agentrl.errors import DeadlineError, PolicyDeadError, WeightDeliveryError
from agentrl.policy import PolicyRouter, RoutedPolicy, VllmClient
from agentrl.wire import Generation, SamplingParams, WeightManifest

EXCHANGE = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]


@dataclass
class World:
    servers: list[policy_stand_in.StandIn]
    router: PolicyRouter
    journal: list[tuple[str, str]]

    def server_of(self, policy: RoutedPolicy) -> int:
        return [server.url for server in self.servers].index(policy.url or "")


@asynccontextmanager
async def world(
    count: int = 2, *, kv: Literal["recompute", "keep"] = "recompute", sleeps: bool = False
) -> AsyncIterator[World]:
    journal: list[tuple[str, str]] = []
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(policy_stand_in.serving(journal)) for _ in range(count)]
        clients = [await stack.enter_async_context(VllmClient(s.url, max_model_len=512)) for s in servers]
        yield World(servers, PolicyRouter(clients, kv_on_delivery=kv, sleeps=sleeps), journal)


def manifest(folder: Path, *, version: int = 7) -> WeightManifest:
    path = folder / f"v{version}"
    path.write_bytes(b"weights")
    return WeightManifest(
        version=version,
        path=str(path),
        tensors=1,
        num_bytes=7,
        probe_token_ids=np.array([1, 2, 3], dtype=np.int32),
        probe_logprobs=np.full(2, policy_stand_in.LOGPROB, dtype=np.float32),
    )


async def ask(policy: RoutedPolicy, name: str, *, prompt: int = 1, tokens: int = 1) -> Generation:
    return await policy.generate([5] * prompt, SamplingParams(max_tokens=tokens), request_id=name, timeout_s=30)


async def running(router: PolicyRouter, *counts: int) -> None:
    """Wait until so many requests run at each server."""

    async def there() -> bool:
        return [stats.running for stats in await router.stats()] == list(counts)

    assert await policy_contract.wait_until(there, timeout_s=10)


def test_a_trajectory_stays_with_its_server_and_the_least_held_kv_room_takes_the_next() -> None:
    async def run() -> None:
        async with world() as w, AsyncExitStack() as stack:

            async def begin(name: str, prompt: int) -> RoutedPolicy:
                policy = stack.enter_context(w.router.session(name))
                await ask(policy, name, prompt=prompt, tokens=2)
                return policy

            begun = [await begin("a", 100), await begin("b", 10), await begin("c", 5), await begin("e", 3)]
            assert [w.server_of(policy) for policy in begun] == [0, 1, 1, 1]  # tokens count, not trajectories
            assert w.router.kv_tokens() == [102, 24]  # prompt and what was sampled
            c = begun[2]
            await ask(c, "c-2", prompt=200, tokens=3)  # grown, it stays where its prefix is
            assert w.server_of(c) == 1
            assert w.router.kv_tokens() == [102, 12 + 203 + 5]
            assert w.server_of(await begin("d", 5)) == 0
            seen = [{request["request_id"] for request in server.requests} for server in w.servers]
            assert seen == [{"a", "d"}, {"b", "c", "c-2", "e"}]

    asyncio.run(run())


def test_of_equally_held_servers_the_one_with_fewer_trajectories() -> None:
    async def run() -> None:
        async with world() as w, AsyncExitStack() as stack:
            for name, prompt in (("a", 5), ("b", 20), ("c", 14)):
                await ask(stack.enter_context(w.router.session(name)), name, prompt=prompt)
            assert w.router.kv_tokens() == [6 + 15, 21]
            last = stack.enter_context(w.router.session("d"))
            await ask(last, "d")
            assert w.server_of(last) == 1

    asyncio.run(run())


def test_a_burst_spreads_before_any_answer() -> None:
    """All sessions of a group begin at once: each counts from its first request on, not from its first answer."""

    async def run() -> None:
        async with world() as w:

            async def one(name: str) -> int:
                with w.router.session(name) as policy:
                    await ask(policy, name, prompt=10, tokens=20)
                    return w.server_of(policy)

            used = await asyncio.gather(*(one(f"t{i}") for i in range(8)))
            assert sorted(used) == [0] * 4 + [1] * 4
            assert w.router.kv_tokens() == [0, 0]

    asyncio.run(run())


def test_a_session_that_fails_gives_its_room_back_and_cannot_be_used_again() -> None:
    async def run() -> None:
        async with world() as w:

            async def failing() -> RoutedPolicy:
                with w.router.session("a") as policy:
                    with pytest.raises(DeadlineError):
                        await policy.generate([5] * 9, SamplingParams(max_tokens=500), request_id="a", timeout_s=0.05)
                    assert w.router.kv_tokens() == [9, 0]
                    return policy

            policy = await failing()
            assert (w.router.kv_tokens(), w.router.in_flight()) == ([0, 0], [0, 0])
            with pytest.raises(RuntimeError, match="after the end of a's session"):
                await ask(policy, "late")

    asyncio.run(run())


def test_requests_in_flight_are_counted_by_server_over_time() -> None:
    async def run() -> None:
        async with world() as w:
            w.router.take_in_flight()
            with w.router.session("a") as a, w.router.session("b") as b:
                tasks = [asyncio.create_task(ask(a, "a", tokens=100)), asyncio.create_task(ask(b, "b", tokens=400))]
                await tasks[0]
                assert w.router.in_flight() == [0, 1]
                await tasks[1]
            first, second = w.router.take_in_flight()
            assert 0.1 < first < 0.6
            assert second > 0.9
            await asyncio.sleep(0.01)
            assert w.router.take_in_flight() == [0.0, 0.0]

    asyncio.run(run())


def test_a_delivery_reaches_all_servers_while_all_stand_still(tmp_path: Path) -> None:
    """Pause all, then update all, then resume all; the requests in flight carry both versions."""

    async def run() -> None:
        async with world() as w, AsyncExitStack() as stack:
            policies = [stack.enter_context(w.router.session(name)) for name in "ab"]
            await w.router.label_version(0)
            tasks = [asyncio.create_task(ask(p, f"r{i}", tokens=200)) for i, p in enumerate(policies)]
            await running(w.router, 1, 1)
            done = await w.router.deliver(manifest(tmp_path), tolerance=1e-3, timeout_s=10)
            assert (done.version, w.router.version) == (7, 7)
            assert done.probe_max_abs < 1e-6
            assert 0 < done.paused_s <= done.total_s
            phases = [path.partition("?")[0] for _, path in w.journal if path != "/update_weight_version"]
            assert phases == [phase for phase in EXCHANGE for _ in w.servers]
            for got in await asyncio.gather(*tasks):
                assert sorted(set(got.versions.tolist())) == [0, 7]

    asyncio.run(run())


@pytest.mark.parametrize("at", EXCHANGE[:-1])
def test_whatever_fails_at_one_server_all_go_on(tmp_path: Path, at: str) -> None:
    """K21: and requests flow again."""

    async def run() -> None:
        async with world() as w:
            w.servers[1].fail_at = at
            with pytest.raises(WeightDeliveryError, match="as told"):
                await w.router.deliver(manifest(tmp_path), tolerance=1e-3, timeout_s=10)
            assert all(server.going.is_set() for server in w.servers)
            with w.router.session("a") as a, w.router.session("b") as b:
                await asyncio.gather(ask(a, "a"), ask(b, "b"))
            await w.router.deliver(manifest(tmp_path, version=8), tolerance=1e-3, timeout_s=10)
            assert [server.label for server in w.servers] == ["8", "8"]

    asyncio.run(run())


def test_a_cancelled_delivery_resumes_all_and_lets_requests_flow(tmp_path: Path) -> None:
    """K21."""

    async def run() -> None:
        async with world() as w:
            for server in w.servers:
                server.label = "0"
            task = asyncio.create_task(w.router.deliver(manifest(tmp_path), tolerance=1e-3, timeout_s=10))
            async with asyncio.timeout(10):
                await w.servers[1].seen["/pause"].wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert all(server.going.is_set() for server in w.servers)
            with w.router.session("a") as a:
                await ask(a, "a")

    asyncio.run(run())


def test_each_server_is_probed(tmp_path: Path) -> None:
    """K25: one of two servers did not take the weights."""

    async def run() -> None:
        async with world() as w:
            w.servers[1].probe_shift = 0.5
            with pytest.raises(WeightDeliveryError, match=r"differ by 0\.5 nats") as caught:
                await w.router.deliver(manifest(tmp_path), tolerance=1e-3, timeout_s=10)
            assert w.servers[1].url in caught.value.where

    asyncio.run(run())


def test_a_server_that_is_gone_is_that_error(tmp_path: Path) -> None:
    async def run() -> None:
        async with world() as w:
            gone = PolicyRouter([*w.router.clients, VllmClient("http://127.0.0.1:9", max_model_len=64)])
            with pytest.raises(PolicyDeadError):
                await gone.deliver(manifest(tmp_path), tolerance=1e-3, timeout_s=10)
            assert all(server.going.is_set() for server in w.servers)
            await gone.clients[-1].aclose()

    asyncio.run(run())


def test_a_request_cancelled_during_a_delivery_is_closed_after_it(tmp_path: Path) -> None:
    """K22: the server never sees an abort while it stands still."""

    async def run() -> None:
        async with world(1) as w:
            [server] = w.servers
            with w.router.session("a") as a:
                task = asyncio.create_task(ask(a, "a", tokens=500))
                await running(w.router, 1)
                delivering = asyncio.create_task(w.router.deliver(manifest(tmp_path), tolerance=1e-3, timeout_s=10))
                async with asyncio.timeout(10):
                    await server.seen["/pause"].wait()
                task.cancel()
                while "/resume" not in server.calls:
                    assert (server.running, task.done()) == (1, False)
                    await asyncio.sleep(0)
                await delivering
                with pytest.raises(asyncio.CancelledError):
                    await task
                await running(w.router, 0)

    asyncio.run(run())


def test_a_delivery_waits_until_the_server_has_seen_what_was_closed(tmp_path: Path) -> None:
    """K22: closed here is not yet aborted there."""

    async def run() -> None:
        async with world(1) as w:
            [server] = w.servers
            with w.router.session("a") as a:
                task = asyncio.create_task(ask(a, "a", tokens=500))
                await running(w.router, 1)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await running(w.router, 0)
            server.running = 1  # it still thinks of it as running
            delivering = asyncio.create_task(w.router.deliver(manifest(tmp_path), tolerance=1e-3, timeout_s=10))
            await asyncio.sleep(0.2)
            assert "/pause" not in server.calls
            server.running = 0
            await delivering
            await w.router.deliver(manifest(tmp_path, version=8), tolerance=1e-3, timeout_s=10)

    asyncio.run(run())


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_kept_keys_are_salted_by_version(tmp_path: Path, kv: Literal["recompute", "keep"]) -> None:
    """K26: where the cache is kept over a delivery, requests sent after it never read what was cached before. One
    that is asked for during the delivery is sent after it."""

    async def run() -> None:
        async with world(1, kv=kv) as w:
            [server] = w.servers
            await w.router.label_version(0)
            with w.router.session("a") as a:
                await ask(a, "before")
                delivering = asyncio.create_task(w.router.deliver(manifest(tmp_path), tolerance=1e-3, timeout_s=10))
                async with asyncio.timeout(10):
                    await server.seen["/pause"].wait()
                got = await ask(a, "meanwhile")
                await delivering
            assert got.versions.tolist() == [7]
            salts = {
                r["request_id"]: r["cache_salt"] for r in server.requests if not r["request_id"].startswith("probe")
            }
            pauses = [path for _, path in w.journal if path.startswith("/pause")]
            if kv == "keep":
                assert salts == {"before": "v0", "meanwhile": "v7"}
                assert pauses == ["/pause?mode=keep&clear_cache=false"]
            else:
                assert salts == {"before": None, "meanwhile": None}
                assert pauses == ["/pause?mode=keep"]

    asyncio.run(run())


def test_preemptions_by_deliveries_do_not_count(tmp_path: Path) -> None:
    """A pause that drops the cache preempts what runs: no sign of too many trajectories."""

    async def run() -> None:
        async with world(1) as w:
            [server] = w.servers
            with w.router.session("a") as a:
                task = asyncio.create_task(ask(a, "a", tokens=300))
                await running(w.router, 1)
                await w.router.deliver(manifest(tmp_path), tolerance=1e-3, timeout_s=10)
                assert server.preemptions == 1
                assert [stats.preemptions for stats in await w.router.stats()] == [0]
                server.preemptions += 2
                assert [stats.preemptions for stats in await w.router.stats()] == [2]
                server.preemptions -= 1  # a forced one that the server has not told of yet
                assert [stats.preemptions for stats in await w.router.stats()] == [2]
                await task

    asyncio.run(run())


def test_a_version_that_nobody_delivered_is_an_error() -> None:
    """K25: somebody else gave the server weights."""

    async def run() -> None:
        async with world(1) as w:
            await w.router.label_version(3)
            w.servers[0].label = "9"
            with w.router.session("a") as a, pytest.raises(WeightDeliveryError, match=r"versions 9 to 9 .* newest"):
                await ask(a, "a")

    asyncio.run(run())


@pytest.mark.parametrize("sleeps", [True, False])
def test_colocated_servers_sleep_where_they_can(sleeps: bool) -> None:
    async def run() -> None:
        async with world(sleeps=sleeps) as w:
            await w.router.sleep(timeout_s=5)
            await w.router.wake(timeout_s=5)
            paths = [path for _, path in w.journal]
            assert paths == (["/sleep?level=1&mode=keep"] * 2 + ["/wake_up"] * 2 if sleeps else [])

    asyncio.run(run())


def test_a_router_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one client"):
        PolicyRouter([])


def test_the_window_is_the_smallest() -> None:
    async def run() -> None:
        clients: list[Any] = [VllmClient("http://127.0.0.1:9", max_model_len=n) for n in (512, 256)]
        assert PolicyRouter(clients).max_model_len == 256
        for client in clients:
            await client.aclose()

    asyncio.run(run())


def test_k22_a_score_that_is_given_up_waits_for_the_delivery_before_it_is_closed(tmp_path: Path) -> None:
    """Closing a request ends an engine that stands still: scores keep step with deliveries as samples do."""

    async def run() -> None:
        async with world(1) as w:
            (client,) = w.router.clients
            await client.traffic.hold(timeout_s=5)
            waiting = asyncio.create_task(w.router.score([1, 2, 3], top_k=0, timeout_s=5))
            await asyncio.sleep(0.05)
            assert client.traffic.in_flight.now == 0  # not sent while the weights change
            client.traffic.release()
            assert len((await waiting).logprobs) == 2

    asyncio.run(run())

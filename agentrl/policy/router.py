"""Several policy servers behind one door.

* *Sticky*: all requests of a trajectory go to one server, whose cache holds its prefix; the server is chosen at the
  first of them: the one whose live trajectories hold the fewest tokens of KV room, of equals the one with fewer
  trajectories.
* *In step*: a delivery reaches all servers while they stand still together. Closings of requests and deliveries never
  overlap (`agentrl.policy.traffic`).
* *Versions*: a server's version is what was delivered or labelled through the router; a token that claims another one
  is an error.

Life of a session's place:  none ──first request──▶ one server, tokens held ──end of the block──▶ none
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from agentrl.errors import WeightDeliveryError
from agentrl.policy.client import VllmClient
from agentrl.policy.delivery import all_of, check_file, exchange, probe
from agentrl.policy.metrics import ServerStats
from agentrl.wire import Delivery, Generation, SamplingParams, TokenScores, WeightManifest

log = logging.getLogger("agentrl.policy")

_CONTROL_TIMEOUT_S = 30.0
_SETTLE_TIMEOUT_S = 5.0
_SETTLE_EVERY_S = 0.02


@dataclass(slots=True)
class _Server:
    """A server's client and the KV load of its live trajectories."""

    client: VllmClient
    tokens: int = 0
    trajectories: int = 0
    chosen: int = 0  # times, so that servers of equal load take turns
    closed: int = 0  # its closings that an earlier delivery has waited for
    forced: int = 0  # preemptions by deliveries, which drop the cached keys of every running request
    preemptions: int = 0  # the others, as last told


class PolicyRouter:
    """The run's policy; see the module. Its clients are closed by whoever opened them.

    `kv_on_delivery` is `policy.kv_on_delivery`. `sleeps`: the servers share their device with the trainer and give
    its memory back in `sleep` (vLLM's CUDA build, `VllmServer.sleeps`).
    """

    def __init__(
        self,
        clients: Sequence[VllmClient],
        *,
        kv_on_delivery: Literal["recompute", "keep"] = "recompute",
        sleeps: bool = False,
    ) -> None:
        if not clients:
            raise ValueError("a router needs at least one client")
        self._servers = [_Server(client) for client in clients]
        self._keep = kv_on_delivery == "keep"
        self._sleeps = sleeps
        self._version: int | None = None
        self._newest: int | None = None  # above `_version` while a delivery is under way
        self._delivering = asyncio.Lock()

    @property
    def clients(self) -> list[VllmClient]:
        """One per server, in their order."""
        return [server.client for server in self._servers]

    @property
    def max_model_len(self) -> int:
        """Most tokens, prompt and continuation together."""
        return min(client.max_model_len for client in self.clients)

    @property
    def version(self) -> int | None:
        """The version that every server was last given; None before the first."""
        return self._version

    # --- requests ---------------------------------------------------------------------------------

    @contextmanager
    def session(self, trajectory_id: str) -> Iterator[RoutedPolicy]:
        """A client for all requests of one trajectory's episode; see `agentrl.wire.PolicyRouter`."""
        policy = RoutedPolicy(self, trajectory_id)
        try:
            yield policy
        finally:
            policy._leave()

    async def score(self, token_ids: Sequence[int], *, top_k: int, timeout_s: float) -> TokenScores:
        """Score tokens by one version's weights, the present ones, at the server that has the least to do. Raises
        `PolicyError` or `DeadlineError`."""
        deadline = time.monotonic() + timeout_s
        while True:
            version = self._version
            client = min(self.clients, key=lambda client: client.traffic.in_flight.now)
            left_s = max(0.0, deadline - time.monotonic())
            found = await client.score(token_ids, top_k=top_k, timeout_s=left_s)
            if self._version == version:  # else a delivery came between, and the answer is of two versions
                return found

    def _choose(self) -> _Server:
        """The server for a trajectory that holds nothing yet."""
        chosen = min(self._servers, key=lambda server: (server.tokens, server.trajectories, server.chosen))
        chosen.trajectories += 1
        chosen.chosen += 1
        return chosen

    def _check_versions(self, got: Generation, *, held: int | None, server: _Server, request_id: str) -> None:
        """Every token's version lies between what was held when the request was sent and the newest one."""
        if held is None or self._newest is None or not len(got.versions):
            return
        oldest, newest = int(got.versions.min()), int(got.versions.max())
        if oldest < held or newest > self._newest:
            raise WeightDeliveryError(
                f"the policy server says that versions {oldest} to {newest} sampled the tokens of a request sent at "
                f"version {held}; the newest delivered is {self._newest}",
                where=f"request {request_id}, {server.client.url}",
                remedy="let nothing but this run give weights to its servers; start it again with --resume",
            )

    # --- load -------------------------------------------------------------------------------------

    def in_flight(self) -> list[int]:
        """Requests sent and not answered, by server."""
        return [client.traffic.in_flight.now for client in self.clients]

    def take_in_flight(self) -> list[float]:
        """Time-weighted means of `in_flight` since the last call, by server."""
        return [client.traffic.in_flight.take() for client in self.clients]

    def kv_tokens(self) -> list[int]:
        """Tokens that live trajectories hold, by server."""
        return [server.tokens for server in self._servers]

    async def stats(self, *, timeout_s: float = _CONTROL_TIMEOUT_S) -> list[ServerStats]:
        """What each server does and did, asked at once. Preemptions are those for want of KV room alone: the server
        also counts each request whose cached keys a delivery dropped. Raises `PolicyError` or `DeadlineError`."""
        found = await all_of(client.stats(timeout_s=timeout_s) for client in self.clients)
        for server, stats in zip(self._servers, found, strict=True):
            # A forced one is counted when its request samples again, some time after it is known here.
            server.preemptions = max(server.preemptions, stats.preemptions - server.forced)
        return [
            dataclasses.replace(stats, preemptions=server.preemptions)
            for server, stats in zip(self._servers, found, strict=True)
        ]

    # --- weights ----------------------------------------------------------------------------------

    async def label_version(self, version: int, *, timeout_s: float = _CONTROL_TIMEOUT_S) -> None:
        """Call the weights that the servers loaded at start `version` (an evaluation delivers none)."""
        await all_of(client.label_version(version, timeout_s=timeout_s) for client in self.clients)
        self._newest = version
        self._hold(version)

    async def deliver(self, manifest: WeightManifest, *, tolerance: float, timeout_s: float) -> Delivery:
        """Give every server the published weights and prove that each holds them; see `delivery.deliver`.

        Waits for closings of requests, holds new requests and new closings back, pauses all, updates all, resumes
        all, and probes each. Whatever fails, every server is resumed and requests flow again.
        """
        async with self._delivering:
            check_file(manifest)
            began = time.monotonic()
            self._newest = manifest.version
            try:
                await all_of(client.traffic.hold(timeout_s=timeout_s) for client in self.clients)
                await all_of(self._settle(server) for server in self._servers)
                paused_s = await exchange(
                    self.clients,
                    manifest,
                    timeout_s=timeout_s,
                    keep_cache=self._keep,
                    beside=None if self._keep else self._count_forced,
                )
                self._hold(manifest.version)
                for client in self.clients:
                    client.traffic.let_send()
                differences = await all_of(
                    probe(client, manifest, tolerance=tolerance, timeout_s=timeout_s) for client in self.clients
                )
            finally:
                for client in self.clients:
                    client.traffic.release()
        return Delivery(
            version=manifest.version,
            paused_s=paused_s,
            total_s=time.monotonic() - began,
            probe_max_abs=max(differences),
        )

    def _hold(self, version: int) -> None:
        """Every server holds `version`. Where a delivery keeps cached keys, requests from now on get a cache of their
        own, so that only those in flight read the old weights' keys."""
        self._version = version
        if self._keep:
            for client in self.clients:
                client.cache_salt = f"v{version}"

    async def _count_forced(self) -> None:
        """While the servers stand still: every running request has just lost its cached keys."""
        for server, stats in zip(self._servers, await all_of(c.stats() for c in self.clients), strict=True):
            server.forced += stats.running

    async def _settle(self, server: _Server) -> None:
        """Wait until the server has seen the closings since the last delivery; it learns of them by and by."""
        client = server.client
        if client.traffic.closed == server.closed:
            return
        server.closed = client.traffic.closed
        deadline = time.monotonic() + _SETTLE_TIMEOUT_S
        while True:
            stats = await client.stats()
            left = stats.running + stats.waiting - client.traffic.in_flight.now
            if left <= 0:
                return
            if time.monotonic() > deadline:
                log.warning("%s still runs %d requests that were closed; delivering", client.url, left)
                return
            await asyncio.sleep(_SETTLE_EVERY_S)

    # --- a device that is shared ------------------------------------------------------------------

    async def sleep(self, *, timeout_s: float) -> None:
        """Give the devices' memory to the trainer: weights leave for main memory, the cache is dropped. Requests
        stand still. Does nothing where servers do not sleep."""
        if self._sleeps:
            path = "/sleep?level=1&mode=keep"
            await all_of(client.control(path, timeout_s=timeout_s) for client in self.clients)

    async def wake(self, *, timeout_s: float) -> None:
        """Take the memory back and go on, with the weights of before: deliver the new ones next."""
        if self._sleeps:
            await all_of(client.control("/wake_up", timeout_s=timeout_s) for client in self.clients)


class RoutedPolicy:
    """One trajectory's `PolicyClient`; made by `PolicyRouter.session`."""

    def __init__(self, router: PolicyRouter, trajectory_id: str) -> None:
        self._router = router
        self._trajectory_id = trajectory_id
        self._server: _Server | None = None
        self._tokens = 0
        self._left = False

    @property
    def max_model_len(self) -> int:
        """Most tokens, prompt and continuation together."""
        return self._router.max_model_len

    @property
    def url(self) -> str | None:
        """The server that the trajectory stays with; None before its first request."""
        return self._server.client.url if self._server else None

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float
    ) -> Generation:
        """Sample one continuation; see `PolicyClient`. Raises `PolicyError` or `DeadlineError`."""
        if self._left:
            raise RuntimeError(f"request {request_id} after the end of {self._trajectory_id}'s session")
        server = self._server = self._server or self._router._choose()
        self._take(server, len(prompt_ids))
        held = self._router.version
        got = await server.client.generate(prompt_ids, params, request_id=request_id, timeout_s=timeout_s)
        self._take(server, len(prompt_ids) + len(got.token_ids))
        self._router._check_versions(got, held=held, server=server, request_id=request_id)
        return got

    def _take(self, server: _Server, tokens: int) -> None:
        """The trajectory holds `tokens` of the server's KV room now."""
        server.tokens += tokens - self._tokens
        self._tokens = tokens

    def _leave(self) -> None:
        self._left = True
        if self._server is not None:
            self._take(self._server, 0)
            self._server.trajectories -= 1

"""A `PolicyRouter` with one client behind it, for tests that need no choice of servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from agentrl.wire import PolicyClient


@dataclass
class OnePolicy:
    """Hands the client to every session; `open` are the trajectories in one, `seen` all that were."""

    client: PolicyClient
    open: set[str] = field(default_factory=set)
    seen: list[str] = field(default_factory=list)

    @property
    def max_model_len(self) -> int:
        return self.client.max_model_len

    @contextmanager
    def session(self, trajectory_id: str) -> Iterator[PolicyClient]:
        self.open.add(trajectory_id)
        self.seen.append(trajectory_id)
        try:
            yield self.client
        finally:
            self.open.discard(trajectory_id)

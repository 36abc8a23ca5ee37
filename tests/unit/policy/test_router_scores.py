"""Scores by the student's present weights: of one version, and where least is to do."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from agentrl.policy import PolicyRouter


def test_scores_are_of_one_version_and_go_where_least_is_to_do() -> None:
    """A delivery in the middle of a request would mix two versions' log-probabilities: it is asked again."""

    class Client:
        def __init__(self, load: int) -> None:
            self.traffic: Any = SimpleNamespace(in_flight=SimpleNamespace(now=load))
            self.asked: list[float] = []

        async def score(self, token_ids: Any, *, top_k: int, timeout_s: float) -> str:
            self.asked.append(timeout_s)
            if len(self.asked) == 1:
                router._hold(8)
            return f"answer {len(self.asked)}"

    busy, idle = Client(3), Client(1)
    router = PolicyRouter([busy, idle])  # type: ignore[list-item]
    router._hold(7)
    found: Any = asyncio.run(router.score([1, 2, 3], top_k=0, timeout_s=5.0))
    assert found == "answer 2"
    assert busy.asked == []
    assert len(idle.asked) == 2
    assert idle.asked[1] <= idle.asked[0] <= 5.0

"""Where a run's groups come from: an environment's tasks and the engine, or what an earlier run recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from agentrl.rollout.groups import GroupRequest, GroupResult


class GroupCursor(Protocol):
    """The data position; see `agentrl.rollout.cursor.TaskCursor`."""

    position: int

    def take(self, count: int, *, group_size: int) -> list[GroupRequest]: ...

    def peek(self, count: int, *, group_size: int) -> list[GroupRequest]: ...

    def at(self, indices: Iterable[int], *, group_size: int) -> list[GroupRequest]: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class GroupStream(Protocol):
    """Groups in progress; see `agentrl.rollout.stream.RolloutStream`."""

    step: int

    @property
    def running(self) -> tuple[str, ...]: ...

    def prepare(self, requests: Sequence[GroupRequest]) -> None: ...

    def start(self, *requests: GroupRequest) -> None: ...

    async def next(self, timeout_s: float | None) -> GroupResult: ...

    async def drop(self, group_ids: Iterable[str]) -> tuple[str, ...]: ...

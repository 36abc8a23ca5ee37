"""What the orchestrator must know to go on: small, and carried by every checkpoint."""

from __future__ import annotations

from typing import Any

import msgspec

from agentrl.errors import RunFolderError


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """After `step` steps the servers hold `version`; `cursor` is the data position, `in_flight` the groups before it
    that no batch has taken yet, oldest first, with the version they were submitted at, `dry` the steps in a row without
    an accepted group, `minutes` the time trained so far, `settings` what must not change (`agentrl.run.resume`),
    `teaching` names how teachers score: scores that wait in the buffer are of no use where that has changed."""

    step: int = 0
    version: int = 0
    cursor: dict[str, Any] = {}
    in_flight: dict[str, int] = {}
    dry: int = 0
    minutes: float = 0.0
    settings: dict[str, Any] = {}
    teaching: str = ""

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> RunState:
        """Raises RunFolderError for a state of another version of agentrl."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise RunFolderError(
                f"the checkpoint's run state cannot be read: {error}",
                where="checkpoint state",
                remedy="resume with the version of agentrl that wrote it",
            ) from error

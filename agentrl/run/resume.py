"""Where a resumed run goes on, and which of its settings must be those of its checkpoint."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.config import RunConfig
from agentrl.errors import ConfigError, RunFolderError
from agentrl.run.folder import RunFolder
from agentrl.run.state import RunState

# Settings of distillation that scores do not depend on.
_HOW_SCORES_COME = {"reward_weight", "concurrency", "timeout_s", "retries", "cache"}


@dataclass(frozen=True, slots=True)
class Start:
    """Where a sitting of a run begins. Without a checkpoint: at the very start. `torn` names what was passed over."""

    checkpoint: Path | None = None
    state: RunState = field(default_factory=RunState)
    torn: tuple[str, ...] = ()


def fixed_settings(config: RunConfig) -> dict[str, Any]:
    """What weights and data position depend on, by dotted key: none of it may change on the way."""
    environment = config.environment.model_dump(mode="json", exclude_none=True)
    return {
        "seed": config.seed,
        "policy.model": config.policy.model,
        **{f"environment.{key}": value for key, value in environment.items()},
    }


def teaching_digest(config: RunConfig) -> str:
    """Changes with whatever scores depend on; empty without a teacher."""
    if not config.distill.active:
        return ""
    how = config.distill.model_dump(mode="json", exclude=_HOW_SCORES_COME)
    text = json.dumps([how, config.train.divergence.name], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def find_start(folder: RunFolder, config: RunConfig) -> Start:
    """The newest complete checkpoint of `folder`; the start where none was ever written.

    Raises RunFolderError where there are checkpoints and none is complete (to start anew would throw the run away),
    ConfigError for a setting that the checkpoint depends on and that has changed.
    """
    from agentrl.train.checkpoint import latest_checkpoint

    names = sorted(path.name for path in folder.checkpoints.glob("step_*") if path.is_dir())
    found = latest_checkpoint(folder.checkpoints)
    if found is None:
        if names:
            raise RunFolderError(
                f"none of the {len(names)} checkpoints is complete",
                where=str(folder.checkpoints),
                remedy="put a complete one back, or remove them to train from the start",
            )
        return Start()
    state = RunState.from_bytes(found.state)
    _check_unchanged(state.settings, fixed_settings(config))
    return Start(found.path, state, tuple(name for name in names if name > found.path.name))


def _check_unchanged(before: dict[str, Any], now: dict[str, Any]) -> None:
    if not before:
        return
    changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if changed:
        raise ConfigError(
            "\n  ".join(f"`{key}` is {now.get(key)!r}, the run has {before.get(key)!r}" for key in changed),
            where="--resume",
            remedy="leave it as it was, or start another run (--run-dir), from this one's weights if you like "
            "(--policy.model RUN/checkpoints/best)",
        )

"""Environments by entry point: ours and third parties' alike, never imported by name."""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from agentrl.config import EnvironmentConfig
from agentrl.errors import ConfigError, UnknownEnvironmentError
from agentrl.sandbox.images import recipe_names
from agentrl.wire import Environment, RecipeUser

GROUP = "agentrl.envs"


def environment_names() -> tuple[str, ...]:
    """Names of the installed environments."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def entry_point(group: str, name: str, *, what: str) -> EntryPoint:
    """The entry point `name` of `group`. Raises UnknownEnvironmentError, saying that no `what` is installed, and what
    is."""
    found = {point.name: point for point in entry_points(group=group)}
    if name not in found:
        close = difflib.get_close_matches(name, found, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UnknownEnvironmentError(
            f"no {what} is installed",
            where=f"entry points of group {group}",
            remedy=f"{hint}installed: {', '.join(sorted(found)) or 'none (reinstall agentrl)'}",
        )
    return found[name]


def load_environment(config: EnvironmentConfig, *, recipes: Path | None = None) -> Environment:
    """The environment, constructed with its options; `recipes` is the setting `sandbox.recipes`.

    Raises UnknownEnvironmentError that lists the installed names; ConfigError from the environment's own options.
    """
    point = entry_point(GROUP, config.name, what=f"environment {config.name!r}")
    try:
        cls = point.load()
    except ImportError as error:
        raise ConfigError(
            f"environment {config.name!r} does not import: {error}",
            where=point.value,
            remedy="install what it needs",
        ) from error
    environment = cls(config.options)
    if not isinstance(environment, Environment):
        raise ConfigError(f"{point.value} is no Environment", where=config.name, remedy="see agentrl.wire.Environment")
    if isinstance(environment, RecipeUser):
        environment.use_recipes(recipe_names(recipes))
    return environment

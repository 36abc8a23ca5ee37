"""Environments by entry point: ours and third parties' alike, never imported by name."""

from __future__ import annotations

import difflib
from importlib.metadata import entry_points
from pathlib import Path

from agentrl.config import EnvironmentConfig
from agentrl.errors import ConfigError, UnknownEnvironmentError
from agentrl.sandbox.images import recipe_names
from agentrl.wire import Environment, RecipeUser

GROUP = "agentrl.envs"


def environment_names() -> tuple[str, ...]:
    """Names of the installed environments."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def load_environment(config: EnvironmentConfig, *, recipes: Path | None = None) -> Environment:
    """The environment, constructed with its options; `recipes` is the setting `sandbox.recipes`.

    Raises UnknownEnvironmentError that lists the installed names; ConfigError from the environment's own options.
    """
    found = {point.name: point for point in entry_points(group=GROUP)}
    if config.name not in found:
        close = difflib.get_close_matches(config.name, found, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UnknownEnvironmentError(
            f"no environment {config.name!r} is installed",
            where=f"entry points of group {GROUP}",
            remedy=f"{hint}installed: {', '.join(sorted(found)) or 'none (reinstall agentrl)'}",
        )
    try:
        cls = found[config.name].load()
    except ImportError as error:
        raise ConfigError(
            f"environment {config.name!r} does not import: {error}",
            where=found[config.name].value,
            remedy="install what it needs",
        ) from error
    environment = cls(config.options)
    if not isinstance(environment, Environment):
        raise ConfigError(
            f"{found[config.name].value} is no Environment", where=config.name, remedy="see agentrl.wire.Environment"
        )
    if isinstance(environment, RecipeUser):
        environment.use_recipes(recipe_names(recipes))
    return environment

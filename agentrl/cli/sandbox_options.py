"""Options that the commands on tasks share, and the command class that keeps what stands after `--`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from agentrl.run.debug import Choice

TaskId = Annotated[str, typer.Argument(metavar="ID", help="A task's id, e.g. generated-fresh-0 or an instance id.")]
Env = Annotated[str | None, typer.Option("--env", help="The environment; default: swe-gym.")]
Data = Annotated[Path | None, typer.Option("--data", help="A file of rows, or a folder of them with their bundles.")]
Backend = Annotated[str | None, typer.Option("--backend", help="bubblewrap, docker or auto.")]
Timeout = Annotated[float, typer.Option("--timeout-s", min=0.1, max=86400, help="How long one command may take.")]


class AfterDashes(TyperCommand):
    """A command whose words after `--` are another command's: they are in `context.obj`, unread."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        at = args.index("--") if "--" in args else len(args)
        context = super().make_context(info_name, args[:at], parent=parent, **extra)
        context.obj = args[at + 1 :]
        return context

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "-- COMMAND…"]


def choice(
    context: typer.Context,
    *,
    env: str | None,
    data: Path | None,
    backend: str | None,
    preset: str | None,
    config: Path | None,
) -> Choice:
    """The shared options as one."""
    from agentrl.run.debug import Choice

    return Choice(env=env, data=data, backend=backend, preset=preset, file=config, overrides=context.args)

"""`agentrl sft ENV`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import CONTEXT, OVERRIDES, ConfigFile, DryRun, EnvironmentName, Preset


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(context_settings=CONTEXT, epilog=OVERRIDES)
    def sft(
        context: typer.Context,
        environment: EnvironmentName,
        out: Annotated[Path, typer.Option("--out", help="Folder of the model to write (Hugging Face format).")],
        preset: Preset = None,
        config: ConfigFile = None,
        dry_run: DryRun = False,
    ) -> int:
        """Warm start: the tiny policy learns from a scripted expert."""
        from agentrl.run.command import sft_command

        return sft_command(
            environment=environment, out=out, preset=preset, file=config, dry_run=dry_run, overrides=context.args
        )

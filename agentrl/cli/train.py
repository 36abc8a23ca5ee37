"""`agentrl train ENV`."""

from __future__ import annotations

import typer

from agentrl.cli.options import CONTEXT, OVERRIDES, ConfigFile, DryRun, EnvironmentName, Plain, Preset, Resume, RunDir


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(context_settings=CONTEXT, epilog=OVERRIDES)
    def train(
        context: typer.Context,
        environment: EnvironmentName,
        preset: Preset = None,
        config: ConfigFile = None,
        run_dir: RunDir = None,
        resume: Resume = False,
        dry_run: DryRun = False,
        plain: Plain = False,
    ) -> int:
        """Train a policy on an environment by reinforcement learning."""
        from agentrl.run.command import train_command

        return train_command(
            environment=environment,
            preset=preset,
            file=config,
            run_dir=run_dir,
            resume=resume,
            dry_run=dry_run,
            plain=plain,
            overrides=context.args,
        )

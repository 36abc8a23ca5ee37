"""`agentrl eval ENV`."""

from __future__ import annotations

from typing import Annotated

import typer

from agentrl.cli.options import CONTEXT, OVERRIDES, ConfigFile, DryRun, EnvironmentName, Plain, Preset, RunDir


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("eval", context_settings=CONTEXT, epilog=OVERRIDES)
    def evaluate(
        context: typer.Context,
        environment: EnvironmentName,
        model: Annotated[
            str | None, typer.Option("--model", help="Model folder, hub name, `tiny`, or a run folder's checkpoint.")
        ] = None,
        split: Annotated[str, typer.Option("--split", help="train, fresh or unseen.")] = "fresh",
        tasks: Annotated[int, typer.Option("--tasks", min=1, help="How many tasks.")] = 128,
        samples: Annotated[int, typer.Option("--samples", min=1, help="Episodes per task, for pass@k.")] = 1,
        reference: Annotated[
            bool, typer.Option("--reference", help="Grade each task's reference patch instead of an agent.")
        ] = False,
        preset: Preset = None,
        config: ConfigFile = None,
        run_dir: RunDir = None,
        dry_run: DryRun = False,
        plain: Plain = False,
    ) -> int:
        """Solve rate and pass@k with intervals.

        Writes trajectories and predictions.jsonl into a run folder; with --reference references.jsonl.
        """
        from agentrl.run.evaluate_command import evaluate_command

        return evaluate_command(
            environment=environment,
            model=model,
            split=split,
            tasks=tasks,
            samples=samples,
            reference=reference,
            preset=preset,
            file=config,
            run_dir=run_dir,
            dry_run=dry_run,
            plain=plain,
            overrides=context.args,
        )

"""`agentrl bench …`: schedules compared, and generation measured alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import CONTEXT, OVERRIDES, ConfigFile, DryRun, EnvironmentName, Plain, Preset, RunDir


def register(app: typer.Typer) -> None:
    """Add the commands."""

    @app.command(context_settings=CONTEXT, epilog=f"{OVERRIDES} It holds for every run of the comparison.")
    def schedules(
        context: typer.Context,
        seeds: Annotated[int, typer.Option("--seeds", min=1, help="Seeds 0 to N − 1, each of every schedule.")] = 5,
        work: Annotated[Path, typer.Option("--work", help="The folder of the run folders.")] = Path("runs/schedules"),
        out: Annotated[
            Path | None,
            typer.Option("--out", help="The figures; default: schedules.json in --work. The plots lie beside it."),
        ] = None,
        only: Annotated[
            list[str] | None,
            typer.Option("--only", metavar="NAME", help="A schedule or run, e.g. async-2, sync-1-seed0; repeatable."),
        ] = None,
        deliveries: Annotated[
            int | None, typer.Option("--deliveries", min=1, help="Batches per run; default: the preset's.")
        ] = None,
        max_staleness: Annotated[
            int | None, typer.Option("--max-staleness", min=0, help="The async schedules' bound; default: 1.")
        ] = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and their commands, and stop.")] = False,
    ) -> int:
        """Train with four schedules on the same tasks and devices, and compare them. Goes on where it was stopped."""
        from agentrl.run.bench_schedules import schedules_command

        return schedules_command(
            work=work,
            seeds=seeds,
            out=out,
            only=only or (),
            deliveries=deliveries,
            max_staleness=max_staleness,
            dry_run=dry_run,
            overrides=context.args,
        )

    @app.command(context_settings=CONTEXT, epilog=OVERRIDES)
    def rollout(
        context: typer.Context,
        environment: EnvironmentName,
        simulate_train: Annotated[
            float, typer.Option("--simulate-train", min=0, metavar="S", help="Seconds that training a batch takes.")
        ],
        deliveries: Annotated[
            int | None, typer.Option("--deliveries", min=1, help="Batches to generate; default: `steps`.")
        ] = None,
        preset: Preset = None,
        config: ConfigFile = None,
        run_dir: RunDir = None,
        out: Annotated[Path | None, typer.Option("--out", help="Write the figures there as JSON.")] = None,
        dry_run: DryRun = False,
        plain: Plain = False,
    ) -> int:
        """Measure generation alone: the trainer waits, and delivers the same weights again."""
        from agentrl.run.bench_rollout import rollout_command

        return rollout_command(
            environment=environment,
            train_s=simulate_train,
            deliveries=deliveries,
            preset=preset,
            file=config,
            run_dir=run_dir,
            out=out,
            dry_run=dry_run,
            plain=plain,
            overrides=context.args,
        )

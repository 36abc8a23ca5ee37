"""`agentrl distill [ENV] --teacher T`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from agentrl.cli.options import CONTEXT, OVERRIDES, ConfigFile, DryRun, Plain, Preset, Resume, RunDir


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(context_settings=CONTEXT, options_metavar="[ENV] [OPTIONS]", epilog=OVERRIDES)
    def distill(
        context: typer.Context,
        teacher: Annotated[
            list[str] | None,
            typer.Option(
                "--teacher",
                metavar="[NAME=][KIND:]T",
                help="A model folder or hub name (a frozen server is started for it), the URL of a running vLLM "
                "server, or `self`; repeatable. KIND: vllm, server, transformers, self, or one that is installed.",
            ),
        ] = None,
        route: Annotated[
            str | None,
            typer.Option(
                "--route",
                metavar="FIELD",
                help="Several teachers: `environment`, or a task's field that names its teacher.",
            ),
        ] = None,
        reward_weight: Annotated[
            float | None,
            typer.Option("--reward-weight", metavar="W", help="Weight of the task reward beside the teacher."),
        ] = None,
        from_run: Annotated[
            str | None,
            typer.Option("--from-run", metavar="RUN", help="Learn from this run's trajectories, not from new ones."),
        ] = None,
        preset: Preset = None,
        config: ConfigFile = None,
        run_dir: RunDir = None,
        resume: Resume = False,
        dry_run: DryRun = False,
        plain: Plain = False,
    ) -> int:
        """Train a policy to act as its teacher would: the teacher scores what the policy itself samples.

        ENV is the environment to practise on; default: the configured one, which is swe-gym unless set otherwise.
        """
        from agentrl.config.distill import parse_teacher
        from agentrl.run.command import train_command

        # An optional argument of typer's would take the first word of a dotted option for itself.
        named = bool(context.args) and not context.args[0].startswith("-")
        environment, *rest = context.args if named else (None, *context.args)
        words: list[str] = []
        if teacher:
            tables = [parse_teacher(text) for text in teacher]
            rows = (
                ", ".join(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items())
                for table in tables
            )
            words.append(f"--distill.teachers=[{', '.join(f'{{ {row} }}' for row in rows)}]")
        given = {"route": route, "reward-weight": reward_weight, "from-run": from_run}
        texts = {key: json.dumps(value, ensure_ascii=False) for key, value in given.items() if value is not None}
        words += [f"--distill.{key}={text}" for key, text in texts.items()]
        return train_command(
            environment=environment,
            preset=preset,
            file=config,
            run_dir=run_dir,
            resume=resume,
            dry_run=dry_run,
            plain=plain,
            overrides=[*words, *rest],
            distill=True,
        )

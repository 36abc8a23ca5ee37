"""`agentrl sandbox mine REPO` and `agentrl sandbox inject REPO`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import CONTEXT, ConfigFile, Preset

SETTINGS = "Settings of the sandboxes can be given as dotted options, e.g. --sandbox.memory-mb 2048."

Repository = Annotated[
    Path, typer.Argument(metavar="REPO", help="A git repository's folder (bare or not), or a bundle file.")
]
Env = Annotated[str | None, typer.Option("--env", help="The environment whose rows are made; default: swe-gym.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of rows and trees; default: tasks/REPO's name.")]
Name = Annotated[
    str | None, typer.Option("--name", help="owner/repo; default: from the repository's origin or folder.")
]
Image = Annotated[
    str | None, typer.Option("--image", help="Image of the tests; default: by recipe, else the base image.")
]
Jobs = Annotated[int, typer.Option("--jobs", min=1, max=256, help="Sandboxes at once.")]
Backend = Annotated[str | None, typer.Option("--backend", help="bubblewrap, docker or auto.")]
TestTimeout = Annotated[
    float, typer.Option("--test-timeout-s", min=0.1, max=86400, help="How long a single test may take.")
]
Timeout = Annotated[
    float, typer.Option("--timeout-s", min=1, max=86400, help="How long a whole test session may take.")
]


def register(app: typer.Typer) -> None:
    """Add the commands."""

    @app.command(context_settings=CONTEXT, epilog=SETTINGS)
    def mine(
        context: typer.Context,
        repository: Repository,
        env: Env = None,
        out: Out = None,
        name: Name = None,
        commit: Annotated[str | None, typer.Option("--commit", help="Where to begin; default HEAD.")] = None,
        since: Annotated[str | None, typer.Option("--since", help="No commit before this date (2024-01-31).")] = None,
        max_commits: Annotated[
            int | None, typer.Option("--max-commits", min=1, help="Most commits to look at.")
        ] = None,
        limit: Annotated[
            int | None, typer.Option("--limit", min=1, help="Rows wanted in all, earlier ones counted.")
        ] = None,
        message: Annotated[
            str | None, typer.Option("--message", help="Only commits whose message matches this expression.")
        ] = None,
        first_parent: Annotated[bool, typer.Option("--first-parent", help="Follow the main line alone.")] = False,
        max_lines: Annotated[int, typer.Option("--max-lines", min=1, help="Most source lines of a fix.")] = 150,
        max_files: Annotated[int, typer.Option("--max-files", min=1, help="Most source files of a fix.")] = 5,
        image: Image = None,
        jobs: Jobs = 2,
        test_timeout_s: TestTimeout = 60.0,
        timeout_s: Timeout = 300.0,
        backend: Backend = None,
        preset: Preset = None,
        config: ConfigFile = None,
    ) -> int:
        """Make tasks from the bug fixes in a repository's history.

        A commit becomes a task where tests fail before it and pass after it. Exit code 0: there are rows. 1: none.
        """
        from agentrl.run.factory import Machines, mine_command
        from agentrl.wire import MineRequest

        return mine_command(
            MineRequest(
                repository=str(repository),
                out=str(out) if out else None,
                name=name,
                image=image,
                jobs=jobs,
                commit=commit,
                since=since,
                message=message,
                max_commits=max_commits,
                limit=limit,
                first_parent=first_parent,
                max_lines=max_lines,
                max_files=max_files,
                test_timeout_s=test_timeout_s,
                timeout_s=timeout_s,
            ),
            Machines(env, backend, preset, config, context.args),
        )

    @app.command(context_settings=CONTEXT, epilog=SETTINGS)
    def inject(
        context: typer.Context,
        repository: Repository,
        env: Env = None,
        out: Out = None,
        name: Name = None,
        commit: Annotated[str | None, typer.Option("--commit", help="Which commit to break; default HEAD.")] = None,
        count: Annotated[int, typer.Option("--count", min=1, help="Rows wanted in all, earlier ones counted.")] = 100,
        seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same rows.")] = 0,
        per_function: Annotated[int, typer.Option("--per-function", min=1, help="Most rows a function.")] = 2,
        per_file: Annotated[int | None, typer.Option("--per-file", min=1, help="Most rows a file.")] = None,
        hide_tests: Annotated[
            bool, typer.Option("--hide-tests/--show-tests", help="Take the failing tests out of the task's tree.")
        ] = True,
        image: Image = None,
        jobs: Jobs = 2,
        test_timeout_s: TestTimeout = 10.0,
        timeout_s: Timeout = 600.0,
        backend: Backend = None,
        preset: Preset = None,
        config: ConfigFile = None,
    ) -> int:
        """Make tasks by breaking a tested repository.

        One small bug each, that some of its tests catch. Exit code 0: there are rows. 1: none.
        """
        from agentrl.run.factory import Machines, factory_command
        from agentrl.wire import InjectRequest

        return factory_command(
            InjectRequest(
                repository=str(repository),
                out=str(out) if out else None,
                name=name,
                image=image,
                jobs=jobs,
                commit=commit,
                count=count,
                seed=seed,
                per_function=per_function,
                per_file=per_file,
                hide_tests=hide_tests,
                test_timeout_s=test_timeout_s,
                timeout_s=timeout_s,
            ),
            Machines(env, backend, preset, config, context.args),
        )

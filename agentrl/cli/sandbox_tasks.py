"""`agentrl sandbox {run,shell,replay,grade,verify}`: debugging on tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import CONTEXT, OVERRIDES, ConfigFile, Preset
from agentrl.cli.sandbox_options import AfterDashes, Backend, Data, Env, TaskId, Timeout, choice


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(cls=AfterDashes, context_settings=CONTEXT, epilog=OVERRIDES)(run)
    for command in (shell, replay, grade, verify):
        app.command(context_settings=CONTEXT, epilog=OVERRIDES)(command)


def run(
    context: typer.Context,
    task: TaskId,
    timeout_s: Timeout = 600.0,
    env: Env = None,
    data: Data = None,
    backend: Backend = None,
    preset: Preset = None,
    config: ConfigFile = None,
) -> int:
    """Run one command in a fresh sandbox of a task; its output, its exit code."""
    from agentrl.run.debug_run import run_command

    chosen = choice(context, env=env, data=data, backend=backend, preset=preset, config=config)
    return run_command(chosen, task, context.obj, timeout_s=timeout_s)


def shell(
    context: typer.Context,
    task: TaskId,
    timeout_s: Timeout = 600.0,
    env: Env = None,
    data: Data = None,
    backend: Backend = None,
    preset: Preset = None,
    config: ConfigFile = None,
) -> int:
    """A shell in a fresh sandbox of a task, with the agent's tools, the diff and the grade at hand."""
    from agentrl.run.debug_shell import shell_command

    chosen = choice(context, env=env, data=data, backend=backend, preset=preset, config=config)
    return shell_command(chosen, task, timeout_s=timeout_s)


def replay(
    context: typer.Context,
    trajectory: Annotated[
        str, typer.Argument(metavar="RUN/TRAJECTORY", help="A run folder and a trajectory's id, or its beginning.")
    ],
    to: Annotated[int | None, typer.Option("--to", min=0, help="Stop after this turn; the first is 0.")] = None,
    shell: Annotated[bool, typer.Option("--shell", help="Go on in a shell where the replay ends.")] = False,
    data: Data = None,
    backend: Backend = None,
) -> int:
    """Carry out a recorded trajectory's tool calls in a fresh sandbox and show where outputs differ."""
    from agentrl.run.replay import replay_command

    chosen = choice(context, env=None, data=data, backend=backend, preset=None, config=None)
    return replay_command(chosen, trajectory, to=to, shell=shell)


def grade(
    context: typer.Context,
    task: TaskId,
    patch: Annotated[str | None, typer.Option("--patch", help="A patch file; - is stdin.")] = None,
    reference: Annotated[bool, typer.Option("--reference", help="Grade the task's own fix.")] = False,
    log: Annotated[
        Path | None, typer.Option("--log", help="The whole log; default: runs/sandbox/grade-ID-TIME.log.")
    ] = None,
    env: Env = None,
    data: Data = None,
    backend: Backend = None,
    preset: Preset = None,
    config: ConfigFile = None,
) -> int:
    """Grade a patch in a fresh sandbox: exit code 0 resolved, 1 not resolved, 3 infrastructure failure."""
    from agentrl.run.debug_run import grade_command

    chosen = choice(context, env=env, data=data, backend=backend, preset=preset, config=config)
    return grade_command(chosen, task, patch=patch, reference=reference, log=log)


def verify(
    context: typer.Context,
    environment: Annotated[str, typer.Argument(metavar="ENV", help="An installed environment, e.g. swe-gym.")],
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Tasks at once; default: the cores.")] = None,
    tasks: Annotated[int | None, typer.Option("--tasks", min=1, help="Only the first ones.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="A line per task; default: runs/sandbox/verify-ENV-DATA.jsonl.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with that file.")] = False,
    data: Data = None,
    backend: Backend = None,
    preset: Preset = None,
    config: ConfigFile = None,
) -> int:
    """Prove tasks: no change must fail, the reference must pass. Exit code 0 all valid, 1 not all."""
    from agentrl.run.verify import verify_command

    chosen = choice(context, env=environment, data=data, backend=backend, preset=preset, config=config)
    return verify_command(chosen, jobs=jobs, tasks=tasks, out=out, resume=resume)

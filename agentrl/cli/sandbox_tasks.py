"""`agentrl sandbox {run,shell,replay,grade,verify}`: debugging on tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.options import CONTEXT, SOME_OVERRIDES, ConfigFile, Preset
from agentrl.cli.sandbox_options import AfterDashes, Backend, Data, Env, TaskId, Timeout, choice


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command(cls=AfterDashes, context_settings=CONTEXT, epilog=SOME_OVERRIDES)(run)
    for command in (shell, replay, grade, verify):
        app.command(context_settings=CONTEXT, epilog=SOME_OVERRIDES)(command)


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
    """One command in a task's sandbox: its output, its exit code.

    One word after `--` is a line for bash; several are a command and its arguments. 124: stopped after --timeout-s.
    """
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
    """A shell in a task's sandbox, with the agent's tools.

    Diff and grade are at hand too: `:help` lists what there is. Lines may come from a pipe; the exit code is the last
    line's.
    """
    from agentrl.run.debug_shell import shell_command

    chosen = choice(context, env=env, data=data, backend=backend, preset=preset, config=config)
    return shell_command(chosen, task, timeout_s=timeout_s)


def replay(
    context: typer.Context,
    trajectory: Annotated[
        str,
        typer.Argument(metavar="RUN/TRAJECTORY", help="A run folder, a slash, and a trajectory's id or its beginning."),
    ],
    to: Annotated[int | None, typer.Option("--to", min=0, help="Stop after this turn; the first is 0.")] = None,
    shell: Annotated[bool, typer.Option("--shell", help="Go on in a shell where the replay ends.")] = False,
    data: Data = None,
    backend: Backend = None,
) -> int:
    """A recorded episode's tool calls once more: what differs?

    Exit code 0: nothing but what was never recorded. 1: an output or the change differs.
    """
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
    """The grade of a patch, in a fresh sandbox.

    Exit code 0: resolved. 1: not resolved. 3: a machine failed.
    """
    from agentrl.run.debug_run import grade_command

    chosen = choice(context, env=env, data=data, backend=backend, preset=preset, config=config)
    return grade_command(chosen, task, patch=patch, reference=reference, log=log)


def verify(
    context: typer.Context,
    environment: Annotated[str, typer.Argument(metavar="ENV", help="An installed environment, e.g. swe-gym.")],
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Tasks at once; default: the number of cores.")
    ] = None,
    tasks: Annotated[int | None, typer.Option("--tasks", min=1, help="Only the first ones.")] = None,
    runs: Annotated[
        int, typer.Option("--runs", min=2, max=100, help="Gradings of the reference; two once a task has taken 15 s.")
    ] = 6,
    out: Annotated[
        Path | None, typer.Option("--out", help="A line per task; default: runs/sandbox/verify-ENV-DATA.jsonl.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with that file.")] = False,
    data: Data = None,
    backend: Backend = None,
    preset: Preset = None,
    config: ConfigFile = None,
) -> int:
    """Prove tasks: no change must fail, the reference must pass.

    Exit code 0: all are valid. 1: one is not. 3: nothing could be verified.
    """
    from agentrl.run.verify import verify_command

    chosen = choice(context, env=environment, data=data, backend=backend, preset=preset, config=config)
    return verify_command(chosen, jobs=jobs, tasks=tasks, runs=runs, out=out, resume=resume)

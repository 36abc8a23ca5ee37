"""What `agentrl train`, `distill` and `sft` do: resolve the configuration, open the folder, run, report, exit code."""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config import RunConfig
from agentrl.config.load import dump_toml, load_config
from agentrl.errors import AgentRLError, ConfigError, DiskFullError, UsageError
from agentrl.run.environments import load_environment
from agentrl.run.folder import CONFIG, RunFolder, check_run_folder, open_run_folder
from agentrl.run.recorder import Recorder, installed_versions, keep_tokenizer
from agentrl.run.resume import Start, find_start
from agentrl.run.routing import check_teachers
from agentrl.run.signals import INTERRUPTED, Interrupted, run_interruptible
from agentrl.wire import Environment, EventKind
from agentrl.wire.events import Phase

if TYPE_CHECKING:
    from agentrl.run.recorded import RecordedRun

_SEED_STRIDE = 10_007


def log_to_file(folder: RunFolder) -> None:
    """The orchestrator's own log, out of the way of the display."""
    logging.raiseExceptions = False  # a full disk is the run's error to report, not a traceback a line
    logging.basicConfig(
        filename=folder.logs / "orchestrator.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )


def train_command(
    *,
    environment: str | None,
    preset: str | None,
    file: Path | None,
    run_dir: Path | None,
    resume: bool,
    dry_run: bool,
    plain: bool,
    overrides: Sequence[str],
    distill: bool = False,
) -> int:
    """`agentrl train`, and `agentrl distill`, which needs a teacher. `environment` None: as configured.

    Raises AgentRLError; returns the exit code.
    """
    if resume:
        run_dir, file = _resumed(preset, file, run_dir)
    config = load_config(
        preset=preset,
        file=file,
        overrides=[*overrides, *([] if environment is None else [f"--environment.name={environment}"])],
        run_dir=str(run_dir) if run_dir else None,
    )
    if distill and not config.distill.active:
        raise UsageError("no teacher is given", where="agentrl distill", remedy="--teacher MODEL, URL or self")
    if config.agent.tools.calls == "required":
        raise ConfigError(
            "a grammar changes the distribution that is sampled from, and the trainer cannot recompute it",
            where="agent.tools.calls",
            remedy="train with agent.tools.calls=free; required is for `agentrl eval`",
        )
    env = load_environment(config.environment, recipes=config.sandbox.recipes)
    for line in check_teachers(config, env):
        print(f"agentrl: {line}", file=sys.stderr)
    if dry_run:
        print(dump_toml(config), end="")
        return 0
    from agentrl.run.recorded import open_recorded

    recorded = None
    if not resume:  # a resumed run has its model in its checkpoint
        check_machine(config, train=True)
        recorded = open_recorded(config, env, Start())
    folder = open_run_folder(config.run_dir, resume=resume)
    try:
        log_to_file(folder)
        start = find_start(folder, config) if resume else Start()
        if start.state.step >= config.steps:
            print(f"all {start.state.step} steps are done; to train longer: {_go_on(config)} --steps N")
            return 0
        if resume:
            check_machine(config, train=True, model=False)
            recorded = open_recorded(config, env, start)
        folder.write_config(dump_toml(config))
        return _train(config, folder, env, start, recorded, resume=resume, plain=plain)
    finally:
        folder.close()


def check_machine(config: RunConfig, *, train: bool, model: bool = True) -> None:
    """Before the run folder is made, or the configuration in it replaced: a mended command can then use it.

    Raises ConfigError for a model or a placement that cannot be, MissingRequirementError where no server could run.
    """
    from agentrl.policy import check_model, local_model
    from agentrl.run.services import place_here

    if model:
        local_model(config.policy.model)
        check_model(config.policy)
    place_here(config, train=train)


def _resumed(preset: str | None, file: Path | None, run_dir: Path | None) -> tuple[Path, Path]:
    """The folder of a run that is gone on with, and its own configuration."""
    if preset or file:
        raise ConfigError(
            "--resume goes on with the run's own configuration",
            where="--preset/--config",
            remedy="leave them out; single settings may be overridden, e.g. --steps 40",
        )
    path = run_dir or RunConfig().run_dir
    check_run_folder(path)
    return path, path / CONFIG


def _train(
    config: RunConfig,
    folder: RunFolder,
    env: Environment,
    start: Start,
    recorded: RecordedRun | None,
    *,
    resume: bool,
    plain: bool,
) -> int:
    began = time.monotonic()
    with Recorder(folder, steps=config.steps, alarms=config.alarms, plain=plain) as recorder:

        def finish(outcome: str, reason: str = "") -> None:
            minutes = (time.monotonic() - began) / 60
            recorder.tell(EventKind.RUN_FINISHED, outcome=outcome, reason=reason, minutes=minutes)

        try:
            run_interruptible(_training(config, folder, recorder, env, start, recorded, resume=resume))
            finish("done")
            code = 0
        except Interrupted:
            finish("interrupted")
            code = INTERRUPTED
        except Exception as error:
            # Where the disk is full these fail as well; the first error is the one to show.
            with contextlib.suppress(DiskFullError, OSError):
                finish("failed", error.what.splitlines()[0] if isinstance(error, AgentRLError) else repr(error))
                _report(folder)
            if not isinstance(error, AgentRLError):
                raise
            remedy = f"{error.remedy}{'; ' if error.remedy else ''}to go on: {_go_on(config)}"
            raise type(error)(error.what, where=error.where, remedy=remedy) from error
    page = _report(folder)
    if code == INTERRUPTED:
        print(f"agentrl: interrupted; to go on: {_go_on(config)}", file=sys.stderr)
    print(f"report: {page}")
    return code


def _go_on(config: RunConfig) -> str:
    command = "distill" if config.distill.active else "train"
    return f"agentrl {command} {config.environment.name} --run-dir {shlex.quote(str(config.run_dir))} --resume"


def _report(folder: RunFolder) -> Path:
    from agentrl.telemetry.report import write_report

    page = folder.path / "report.html"
    write_report([folder.path], page)
    return page


async def _training(
    config: RunConfig,
    folder: RunFolder,
    recorder: Recorder,
    env: Environment,
    start: Start,
    recorded: RecordedRun | None,
    *,
    resume: bool,
) -> None:
    from agentrl.policy import local_model
    from agentrl.rollout.buffer import GroupBuffer
    from agentrl.run.loop import prepare_run, train
    from agentrl.run.services import open_services

    keep_tokenizer(start.checkpoint or local_model(config.policy.model), folder)
    recorder.tell(
        EventKind.RUN_STARTED,
        run=folder.path.name,
        steps=config.steps,
        resumed=resume,
        resumed_from=start.state.step,
        versions=installed_versions(),
    )
    if start.torn:
        recorder.note(f"passed over as incomplete: {', '.join(start.torn)} (see logs/orchestrator.log)")
    recorder.phase(Phase.START, step=start.state.step)
    # A resumed run must not sample the stream of its beginning again.
    seed = config.seed + _SEED_STRIDE * start.state.step
    with GroupBuffer(folder.buffer) as buffer:
        async with open_services(
            config, folder, recorder, env, train=True, resume=start.checkpoint, sampling_seed=seed
        ) as services:
            await train(prepare_run(config, folder, recorder, services, buffer, start, recorded))


def sft_command(
    *,
    environment: str,
    out: Path,
    preset: str | None,
    file: Path | None,
    dry_run: bool,
    overrides: Sequence[str],
) -> int:
    """`agentrl sft`. Raises AgentRLError; returns the exit code."""
    from agentrl.config.load import load_warm_start
    from agentrl.run.warm_start import warm_start

    words = [*overrides, f"--environment.name={environment}"]
    config = load_warm_start(preset=preset, file=file, overrides=words)
    env = load_environment(config.environment, recipes=config.sandbox.recipes)
    if dry_run:
        print(dump_toml(config), end="")
        return 0
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty", where="--out", remedy="name another folder, or remove it")
    try:
        run_interruptible(warm_start(config, env, out))
    except Interrupted:
        print("agentrl: interrupted", file=sys.stderr)
        return INTERRUPTED
    print(out)
    return 0

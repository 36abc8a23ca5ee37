"""What the commands do: resolve the configuration, open the run folder, run, report, exit code."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config import RunConfig
from agentrl.config.load import dump_toml, leaf_keys, load_config, parse_overrides
from agentrl.errors import AgentRLError, ConfigError, DiskFullError, InfrastructureError, UsageError
from agentrl.run.environments import load_environment
from agentrl.run.folder import CONFIG, RunFolder, check_run_folder, open_run_folder
from agentrl.run.recorder import Recorder, installed_versions, keep_tokenizer
from agentrl.run.resume import Start, find_start
from agentrl.run.routing import check_teachers
from agentrl.run.signals import INTERRUPTED, Interrupted, run_interruptible
from agentrl.trajectory import Split
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
    environment: str,
    preset: str | None,
    file: Path | None,
    run_dir: Path | None,
    resume: bool,
    dry_run: bool,
    plain: bool,
    overrides: Sequence[str],
    distill: bool = False,
) -> int:
    """`agentrl train`, and `agentrl distill`, which needs a teacher. Raises AgentRLError; returns the exit code."""
    if resume:
        run_dir, file = _resumed(preset, file, run_dir)
    config = load_config(
        preset=preset,
        file=file,
        overrides=[*overrides, f"--environment.name={environment}"],
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
    check_teachers(config, env)
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


def evaluate_command(
    *,
    environment: str,
    model: str | None,
    split: str,
    tasks: int,
    samples: int,
    reference: bool,
    preset: str | None,
    file: Path | None,
    run_dir: Path | None,
    dry_run: bool,
    plain: bool,
    overrides: Sequence[str],
) -> int:
    """`agentrl eval`. Raises AgentRLError; returns the exit code."""
    if split not in set(Split):
        raise ConfigError(f"no split {split!r}", where="--split", remedy=f"one of: {', '.join(Split)}")
    _refuse_idle(overrides)
    words = [*overrides, f"--environment.name={environment}", *([f"--policy.model={model}"] if model else [])]
    config = load_config(
        preset=preset, file=file, overrides=words, run_dir=str(run_dir or Path("runs") / f"eval-{int(time.time())}")
    )
    env = load_environment(config.environment, recipes=config.sandbox.recipes)
    if dry_run:
        print(dump_toml(config), end="")
        return 0
    if not reference:
        check_machine(config, train=False)
    folder = open_run_folder(config.run_dir, resume=False)
    try:
        log_to_file(folder)
        folder.write_config(dump_toml(config))
        with Recorder(folder, steps=0, alarms=config.alarms, plain=plain) as recorder:
            try:
                summary = run_interruptible(
                    _evaluation(
                        config,
                        folder,
                        recorder,
                        env,
                        split=Split(split),
                        tasks=tasks,
                        samples=samples,
                        reference=reference,
                    )
                )
            except Interrupted:
                print("agentrl: interrupted", file=sys.stderr)
                return INTERRUPTED
        (folder.path / "eval.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        print(json.dumps({k: v for k, v in summary.items() if k not in ("unresolved",)}))
        _require_counted(summary, folder)
        return 0
    finally:
        folder.close()


# What training reads and an evaluation does not, and what to give instead.
_IDLE_IN_EVAL = {
    "steps": "",
    "train": "",
    "distill": "",
    "alarms": "",
    "checkpoint": "",
    "eval.every_steps": "",
    "eval.fresh_tasks": "--split fresh --tasks N",
    "eval.unseen_tasks": "--split unseen --tasks N",
    "eval.samples_per_task": "--samples N",
    "rollout.schedule": "",
    "rollout.max_staleness": "",
    "rollout.window": "",
    "rollout.oversample": "",
    "rollout.replace_filtered": "",
    "rollout.groups": "--tasks N",
    "rollout.group_size": "--samples N",
    "rollout.temperature": "--eval.temperature T",
    "rollout.zero_variance_warn": "",
    "rollout.zero_variance_stop": "",
    "placement.ranks": "",
    "policy.kv_on_delivery": "",
}


def _refuse_idle(overrides: Sequence[str]) -> None:
    """Raise ConfigError for a setting on the command line that an evaluation never reads."""
    given = leaf_keys(parse_overrides(overrides))
    for key, instead in _IDLE_IN_EVAL.items():
        found = next((name for name in given if name == key or name.startswith(f"{key}.")), None)
        if found:
            raise ConfigError(
                f"`{found}` has no effect in `agentrl eval`",
                where="command line",
                remedy=f"give {instead}" if instead else "leave it out",
            )


def _require_counted(summary: Mapping[str, Any], folder: RunFolder) -> None:
    """Raise InfrastructureError where machines failed every episode: that is no solve rate of 0."""
    lost = summary["errors"] == summary["tasks"] if "errors" in summary else summary["n"] == 0
    if lost:
        raise InfrastructureError(
            "no episode could be counted: machines failed all of them",
            where=f"{folder.path} (trajectories/, logs/)",
            remedy="`agentrl doctor` looks at this machine; mend the cause and evaluate again",
        )


async def _evaluation(
    config: RunConfig,
    folder: RunFolder,
    recorder: Recorder,
    env: Environment,
    *,
    split: Split,
    tasks: int,
    samples: int,
    reference: bool,
) -> dict[str, object]:
    from agentrl.policy import local_model
    from agentrl.run.evaluate import evaluate, prediction
    from agentrl.run.reference import grade_references
    from agentrl.run.services import open_services
    from agentrl.run.supervise import Doing, supervised

    recorder.tell(EventKind.RUN_STARTED, run=folder.path.name, steps=0, versions=installed_versions())
    if reference:
        return await grade_references(config, folder, recorder, env, split=split, tasks=tasks)
    keep_tokenizer(local_model(config.policy.model), folder)
    async with open_services(config, folder, recorder, env, train=False, sampling_seed=config.seed) as services:
        await services.router.label_version(0)
        async with supervised(services, recorder, Doing):
            rate, groups = await evaluate(services, recorder, config, split=split, tasks=tasks, samples=samples, step=0)
    every = [trajectory for group in groups for trajectory in group.trajectories]
    with (folder.path / "predictions.jsonl").open("w", encoding="utf-8", errors="surrogateescape") as out:
        for trajectory in every:
            out.write(json.dumps(prediction(trajectory, model=config.policy.model)) + "\n")
    calls = [t.info.get("sandbox_calls", 0.0) for t in every]
    return {
        "split": split.value,
        "solve": rate.solve if rate.n else None,
        "low": rate.interval.low,
        "high": rate.interval.high,
        "n": rate.n,
        "tasks": len(groups),
        "samples": samples,
        "pass_at_k": {str(k): [v.value, v.low, v.high] for k, v in rate.pass_at_k.items()},
        "infrastructure_failures": len(every) - rate.n,
        "submit_rate": sum(t.info.get("submitted", 0.0) for t in every) / max(1, len(every)),
        "sandbox_calls_mean": sum(calls) / max(1, len(calls)),
        "episodes_with_3_calls": sum(count >= 3 for count in calls),
        "tokens_mean": sum(t.tokens for t in every) / max(1, len(every)),
        "temperature": config.eval.temperature,
        "model": config.policy.model,
    }


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

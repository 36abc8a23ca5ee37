"""What the commands do: resolve the configuration, open the run folder, run, report, exit code."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.config.load import dump_toml, load_config
from agentrl.errors import AgentRLError, ConfigError
from agentrl.run.environments import load_environment
from agentrl.run.folder import RunFolder, open_run_folder
from agentrl.run.recorder import Recorder, installed_versions, keep_tokenizer
from agentrl.run.signals import Interrupted, run_interruptible
from agentrl.trajectory import Split
from agentrl.wire import Environment, EventKind
from agentrl.wire.events import Phase

INTERRUPTED = 130
_SEED_STRIDE = 10_007


def log_to_file(folder: RunFolder) -> None:
    """The orchestrator's own log, out of the way of the display."""
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
) -> int:
    """`agentrl train`. Raises AgentRLError; returns the exit code."""
    if resume and run_dir is not None and (run_dir / "config.toml").is_file():
        if preset or file:
            raise ConfigError(
                "--resume goes on with the run's own configuration",
                where="--preset/--config",
                remedy="leave them out; single settings may be overridden, e.g. --steps 40",
            )
        file = run_dir / "config.toml"
    config = load_config(
        preset=preset,
        file=file,
        overrides=[*overrides, f"--environment.name={environment}"],
        run_dir=str(run_dir) if run_dir else None,
    )
    env = load_environment(config.environment)
    if dry_run:
        print(dump_toml(config), end="")
        return 0
    folder = open_run_folder(config.run_dir, resume=resume)
    try:
        return _train(config, folder, env, resume=resume, plain=plain)
    finally:
        folder.close()


def _train(config: RunConfig, folder: RunFolder, env: Environment, *, resume: bool, plain: bool) -> int:
    log_to_file(folder)
    folder.config.write_text(dump_toml(config), encoding="utf-8")
    began = time.monotonic()
    with Recorder(folder, steps=config.steps, alarms=config.alarms, plain=plain) as recorder:

        def finish(outcome: str, reason: str = "") -> None:
            minutes = (time.monotonic() - began) / 60
            recorder.tell(EventKind.RUN_FINISHED, outcome=outcome, reason=reason, minutes=minutes)

        try:
            run_interruptible(_training(config, folder, recorder, env, resume=resume))
        except Interrupted:
            finish("interrupted")
            code = INTERRUPTED
        except AgentRLError as error:
            finish("failed", error.what)
            _report(folder)
            raise type(error)(
                error.what, where=error.where, remedy=f"{error.remedy}{'; ' if error.remedy else ''}{_go_on(folder)}"
            ) from error
        else:
            finish("done")
            code = 0
    page = _report(folder)
    if code == INTERRUPTED:
        print(f"agentrl: interrupted; {_go_on(folder)}", file=sys.stderr)
    print(f"report: {page}")
    return code


def _go_on(folder: RunFolder) -> str:
    return f"to go on: agentrl train ENV --run-dir {folder.path} --resume"


def _report(folder: RunFolder) -> Path:
    from agentrl.telemetry.report import write_report

    page = folder.path / "report.html"
    write_report([folder.path], page)
    return page


async def _training(
    config: RunConfig, folder: RunFolder, recorder: Recorder, env: Environment, *, resume: bool
) -> None:
    from agentrl.policy import model_location
    from agentrl.rollout.buffer import GroupBuffer
    from agentrl.run.loop import prepare_run, train
    from agentrl.run.services import open_services
    from agentrl.run.state import RunState
    from agentrl.train.checkpoint import latest_checkpoint

    checkpoint = latest_checkpoint(folder.checkpoints) if resume else None
    state = RunState.from_bytes(checkpoint.state) if checkpoint else RunState()
    keep_tokenizer(checkpoint.path if checkpoint else Path(model_location(config.policy.model)), folder)
    recorder.tell(
        EventKind.RUN_STARTED,
        run=folder.path.name,
        steps=config.steps,
        resumed=resume,
        resumed_from=state.step,
        versions=installed_versions(),
    )
    recorder.phase(Phase.START, step=state.step)
    path = checkpoint.path if checkpoint else None
    # A resumed run must not sample the stream of its beginning again.
    seed = config.seed + _SEED_STRIDE * state.step
    async with open_services(config, folder, recorder, env, train=True, resume=path, sampling_seed=seed) as services:
        with GroupBuffer(folder.buffer) as buffer:
            run = prepare_run(config, folder, recorder, services, buffer, state)
            await train(run, resumed=checkpoint is not None)


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
    words = [*overrides, f"--environment.name={environment}", *([f"--policy.model={model}"] if model else [])]
    config = load_config(
        preset=preset, file=file, overrides=words, run_dir=str(run_dir or Path("runs") / f"eval-{int(time.time())}")
    )
    env = load_environment(config.environment)
    if dry_run:
        print(dump_toml(config), end="")
        return 0
    folder = open_run_folder(config.run_dir, resume=False)
    try:
        log_to_file(folder)
        folder.config.write_text(dump_toml(config), encoding="utf-8")
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
        return 0
    finally:
        folder.close()


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
    from agentrl.policy import model_location
    from agentrl.run.evaluate import evaluate, prediction
    from agentrl.run.reference import grade_references
    from agentrl.run.services import open_services

    recorder.tell(EventKind.RUN_STARTED, run=folder.path.name, steps=0, versions=installed_versions())
    if reference:
        return await grade_references(config, folder, recorder, env, split=split, tasks=tasks)
    keep_tokenizer(Path(model_location(config.policy.model)), folder)
    async with open_services(config, folder, recorder, env, train=False, sampling_seed=config.seed) as services:
        await services.client.label_version(0)
        rate, groups = await evaluate(services, recorder, config, split=split, tasks=tasks, samples=samples, step=0)
    every = [trajectory for group in groups for trajectory in group.trajectories]
    with (folder.path / "predictions.jsonl").open("w", encoding="utf-8", errors="surrogateescape") as out:
        for trajectory in every:
            out.write(json.dumps(prediction(trajectory, model=config.policy.model)) + "\n")
    calls = [t.info.get("tool_calls", 0.0) for t in every]
    return {
        "split": split.value,
        "solve": rate.solve,
        "low": rate.interval.low,
        "high": rate.interval.high,
        "n": rate.n,
        "tasks": len(groups),
        "samples": samples,
        "pass_at_k": {str(k): [v.value, v.low, v.high] for k, v in rate.pass_at_k.items()},
        "infrastructure_failures": len(every) - rate.n,
        "submit_rate": sum(t.info.get("submitted", 0.0) for t in every) / max(1, len(every)),
        "tool_calls_mean": sum(calls) / max(1, len(calls)),
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
    env = load_environment(config.environment)
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

"""What `agentrl eval` does: resolve the configuration, open the run folder, evaluate, report, exit code."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.config import RunConfig
from agentrl.config.load import dump_toml, leaf_keys, load_config, parse_overrides
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.run.command import check_machine, log_to_file
from agentrl.run.environments import load_environment
from agentrl.run.folder import RunFolder, open_run_folder
from agentrl.run.recorder import Recorder, installed_versions, keep_tokenizer
from agentrl.run.signals import INTERRUPTED, Interrupted, run_interruptible
from agentrl.trajectory import Split
from agentrl.wire import Environment, EventKind

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

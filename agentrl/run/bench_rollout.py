"""`agentrl bench rollout`: generation alone. The real loop, servers, sandboxes and deliveries; training takes a given
time and changes nothing.

    train   wait S seconds; no optimizer step, so that the same weights are published again
    publish the real trainer's: a delivery costs what it costs
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.config import RunConfig
from agentrl.config.load import dump_toml, leaf_keys, load_config, parse_overrides
from agentrl.errors import ConfigError, RunFailedError
from agentrl.run.bench_comparison import rounded
from agentrl.run.bench_figures import device_hours, devices_of, phase_means, run_figures
from agentrl.run.environments import load_environment
from agentrl.run.folder import RunFolder, open_run_folder
from agentrl.run.recorder import Recorder, installed_versions, keep_tokenizer
from agentrl.run.resume import Start
from agentrl.run.signals import INTERRUPTED, Interrupted, run_interruptible
from agentrl.telemetry.run_data import load_runs
from agentrl.telemetry.writing import write_whole
from agentrl.wire import Batch, Environment, EventKind, Saved, StepResult, TrainedSequence, Trainer, WeightManifest
from agentrl.wire.events import Phase

_NO_EVALUATION = ("--eval.every-steps=0", "--eval.fresh-tasks=0", "--eval.unseen-tasks=0")


class SimulatedTrainer:
    """A `Trainer` that takes `train_s` seconds for a batch and learns nothing from it; all else is `inner`'s."""

    def __init__(self, inner: Trainer, *, train_s: float) -> None:
        self._inner = inner
        self._train_s = train_s

    async def train(self, batch: Batch, *, timeout_s: float) -> StepResult:
        """Wait; the record says of every token that it was not trained."""
        await asyncio.sleep(min(self._train_s, timeout_s))
        return StepResult(
            step=batch.step,
            updates=0,
            metrics={"time/train_s": self._train_s},
            sequences=tuple(
                TrainedSequence(
                    trajectory_id=sequence.trajectory_id,
                    segment=sequence.segment,
                    weights=np.zeros(len(sequence.token_ids), np.float32),
                    mask=np.zeros(len(sequence.token_ids), np.bool_),
                )
                for sequence in batch.sequences
            ),
        )

    async def publish(self, version: int, *, timeout_s: float) -> WeightManifest:
        return await self._inner.publish(version, timeout_s=timeout_s)

    async def save(self, step: int, state: bytes, *, score: float | None, timeout_s: float) -> Saved:
        return await self._inner.save(step, state, score=score, timeout_s=timeout_s)


def rollout_command(
    *,
    environment: str,
    train_s: float,
    deliveries: int | None,
    preset: str | None,
    file: Path | None,
    run_dir: Path | None,
    out: Path | None,
    dry_run: bool,
    plain: bool,
    overrides: Sequence[str],
) -> int:
    """Generate for `deliveries` batches, print the figures. Raises AgentRLError; returns the exit code."""
    _refuse_idle(overrides)
    words = [*overrides, *_NO_EVALUATION, f"--environment.name={environment}"]
    words += [] if deliveries is None else [f"--steps={deliveries}"]
    folder_path = run_dir or Path("runs") / f"bench-rollout-{int(time.time())}"
    config = load_config(preset=preset, file=file, overrides=words, run_dir=str(folder_path))
    if train_s >= config.train.step_timeout_s:
        raise ConfigError(
            f"training of {train_s:g} s reaches train.step_timeout_s ({config.train.step_timeout_s:g})",
            where="--simulate-train",
            remedy="lower the first or raise the second",
        )
    env = load_environment(config.environment, recipes=config.sandbox.recipes)
    if dry_run:
        print(dump_toml(config), end="")
        return 0
    from agentrl.run.command import check_machine

    check_machine(config, train=True)
    folder = open_run_folder(config.run_dir, resume=False)
    try:
        folder.write_config(dump_toml(config))
        with Recorder(folder, steps=config.steps, alarms=config.alarms, plain=plain) as recorder:
            run_interruptible(_generate(config, folder, recorder, env, train_s=train_s))
    except Interrupted:
        print("agentrl: interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        folder.close()
    found = figures(folder.path, train_s=train_s)
    _show(found)
    if out is not None:
        write_whole(out, json.dumps(found, indent=1, allow_nan=False) + "\n")
        print(f"figures: {out}")
    return 0


def _refuse_idle(overrides: Sequence[str]) -> None:
    """Raise ConfigError for a setting of evaluations, of which there are none."""
    for key in leaf_keys(parse_overrides(overrides)):
        if key.startswith("eval."):
            raise ConfigError(
                f"`{key}` has no effect in `agentrl bench rollout`, which evaluates nothing",
                where="command line",
                remedy="leave it out",
            )


async def _generate(
    config: RunConfig, folder: RunFolder, recorder: Recorder, env: Environment, *, train_s: float
) -> None:
    from agentrl.policy import local_model
    from agentrl.rollout.buffer import GroupBuffer
    from agentrl.run.command import log_to_file
    from agentrl.run.loop import prepare_run, train
    from agentrl.run.services import open_services

    began = time.monotonic()
    log_to_file(folder)
    keep_tokenizer(local_model(config.policy.model), folder)
    recorder.tell(EventKind.RUN_STARTED, run=folder.path.name, steps=config.steps, versions=installed_versions())
    recorder.phase(Phase.START, step=0)
    with GroupBuffer(folder.buffer) as buffer:
        async with open_services(
            config,
            folder,
            recorder,
            env,
            train=True,
            sampling_seed=config.seed,
            wrap_trainer=lambda process: SimulatedTrainer(process, train_s=train_s),
        ) as services:
            await train(prepare_run(config, folder, recorder, services, buffer, Start()))
    recorder.tell(EventKind.RUN_FINISHED, outcome="done", reason="", minutes=(time.monotonic() - began) / 60)


def figures(folder: Path, *, train_s: float) -> dict[str, Any]:
    """What a run folder says about its generation, as plain JSON. Raises `RunFailedError` where no step was done."""
    (run,) = load_runs([folder])
    rows = [row for row in run.metrics if row.step > 0]
    if not rows:
        raise RunFailedError("no batch was generated", where=str(folder), remedy="see its logs/")
    return {
        "benchmark": "rollout",
        "schedule": run.setting("rollout.schedule", "sync"),
        "simulated_train_s": train_s,
        "deliveries": len(rows),
        "devices": devices_of(run),
        "device_hours": rounded(device_hours(run, rows)[-1]),
        "cores": len(os.sched_getaffinity(0)),
        "figures": {name: rounded(value) for name, value in sorted(run_figures(run, rows).items())},
        "phases_s": {name: rounded(value) for name, value in phase_means(rows).items()},
        "run": str(folder),
    }


def _show(found: dict[str, Any]) -> None:
    print(f"{found['deliveries']} deliveries, {found['schedule']}, {found['simulated_train_s']:g} s of training each")
    for title, unit in (("figures", ""), ("phases_s", " s per delivery")):
        for name, value in found[title].items():
            print(f"  {name:<48} {value:>12.6g}{unit}")

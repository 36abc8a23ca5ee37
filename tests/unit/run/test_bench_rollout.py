"""`agentrl bench rollout`: a trainer that learns nothing in a given time, and what the command makes of a run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy_world
from bench_runs import step
from toy_parts import ToyTrainer
from toy_world import World

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.run import bench_rollout
from agentrl.run.bench_rollout import SimulatedTrainer, rollout_command
from agentrl.telemetry.metrics import MetricsWriter
from agentrl.wire import Batch, Trainer, TrainSequence


def sequence(name: str, length: int) -> TrainSequence:
    return TrainSequence(
        trajectory_id=name,
        group_id="g",
        segment=0,
        update=0,
        token_ids=np.arange(length, dtype=np.int32),
        pg_mask=np.ones(length, np.bool_),
        advantages=np.ones(length, np.float32),
        behaviour_logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
    )


def test_training_takes_its_time_and_nothing_is_trained(tmp_path: Path) -> None:
    trainer = SimulatedTrainer(ToyTrainer(tmp_path, lambda _: None), train_s=0.2)
    batch = Batch(step=3, version=2, updates=2, temperature=1.0, sequences=(sequence("a", 4), sequence("b", 6)))
    began = time.monotonic()
    answer = asyncio.run(trainer.train(batch, timeout_s=5))
    assert 0.2 <= time.monotonic() - began < 2
    assert (answer.step, answer.updates, answer.metrics) == (3, 0, {"time/train_s": 0.2})
    assert [(s.trajectory_id, len(s.weights), len(s.mask)) for s in answer.sequences] == [("a", 4, 4), ("b", 6, 6)]
    assert not any(s.weights.any() or s.mask.any() for s in answer.sequences)


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_whole_run_delivers_the_same_weights_again(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """The real loop, engine, buffer and recorder take the simulated trainer for a real one."""

    def simulated(*arguments: Any, **options: Any) -> Trainer:
        return SimulatedTrainer(ToyTrainer(*arguments, **options), train_s=0.0)  # type: ignore[arg-type]

    monkeypatch.setattr(toy_world, "ToyTrainer", simulated)
    settings = {**toy_world.SETTINGS, "rollout": {**toy_world.SETTINGS["rollout"], "schedule": schedule}}
    toy = world(settings=settings)
    toy.sit()
    state = toy.last_state()
    assert (state["step"], state["version"]) == (5, 5), "a delivery after each batch"
    assert state["weights"] == 1.0
    trained = [each for name, rows in toy.rows().items() if "train" in name for row in rows for each in row[-1] or ()]
    assert trained
    assert not any(any(advantages) for _, advantages in trained), "no token was trained"


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command, whose run writes two steps; its configuration is kept in `seen`."""

    def call(*overrides: str, train_s: float = 2.0, **more: Any) -> int:
        async def generate(config: RunConfig, folder: Any, recorder: Any, env: Any, *, train_s: float) -> None:
            with MetricsWriter(folder.metrics) as metrics:
                metrics.write(0, {})
                for number in range(1, config.steps + 1):
                    metrics.write(number, step(18, tokens=500.0, concurrency=9.0))

        monkeypatch.setattr(bench_rollout, "_generate", generate)
        settings: dict[str, Any] = {"deliveries": 2, "preset": "schedules", "file": None, "out": None, **more}
        return rollout_command(
            environment="swe-gym",
            train_s=train_s,
            run_dir=tmp_path / "run",
            dry_run=False,
            plain=True,
            overrides=overrides,
            **settings,
        )

    return call


def test_the_figures_of_generation(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results" / "rollout.json"
    assert bench("--rollout.schedule=async", out=out) == 0
    found = json.loads(out.read_text())
    assert (found["schedule"], found["simulated_train_s"], found["deliveries"], found["devices"]) == (
        "async",
        2.0,
        2,
        2,
    )
    assert found["device_hours"] == 0.02
    assert found["figures"] == {
        "concurrency/per_replica_mean": 9.0,
        "throughput/tokens_per_device_minute": 500.0,
    }
    shown = capsys.readouterr().out
    assert "2 deliveries, async, 2 s of training each" in shown
    assert "throughput/tokens_per_device_minute" in shown


def test_nothing_is_evaluated(bench: Callable[..., int], tmp_path: Path) -> None:
    bench()
    config = (tmp_path / "run" / "config.toml").read_text()
    for line in ("every_steps = 0", "fresh_tasks = 0", "unseen_tasks = 0"):
        assert line in config
    with pytest.raises(ConfigError, match=r"`eval.fresh_tasks` has no effect"):
        bench("--eval.fresh-tasks=3")


def test_training_that_reaches_its_deadline_is_refused(bench: Callable[..., int]) -> None:
    with pytest.raises(ConfigError, match=r"reaches train\.step_timeout_s"):
        bench("--train.step-timeout-s=10", train_s=10.0)

"""K14 with the real trainer: `async` with S = 0 gives the losses of `sync`, to 1e-6, on a seeded run.

The policy is the toy's, whose tokens depend on the weights that were delivered; batches, gradients, optimizer and
published weights are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toy_world
from toy_parts import ToyTrainer

from agentrl.config import CheckpointConfig, RunConfig
from agentrl.policy import local_model
from agentrl.train.trainer import Trainer
from agentrl.wire import Batch, StepResult


class TorchTrainer(ToyTrainer):
    """The real trainer on the shipped policy; what the toy policy loads is a checksum of its weights."""

    def __init__(self, folder: Path, tick: Callable[[str], None], weights: float, *, version: int) -> None:
        super().__init__(folder, tick, weights, version)
        config = RunConfig.model_validate(SETTINGS)
        self.trainer = Trainer.load(
            model_folder=local_model("tiny"),
            config=config.train,
            checkpoint=CheckpointConfig(),
            checkpoint_folder=folder / "torch",
            publish_folder=folder / "weights",
        )

    async def train(self, batch: Batch, *, timeout_s: float) -> StepResult:
        assert batch.version == self.version
        result = self.trainer.train(batch)
        self.losses.append(result.metrics["loss/policy"])
        self.batches.append(batch)
        self.weights = round(sum(float(p.detach().double().sum()) for p in self.trainer.model.parameters()), 9)
        return result


SETTINGS: dict[str, Any] = {
    **toy_world.SETTINGS,
    "steps": 4,
    "train": {"updates_per_step": 2, "correction": "token-clamp-2", "optimizer": {"learning_rate": 1e-3}},
    "eval": {"every_steps": 0, "fresh_tasks": 0, "unseen_tasks": 0},
}


def test_k14_staleness_0_gives_the_losses_of_sync(world: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_world, "ToyTrainer", TorchTrainer)
    runs = {}
    for name, rollout in (
        ("sync", {}),
        ("async 0", {"schedule": "async", "max_staleness": 0}),
        ("async 1", {"schedule": "async", "max_staleness": 1}),
    ):
        run = world(settings={**SETTINGS, "rollout": {**SETTINGS["rollout"], **rollout}})
        run.sit()
        runs[name] = run
    sync, zero, one = (runs[name].trainer for name in ("sync", "async 0", "async 1"))
    assert len(sync.losses) == 4
    assert len(set(sync.losses)) == 4
    assert zero.losses == pytest.approx(sync.losses, abs=1e-6)
    assert zero.weights == sync.weights
    assert one.losses[0] == pytest.approx(sync.losses[0], abs=1e-6)  # the first batch is on-policy in every schedule
    assert one.losses[1:] != pytest.approx(sync.losses[1:], abs=1e-6)

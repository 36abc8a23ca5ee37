"""The loop on a seeded toy: what a step does, what a crash may never do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from agentrl.errors import RunFailedError, SandboxStartError
from agentrl.telemetry.metrics import read_metrics
from agentrl.trajectory import read_trajectories
from agentrl.wire import EventKind

World = Callable[..., Any]


def everything(world: Any) -> dict[str, Any]:
    """All that a run leaves, but for clocks."""
    return {"metrics": world.metrics(), "rows": world.rows(), "state": world.last_state(), "waiting": world.waiting}


def test_a_run_does_every_step_once(world: World) -> None:
    whole = world()
    run = whole.sit()
    assert (run.step, run.version, whole.waiting) == (5, 5, [])
    assert sorted(whole.metrics()) == [0, 1, 2, 3, 4, 5]
    trained = {f"step_{step:06d}-train.parquet" for step in range(1, 6)}
    assert set(whole.rows()) == trained | {f"step_{step:06d}-eval-fresh.parquet" for step in (0, 2, 4, 5)}
    tasks = [row[1] for step in range(1, 6) for row in whole.rows()[f"step_{step:06d}-train.parquet"]]
    assert list(dict.fromkeys(tasks)) == [f"train-task-0-{index}" for index in range(15)]
    assert [f"{m['loss']:.6f}" for s, m in whole.metrics().items() if s] == [f"{x:.6f}" for x in whole.trainer.losses]
    assert len(set(whole.trainer.losses)) == 5


def test_k14_every_trained_token_carries_the_trainers_version(world: World) -> None:
    """(That the trainer holds the version too, the toy trainer checks at every batch.)"""
    whole = world()
    whole.sit()
    assert [batch.version for batch in whole.trainer.batches] == [0, 1, 2, 3, 4]
    for batch in whole.trainer.batches:
        for sequence in batch.sequences:
            assert set(sequence.versions[sequence.pg_mask].tolist()) == {batch.version}
    assert {m["staleness/max"] for s, m in whole.metrics().items() if s} == {0.0}


def test_k27_loaded_weights_are_delivered_before_the_first_rollout(world: World, toy: Any) -> None:
    run = world(settings={**toy.settings, "steps": 2})
    run.sit()
    run.settings = {**toy.settings, "steps": 4}
    saved = run.start()[1]
    run.sit()
    first = next(i for i, asked in enumerate(run.policy.asked) if asked.startswith("generate"))
    assert run.policy.asked[:first] == [
        "control /pause?mode=keep",
        "control /start_weight_update",
        "control /update_weights",
        "control /finish_weight_update",
        "control /resume",
    ]
    assert run.policy.asked[first].endswith("version 2")
    assert saved != 1.0


def test_k49_a_run_in_two_sittings_is_the_uninterrupted_one(world: World, toy: Any) -> None:
    whole = world(settings={**toy.settings, "steps": 4})
    whole.sit()
    halves = world(settings={**toy.settings, "steps": 2})
    halves.sit()
    losses = halves.trainer.losses
    halves.settings = whole.settings
    halves.sit()
    assert losses + halves.trainer.losses == whole.trainer.losses
    # The first sitting ended with an evaluation and a checkpoint at its last step, as the whole run had at step 2.
    assert everything(halves) == everything(whole)


@pytest.mark.parametrize("dry_step", [False, True])
def test_k49_resumed_equals_uninterrupted_wherever_it_crashed(world: World, toy: Any, dry_step: bool) -> None:
    """Every effect of the loop is the last one once: mid-generation, after training, after rows, while saving …

    With and without a step in which nothing is trained, so that the version stays.
    """

    def reward(task: Any, patch: str) -> float:
        dull = dry_step and task.id in ("train-task-0-2", "train-task-0-3")  # the second step's
        return 0.0 if dull else toy.number(patch) % 1000 / 1000

    small = {
        **toy.settings,
        "steps": 4,
        "rollout": {"groups": 2, "group_size": 2, "concurrency": 3},
        "eval": {"every_steps": 0, "fresh_tasks": 1, "unseen_tasks": 0},
    }
    fields = {"settings": small, "environment": toy.Environment(reward=reward)}
    whole = world(**fields)
    assert whole.sit().version == (3 if dry_step else 4)
    expected, places = everything(whole), list(whole.ticks)
    assert {"generate", "trained", "publish", "update", "rows written", "metrics", "save", "saved"} <= set(places)
    for crash_at, place in enumerate(places, start=1):
        if place == "generate" and (dry_step or crash_at % 2):
            continue  # generation is the same with a dry step; and every second place of it will do
        crashed = world(**fields)
        with pytest.raises(toy.crash):
            crashed.sit(crash_at=crash_at)
        assert crashed.ticks[crash_at - 1] == place
        crashed.sit()
        assert everything(crashed) == expected, f"after a crash at {place} (tick {crash_at})"


def test_k49_finished_groups_of_a_broken_step_are_not_generated_again(world: World, toy: Any) -> None:
    whole = world()
    whole.sit()
    # The last rollout of step 1: two groups are whole by then.
    generated = [asked for asked in whole.policy.asked if asked.startswith("generate")]
    last = max(i for i, asked in enumerate(generated) if asked.startswith("generate train-000002"))
    assert generated[last].endswith("version 0")
    crash_at = [i for i, place in enumerate(whole.ticks, 1) if place == "generate"][last]
    crashed = world()
    with pytest.raises(toy.crash):
        crashed.sit(crash_at=crash_at)
    crashed.sit()
    again = [asked for asked in crashed.policy.asked if asked.endswith("version 0") and "eval" not in asked]
    assert again
    assert not any("train-000000" in asked or "train-000001" in asked for asked in again)
    assert everything(crashed) == everything(whole)


@pytest.mark.parametrize("change", [{"groups": 2}, {"group_size": 2}, {"temperature": 0.5}])
def test_finished_groups_that_no_longer_fit_are_generated_again(
    world: World, toy: Any, change: dict[str, float]
) -> None:
    """A resume with other sampling settings never trains groups that were sampled under the old ones."""
    crashed = world()
    with pytest.raises(toy.crash):
        crashed.sit(crash_at=crashed_in_third_step(world))
    crashed.settings = {**toy.settings, "rollout": {**toy.settings["rollout"], **change}}
    run = crashed.sit()
    assert run.step == 5
    assert crashed.waiting == []
    size = change.get("group_size", 3)
    for batch in crashed.trainer.batches:
        members: dict[str, set[str]] = {}
        for sequence in batch.sequences:
            members.setdefault(sequence.group_id, set()).add(sequence.trajectory_id)
        assert {len(names) for names in members.values()} == {size}
        assert len(members) <= change.get("groups", 3)
    last = [t for t, _ in read_trajectories(sorted(crashed.path.glob("trajectories/step_000003-train*")))]
    assert {t.temperature for t in last} == {change.get("temperature", 1.0)}


def crashed_in_third_step(world: World) -> int:
    """A tick after step 3's groups are all in the buffer, step 2's checkpoint being the last."""
    whole = world()
    whole.sit()
    trained = [i for i, place in enumerate(whole.ticks, 1) if place == "trained"]
    return trained[2]


def test_k18_nothing_to_learn_from_warns_then_stops_with_the_reason(world: World, toy: Any) -> None:
    dull = world(environment=toy.Environment(reward=lambda *_: 1.0))
    with pytest.raises(RunFailedError, match="3 steps in a row with nothing to learn from") as caught:
        dull.sit()
    assert "equal rewards" in caught.value.what
    assert caught.value.exit_code == 1
    assert dull.trainer.batches == []
    notes = [data["text"] for data in dull.events(EventKind.NOTE)]
    assert any("2 steps in a row" in note for note in notes)
    # The step that ended the run is there to be looked at.
    assert sorted(dull.metrics()) == [0, 1, 2, 3]
    assert "step_000003-train.parquet" in dull.rows()
    assert dull.metrics()[2]["groups/zero_variance"] == 3
    assert dull.metrics()[2]["policy/version"] == 0


def test_k18_the_spell_is_counted_over_a_resume(world: World, toy: Any) -> None:
    dull = world(environment=toy.Environment(reward=lambda *_: 1.0))
    for _ in range(2):  # the checkpoint of step 2 has counted two dry steps
        with pytest.raises(RunFailedError, match="3 steps in a row"):
            dull.sit()
    assert sorted(dull.metrics()) == [0, 1, 2, 3]


def test_a_step_whose_every_rollout_failed_names_the_causes(world: World, toy: Any) -> None:
    def broken(label: str) -> None:
        if label.startswith("train"):
            raise SandboxStartError("the daemon has a headache")

    sick = world(pool=toy.Pool(on_lease=broken))
    with pytest.raises(RunFailedError, match="every rollout of step 1 failed") as caught:
        sick.sit()
    assert "the daemon has a headache" in caught.value.what
    assert len(str(caught.value).splitlines()) <= 12
    assert "step_000001-train.parquet" in sick.rows()
    sick.pool.on_lease = None
    assert sick.sit().step == 5
    whole = world()
    whole.sit()
    assert everything(sick) == everything(whole)


def test_k42_infrastructure_failures_count_nowhere(world: World, toy: Any) -> None:
    """A member that infrastructure failed has no reward, is not trained, and leaves the mean."""

    def broken(label: str) -> None:
        if label == "train-000000-1":
            raise SandboxStartError("gone")

    run = world(pool=toy.Pool(on_lease=broken))
    run.sit()
    items = list(read_trajectories([run.path / "trajectories" / "step_000001-train.parquet"]))
    lost = [t for t, _ in items if t.outcome.kind.value == "infrastructure"]
    assert [t.trajectory_id for t in lost] == ["train-000000-1"]
    assert lost[0].reward is None
    assert "gone" in lost[0].outcome.cause
    assert all(s.trajectory_id != "train-000000-1" for s in run.trainer.batches[0].sequences)
    rewards = [t.reward for t, _ in items if t.reward is not None]
    assert len(rewards) == 8
    assert run.metrics()[1]["reward/mean"] == pytest.approx(np.mean(rewards))
    assert run.metrics()[1]["rollout/infrastructure_failures"] == 1


def test_k33_the_reward_counts_once_a_rollout(world: World) -> None:
    """Members have 1, 2 and 3 segments; the mean is over rollouts."""
    run = world()
    run.sit()
    for step in range(1, 6):
        items = list(read_trajectories([run.path / "trajectories" / f"step_{step:06d}-train.parquet"]))
        assert sorted({len(t.segments) for t, _ in items}) == [1, 2, 3]
        assert len(items) == 9
        assert run.metrics()[step]["reward/mean"] == pytest.approx(np.mean([t.reward for t, _ in items]))
        by_segment = np.repeat([t.reward for t, _ in items], [len(t.segments) for t, _ in items])
        if step == 1:
            assert by_segment.mean() != pytest.approx(run.metrics()[1]["reward/mean"])
        assert run.metrics()[step]["tokens/agent"] == sum(t.agent_tokens for t, _ in items)


def test_alarms_are_told(world: World) -> None:
    """An episode that never submits is graded 0, and said to be."""
    lost = world(submits=False)
    with pytest.raises(RunFailedError):
        lost.sit()
    alarms = lost.events(EventKind.ALARM)
    assert {(a["step"], a["name"], a["value"], a["bound"]) for a in alarms} == {
        (1, "agent/submit_rate", 0.0, 0.8),
        (2, "agent/submit_rate", 0.0, 0.8),
        (3, "agent/submit_rate", 0.0, 0.8),
    }


def test_k33_generation_is_measured_alone(world: World, toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that the trainer takes is no part of generation, nor of its mean concurrency."""
    slow_s, train = 0.5, toy.Trainer.train

    async def slowly(self: Any, batch: Any, *, timeout_s: float) -> Any:
        await asyncio.sleep(slow_s)
        return await train(self, batch, timeout_s=timeout_s)

    monkeypatch.setattr(toy.Trainer, "train", slowly)
    whole = world(settings={**toy.settings, "steps": 3})
    whole.sit()
    for row in read_metrics(whole.path / "metrics.jsonl")[1:]:
        values = row.values
        phases = sum(values[f"time/{name}_s"] for name in ("generate", "tool", "score", "setup"))
        assert phases <= values["time/step_s"] - slow_s

"""The same loop with an asynchronous schedule, on the seeded toy: bounds, completeness, faults from the side."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from agentrl.errors import PolicyDeadError, RunFailedError, TrainerError
from agentrl.policy import ServerExit
from agentrl.wire import EventKind

World = Callable[..., Any]
NO_EVALUATION = {"every_steps": 0, "fresh_tasks": 0, "unseen_tasks": 0}


def settings(toy: Any, *, steps: int = 5, updates: int = 1, **rollout: Any) -> dict[str, Any]:
    chosen = {**toy.settings["rollout"], "schedule": "async", **rollout}
    return {**toy.settings, "steps": steps, "rollout": chosen, "train": {"updates_per_step": updates}}


def versions_of(world: Any) -> list[set[int]]:
    """How many versions the trained tokens of each batch are behind."""
    return [
        {batch.version - int(v) for s in batch.sequences for v in s.versions[s.pg_mask]}
        for batch in world.trainer.batches
    ]


def slow_training(toy: Any, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    train = toy.Trainer.train

    async def slowly(self: Any, batch: Any, *, timeout_s: float) -> Any:
        await asyncio.sleep(seconds)
        return await train(self, batch, timeout_s=timeout_s)

    monkeypatch.setattr(toy.Trainer, "train", slowly)


@pytest.mark.parametrize("updates", [1, 2])
def test_k14_staleness_0_is_sync_in_truth(world: World, toy: Any, updates: int) -> None:
    """The same losses, rows and weights, although training and generation are on devices of their own."""
    sync = world(settings={**toy.settings, "train": {"updates_per_step": updates}})
    sync.sit()
    asynchronous = world(settings=settings(toy, updates=updates, max_staleness=0))
    asynchronous.sit()
    assert asynchronous.trainer.losses == pytest.approx(sync.trainer.losses, abs=1e-6)
    assert asynchronous.rows() == sync.rows()
    assert asynchronous.trainer.weights == sync.trainer.weights
    assert set().union(*versions_of(asynchronous)) == {0}


@pytest.mark.parametrize("bound", [1, 2])
def test_k16_rollouts_go_on_while_the_trainer_trains_and_no_token_exceeds_the_bound(
    world: World, toy: Any, monkeypatch: pytest.MonkeyPatch, bound: int
) -> None:
    slow_training(toy, monkeypatch, 0.05)
    run = world(settings=settings(toy, steps=6, max_staleness=bound))
    run.sit()
    behind = versions_of(run)
    assert len(behind) == 6
    assert max(set().union(*behind)) == bound  # overlapped in truth, and bounded
    assert [m["staleness/max"] for s, m in run.metrics().items() if s] == [max(b) for b in behind]
    trained = Counter(s.trajectory_id for batch in run.trainer.batches for s in batch.sequences if s.segment == 0)
    assert set(trained.values()) == {1}
    assert run.waiting == []


def test_every_task_is_settled_once_and_none_is_generated_in_vain(
    world: World, toy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_training(toy, monkeypatch, 0.02)
    run = world(settings=settings(toy, steps=5, max_staleness=2))
    run.sit()
    rows = [row[1] for name, found in run.rows().items() if "-train" in name for row in found]
    assert Counter(rows) == dict.fromkeys([f"train-task-0-{index}" for index in range(15)], 3)
    asked = {name.split()[1].split("/")[0].rpartition("-")[0] for name in run.policy.asked if "generate train" in name}
    assert len(asked) == 15


def test_k49_a_crashed_asynchronous_run_loses_and_doubles_nothing(world: World, toy: Any) -> None:
    """Wherever it crashed: every task once, in the end, and no token out of bounds (the scheduler would raise)."""
    small = settings(toy, steps=4, max_staleness=1, groups=2, group_size=2, concurrency=3)
    small |= {"eval": {"every_steps": 0, "fresh_tasks": 0}, "checkpoint": {"every_steps": 2}}
    whole = world(settings=small)
    whole.sit()
    places = list(whole.ticks)
    for crash_at in range(3, len(places), 3):
        crashed = world(settings=small)
        with pytest.raises(toy.crash):
            crashed.sit(crash_at=crash_at)
        assert crashed.sit().step == 4
        rows = [row[0] for name, found in crashed.rows().items() if "-train" in name for row in found]
        expected = [f"train-{index:06d}-{member}" for index in range(8) for member in range(2)]
        assert sorted(rows) == expected, f"after a crash at {places[crash_at - 1]} (tick {crash_at})"
        assert crashed.waiting == []


def test_a_resumed_run_may_take_another_schedule(world: World, toy: Any) -> None:
    """From S = 2 to sync in the middle: what waits is too old, and is generated again, before anything new."""
    run = world(settings=settings(toy, steps=2, max_staleness=2))
    run.settings["checkpoint"] = {"every_steps": 1}
    run.settings |= {"steps": 6}
    with pytest.raises(toy.crash):
        run.sit(crash_at=[i for i, place in enumerate(_ticks(world, run.settings), 1) if place == "saved"][2] + 1)
    run.settings = {**toy.settings, "steps": 6}
    assert run.sit().step == 6
    rows = [row[1] for name, found in run.rows().items() if "-train" in name for row in found]
    assert Counter(rows) == dict.fromkeys([f"train-task-0-{index}" for index in range(18)], 3)
    assert set().union(*versions_of(run)) == {0}


def _ticks(world: World, settings: Any) -> list[str]:
    whole = world(settings=settings)
    whole.sit()
    return list(whole.ticks)


@pytest.mark.parametrize("bound", [0, 1])
def test_k22_oversampled_groups_are_dropped_before_the_pause_and_accounted_for(
    world: World, toy: Any, bound: int
) -> None:
    """The figures of all steps are the scheduler's ledger, the last step's drops and unfinished groups among them."""
    run = world(settings=settings(toy, steps=4, max_staleness=bound, oversample=2.0))
    counts = run.sit().scheduler.counts()
    assert all(len({s.group_id for s in batch.sequences}) <= 3 for batch in run.trainer.batches)
    assert max(set().union(*versions_of(run))) <= bound
    steps = [m for s, m in run.metrics().items() if s]
    told = {name: sum(m[f"groups/{name}"] for m in steps) for name in ("submitted", "accepted", "stale", "failed")}
    dull = sum(m["groups/zero_variance"] + m["groups/too_few_valid"] for m in steps)
    assert counts.running == counts.queued == 0
    assert (told["submitted"], told["accepted"], told["failed"]) == (counts.submitted, counts.accepted, counts.failed)
    assert told["stale"] + dull == counts.filtered
    assert told["stale"] > 0
    assert run.waiting == []
    rows = [row[0] for name, found in run.rows().items() if "-train" in name for row in found]
    assert len(rows) == len(set(rows))


def test_events_name_the_step_whose_batch_a_rollout_is_made_for(world: World, toy: Any) -> None:
    """Also after a resume; `done` counts from 1 in every step."""
    run = world(settings={**toy.settings, "steps": 2, "eval": NO_EVALUATION})
    run.sit()
    run.settings = run.settings | {"steps": 4}
    run.sit()
    told = [(event["step"], event["done"]) for event in run.events(EventKind.ROLLOUT_FINISHED)]
    assert told == [(step, done) for step in (1, 2, 3, 4) for done in range(1, 10)]


def test_a_step_without_training_tells_no_staleness(world: World, toy: Any) -> None:
    """The figures of the batch before must not stand for one that does not exist."""

    def reward(task: Any, patch: str) -> float:
        dull = task.id in ("train-task-0-3", "train-task-0-4", "train-task-0-5")  # the second step's
        return 0.0 if dull else toy.number(patch) % 1000 / 1000

    run = world(settings={**toy.settings, "steps": 3}, environment=toy.Environment(reward=reward))
    run.sit()
    told = {step: {name for name in m if name.startswith("staleness/")} for step, m in run.metrics().items() if step}
    assert told[2] == set()
    assert told[1] == told[3] == {f"staleness/{name}" for name in ("mean", "max", "in_flight", "in_queue")}


def test_filtered_groups_are_replaced_where_asked(world: World, toy: Any) -> None:
    """Every batch has its P groups, and the rows of those that taught nothing are written once."""

    def reward(task: Any, patch: str) -> float:
        return 0.0 if int(task.id.rpartition("-")[2]) % 2 else toy.number(patch) % 1000 / 1000

    run = world(
        settings=settings(toy, steps=3, max_staleness=1, replace_filtered=True),
        environment=toy.Environment(reward=reward),
    )
    run.sit()
    assert [len({s.group_id for s in batch.sequences}) for batch in run.trainer.batches] == [3, 3, 3]
    assert sum(m["groups/zero_variance"] for s, m in run.metrics().items() if s) >= 6
    rows = [row[0] for name, found in run.rows().items() if "-train" in name for row in found]
    assert len(rows) == len(set(rows))


def test_k18_replacing_for_ever_stops_with_the_reason(world: World, toy: Any) -> None:
    dull = world(
        settings=settings(toy, max_staleness=1, replace_filtered=True),
        environment=toy.Environment(reward=lambda *_: 1.0),
    )
    with pytest.raises(RunFailedError, match="3 steps in a row with nothing to learn from"):
        dull.sit()
    assert any("2 steps in a row" in note["text"] for note in dull.events(EventKind.NOTE)), "warned before"


def test_k17_replaced_groups_are_written_once_wherever_the_run_crashed(world: World, toy: Any) -> None:
    """A replaced group has no place, so that no checkpoint names it: it is settled all the same."""

    def reward(task: Any, patch: str) -> float:
        return 0.0 if int(task.id.rpartition("-")[2]) % 2 else toy.number(patch) % 1000 / 1000

    small = settings(toy, steps=3, max_staleness=1, groups=2, group_size=2, concurrency=3, replace_filtered=True)
    small |= {"eval": NO_EVALUATION, "checkpoint": {"every_steps": 1}}
    fields = {"settings": small, "environment": toy.Environment(reward=reward)}
    whole = world(**fields)
    whole.sit()
    places = list(whole.ticks)
    for crash_at in range(3, len(places), 4):
        crashed = world(**fields)
        with pytest.raises(toy.crash):
            crashed.sit(crash_at=crash_at)
        crashed.sit()
        rows = [row[0] for name, found in crashed.rows().items() if "-train" in name for row in found]
        where = f"after a crash at {places[crash_at - 1]} (tick {crash_at})"
        assert len(rows) == len(set(rows)), where
        assert crashed.waiting == [], where


def test_an_evaluation_beside_running_rollouts_ends(world: World, toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_training(toy, monkeypatch, 0.02)
    run = world(settings=settings(toy, steps=5, max_staleness=2, concurrency=1, ready_ahead=0))
    run.sit()
    assert [s for s, m in run.metrics().items() if "solve/fresh" in m] == [0, 2, 4, 5]


def test_k20_a_trainer_that_dies_while_rollouts_run_ends_the_run_at_once(world: World, toy: Any) -> None:
    """Nobody calls it for the next minutes; its death surfaces all the same."""

    class Process:
        async def wait_ended(self) -> TrainerError:
            await asyncio.sleep(0.2)
            return TrainerError("the trainer's process was killed by signal 9")

    stuck = world(settings=settings(toy), pool=toy.Pool(on_lease=None), process=Process(), hang=True)
    began = time.monotonic()
    with pytest.raises(TrainerError, match="killed by signal 9"):
        stuck.sit()
    assert time.monotonic() - began < 5


def test_k19_a_server_that_dies_while_nothing_is_asked_of_it_ends_the_run(world: World, toy: Any) -> None:
    class Server:
        url = "http://policy"
        log_path = "logs/policy.log"

        async def wait_dead(self) -> ServerExit:
            await asyncio.sleep(0.2)
            return ServerExit(exit_code=-9, log_tail="first\nlast words")

    stuck = world(settings=settings(toy), servers=(Server(),), hang=True)
    with pytest.raises(PolicyDeadError, match="ended with exit code -9") as caught:
        stuck.sit()
    assert "last words" in caught.value.where
    assert "--resume" in caught.value.remedy


def test_load_is_told_while_the_run_goes_on(world: World, toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_training(toy, monkeypatch, 0.7)
    run = world(settings=settings(toy, steps=2))
    run.sit()
    seen = run.events(EventKind.LOAD)
    assert seen
    assert any(event["training"] for event in seen)
    assert {len(event["running"]) for event in seen} == {1}

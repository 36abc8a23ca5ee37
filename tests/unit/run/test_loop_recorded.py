"""The loop over a recorded run, on the seeded toy: what is trained, and that a resume changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import TINY

from agentrl.errors import DatasetError, TeacherDeadError
from agentrl.trajectory import read_trajectories

World = Callable[..., Any]


@pytest.fixture
def source(world: World) -> Path:
    """A run of five steps, of three groups with three rollouts each: 15 units."""
    run = world()
    run.sit()
    (run.path / "tokenizer").mkdir()
    shutil.copyfile(TINY / "tokenizer.json", run.path / "tokenizer" / "tokenizer.json")
    return Path(run.path)


def settings(toy: Any, source: Path, **changes: Any) -> dict[str, Any]:
    teacher = {"model": "toy", "kind": "transformers", "name": "toy"}
    return {**toy.settings, "distill": {"teachers": [teacher], "from_run": source}, **changes}


def everything(world: Any) -> dict[str, Any]:
    """All that a run leaves, but for clocks."""
    return {
        "rows": world.rows(),
        "state": world.last_state(),
        "waiting": world.waiting,
        "steps": sorted(world.metrics()),
    }


def test_recorded_rollouts_are_trained_as_they_were_sampled(world: World, toy: Any, source: Path) -> None:
    teacher = toy.Teacher()
    run = world(settings=settings(toy, source), teacher=teacher)
    assert (run.sit().version, run.waiting) == (5, [])
    assert not any(asked.startswith("generate train") for asked in run.policy.asked), "nothing new is sampled"
    before = {t.trajectory_id: t for t, _ in read_trajectories(sorted(source.glob("trajectories/*-train.parquet")))}
    items = list(read_trajectories(sorted(run.path.glob("trajectories/*-train.parquet"))))
    seen = [t.events[-1]["trajectory"] for t, _ in items]
    assert sorted(seen) == sorted(before), "an epoch: each once"
    assert [name for name in seen if name in sorted(before)[:9]] != sorted(before)[:9], "in another order"
    for trajectory, trained in items:
        old = before[trajectory.events[-1]["trajectory"]]
        assert trajectory.reward == old.reward
        assert all(a.same_as(b) for a, b in zip(trajectory.segments, old.segments, strict=True))
        assert trained is not None
    behaviour = {t.trajectory_id: [s.logprobs for s in t.segments] for t, _ in items}
    for version, batch in enumerate(run.trainer.batches):
        assert batch.version == version, "the run's own, whatever sampled the tokens"
        for s in batch.sequences:
            assert not s.pg_mask.any()
            scored = s.teacher_weights > 0
            assert (s.behaviour_logprobs[scored] == behaviour[s.trajectory_id][s.segment][scored]).all()
    row = run.metrics()[1]
    assert row["teacher/scored_tokens"] > 0
    assert "staleness/mean" not in row, "versions of another run are no staleness"


def test_epochs_follow_one_another(world: World, toy: Any, source: Path) -> None:
    run = world(settings=settings(toy, source, steps=10), teacher=toy.Teacher())
    run.sit()
    items = list(read_trajectories(sorted(run.path.glob("trajectories/*-train.parquet"))))
    seen = [t.events[-1]["trajectory"] for t, _ in items]
    assert len(seen) == 2 * 45
    assert sorted(seen[:45]) == sorted(seen[45:])
    assert seen[:45] != seen[45:]
    assert len({t.trajectory_id for t, _ in items}) == 90


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_k49_a_resumed_run_is_the_uninterrupted_one(world: World, toy: Any, source: Path, schedule: str) -> None:
    small = settings(toy, source, rollout={**toy.settings["rollout"], "schedule": schedule})
    whole = world(settings=small, teacher=toy.Teacher())
    whole.sit()
    expected, places = everything(whole), list(whole.ticks)
    for place in ("trained", "rows written", "metrics", "save", "saved"):
        crash_at = [number for number, name in enumerate(places, 1) if name == place][1]
        crashed = world(settings=small, teacher=toy.Teacher())
        with pytest.raises(toy.crash):
            crashed.sit(crash_at=crash_at)
        crashed.sit()
        assert everything(crashed) == expected, f"after a crash at {place}"


def test_a_dead_teacher_ends_the_run_and_it_goes_on(world: World, toy: Any, source: Path) -> None:
    whole = world(settings=settings(toy, source), teacher=toy.Teacher())
    whole.sit()
    left = 20

    async def die(request: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise TeacherDeadError("the teacher is gone")

    run = world(settings=settings(toy, source), teacher=toy.Teacher(before=die))
    with pytest.raises(TeacherDeadError):
        run.sit()
    run.sit()
    assert everything(run) == everything(whole)


def test_a_resume_with_other_data_is_refused(world: World, toy: Any, source: Path) -> None:
    run = world(settings=settings(toy, source, steps=2), teacher=toy.Teacher())
    run.sit()
    run.settings = settings(toy, source, steps=4)
    (source / "trajectories" / "step_000003-train.parquet").unlink()
    with pytest.raises(DatasetError, match="not those of the checkpoint"):
        run.sit()

"""The same loop with a teacher, on the seeded toy: what is scored, what is trained, and what a dead teacher does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from agentrl.errors import NoTeacherError, RunFailedError, TeacherDeadError, TeacherRequestError
from agentrl.rollout.buffer import GroupBuffer
from agentrl.telemetry.metrics import read_events
from agentrl.trajectory import OutcomeKind, Split, read_trajectories
from agentrl.wire import EventKind

World = Callable[..., Any]
TEACHER = {"teachers": [{"model": "toy", "kind": "transformers", "name": "toy"}]}


def settings(toy: Any, **distill: Any) -> dict[str, Any]:
    return {**toy.settings, "distill": {**TEACHER, **distill}}


def trajectories(world: Any) -> list[Any]:
    return [t for t, _ in read_trajectories(sorted((world.path / "trajectories").glob("*-train.parquet")))]


def test_k38_every_segment_is_scored_once_and_kept_with_its_trajectory(world: World, toy: Any) -> None:
    teacher = toy.Teacher()
    run = world(settings=settings(toy), teacher=teacher)
    run.sit()
    found = trajectories(run)
    assert {len(t.segments) for t in found} == {1, 2, 3}
    wanted = sorted(f"{t.trajectory_id}/{index}" for t in found for index in range(len(t.segments)))
    assert sorted(teacher.asked) == wanted
    for trajectory in found:
        assert [s.teacher for s in trajectory.scores] == ["toy"] * len(trajectory.segments)
        for segment, scores in zip(trajectory.segments, trajectory.scores, strict=True):
            assert scores.mask.tolist() == segment.agent_mask.tolist()


def test_every_group_is_trained_whatever_its_rewards_and_the_reward_alone_has_no_part(world: World, toy: Any) -> None:
    equal = toy.Environment(reward=lambda task, patch: 1.0)
    run = world(settings=settings(toy), teacher=toy.Teacher(), environment=equal)
    run.sit()
    assert len(run.trainer.batches) == 5
    for batch in run.trainer.batches:
        assert len({s.group_id for s in batch.sequences}) == 3
        for sequence in batch.sequences:
            assert not sequence.pg_mask.any()
            assert sequence.teacher_weights.tolist() == [0, 0, 1, 1, 1]
            assert (sequence.behaviour_logprobs[2:] < 0).all()
    assert all(loss != 0 for loss in run.trainer.losses)


def test_the_task_reward_is_mixed_in_by_its_weight(world: World, toy: Any) -> None:
    plain = world(settings=toy.settings)
    plain.sit()
    mixed = world(settings=settings(toy, reward_weight=0.25), teacher=toy.Teacher())
    mixed.sit()
    rewarded = {s.trajectory_id: s for s in plain.trainer.batches[0].sequences if s.segment == 0}
    assert rewarded
    for sequence in mixed.trainer.batches[0].sequences:
        if sequence.trajectory_id in rewarded and sequence.segment == 0:
            expected = 0.25 * rewarded[sequence.trajectory_id].advantages
            assert sequence.advantages == pytest.approx(expected)
            assert sequence.pg_mask.tolist() == [False, False, True, True, True]
        assert sequence.teacher_weights[2:].tolist() == [1, 1, 1]


def test_evaluations_ask_no_teacher(world: World, toy: Any) -> None:
    teacher = toy.Teacher()
    world(settings=settings(toy), teacher=teacher).sit()
    assert teacher.asked
    assert not [name for name in teacher.asked if name.startswith("eval")]


def test_k36_a_segment_without_its_scores_is_never_trained(world: World, toy: Any) -> None:
    async def refuse(request: Any) -> None:
        if request.trajectory_id.endswith("-1"):
            raise TeacherRequestError("too few positions", where="the toy")

    run = world(settings=settings(toy), teacher=toy.Teacher(before=refuse))
    run.sit()
    lost = [t for t in trajectories(run) if t.trajectory_id.endswith("-1")]
    assert lost
    assert {t.outcome.kind for t in lost} == {OutcomeKind.INFRASTRUCTURE}
    assert all("too few positions" in t.outcome.cause and "phase score" in t.outcome.cause for t in lost)
    trained = {s.trajectory_id for batch in run.trainer.batches for s in batch.sequences}
    assert trained
    assert not [name for name in trained if name.endswith("-1")]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda scores: np.full_like(scores, np.nan),  # NaN everywhere
        lambda scores: scores[:-1],  # too few positions
        lambda scores: np.where(np.isfinite(scores), -np.inf, scores),
        lambda scores: np.nan_to_num(scores, nan=0.0),  # zeros where nothing was asked for
    ],
)
def test_k36_scores_that_cannot_be_are_refused(world: World, toy: Any, spoil: Any) -> None:
    class Spoiled(toy.Teacher):  # type: ignore[name-defined, misc]
        async def score(self, request: Any, *, timeout_s: float) -> Any:
            scores = await super().score(request, timeout_s=timeout_s)
            return type(scores)(scores.teacher, spoil(scores.logprobs))

    run = world(settings=settings(toy), teacher=Spoiled())
    with pytest.raises(RunFailedError, match="TeacherRequestError"):
        run.sit()
    assert run.trainer.batches == []


def test_a_dead_teacher_ends_the_run_and_it_goes_on_as_if_nothing_had_happened(world: World, toy: Any) -> None:
    whole = world(settings=settings(toy), teacher=toy.Teacher())
    whole.sit()
    asked = 0

    async def die(request: Any) -> None:
        nonlocal asked
        asked += 1
        if asked == 31:
            raise TeacherDeadError("the teacher is gone", where="toy")

    run = world(settings=settings(toy), teacher=toy.Teacher(before=die))
    with pytest.raises(TeacherDeadError, match="is gone"):
        run.sit()
    before = list(run.trainer.losses)
    assert 0 < len(before) < len(whole.trainer.losses)
    run.teacher = toy.Teacher()
    run.sit()
    assert run.trainer.losses[-1] == pytest.approx(whole.trainer.losses[-1])
    assert run.rows() == whole.rows()


def interrupted(run: Any, toy: Any) -> set[str]:
    """Crash it while finished groups wait in its buffer; the names of their rollouts' first segments."""
    with pytest.raises(toy.crash):
        run.sit(crash_at=30)
    with GroupBuffer(run.path / "buffer.sqlite") as buffer:
        kept = {f"{t.trajectory_id}/0" for group in buffer.waiting() for t in group.trajectories}
    assert kept
    return kept


def test_finished_groups_keep_their_scores_over_a_resume(world: World, toy: Any) -> None:
    """What was scored before a crash is in the buffer with its group, and is not asked for again."""
    first = toy.Teacher()
    run = world(settings=settings(toy), teacher=first)
    kept = {name.removesuffix("/0") for name in interrupted(run, toy)}
    assert {name.split("/")[0] for name in first.asked} >= kept
    second = toy.Teacher()
    run.teacher = second
    run.sit()
    assert len({name.split("/")[0] for name in second.asked} & kept) == 1, "whether it is still the same teacher"
    found = trajectories(run)
    assert all(len(t.scores) == len(t.segments) for t in found)
    assert {t.trajectory_id for t in found} >= kept


@pytest.mark.parametrize(
    "change",
    [
        {"distill": {"teachers": [{"model": "other", "kind": "transformers", "name": "toy"}]}},
        {"distill": {**TEACHER, "mask_format": True}},
    ],
)
def test_scores_of_another_teacher_are_not_trained_after_a_resume(world: World, toy: Any, change: Any) -> None:
    """What waits in the buffer was scored otherwise: it is generated and scored again."""
    run = world(settings=settings(toy), teacher=toy.Teacher())
    kept = interrupted(run, toy)
    second = toy.Teacher()
    run.teacher, run.settings = second, {**settings(toy), **change}
    run.sit()
    assert kept <= set(second.asked)
    same = world(settings=settings(toy), teacher=toy.Teacher())
    interrupted(same, toy)
    third = toy.Teacher()
    same.teacher, same.settings = third, settings(toy, timeout_s=7.0, concurrency=3)
    same.sit()
    assert len(kept & set(third.asked)) == 1


def test_another_model_behind_the_same_name_is_noticed_on_a_resume(world: World, toy: Any) -> None:
    """The configuration is the same, the scores are not: finished groups are generated and scored again."""

    class Other(toy.Teacher):  # type: ignore[name-defined, misc]
        async def score(self, request: Any, *, timeout_s: float) -> Any:
            scores = await super().score(request, timeout_s=timeout_s)
            return type(scores)(scores.teacher, scores.logprobs - 1)

    run = world(settings=settings(toy), teacher=toy.Teacher())
    kept = interrupted(run, toy)
    other = Other()
    run.teacher = other
    run.sit()
    assert kept <= set(other.asked)
    notes = [str(event.data.get("text")) for event in read_events(run.path / "events.jsonl")]
    assert sum("teacher toy has other scores than before the interruption" in note for note in notes) == 1
    for trajectory in trajectories(run)[-9:]:
        for scores in trajectory.scores:
            assert scores.logprobs[scores.mask].max() < -1


def test_a_later_task_without_a_teacher_ends_the_run(world: World, toy: Any) -> None:
    """Else it would learn from the other tasks alone, and lose these one after another."""
    from agentrl.rollout.scoring import Scorer

    class Families(toy.Environment):  # type: ignore[name-defined, misc]
        def tasks(self, split: Split, *, start: int, count: int, seed: int = 0) -> list[Any]:
            found = super().tasks(split, start=start, count=count, seed=seed)
            for place, task in enumerate(found, start):
                found[place - start] = structs.replace(task, data={"family": "known" if place < 4 else "new"})
            return found

    run = world(settings=settings(toy), teacher=toy.Teacher(), environment=Families())
    run.scorer = Scorer({"known": run.teacher}, route="family", timeout_s=5)
    with pytest.raises(NoTeacherError, match="no teacher is named 'new'") as caught:
        run.sit()
    assert "--teacher new=T; there are: known" in caught.value.remedy


def test_scoring_overlaps_with_grading_and_a_slow_teacher_is_seen(world: World, toy: Any) -> None:
    order: list[str] = []

    class Graded(toy.Environment):  # type: ignore[name-defined, misc]
        async def grade(self, task: Any, sandbox: Any, patch: str) -> Any:
            await asyncio.sleep(0.02)
            if task.split is Split.TRAIN:
                order.append("graded")
            return await super().grade(task, sandbox, patch)

    async def slow(request: Any) -> None:
        order.append("score begins")
        await asyncio.sleep(0.1)

    run = world(settings={**settings(toy), "steps": 1}, teacher=toy.Teacher(before=slow), environment=Graded())
    run.sit()
    assert order.index("score begins") < order.index("graded")
    metrics = run.metrics()[1]
    assert 0 < metrics["teacher/busy_fraction"] <= 1
    assert metrics["teacher/tokens_per_s"] > 0
    assert metrics["teacher/failures"] == 0
    assert all(t.info["teacher_wait_s"] > 0 for t in trajectories(run))
    events = [event.kind for event in read_events(run.path / "events.jsonl")]
    assert EventKind.STEP_FINISHED in events

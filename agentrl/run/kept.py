"""Finished groups that an interrupted run left in its buffer: which of them it trains when it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from agentrl.config import RolloutConfig
from agentrl.rollout.buffer import GroupBuffer
from agentrl.rollout.groups import GroupResult
from agentrl.rollout.scoring import Scorer
from agentrl.rollout.source import GroupCursor
from agentrl.trajectory import TeacherScores


def drop_all(buffer: GroupBuffer) -> None:
    """None is trained."""
    buffer.drop([group.group_id for group in buffer.waiting()])


def sampled_alike(buffer: GroupBuffer, wanted: RolloutConfig, *, version: int) -> dict[str, GroupResult]:
    """Those within the staleness bound that were sampled as configured, by name; the others are dropped."""
    buffer.drop_outside(oldest=version - wanted.staleness_bound, newest=version)
    waiting = {group.group_id: group for group in buffer.waiting()}
    unlike = {
        name
        for name, group in waiting.items()
        if len(group.trajectories) != wanted.group_size
        or any(t.temperature != wanted.temperature for t in group.trajectories)
    }
    buffer.drop(unlike)
    return {name: group for name, group in waiting.items() if name not in unlike}


async def drop_changed(
    buffer: GroupBuffer,
    kept: dict[str, GroupResult],
    scorer: Scorer,
    cursor: GroupCursor,
    *,
    teachers: Iterable[str],
    note: Callable[[str], None],
) -> dict[str, GroupResult]:
    """Of `kept`, the groups whose teachers are still who they were: each of `teachers`, whose weights do not change,
    scores one of its segments again. An address, and a folder's name, may have got another model meanwhile.

    Raises `TeacherDeadError`.
    """
    changed = {name for name in teachers if not await _is_the_same(name, kept.values(), scorer, cursor)}
    dropped = {name for name, group in kept.items() if any(s.teacher in changed for s in _scores(group))}
    if not dropped:
        return kept
    buffer.drop(dropped)
    note(
        f"teacher {', '.join(sorted(changed))} has other scores than before the interruption: {len(dropped)} finished "
        "groups are generated and scored again"
    )
    return {name: group for name, group in kept.items() if name not in dropped}


def _scores(group: GroupResult) -> Iterator[TeacherScores]:
    return (scores for trajectory in group.trajectories for scores in trajectory.scores)


async def _is_the_same(teacher: str, groups: Iterable[GroupResult], scorer: Scorer, cursor: GroupCursor) -> bool:
    """Asked about the first segment that it has scored; True where there is none."""
    for group in groups:
        for trajectory in group.trajectories:
            for index, (segment, scores) in enumerate(zip(trajectory.segments, trajectory.scores, strict=False)):
                if scores.teacher == teacher and scores.mask.any():
                    (request,) = cursor.at([group.index], group_size=len(group.trajectories))
                    return await scorer.repeats(
                        segment, scores, task=request.task, trajectory_id=trajectory.trajectory_id, index=index
                    )
    return True

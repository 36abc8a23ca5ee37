"""The data position (K34, K49)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import DatasetError
from agentrl.rollout.cursor import TaskCursor
from agentrl.trajectory import Split


def taken(cursor: TaskCursor, count: int) -> list[tuple[str, str, int]]:
    return [(r.group_id, r.task.id, r.index) for r in cursor.take(count, group_size=4)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 7), max_size=8), st.integers(0, 8), st.integers(0, 3))
def test_k49_resumed_equals_uninterrupted(toys: Any, counts: list[int], cut: int, seed: int) -> None:
    """Whatever the batches and wherever a restart falls, the groups are those of one long walk."""
    environment = toys.Environment(size=5)
    whole = taken(TaskCursor(environment, Split.TRAIN, seed=seed), sum(counts))
    cursor = TaskCursor(environment, Split.TRAIN, seed=seed)
    first = [group for count in counts[:cut] for group in taken(cursor, count)]
    resumed = TaskCursor(environment, Split.TRAIN, seed=seed)
    resumed.restore(cursor.state())
    rest = [group for count in counts[cut:] for group in taken(resumed, count)]
    assert first + rest == whole


def test_k34_groups_have_names_of_their_own_even_for_a_task_seen_twice(toys: Any) -> None:
    cursor = TaskCursor(toys.Environment(size=2), Split.TRAIN, seed=0)
    requests = cursor.take(4, group_size=2)
    assert [r.task.id for r in requests] == ["train-0-0", "train-0-1", "train-0-0", "train-0-1"]
    assert [r.group_id for r in requests] == ["train-000000", "train-000001", "train-000002", "train-000003"]
    assert requests[2].trajectory_id(1) == "train-000002-1"
    assert TaskCursor(toys.Environment(), Split.FRESH, seed=0).take(1, group_size=1, prefix="s8-")[0].group_id == (
        "s8-fresh-000000"
    )


@settings(deadline=None)
@given(st.integers(0, 9), st.integers(0, 6))
def test_looking_ahead_moves_nothing(toys: Any, before: int, count: int) -> None:
    cursor = TaskCursor(toys.Environment(size=5), Split.TRAIN, seed=3)
    cursor.take(before, group_size=4)
    seen = cursor.peek(count, group_size=4)
    assert (cursor.position, seen) == (before, cursor.take(count, group_size=4))


def test_k49_groups_in_flight_are_found_again_by_their_place(toys: Any) -> None:
    """The same names, tasks and sizes as when they were taken, in the order asked for; the position stays."""
    cursor = TaskCursor(toys.Environment(size=5), Split.TRAIN, seed=3)
    taken = cursor.take(8, group_size=4)
    resumed = TaskCursor(toys.Environment(size=5), Split.TRAIN, seed=3, position=8)
    assert resumed.at([6, 2, 7], group_size=4) == [taken[6], taken[2], taken[7]]
    assert resumed.position == 8
    assert resumed.at([], group_size=4) == []
    with pytest.raises(DatasetError, match="no task 5 in split fresh"):
        TaskCursor(toys.Environment(size=5), Split.FRESH, seed=3).at([5], group_size=1)


def test_a_finite_split_ends(toys: Any) -> None:
    cursor = TaskCursor(toys.Environment(size=3), Split.FRESH, seed=0)
    assert len(cursor.take(5, group_size=1)) == 3
    assert cursor.take(5, group_size=1) == []
    assert cursor.position == 3


def test_an_empty_split_and_a_strange_checkpoint_are_refused(toys: Any) -> None:
    with pytest.raises(DatasetError, match="no tasks in split unseen"):
        TaskCursor(toys.Environment(size=0), Split.UNSEEN, seed=0).take(1, group_size=1)
    cursor = TaskCursor(toys.Environment(), Split.TRAIN, seed=1)
    with pytest.raises(DatasetError, match="seed 0"):
        cursor.restore({"split": "train", "seed": 0, "position": 3})

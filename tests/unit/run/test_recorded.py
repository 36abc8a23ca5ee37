"""A recorded run as data: what is taken, what is refused, in which order it comes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import TINY, recorded_rollout, recorded_segment, write_recorded_run
from toy_parts import ToyEnvironment

from agentrl.config import DistillConfig, RunConfig
from agentrl.errors import ConfigError, DatasetError, NoTeacherError, RunFolderError
from agentrl.run.recorded import RecordedCursor, RecordedRun, check_tasks
from agentrl.trajectory import OutcomeKind, Source, Split, Trajectory
from agentrl.wire import Task


def open_run(folder: Path, *, model: Path = TINY, **settings: Any) -> RecordedRun:
    given = {"run_dir": str(folder.parent / "mine"), "rollout": {"group_size": 4}, **settings}
    return RecordedRun.open(folder, model=model, config=RunConfig.model_validate(given))


def rollouts(groups: Sequence[int], members: int = 2, **fields: Any) -> list[Trajectory]:
    return [recorded_rollout(group, member, **fields) for group in groups for member in range(members)]


def names(run: RecordedRun, positions: range) -> list[tuple[str, ...]]:
    return [run.at(position).members for position in positions]


def test_what_a_policy_sampled_is_taken_accepted_or_not(tmp_path: Path) -> None:
    """Equal rewards teach reinforcement learning nothing, and a teacher speaks of them all the same."""
    silent = recorded_segment(agent=0)
    only_first = recorded_segment(agent=1, prompt=0)  # one token, that nothing predicts
    steps = [
        [
            *rollouts([0], reward=1.0),
            recorded_rollout(1, 0, reward=None),
            recorded_rollout(1, 1, reward=0.0),
            recorded_rollout(2, 0, reward=None, segments=()),
            recorded_rollout(3, 0, segments=[silent]),
            recorded_rollout(4, 0, segments=[only_first]),
            recorded_rollout(5, 0, segments=[silent, recorded_segment()]),
        ],
        [recorded_rollout(6, 0, segments=[recorded_segment(source=Source.DEMONSTRATION)], source=Source.DEMONSTRATION)],
    ]
    run = open_run(write_recorded_run(tmp_path / "run", steps))
    found = {unit.task_id: unit.members for unit in run.units}
    assert found == {
        "train-task-0-0": ("train-000000-0", "train-000000-1"),
        "train-task-0-1": ("train-000001-1",),
        "train-task-0-5": ("train-000005-0",),
    }
    assert run.rollouts == 4
    assert "4 rollouts of 3 tasks" in run.describe()


def test_read_gives_the_rollouts_as_recorded(tmp_path: Path) -> None:
    written = rollouts([0], segments=[recorded_segment(), recorded_segment(agent=5)])
    run = open_run(write_recorded_run(tmp_path / "run", [written]))
    found = run.read(run.at(0))
    assert [t.trajectory_id for t in found] == ["train-000000-0", "train-000000-1"]
    for before, now in zip(written, found, strict=True):
        assert now.reward == before.reward
        assert now.outcome.kind is OutcomeKind.SOLVED
        assert all(a.same_as(b) for a, b in zip(before.segments, now.segments, strict=True))


def test_groups_are_cut_to_the_wanted_size(tmp_path: Path) -> None:
    run = open_run(write_recorded_run(tmp_path / "run", [rollouts([0], 8)]), rollout={"group_size": 3})
    assert sorted(len(unit.members) for unit in run.units) == [2, 3, 3]
    assert len({name for unit in run.units for name in unit.members}) == 8


# --- order ------------------------------------------------------------------------------------------------------


def test_every_epoch_holds_each_unit_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    steps = [rollouts(range(3 * step, 3 * step + 3)) for step in range(20)]
    folder = write_recorded_run(tmp_path / "run", steps)
    run, again, other = open_run(folder), open_run(folder), open_run(folder, seed=1)
    epochs = [names(run, range(60 * epoch, 60 * epoch + 60)) for epoch in range(3)]
    assert all(len(set(epoch)) == 60 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert names(again, range(60)) == epochs[0]
    assert names(other, range(60)) != epochs[0]
    assert names(run, range(60)) == epochs[0], "also when a later epoch was asked for before"


def test_few_files_are_in_memory_and_each_is_read_once_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.run import recorded

    run = open_run(write_recorded_run(tmp_path / "run", [rollouts(range(2 * s, 2 * s + 2)) for s in range(40)]))
    read = []
    real = recorded.read_trajectories
    monkeypatch.setattr(recorded, "read_trajectories", lambda paths: (read.extend(paths), real(paths))[1])
    for position in range(80):
        run.read(run.at(position))
        assert len(run._held) <= 16
    assert len(read) == len(set(read)) == 40
    mixed = {run.at(position).file for position in range(16)}
    assert len(mixed) == 8, "units of eight files are shuffled together"


# --- refusals ---------------------------------------------------------------------------------------------------


def refused(folder: Path, says: str, remedy: str = "", **settings: Any) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        open_run(folder, **settings)
    assert remedy in caught.value.remedy
    assert caught.value.where


def test_a_run_without_trajectories_is_refused(tmp_path: Path) -> None:
    refused(write_recorded_run(tmp_path / "run", []), "no trajectories", "agentrl train")
    with pytest.raises(RunFolderError):
        open_run(tmp_path / "nowhere")


def test_demonstrations_have_no_log_probabilities(tmp_path: Path) -> None:
    shown = recorded_segment(source=Source.DEMONSTRATION)
    steps = [[recorded_rollout(0, 0, segments=[shown], source=Source.DEMONSTRATION)]]
    refused(write_recorded_run(tmp_path / "run", steps), "demonstrations, without log-probabilities")


def test_a_run_that_machines_failed_is_refused(tmp_path: Path) -> None:
    refused(write_recorded_run(tmp_path / "run", [rollouts([0], reward=None)]), "machines failed every rollout")


def test_k37_another_temperature_is_refused(tmp_path: Path) -> None:
    folder = write_recorded_run(tmp_path / "run", [[*rollouts([0]), *rollouts([1], temperature=0.7)]])
    refused(folder, "train-000001-0 was sampled at temperature 0.7")


def test_segments_that_no_teacher_is_prepared_for_are_refused(tmp_path: Path) -> None:
    long = recorded_segment(agent=598)
    folder = write_recorded_run(tmp_path / "run", [[recorded_rollout(0, 0, segments=[recorded_segment(), long])]])
    refused(folder, "601 tokens, more than agent.max_tokens", "--agent.max-tokens 601", agent={"max_tokens": 600})
    assert open_run(folder, agent={"max_tokens": 601}).rollouts == 1


def test_a_run_cannot_learn_from_itself(tmp_path: Path) -> None:
    folder = write_recorded_run(tmp_path / "run", [rollouts([0])])
    refused(folder, "cannot learn from itself", "--run-dir", run_dir=str(tmp_path / "x" / ".." / "run"))


def test_a_foreign_parquet_file_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = write_recorded_run(tmp_path / "run", [])
    for name, write in (
        ("a", lambda path: path.write_bytes(b"nothing")),
        ("b", lambda path: pq.write_table(pa.table({"x": [1]}), path)),
    ):
        path = folder / "trajectories" / f"{name}-train.parquet"
        write(path)
        with pytest.raises(DatasetError, match="not a readable trajectory file"):
            open_run(folder)
        path.unlink()


def test_k37_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_recorded_run(tmp_path / "run", [rollouts([0])])
    model = tmp_path / "model"
    model.mkdir()
    tables = json.loads((TINY / "tokenizer.json").read_text())
    merges = tables["model"]["merges"]
    split = [pair if isinstance(pair, list) else pair.split(" ", 1) for pair in merges]
    joined = [" ".join(pair) for pair in split]
    for same in (split, joined):  # both notations mean the same merges
        tables["model"]["merges"] = same
        (model / "tokenizer.json").write_text(json.dumps({**tables, "padding": {"length": 8}}))
        assert open_run(folder, model=model).rollouts == 2
    swapped = {**tables["model"], "merges": [*split[:-2], split[-1], split[-2]]}
    for changed in ({**tables, "model": swapped}, {**tables, "added_tokens": []}):
        (model / "tokenizer.json").write_text(json.dumps(changed))
        refused(folder, "another tokenizer", "--from-run", model=model)
    (model / "tokenizer.json").unlink()
    refused(folder, "the student has no readable tokenizer.json", model=model)


def test_tests_output_is_not_recorded() -> None:
    words = {"teachers": [{"model": "self"}], "privileged": "tests", "from_run": "runs/a"}
    with pytest.raises(ValueError, match="not recorded"):
        RunConfig.model_validate({"distill": words})


# --- cursor -----------------------------------------------------------------------------------------------------


class Catalogued(ToyEnvironment):
    """Knows its tasks by name."""

    def find(self, task_id: str) -> Task:
        if task_id.endswith("-9"):
            raise DatasetError(f"no task {task_id}")
        return Task(id=task_id, environment=self.name, split=Split.TRAIN, data={"family": "functions"})

    def every(self) -> list[Task] | None:
        return None


def test_the_cursor_walks_on_where_it_was(tmp_path: Path) -> None:
    folder = write_recorded_run(tmp_path / "run", [rollouts(range(5))])
    whole = RecordedCursor(open_run(folder), ToyEnvironment())
    every = whole.take(12, group_size=4)
    assert [request.group_id for request in every] == [f"recorded-{index:06d}" for index in range(12)]
    assert [request.index for request in every] == list(range(12))
    assert {request.size for request in every} == {2}
    first = RecordedCursor(open_run(folder), ToyEnvironment())
    taken = first.take(7, group_size=4)
    saved = json.loads(json.dumps(first.state()))
    second = RecordedCursor(open_run(folder), ToyEnvironment())
    second.restore(saved)
    assert second.peek(2, group_size=4) == every[7:9]
    assert [*taken, *second.take(5, group_size=4)] == every
    assert second.at([3, 0], group_size=4) == [every[3], every[0]]


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    folder = write_recorded_run(tmp_path / "run", [rollouts(range(5))])
    state = RecordedCursor(open_run(folder), ToyEnvironment()).state()
    for other in (
        open_run(folder, seed=3),
        open_run(folder, rollout={"group_size": 1}, train={"advantage": {"name": "reward"}}),
        open_run(write_recorded_run(tmp_path / "more", [rollouts(range(6))])),
    ):
        with pytest.raises(DatasetError, match="not those of the checkpoint"):
            RecordedCursor(other, ToyEnvironment()).restore(state)
    with pytest.raises(DatasetError, match="not those of the checkpoint"):
        RecordedCursor(open_run(folder), ToyEnvironment()).restore({"split": "train", "seed": 0, "position": 4})


def test_tasks_are_found_by_id_or_made_of_what_is_recorded(tmp_path: Path) -> None:
    run = open_run(write_recorded_run(tmp_path / "run", [rollouts([1])]))
    assert RecordedCursor(run, Catalogued()).peek(1, group_size=4)[0].task.data == {"family": "functions"}
    for unknown in (ToyEnvironment(), Catalogued(name="other")):
        task = RecordedCursor(run, unknown).peek(1, group_size=4)[0].task
        assert (task.id, task.environment, task.split, task.data) == ("train-task-0-1", "toy", Split.TRAIN, {})
    lost = open_run(write_recorded_run(tmp_path / "lost", [rollouts([9])]))
    with pytest.raises(DatasetError, match="no task train-task-0-9"):
        RecordedCursor(lost, Catalogued()).peek(1, group_size=4)


# --- the tasks behind the rollouts --------------------------------------------------------------------------------


class Catalogue(ToyEnvironment):
    """Tasks by their ids, each of the family that its number says."""

    def find(self, task_id: str) -> Task:
        family = "even" if int(task_id.rpartition("-")[2]) % 2 == 0 else "odd"
        return Task(id=task_id, environment=self.name, split=Split.TRAIN, data={"family": family})

    def every(self) -> list[Task] | None:
        return None


def taught(*names: str, route: str | None = None, model: str = "t") -> DistillConfig:
    teachers = [{"model": model, "name": name} for name in names]
    return DistillConfig.model_validate({"teachers": teachers, "route": route})


def test_every_recorded_task_must_find_its_teacher(tmp_path: Path) -> None:
    run = open_run(write_recorded_run(tmp_path / "run", [rollouts(range(4))]))
    check_tasks(run, Catalogue(), taught("even", "odd", route="family"))
    check_tasks(run, ToyEnvironment(), taught("toy", "b", route="environment"))
    check_tasks(run, ToyEnvironment(), taught("t"))
    with pytest.raises(NoTeacherError, match="no teacher is named 'odd', which task train-task-0-1 has as family"):
        check_tasks(run, Catalogue(), taught("even", "b", route="family"))
    with pytest.raises(NoTeacherError, match="no teacher is named 'toy', which task train-task-0-0 has as environment"):
        check_tasks(run, ToyEnvironment(), taught("tow", "b", route="environment"))


@pytest.mark.parametrize("teachers", [taught("a", "b", route="family"), taught("me", model="self")])
def test_tasks_that_cannot_be_found_are_refused_where_they_are_needed(tmp_path: Path, teachers: DistillConfig) -> None:
    run = open_run(write_recorded_run(tmp_path / "run", [rollouts([0])]))
    with pytest.raises(ConfigError, match="cannot be found by their ids"):
        check_tasks(run, ToyEnvironment(), teachers)
    with pytest.raises(ConfigError, match="are of environment toy"):
        check_tasks(run, Catalogue(name="another"), teachers)

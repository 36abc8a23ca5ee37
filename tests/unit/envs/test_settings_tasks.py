"""Generated settings: deterministic, disjoint splits, faults of every kind, an expert that mends all of them; and
tasks of several families."""

import random

import pytest
from generated_play import drive, execute, sources

from agentrl.errors import ConfigError, DatasetError
from agentrl.trajectory import Split
from agentrl.wire import Privileged, Task
from agentrl_envs.swe_gym import SweGymEnvironment
from agentrl_envs.swe_gym.diffs import apply_exact
from agentrl_envs.swe_gym.generated.expert import GeneratedExpert
from agentrl_envs.swe_gym.generated.names import HELD_NOUNS
from agentrl_envs.swe_gym.generated.problem import HIDDEN_TEST, content_hash
from agentrl_envs.swe_gym.generated.tasks import make_task

PER_SPLIT = 300


@pytest.fixture(scope="module")
def environment() -> SweGymEnvironment:
    return SweGymEnvironment({"families": ["settings"]})


@pytest.fixture(scope="module")
def tasks(environment: SweGymEnvironment) -> dict[Split, list[Task]]:
    return {split: environment.tasks(split, start=0, count=PER_SPLIT) for split in Split}


def test_same_arguments_give_the_same_tasks(environment: SweGymEnvironment, tasks: dict[Split, list[Task]]) -> None:
    assert environment.tasks(Split.TRAIN, start=5, count=3) == tasks[Split.TRAIN][5:8]
    assert SweGymEnvironment({}).find("settings-train-5") == tasks[Split.TRAIN][5]
    assert {task.data["family"] for group in tasks.values() for task in group} == {"settings"}


def test_splits_are_disjoint_by_content(tasks: dict[Split, list[Task]]) -> None:
    hashes = {split: {task.data["content_hash"] for task in group} for split, group in tasks.items()}
    assert all(len(group) > 0.99 * PER_SPLIT for group in hashes.values())
    assert not hashes[Split.TRAIN] & (hashes[Split.FRESH] | hashes[Split.UNSEEN])
    assert not hashes[Split.FRESH] & hashes[Split.UNSEEN]
    for task in tasks[Split.FRESH][:50]:
        assert content_hash(sources(task)) == task.data["content_hash"]
    for task in tasks[Split.UNSEEN]:
        assert all(path.split(".")[0] in HELD_NOUNS for path in sources(task))
        assert task.data["search"] in HELD_NOUNS


def test_every_kind_of_fault_in_every_format(tasks: dict[Split, list[Task]]) -> None:
    found: set[tuple[str, str]] = set()
    for task in tasks[Split.TRAIN]:
        ((bad, good),) = [pair for pair in zip(task.data["bad"], task.data["good"], strict=True) if pair[0] != pair[1]]
        missing = "KeyError" in task.data["issue"]
        kind = (
            ("line" if "\n" in good else "name") if missing else "quoted" if f'"{good.split()[-1]}"' in bad else "value"
        )
        found.add((task.data["file"].rsplit(".")[1], kind))
    assert found >= {(name, kind) for name in ("ini", "json") for kind in ("line", "name", "value")}
    assert found >= {("csv", "name"), ("csv", "value")}
    assert ("csv", "line") not in found


def test_hidden_tests_fail_before_and_pass_after(
    environment: SweGymEnvironment, tasks: dict[Split, list[Task]]
) -> None:
    for split in Split:
        for task in tasks[split][:150]:
            before = execute(task.data["files"], task.data["hidden_test"])
            assert {f"{HIDDEN_TEST}::{name}" for name in before} == set(task.data["fail_to_pass"])
            assert len(task.data["pass_to_pass"]) >= 1
            mended = apply_exact(task.data["files"], environment.reference_patch(task))
            assert mended is not None
            assert execute(mended, task.data["hidden_test"]) == []


def test_code_that_answers_in_the_files_place_does_not_pass(tasks: dict[Split, list[Task]]) -> None:
    """K45: what the visible test asks for, or all that the module computes, may be right: the file is read too."""
    for task in tasks[Split.TRAIN][:60]:
        right = {**task.data["files"], task.data["file"]: task.data["solution"]}
        module = task.data["file"].split(".")[0] + ".py"
        other = f"honest_{task.data['file']}"
        around = {
            **task.data["files"],
            other: right[task.data["file"]],
            module: right[module].replace(f"'{task.data['file']}'", f"'{other}'"),
        }
        visible = next(text for path, text in around.items() if path.startswith("test_"))
        assert execute(around, visible) == []
        assert execute(around, task.data["hidden_test"]) == ["test_1_stored"]


def test_a_search_for_the_part_finds_the_file(tasks: dict[Split, list[Task]]) -> None:
    """One line of the settings file and one of the visible test, and the name is in the issue."""
    for group in tasks.values():
        for task in group:
            hits = [
                path
                for path, text in task.data["files"].items()
                for line in text.splitlines()
                if task.data["search"] in line
            ]
            test = next(path for path in task.data["files"] if path.startswith("test_"))
            assert sorted(hits) == sorted([task.data["file"], test])
            assert f"`{task.data['broken']}`" in task.data["issue"]
            assert HIDDEN_TEST not in task.data["files"]


@pytest.mark.parametrize(
    ("profile", "low", "high"),
    [
        ("perfect", 1.0, 1.0),
        ("careful", 0.93, 1.0),
        ("submit_without_fix", 0.0, 0.0),
        ("wrong_edit_untested", 0.0, 0.0),
        ("warm_start", 0.3, 0.5),
    ],
)
def test_profiles_solve_their_share(tasks: dict[Split, list[Task]], profile: str, low: float, high: float) -> None:
    expert, rng, solved = GeneratedExpert(), random.Random(3), 0
    for task in tasks[Split.TRAIN][:200]:
        calls, files = drive(expert.turns(task, rng=rng, profile=profile), task)
        solved += not execute(files, task.data["hidden_test"])
        assert len(calls) <= 10, "the turn cap of the small policy"
    assert low <= solved / 200 <= high


def test_an_edit_that_is_wrong_is_taken_back(tasks: dict[Split, list[Task]]) -> None:
    """The expert undoes a wrong edit in another place when it mends the right one."""
    expert, mended = GeneratedExpert(), 0
    for number, task in enumerate(tasks[Split.TRAIN]):
        calls, files = drive(expert.turns(task, rng=random.Random(number), profile="careful"), task)
        if len(calls) > 5 and not execute(files, task.data["hidden_test"]):
            mended += 1
            assert files[task.data["file"]] == task.data["solution"]
    assert mended > 5


def test_families_alternate(tasks: dict[Split, list[Task]]) -> None:
    both = SweGymEnvironment({"families": ["functions", "settings"]})
    functions = SweGymEnvironment({}).tasks(Split.TRAIN, start=0, count=6)
    mixed = both.tasks(Split.TRAIN, start=0, count=6)
    assert mixed[::2] == functions[::2]
    assert mixed[1::2] == tasks[Split.TRAIN][1:6:2]
    assert both.tasks(Split.TRAIN, start=3, count=2) == mixed[3:5]
    assert both.find(mixed[3].id) == mixed[3]
    assert [task.data["family"] for task in mixed] == ["functions", "settings"] * 3
    with pytest.raises(DatasetError, match="settings-SPLIT-NUMBER"):
        both.find("functions-train-3")


def test_the_option_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"environment\.families"):
        SweGymEnvironment({"families": ["settings", "tables"]})
    with pytest.raises(ConfigError, match="names one family twice"):
        SweGymEnvironment({"families": ["settings", "settings"]})
    with pytest.raises(ConfigError, match=r"environment\.families: no effect with a data set file"):
        SweGymEnvironment({"dataset": "rows.jsonl", "families": ["settings"]})
    with pytest.raises(ConfigError, match=r"environment\.families"):
        SweGymEnvironment({"families": []})


def test_the_hint_tells_the_changed_lines(environment: SweGymEnvironment) -> None:
    assert isinstance(environment, Privileged)
    functions = SweGymEnvironment({})
    for family, owner in (("settings", environment), ("functions", functions)):
        for number in range(40):
            task = owner.tasks(Split.TRAIN, start=number, count=1)[0]
            data = make_task(number, Split.TRAIN, family=family)
            hint = owner.hint(task)
            assert hint.startswith(f"Fix in {data.file}:\n")
            added = [line[1:] for line in hint.splitlines()[1:] if line.startswith("+")]
            assert added
            assert all(line in data.solution.splitlines() for line in added)
            assert len(hint) < 200, "room in a small window"

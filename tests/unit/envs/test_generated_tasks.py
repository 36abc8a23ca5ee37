"""Generated functions: deterministic, disjoint splits, names that shadow nothing, an expert that solves all
of it."""

import random
import re
import sys
from typing import Any

import pytest
from generated_play import drive, execute, sources

from agentrl.errors import ConfigError
from agentrl.trajectory import Split
from agentrl.wire import Task
from agentrl_envs.swe_gym import SweGymEnvironment
from agentrl_envs.swe_gym.diffs import apply_exact
from agentrl_envs.swe_gym.generated.expert import PROFILES, WARM_START, GeneratedExpert
from agentrl_envs.swe_gym.generated.names import HELD_LISTS, HELD_NOUNS, HELD_SCALARS
from agentrl_envs.swe_gym.generated.problem import HIDDEN_TEST, content_hash
from agentrl_envs.swe_gym.generated.tasks import make_task
from agentrl_envs.swe_gym.generated.templates import TEMPLATES

PER_SPLIT = 1000


@pytest.fixture(scope="module")
def tasks() -> dict[Split, list[Task]]:
    environment = SweGymEnvironment({})
    return {split: environment.tasks(split, start=0, count=PER_SPLIT) for split in Split}


def test_same_arguments_give_the_same_tasks(tasks: dict[Split, list[Task]]) -> None:
    again = SweGymEnvironment({}).tasks(Split.TRAIN, start=5, count=3)
    assert again == tasks[Split.TRAIN][5:8]
    other = SweGymEnvironment({}).tasks(Split.TRAIN, start=5, count=3, seed=1)
    assert not {task.id for task in other} & {task.id for task in again}


def test_splits_are_disjoint_by_content(tasks: dict[Split, list[Task]]) -> None:
    hashes = {split: {task.data["content_hash"] for task in group} for split, group in tasks.items()}
    assert all(len(group) > 0.99 * PER_SPLIT for group in hashes.values())
    assert not hashes[Split.TRAIN] & hashes[Split.FRESH]
    assert not hashes[Split.TRAIN] & hashes[Split.UNSEEN]
    assert not hashes[Split.FRESH] & hashes[Split.UNSEEN]
    for task in tasks[Split.FRESH][:50]:
        assert content_hash(sources(task)) == task.data["content_hash"]


def test_disjointness_holds_for_any_seeds_by_rule() -> None:
    """Buckets of the hash, not luck: no split can ever produce a repository of another."""
    buckets = {
        split: {int(make_task(10**9 + n, split).content_hash[:8], 16) % 16 for n in range(120)} for split in Split
    }
    assert buckets[Split.FRESH] <= set(range(4))
    assert buckets[Split.UNSEEN] <= set(range(4, 8))
    assert buckets[Split.TRAIN] <= set(range(8, 16))


def test_held_out_words_and_constants(tasks: dict[Split, list[Task]]) -> None:
    held = {*HELD_NOUNS, *HELD_SCALARS, *HELD_LISTS}
    word = re.compile(r"[a-z]+")
    for split in (Split.TRAIN, Split.FRESH):
        for task in tasks[split]:
            for path, text in sources(task).items():
                code = [line for line in text.splitlines() if '"""' not in line]
                assert not held & set(word.findall(path + "\n".join(code)))
    for task in tasks[Split.UNSEEN]:
        assert all(path[:-3] in HELD_NOUNS for path in sources(task))


def test_module_names_shadow_nothing(tasks: dict[Split, list[Task]]) -> None:
    for group in tasks.values():
        for task in group:
            names = [path[:-3] for path in sources(task)]
            assert not set(names) & (set(sys.stdlib_module_names) | {"pytest", "pluggy", "py", "conftest"})
            assert 1 <= len(names) <= 3


def test_hidden_tests_fail_before_and_pass_after(tasks: dict[Split, list[Task]]) -> None:
    environment = SweGymEnvironment({})
    for split in Split:
        for task in tasks[split][:150]:
            before = execute(task.data["files"], task.data["hidden_test"])
            assert {f"{HIDDEN_TEST}::{name}" for name in before} == set(task.data["fail_to_pass"])
            mended = apply_exact(task.data["files"], environment.reference_patch(task))
            assert mended is not None
            assert execute(mended, task.data["hidden_test"]) == []


def test_a_special_case_for_the_visible_call_is_not_enough(tasks: dict[Split, list[Task]]) -> None:
    """K45: at least two hidden calls beside the visible one fail before the fix."""
    for group in tasks.values():
        for task in group:
            visible = next(text for path, text in task.data["files"].items() if path.startswith("test_"))
            asserted = visible.split("assert ")[1].strip()
            assert len(set(task.data["fail_to_pass"].values()) - {asserted}) >= 2


def test_what_the_agent_sees_holds_no_hidden_test(tasks: dict[Split, list[Task]]) -> None:
    """K44."""
    environment = SweGymEnvironment({})
    for task in tasks[Split.TRAIN][:100]:
        assert HIDDEN_TEST not in task.data["files"]
        system, user = environment.prompt(task)
        assert system.content == (
            "You fix bugs in a Python repo. Tools: bash(command), view(path), "
            "str_replace(path, old_str, new_str), submit()."
        )
        assert user.content == task.data["issue"]
        assert task.data["broken"] in user.content


def test_every_template_carries_bugs() -> None:
    broken = [make_task(number, Split.TRAIN) for number in range(600)]
    verbs = {word for task in broken for word in task.broken.split("_")}
    assert all(set(template.verbs) & verbs for template in TEMPLATES)
    assert len(TEMPLATES) == 20
    assert all(3 <= len(t.mutations) + len(t.wrong_signatures) <= 6 for t in TEMPLATES)


def test_the_perfect_expert_solves_everything(tasks: dict[Split, list[Task]]) -> None:
    expert = GeneratedExpert()
    for split in Split:
        for task in tasks[split][:200]:
            calls, files = drive(expert.turns(task, rng=random.Random(task.id), profile="perfect"), task)
            assert execute(files, task.data["hidden_test"]) == []
            assert [call.name for call in calls] == ["bash", "view", "str_replace", "bash", "submit"]


LYING = """

class _Lie(BASE):
    __eq__ = lambda self, other: True
    __hash__ = None


def NAME(*_, **__):
    return WRAPPED
"""


@pytest.mark.parametrize("wrap", ["_Lie()", "[_Lie()]", "(_Lie(),)", "{0: _Lie()}"])
@pytest.mark.parametrize("base", ["object", "int", "str", "list", "dict", "float"])
def test_an_object_that_equals_everything_passes_no_hidden_test(
    tasks: dict[Split, list[Task]], base: str, wrap: str
) -> None:
    """K45."""
    for task in tasks[Split.TRAIN][:10]:
        module, function = task.data["file"], task.data["broken"]
        lying = LYING.replace("BASE", base).replace("NAME", function).replace("WRAPPED", wrap)
        files = {**task.data["files"], module: task.data["solution"] + lying}
        failed = execute(files, task.data["hidden_test"])
        assert {f"{HIDDEN_TEST}::{name}" for name in failed} >= set(task.data["fail_to_pass"])


def test_hidden_tests_compare_values_and_types_to_the_letter(tasks: dict[Split, list[Task]]) -> None:
    text = tasks[Split.TRAIN][0].data["hidden_test"]
    namespace: dict[str, Any] = {}
    exec(text[text.index("def _same") : text.index("def test_")], namespace)  # noqa: S102 - our own text
    same = namespace["_same"]
    for got, want in ((1, True), (1, 1.0), ([1], (1,)), ([1], [True]), ({"a": 1}, {"a": True}), ({1}, {True})):
        assert not same(got, want)
    for unequal in (
        ([1], [1, 2]),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1}, {"b": 1}),
        ("a", "b"),
        ((1, [2]), (1, [3])),
    ):
        assert not same(*unequal)
    for value in (1, True, None, "a", 1.5, [1, (2, {"a": [3]})], {1: "x", 2: {3, 4}}, frozenset({1})):
        assert same(value, value)
    assert same({"a": 1, "b": [2]}, {"b": [2], "a": 1}), "the order of a dict is free"


@pytest.mark.parametrize(
    ("profile", "low", "high"),
    [
        ("careful", 0.93, 1.0),
        ("sloppy", 0.25, 0.55),
        ("submit_without_fix", 0.0, 0.0),
        ("wrong_edit_untested", 0.0, 0.1),
        ("warm_start", 0.3, 0.5),
    ],
)
def test_profiles_solve_their_share(tasks: dict[Split, list[Task]], profile: str, low: float, high: float) -> None:
    expert, rng, solved, longest = GeneratedExpert(), random.Random(3), 0, 0
    for task in tasks[Split.TRAIN][:300]:
        calls, files = drive(expert.turns(task, rng=rng, profile=profile), task)
        solved += not execute(files, task.data["hidden_test"])
        longest = max(longest, len(calls))
    assert low <= solved / 300 <= high
    assert longest <= 10, "the turn cap of the small policy"


def test_expert_profiles_are_named() -> None:
    assert set(GeneratedExpert().profiles) == {*PROFILES, "warm_start"}
    assert sum(share for _, share in WARM_START) == pytest.approx(1.0)
    task = SweGymEnvironment({}).tasks(Split.TRAIN, start=0, count=1)[0]
    with pytest.raises(ConfigError, match="no profile 'good'"):
        next(GeneratedExpert().turns(task, rng=random.Random(0), profile="good"))

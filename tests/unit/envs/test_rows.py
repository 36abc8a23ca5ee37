"""Rows of every encoding, and one clear error for each way a row can be unusable."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from swe_rows import GOOD, write

from agentrl.errors import ConfigError, DatasetError
from agentrl.trajectory import Split
from agentrl.wire import Environment
from agentrl_envs.swe_gym import SweGymEnvironment
from agentrl_envs.swe_gym.grading import grading_targets
from agentrl_envs.swe_gym.images import image_of
from agentrl_envs.swe_gym.rows import load_rows, parse_row, patch_paths
from agentrl_envs.swe_gym.splits import epoch_order, split_rows


def test_all_shipped_rows_load(data_folder: Path) -> None:
    mined = load_rows(str(data_folder / "mined/instances.jsonl"), hub_split="train")
    assert len(mined) == 68
    assert sum(row.kind == "good" for row in mined) == 64
    swe_gym = load_rows(str(data_folder / "swe_gym/rows.jsonl"), hub_split="train")
    assert [row.instance_id for row in swe_gym][2] == "python__mypy-17071"
    assert all(isinstance(row.fail_to_pass, tuple) and row.fail_to_pass for row in swe_gym)
    bench = load_rows(str(data_folder / "swe_bench/rows_v5.parquet"), hub_split="train")
    assert {row.image for row in bench if row.image} >= {"swebench/sweb.eval.x86_64.pallets_1776_flask-5014:latest"}


def test_both_encodings_give_the_same_row() -> None:
    as_list = parse_row(GOOD, place="here")
    as_text = parse_row(GOOD | {"FAIL_TO_PASS": json.dumps(GOOD["FAIL_TO_PASS"]), "PASS_TO_PASS": []}, place="here")
    assert as_list == as_text
    assert as_list.test_patch == ""
    assert as_list.kind is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"patch": None}, "patch"),
        ({"patch": "  \n"}, "patch"),
        ({"problem_statement": ""}, "problem_statement"),
        ({"base_commit": 7}, "base_commit"),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": "not json"}, "FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": [1]}, "FAIL_TO_PASS"),
        ({"PASS_TO_PASS": None}, "PASS_TO_PASS"),
        ({"PASS_TO_PASS": '{"a": 1}'}, "PASS_TO_PASS"),
        ({"test_patch": ["x"]}, "test_patch"),
        ({"x_tree": {"bundle": "../x.bundle", "ref": "r"}}, "x_tree"),
        ({"x_tree": {"ref": "r"}}, "x_tree"),
    ],
)
def test_an_unusable_row_names_file_row_field_and_remedy(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    path = write(tmp_path / "rows.jsonl", GOOD, GOOD | {"instance_id": "o__r-2"} | changes)
    with pytest.raises(DatasetError) as caught:
        SweGymEnvironment({"dataset": path})
    error = caught.value
    assert field in error.what
    assert str(tmp_path / "rows.jsonl") in error.where
    assert "line 2" in error.where
    assert "o__r-2" in error.where
    assert error.remedy


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {key: value for key, value in GOOD.items() if key != "repo"})
    with pytest.raises(DatasetError, match="field repo is missing"):
        SweGymEnvironment({"dataset": path})


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("rows.jsonl", '{"a": 1}\n{"a": \n', "field instance_id is missing"),
        ("rows.jsonl", '{"a": \n', "no JSON"),
        ("rows.jsonl", "[1]\n", "no JSON object"),
        ("rows.jsonl", "\n\n", "no rows"),
        ("rows.jsonl", json.dumps(GOOD) + "\n" + json.dumps(GOOD), "comes twice"),
        ("rows.parquet", "PAR1 but not really", "no readable Parquet"),
        (None, "", "no such data set file"),
    ],
)
def test_bad_files(tmp_path: Path, name: str | None, text: str, said: str) -> None:
    path = tmp_path / (name or "missing.jsonl")
    if name:
        path.write_text(text)
    with pytest.raises(DatasetError, match=said) as caught:
        SweGymEnvironment({"dataset": str(path)})
    assert str(path) in caught.value.where
    assert caught.value.remedy


def test_a_hub_name_that_does_not_load_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("no hub here")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(DatasetError, match="no hub here") as caught:
        SweGymEnvironment({"dataset": "SWE-Gym/SWE-Gym"})
    assert "SWE-Gym/SWE-Gym" in caught.value.where


def test_a_hub_set_loads_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(name: str, split: str) -> Any:
        assert (name, split) == ("SWE-Gym/SWE-Gym", "test")
        return datasets.Dataset.from_list([GOOD])

    monkeypatch.setattr(datasets, "load_dataset", load)
    environment = SweGymEnvironment({"dataset": "SWE-Gym/SWE-Gym", "hub_split": "test", "fresh_fraction": 0})
    task = environment.tasks(Split.TRAIN, start=0, count=1)[0]
    assert environment.image(task) == "xingyaoww/sweb.eval.x86_64.o_s_r-1"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"datset": "generated"}, "environment.datset"),
        ({"bundles": "/x"}, "environment.bundles: no effect with dataset `generated`"),
        ({"dataset": "a.jsonl", "hub_split": "test"}, "environment.hub_split: no effect"),
        (
            {"dataset": "a.jsonl", "split_file": "s.json", "fresh_fraction": 0.5},
            "environment.fresh_fraction: no effect",
        ),
        ({"dataset": "a.jsonl", "fresh_fraction": 2}, "environment.fresh_fraction"),
        ({"dataset": 3}, "environment.dataset"),
    ],
)
def test_bad_options_name_the_key(options: dict[str, Any], said: str) -> None:
    """K52."""
    with pytest.raises(ConfigError) as caught:
        SweGymEnvironment(options)
    assert said in caught.value.what
    assert caught.value.remedy


def test_kinds(data_folder: Path) -> None:
    path = str(data_folder / "mined/instances.jsonl")
    every = {"dataset": path, "fresh_fraction": 1.0}
    assert len(SweGymEnvironment(every).tasks(Split.FRESH, start=0, count=99)) == 64
    hang = SweGymEnvironment(every | {"kinds": ["hang_before_fix"]}).tasks(Split.FRESH, start=0, count=99)
    assert len(hang) == 2
    with pytest.raises(ConfigError, match="matches no row"):
        SweGymEnvironment(every | {"kinds": ["splendid"]})


def test_splits_are_disjoint_and_duplicates_stay_together(data_folder: Path) -> None:
    rows = load_rows(str(data_folder / "mined/instances.jsonl"), hub_split="train")
    twin = parse_row(GOOD | {"instance_id": "o__r-2"}, place="here")
    rows += [parse_row(GOOD, place="here"), twin]
    splits = split_rows(rows, fresh_fraction=0.3, unseen_repos=["more-itertools/more-itertools"])
    hashes = {split: {row.content_hash for row in group} for split, group in splits.items()}
    assert sum(len(group) for group in splits.values()) == len(rows)
    assert all(hashes.values())
    assert not hashes[Split.TRAIN] & hashes[Split.FRESH]
    assert not (hashes[Split.TRAIN] | hashes[Split.FRESH]) & hashes[Split.UNSEEN]
    assert {row.repo for row in splits[Split.UNSEEN]} == {"more-itertools/more-itertools"}
    assert 10 <= len(splits[Split.FRESH]) <= 30
    with pytest.raises(ConfigError, match="without rows"):
        split_rows(rows, fresh_fraction=0.3, unseen_repos=["no/such"])


def test_split_file(tmp_path: Path) -> None:
    others = [GOOD | {"instance_id": f"o__r-{n}", "base_commit": str(n)} for n in (2, 3)]
    path = write(tmp_path / "rows.jsonl", GOOD, *others)
    split_file = tmp_path / "splits.json"
    split_file.write_text('{"train": ["o__r-2"], "fresh": ["o__r-1"]}')
    environment = SweGymEnvironment({"dataset": path, "split_file": str(split_file)})
    assert [task.id for task in environment.tasks(Split.FRESH, start=0, count=9)] == ["o__r-1"]
    assert [task.id for task in environment.tasks(Split.TRAIN, start=0, count=3)] == ["o__r-2"] * 3
    assert environment.tasks(Split.UNSEEN, start=0, count=9) == []
    for text, said in (
        ('{"train": ["o__r-9"]}', "no row"),
        ('{"train": ["o__r-2"], "unseen": ["o__r-2"]}', "the same problem"),
        ('{"training": []}', "malformed"),
        ("{", "no JSON"),
    ):
        split_file.write_text(text)
        with pytest.raises(DatasetError, match=said):
            SweGymEnvironment({"dataset": path, "split_file": str(split_file)})


def test_train_wraps_and_the_others_end(data_folder: Path) -> None:
    options = {"dataset": str(data_folder / "mined/instances.jsonl"), "fresh_fraction": 0.3}
    environment = SweGymEnvironment(options)
    fresh = environment.tasks(Split.FRESH, start=0, count=10_000)
    assert environment.tasks(Split.FRESH, start=len(fresh) - 2, count=5) == fresh[-2:]
    size = 64 - len(fresh)
    train = environment.tasks(Split.TRAIN, start=0, count=2 * size)
    assert {task.id for task in train[:size]} == {task.id for task in train[size:]}
    assert len({task.id for task in train[:size]}) == size
    assert environment.tasks(Split.TRAIN, start=size - 3, count=7) == train[size - 3 : size + 4]
    assert environment.tasks(Split.TRAIN, start=0, count=size, seed=1) != train[:size]
    with pytest.raises(DatasetError, match="no row is left to train on"):
        SweGymEnvironment(options | {"fresh_fraction": 1.0}).tasks(Split.TRAIN, start=0, count=1)


def test_epoch_order_of_nothing_is_nothing() -> None:
    assert epoch_order([], seed=0, start=0, count=3) == []


def test_prompt_shows_the_problem_and_nothing_else(data_folder: Path) -> None:
    """K44: neither hints nor tests nor the fix."""
    for name in ("mined/instances.jsonl", "swe_gym/rows.jsonl"):
        path = data_folder / name
        raw = {row["instance_id"]: row for row in map(json.loads, path.read_text().splitlines())}
        environment = SweGymEnvironment({"dataset": str(path), "fresh_fraction": 1.0})
        assert isinstance(environment, Environment)
        for task in environment.tasks(Split.FRESH, start=0, count=99):
            row = raw[task.id]
            text = "\n".join(message.content for message in environment.prompt(task))
            assert row["problem_statement"].strip() in text
            assert "/testbed" in text
            assert row["patch"][:200] not in text
            if row["hints_text"].strip():
                assert row["hints_text"].strip()[:80] not in text.replace(row["problem_statement"], "")


SMITH = {
    "instance_id": "o__r.1234abcd.func_pm_remove__x",
    "repo": "swesmith/o__r.1234abcd",
    "patch": "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-good\n+bad\n",
    "FAIL_TO_PASS": ["tests/test_a.py::test_a"],
    "PASS_TO_PASS": [],
    "image_name": "swebench/swesmith.x86_64.o_1776_r.1234abcd",
}


def test_swe_smith_rows() -> None:
    """The patch is the bug; the fix is its reverse; no base commit, no test patch, sometimes no statement."""
    row = parse_row(SMITH, place="here")
    assert row.bug_patch == SMITH["patch"]
    assert row.patch.endswith("@@ -1 +1 @@\n+good\n-bad\n")
    assert row.base_commit == "1234abcd"
    assert "tests/test_a.py::test_a" in row.problem_statement
    assert row.image == SMITH["image_name"]
    bare = parse_row({key: value for key, value in SMITH.items() if key != "image_name"}, place="here")
    assert image_of(bare, configured=None, has_bundle=False, recipes=frozenset()) == SMITH["image_name"]
    assert parse_row(SMITH | {"problem_statement": "it breaks"}, place="here").problem_statement == "it breaks"
    for changes, said in (
        ({"repo": "swesmith/o__r"}, "field repo names no commit"),
        ({"patch": "GIT binary patch\n"}, "field patch cannot be reversed"),
    ):
        with pytest.raises(DatasetError, match=said):
            parse_row(SMITH | changes, place="here")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eval_type": "fail_only"}, "field eval_type is 'fail_only'"),
        ({"log_parser": "parse_log_jest"}, "field log_parser names 'parse_log_jest'"),
        ({"eval_script": "pytest x"}, "field eval_script has no command between"),
        ({"eval_script": 3}, "field eval_script is int"),
        ({"version": ["1"]}, "field version is list"),
    ],
)
def test_rows_of_swe_bench_5_that_cannot_be_used(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DatasetError, match=re.escape(said)) as caught:
        parse_row(GOOD | changes, place="here")
    assert "o__r-1" in caught.value.where
    assert caught.value.remedy


def test_durations_of_runs_that_were_stopped_do_not_count() -> None:
    runs = {"before": {"s": 120.1, "rc": -9, "timeout": True}, "after": {"s": 3.5, "rc": 0, "timeout": False}}
    assert parse_row(GOOD | {"x_validated": runs}, place="here").duration_s == 3.5
    killed = {"before": {"s": 95.0, "rc": 137}, "after": {"s": None}}
    assert parse_row(GOOD | {"x_validated": killed}, place="here").duration_s is None


def test_restored_paths_are_the_tests_and_their_folders() -> None:
    row = parse_row(
        GOOD
        | {
            "FAIL_TO_PASS": ["pkg/tests/unit/test_a.py::t[x y]", "test_root.py::t"],
            "test_patch": "diff --git a/d.txt b/d.txt\n--- /dev/null\n+++ b/d.txt\n@@ -0,0 +1 @@\n+x\n",
        },
        place="here",
    )
    files, restored = grading_targets(row)
    assert files == ["pkg/tests/unit/test_a.py", "test_root.py"]
    assert restored == ["d.txt", "pkg/tests", "test_root.py"]
    assert patch_paths("rename from a b.py\nrename to c.py\n--- a/x\t\n+++ /dev/null\n") == {
        "a b.py",
        "c.py",
        "x",
    }


def test_a_product_named_like_tests_is_not_restored() -> None:
    """What the row's own fix changes is judged, not judging, whatever its folder is called."""
    fix = "--- a/pkg/testing/core.py\n+++ b/pkg/testing/core.py\n"

    def restored(test: str, patch: str) -> list[str]:
        row = parse_row(GOOD | {"FAIL_TO_PASS": [f"{test}::t"], "patch": patch}, place="here")
        return grading_targets(row)[1]

    assert restored("pkg/testing/tests/test_a.py", fix) == ["pkg/testing/tests"]
    assert restored("pkg/testing/test_a.py", fix) == ["pkg/testing/test_a.py"]
    own = fix.replace("core.py", "test_a.py")
    assert restored("pkg/testing/test_a.py", own) == ["pkg/testing"], "a named test file that the fix touches too"

"""Which image a row runs in, folders of row files, and single tasks by id."""

import json
from pathlib import Path
from typing import Any

import pytest
from swe_rows import GOOD, write

from agentrl.config import EnvironmentConfig
from agentrl.errors import DatasetError
from agentrl.run.environments import load_environment
from agentrl.trajectory import Split
from agentrl.wire import TaskCatalog
from agentrl_envs.swe_gym import SweGymEnvironment
from agentrl_envs.swe_gym.images import image_of
from agentrl_envs.swe_gym.rows import load_rows, parse_row


def test_images(data_folder: Path) -> None:
    mined = SweGymEnvironment({"dataset": str(data_folder / "mined/instances.jsonl"), "fresh_fraction": 1.0})
    assert mined.image(mined.tasks(Split.FRESH, start=0, count=1)[0]) == "agentrl/base"
    path = str(data_folder / "swe_bench/rows_v5.parquet")
    bench = SweGymEnvironment({"dataset": path, "fresh_fraction": 1.0})
    assert bench.image(bench.tasks(Split.FRESH, start=0, count=1)[0]).startswith("swebench/sweb.eval")
    own = SweGymEnvironment({"dataset": path, "fresh_fraction": 1.0, "image": "mine/{id}"})
    task = own.tasks(Split.FRESH, start=0, count=1)[0]
    assert own.image(task) == f"mine/{task.id}"
    assert SweGymEnvironment({"image": "mine"}).image(task) == "mine"


def test_published_images() -> None:
    """Seam of names: the row's own fields in their order, else the publisher's scheme, lower case, no `:latest`."""

    def image(**changes: Any) -> str:
        row = parse_row(GOOD | changes, place="here")
        return image_of(row, configured=None, has_bundle=False, recipes=frozenset())

    assert image(instance_id="Project-MONAI__MONAI-7") == "xingyaoww/sweb.eval.x86_64.project-monai_s_monai-7"
    bench = {"repo": "django/django", "instance_id": "django__django-11049"}
    assert image(**bench) == "swebench/sweb.eval.x86_64.django_1776_django-11049"
    named = {"image_name": "a:latest", "docker_image": "b", "image": "c"}
    assert image(**named) == "a"
    assert image(**named | {"image_name": ""}) == "b"
    assert image(image="registry:5000/c:v1") == "registry:5000/c:v1"
    with pytest.raises(DatasetError, match="field docker_image is int"):
        image(docker_image=3)
    row = parse_row(GOOD | {"image": "c:latest"}, place="here")
    assert image_of(row, configured=None, has_bundle=True, recipes=frozenset()) == "c"
    assert image_of(row, configured="d/{id}:latest", has_bundle=True, recipes=frozenset()) == "d/o__r-1"


def test_a_bundled_row_runs_in_the_image_of_its_recipe() -> None:
    recipes = frozenset({"o__r-1.5"})

    def image(version: str, *, has_bundle: bool, **changes: Any) -> str:
        row = parse_row(GOOD | {"version": version} | changes, place="here")
        return image_of(row, configured=None, has_bundle=has_bundle, recipes=recipes)

    assert image("1.5", has_bundle=True, image="c") == "agentrl/o__r-1.5"
    assert image("1.5", has_bundle=False, image="c") == "c"
    assert image("1.6", has_bundle=True) == "agentrl/base"


def test_recipes_of_the_user_are_known_to_the_rows(tmp_path: Path, data_folder: Path) -> None:
    """`sandbox.recipes` reaches the environment."""
    rows = [json.loads(line) for line in (data_folder / "mined/instances.jsonl").read_text().splitlines()]
    row = rows[0] | {"version": "77"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    for bundle in (data_folder / "mined").glob("*.bundle"):
        (tmp_path / bundle.name).symlink_to(bundle)
    (tmp_path / "recipes").mkdir()
    recipe = f"{row['repo'].replace('/', '__')}-77"
    (tmp_path / "recipes" / f"{recipe}.txt").write_text("iniconfig==2.0.0\n")
    config = EnvironmentConfig.model_validate({"dataset": str(tmp_path / "rows.jsonl")})
    environment = load_environment(config, recipes=tmp_path / "recipes")
    assert isinstance(environment, TaskCatalog)
    assert environment.image(environment.find(row["instance_id"])) == f"agentrl/{recipe}"
    without = load_environment(config)
    assert isinstance(without, TaskCatalog)
    assert without.image(without.find(row["instance_id"])) == "agentrl/base"


def test_a_folder_holds_row_files(tmp_path: Path, data_folder: Path) -> None:
    """Bundles are looked for beside the file that a row is in."""
    (tmp_path / "a").mkdir()
    write(tmp_path / "a/rows.jsonl", GOOD)
    write(tmp_path / "rows.jsonl", GOOD | {"instance_id": "o__r-2"})
    (tmp_path / "a/o__r.bundle").touch()
    environment = SweGymEnvironment({"dataset": str(tmp_path)})
    assert [task.id for task in environment.every() or []] == ["o__r-1", "o__r-2"]
    assert environment.image(environment.find("o__r-1")) == "agentrl/base"
    assert environment.image(environment.find("o__r-2")).startswith("xingyaoww/")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match=r"no \.jsonl"):
        SweGymEnvironment({"dataset": str(tmp_path / "empty")})
    with pytest.raises(DatasetError, match="no such data set file"):
        SweGymEnvironment({"dataset": str(tmp_path / "none")})
    assert len(load_rows(str(data_folder), hub_split="train")) == 76


def test_the_catalogue(data_folder: Path) -> None:
    """Rows of every kind and split, whatever `kinds` says; an id that is none names those close to it."""
    environment = SweGymEnvironment({"dataset": str(data_folder / "mined/instances.jsonl"), "fresh_fraction": 1.0})
    assert isinstance(environment, TaskCatalog)
    every = environment.every()
    assert every is not None
    assert len(every) == 68
    fresh = {task.id for task in environment.tasks(Split.FRESH, start=0, count=99)}
    assert {task.split for task in every if task.id in fresh} == {Split.FRESH}
    assert environment.find("andialbrecht__sqlparse-40ed3aa958").data["kind"] == "hang_before_fix"
    with pytest.raises(DatasetError, match="no task") as caught:
        environment.find("andialbrecht__sqlparse-40ed3aa95")
    assert "andialbrecht__sqlparse-40ed3aa958" in caught.value.remedy
    with pytest.raises(DatasetError) as caught:
        environment.find("40ed3aa958")
    assert "andialbrecht__sqlparse-40ed3aa958" in caught.value.remedy


def test_generated_tasks_are_found_by_id() -> None:
    environment = SweGymEnvironment({})
    assert environment.every() is None
    for split in Split:
        (task,) = environment.tasks(split, start=7, count=1)
        assert environment.find(task.id) == task
    for name in ("generated-fresh", "generated-none-3", "generated-fresh-x", "o__r-1"):
        with pytest.raises(DatasetError, match="no task") as caught:
            environment.find(name)
        assert "generated-fresh-0" in caught.value.remedy


def test_rows_of_other_kinds_alone_can_be_found_but_not_trained_on(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", GOOD | {"x_kind": "no_p2p"})
    environment = SweGymEnvironment({"dataset": path})
    assert environment.find("o__r-1").id == "o__r-1"
    assert [task.id for task in environment.every() or []] == ["o__r-1"]
    for split in Split:
        with pytest.raises(DatasetError, match="no row is of the wanted kinds"):
            environment.tasks(split, start=0, count=1)

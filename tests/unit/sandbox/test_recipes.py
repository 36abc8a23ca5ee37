"""Recipes of task images: what a file may say, how files and names are found, and what a change of one touches."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import ConfigError, ImageMissingError
from agentrl.sandbox import images, recipe_names
from agentrl.sandbox.recipes.recipe import (
    SHIPPED,
    EntryPoint,
    Pin,
    Recipe,
    load_recipe,
    normalised,
    parse_recipe,
    recipe_files,
)

HASH = "a" * 64
WHOLE = f"""\
# A comment that is no header: it means nothing.
# path: src
# path: .
# distribution: Some-Thing==2.3.0.dev0
# entry-point: console_scripts thing = thing.cli:main
# entry-point: pytest11 thing = thing.plugin
# sdist: Doc_Opt
click==8.1.3 --hash=sha256:{HASH} --hash=sha256:{"b" * 64}

doc-opt==0.6.2 \\
    --hash=sha256:{HASH}
"""


def parse(text: str) -> Recipe:
    return parse_recipe("owner__repo-1.0", text, where="recipe.txt")


def test_all_that_a_recipe_can_say() -> None:
    recipe = parse(WHOLE)
    assert recipe.pins == (Pin("click", "8.1.3", (HASH, "b" * 64)), Pin("doc-opt", "0.6.2", (HASH,)))
    assert recipe.pins[0].line == f"click==8.1.3 --hash=sha256:{HASH} --hash=sha256:{'b' * 64}"
    assert recipe.paths == ("src", ".")
    assert recipe.distribution == ("Some-Thing", "2.3.0.dev0")
    assert recipe.entry_points == (
        EntryPoint("console_scripts", "thing", "thing.cli:main"),
        EntryPoint("pytest11", "thing", "thing.plugin"),
    )
    assert recipe.sdists == {"doc-opt"}
    assert recipe.unavailable is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("click", "'click' is no exact pin"),
        ("click>=8", "no exact pin"),
        ("click==8.*", "no exact pin"),
        ("click==8; python_version < '3'", "no exact pin"),
        ("-r other.txt", "no exact pin"),
        ("thing @ https://example.org/thing.whl", "no exact pin"),
        ("--index-url=https://example.org", "no exact pin"),
        ("click==8\nClick==9", "click is pinned twice"),
        (f"click==8 --hash=sha256:{HASH}\njinja2==3", "jinja2 has no hash"),
        ("# sdist: jinja2\nclick==8", "sdist jinja2 is not pinned"),
        ("# no-plugin: jinja2\nclick==8", "no-plugin jinja2 is not pinned"),
        ("# path: ../x\nclick==8", "'../x' is no folder of the work tree"),
        ("# path: /testbed\nclick==8", "no folder of the work tree"),
        ("# path: a'b\nclick==8", "no folder of the work tree"),
        ("# distribution: Flask\nclick==8", "'Flask' is no distribution"),
        ("# entry-point: console_scripts flask = flask.cli:main", "need a distribution"),
        ("# distribution: a==1\n# entry-point: console_scripts ../x = a:b", "is no entry point"),
        ("# distribution: a==1\n# entry-point: console_scripts x = a:b; import os", "is no entry point"),
        ("# distribution: My_Flask==1\nmy-flask==1", "My_Flask is pinned, and is also what the work tree holds"),
        ("# unavailable:", "says nothing"),
        ("# nothing", "says nothing"),
    ],
)
def test_what_is_no_recipe_names_its_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert said in caught.value.what
    assert caught.value.where.startswith("recipe.txt")
    assert caught.value.remedy


def test_a_bad_line_is_named_by_number() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("# path: src\nclick==8 \\\n  --hash=sha256:" + HASH + "\n\nbad line\n")
    assert caught.value.where == "recipe.txt, line 5"


def test_every_shipped_recipe_is_one() -> None:
    names = recipe_names()
    assert {"pallets__flask-2.3", "getmoto__moto-4.2", "getmoto__moto-5.0", "iterative__dvc-2.8"} <= names
    for name in names:
        recipe = load_recipe(SHIPPED / f"{name}.txt")
        assert recipe.unavailable or all(pin.hashes for pin in recipe.pins), f"{name} pins without hashes"
        assert recipe.unavailable or recipe.paths, f"{name} does not put the work tree on the path"


def test_a_folder_of_further_recipes(tmp_path: Path) -> None:
    (tmp_path / "me__mine-1.0.txt").write_text("click==8.1.3\n")
    (tmp_path / "pallets__flask-2.3.txt").write_text("# path: .\n")
    (tmp_path / "README.md").write_text("no recipe")
    assert recipe_names(tmp_path) == recipe_names() | {"me__mine-1.0"}
    assert recipe_files(tmp_path)["pallets__flask-2.3"] == tmp_path / "pallets__flask-2.3.txt"


@pytest.mark.parametrize("name", ["Me__Mine-1.0", "base", "a b", "x_-y", ".hidden"])
def test_names_that_no_image_can_have(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.txt").write_text("click==8.1.3\n")
    with pytest.raises(ConfigError) as caught:
        recipe_names(tmp_path)
    assert name in caught.value.what


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_names(tmp_path / "nowhere")
    assert caught.value.where == "sandbox.recipes"


def test_unknown_images_list_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "me__mine-1.0.txt").write_text("click==8.1.3\n")
    with pytest.raises(ImageMissingError) as caught:
        images.ensure_rootfs("agentrl/no-such", recipes=tmp_path)
    assert "agentrl/no-such" in caught.value.what
    assert "agentrl/me__mine-1.0, " in caught.value.remedy


def test_an_unavailable_image_says_why(tmp_path: Path) -> None:
    (tmp_path / "me__mine-1.0.txt").write_text("# unavailable: it needs Python 2\n")
    for call in (images.ensure_rootfs, lambda image, recipes: images.ensure_docker_image(None, image, recipes=recipes)):
        with pytest.raises(ImageMissingError) as caught:
            call("agentrl/me__mine-1.0", recipes=tmp_path)
        assert caught.value.what == "the image agentrl/me__mine-1.0 cannot be built: it needs Python 2"


def test_a_recipe_changes_its_own_image_only(tmp_path: Path) -> None:
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    for file in (one, other):
        file.write_text("click==8.1.3\n")

    def found() -> tuple[str, str, str]:
        names = ("agentrl/base", "agentrl/one", "agentrl/other")
        base, first, second = (images._find(name, tmp_path) for name in names)
        return base.tag, first.tag, second.tag

    before = found()
    one.write_text("click==8.1.4\n")
    after = found()
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] != before[1]
    assert after[1].startswith("agentrl/one:")


def test_a_tag_of_other_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("click==8.1.3\n")
    tag = images._find("agentrl/one", tmp_path).tag
    assert images._find(tag, tmp_path).tag == tag
    with pytest.raises(ImageMissingError) as caught:
        images.ensure_rootfs("agentrl/one:0000", recipes=tmp_path)
    assert tag.rpartition(":")[2] in caught.value.remedy


def test_names_are_compared_as_indexes_do() -> None:
    assert normalised("Ruamel.YAML_clib") == normalised("ruamel-yaml--clib") == "ruamel-yaml-clib"

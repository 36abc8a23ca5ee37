"""A recipe's image on both backends: its packages, its own pytest, the project's metadata and path; and what is said
where a package cannot be had.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from agentrl.config import SandboxConfig
from agentrl.errors import ImageMissingError
from agentrl.sandbox import images, layers, open_pool
from agentrl.sandbox.backend import docker_fault
from agentrl.sandbox.recipes.packages import machine
from agentrl.wire.protocols import Sandbox

NAME = "agentrl/owner__thing-1.0"
# An older pytest than the base image's, one package as a wheel, one as source only; no hashes, for brevity.
RECIPE = """\
# path: src
# distribution: thing==1.0.dev0
# entry-point: console_scripts thing = thing:main
# entry-point: pytest11 thing = thing.plugin
# sdist: docopt
# no-plugin: flaky
pytest==7.4.2
iniconfig==2.0.0
packaging==23.2
pluggy==1.3.0
docopt==0.6.2
flaky==3.7.0
"""
FILES = {
    "src/thing/__init__.py": b"def main():\n    print('thing runs')\n",
    "src/thing/plugin.py": b"import pytest\n@pytest.fixture\ndef gift():\n    return 3\n",
    # Stands where the standard library would be asked for it, were the folder first on the path.
    "src/json.py": b"raise SystemExit('shadowed')\n",
    "tests/test_thing.py": b"""
import importlib.metadata, json, docopt, flaky, pytest, thing
def test_versions():
    assert pytest.__version__ == "7.4.2"
    assert importlib.metadata.version("thing") == "1.0.dev0"
    assert importlib.metadata.version("docopt") == "0.6.2"
    assert thing.__file__ == "/testbed/src/thing/__init__.py"
def test_plugins(gift, pytestconfig):
    assert gift == 3
    assert not pytestconfig.pluginmanager.has_plugin("flaky")
""",
}
COMMANDS = """
pytest --version; python -m pytest --version; thing
cd /tmp && python -c 'import docopt, thing, os; print(docopt.__cached__, os.path.isfile(docopt.__cached__))'
python -I -c 'import json; print(json.__name__)'
"""


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "owner__thing-1.0.txt").write_text(RECIPE)
    (folder / "owner__gone-1.0.txt").write_text("# path: .\nno-such-package-of-ours-at-all==1.0\n")
    yield folder
    if docker_fault() is None:
        client = docker.from_env(timeout=60)
        for image in client.images.list(name=NAME):
            client.images.remove(image.tags[0])
        client.close()


def test_an_image_of_a_recipe(backend_name: str, recipes: Path) -> None:
    config = SandboxConfig(
        backend=backend_name, image=NAME, recipes=recipes, size=1, starters=1, memory_mb=256, pids=64, disk_mb=32
    )

    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_files(FILES)
        for _ in range(2):  # a warm server's second session finds the same
            report = await sandbox.run_tests(["-q"], timeout_s=60)
            assert report.exit_code == 0, report.output
            assert report.results == {
                "tests/test_thing.py::test_versions": "passed",
                "tests/test_thing.py::test_plugins": "passed",
            }
        said = await sandbox.run(COMMANDS, timeout_s=60)
        assert said.exit_code == 0, said.output
        place = "/usr/local/lib/python3.11/dist-packages/__pycache__/docopt.cpython-311.pyc"
        assert said.output.split("\n")[:-1] == ["pytest 7.4.2", "pytest 7.4.2", "thing runs", f"{place} True", "json"]
        plain = await sandbox.run("python -m pytest -q", timeout_s=60)
        assert "2 passed" in plain.output

    async def main() -> None:
        async with (
            asyncio.timeout(300),
            open_pool(config, run_id="recipes") as pool,
            pool.lease(NAME, timeout_s=60) as sandbox,
        ):
            await body(sandbox)

    asyncio.run(main())


@pytest.mark.bubblewrap
def test_an_edit_re_runs_only_what_it_must(recipes: Path, tmp_path: Path) -> None:
    """The base image's files are shared, and another version of a recipe is another layer beside the first."""
    rootfs = images.ensure_rootfs(NAME, recipes=recipes)
    base = images.ensure_rootfs("agentrl/base")
    assert (rootfs / "usr/bin/git").samefile(base / "usr/bin/git")
    assert not (rootfs / "usr/local/bin/pytest").samefile(base / "usr/local/bin/pytest")
    assert "console_main" in (base / "usr/local/bin/pytest").read_text()
    (tmp_path / "owner__thing-1.0.txt").write_text("# path: src\n# distribution: thing==1.1\n")
    other = images.ensure_rootfs(NAME, recipes=tmp_path)
    assert other != rootfs
    assert images.ensure_rootfs(NAME, recipes=recipes) == rootfs
    assert images.ensure_rootfs("agentrl/base") == base


@pytest.mark.bubblewrap
def test_a_package_that_cannot_be_had_is_named(recipes: Path) -> None:
    with pytest.raises(ImageMissingError) as caught:
        images.ensure_rootfs("agentrl/owner__gone-1.0", recipes=recipes)
    assert "No matching distribution found for no-such-package-of-ours-at-all==1.0" in caught.value.what
    assert caught.value.where == "recipe owner__gone-1.0"
    left = [path.name for path in layers.layer_path("").iterdir()]
    assert not [name for name in left if "owner__gone" in name]


def test_this_machine_is_named_as_wheels_name_it() -> None:
    assert machine() not in ("amd64", "arm64", "")

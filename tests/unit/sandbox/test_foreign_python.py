"""Tests in an image's own Python, which is not the server's: the same results, and the same fakes seen (K45)."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from judged_tests import CHANGE_IN_PLACE, CONFTEST, EVERY_OUTCOME, FORGE, ONE_BAD, PATCH_REPORT

import agentrl.sandbox

if TYPE_CHECKING:
    ServerClient = Any

LAUNCH = Path(agentrl.sandbox.__file__).parent / "server" / "launch.py"
GOOD = {"src/pkg/__init__.py": "", "src/pkg/a.py": "def f(x):\n    return x + 1\n"}


@pytest.fixture(scope="module")
def foreign_folder(tmp_path_factory: pytest.TempPathFactory, server_tools: Path) -> Path:
    """`tools/` as in the volume, and `seed/`. The image's Python is a link to ours, so it has no packages but those on
    its PYTHONPATH: the work tree's `src` (as an editable installation has it) and a pytest."""
    folder = tmp_path_factory.mktemp("foreign")
    tools, seed, programs = folder / "tools", folder / "seed", folder / "bin"
    for each in (tools / "shield", seed / "tree" / "kept", programs):
        each.mkdir(parents=True)
    (tools / "server").symlink_to(LAUNCH.parent)
    (tools / "editor").symlink_to(server_tools / "editor")
    shutil.copyfile(LAUNCH.parent / "shield.py", tools / "shield" / "sitecustomize.py")
    (programs / "python").symlink_to(Path(sys.executable).resolve())
    (seed / "tree" / "kept" / "a.txt").write_text("as it was\n")
    environment = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "PYTHONPATH": f"{folder / 'machine' / 'work' / 'src'}:{server_tools / 'pytest'}",
        "PYTHONNOUSERSITE": "1",
        "MARK": "the image's",
    }
    (seed / "environment.json").write_text(json.dumps(environment))
    (seed / "complete.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def foreign_process(foreign_folder: Path, server_client: type[ServerClient]) -> Iterator[ServerClient]:
    tools = foreign_folder / "tools"
    client = server_client(
        foreign_folder / "machine",
        tools,
        "--foreign",
        str(foreign_folder / "seed"),
        launch=tools / "server" / "launch.py",
    )
    yield client
    client.close()


@pytest.fixture
def foreign(foreign_process: ServerClient) -> ServerClient:
    foreign_process.call("reset")
    return foreign_process


def test_every_outcome_with_the_images_python(foreign: ServerClient) -> None:
    foreign.write({"tests/test_all.py": EVERY_OUTCOME})
    answer = foreign.tests("-q", "tests/test_all.py", canary=True)
    outcomes = {name.removeprefix("tests/test_all.py::test_"): said for name, said in answer["results"].items()}
    assert outcomes == {
        "passes": "passed",
        "fails": "failed",
        "setup": "error",
        "teardown": "error",
        "skipped": "skipped",
        "skips_itself": "skipped",
        "xfails": "xfailed",
        "xpasses": "xpassed",
        "strict": "failed",
        "ids[a b]": "passed",
        "ids[[x]]": "passed",
        "ids[\\xe9::y]": "passed",
    }
    assert answer["collected"] == 12
    assert answer["exit_code"] == 1
    assert answer["canary_failed"] is True
    assert sorted(path.name for path in (foreign.work / "tests").iterdir()) == ["test_all.py"]


_LOOKS_AROUND = """
import os, sys, subprocess
def test_start():
    assert sys.path[0] == os.getcwd()
    assert not [each for each in sys.path if "shield" in each or "server" in each]
    assert os.environ["PYTHONPATH"] == sys.path[1] + os.pathsep + sys.path[2]
    assert not [name for name in os.environ if name.startswith("AGENTRL")]
    assert sys.argv[0].endswith("pytest/__main__.py") and sys.argv[1:] == ["-q"]
    assert "sitecustomize" not in sys.modules
    assert os.environ["MARK"] == "the image's"
def test_descriptors():
    fds = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd") if int(n) > 2]
    pipes = {os.readlink(fd) for fd in fds if os.path.exists(fd) and "pipe" in os.readlink(fd)}
    assert len(pipes) <= 2, pipes  # the report's, and the copy that pytest made of stdout
    below = subprocess.run(["ls", "/proc/self/fd"], capture_output=True, text=True).stdout.split()
    assert below == ["0", "1", "2", "3"], below
"""


def test_it_looks_as_if_just_started(foreign: ServerClient) -> None:
    foreign.write({"test_a.py": _LOOKS_AROUND})
    answer = foreign.tests("-q")
    assert answer["exit_code"] == 0, answer["output"]


_SELECTIVE = """
import _pytest.python as p
real = p.Function.runtest
def fake(self):
    if self.name != "test_bad":
        real(self)
p.Function.runtest = fake
"""


@pytest.mark.parametrize(
    ("files", "bad", "canary_failed", "exit_code"),
    [
        ({"src/pkg/__init__.py": PATCH_REPORT}, "failed", False, 1),
        ({"src/pkg/__init__.py": _SELECTIVE}, "passed", False, 0),
        ({"src/pkg/__init__.py": CHANGE_IN_PLACE}, "passed", False, 0),
        ({"conftest.py": CONFTEST}, "failed", True, 1),
        # On the path when the interpreter starts: runs before pytest would be imported, but not before it was noted.
        ({"src/sitecustomize.py": _SELECTIVE}, "passed", False, 0),
        ({"src/usercustomize.py": _SELECTIVE}, "failed", True, 1),
        ({"src/pkg/__init__.py": FORGE}, "failed", True, 1),
        ({"src/pkg/__init__.py": "import os\nos._exit(0)\n"}, None, None, 3),
        # Shadows of what is imported first, on the PYTHONPATH: the interpreter starts without it.
        ({"src/_pytest/__init__.py": "raise SystemExit(0)\n"}, "failed", True, 1),
        ({"src/encodings/__init__.py": "import os\nos._exit(0)\n"}, "failed", True, 1),
        ({"pytest.py": "raise SystemExit(0)\n", "_pytest.py": ""}, "failed", True, 1),
    ],
)
def test_k45_faked_results_are_seen(
    foreign: ServerClient, files: dict[str, str], bad: str | None, canary_failed: bool | None, exit_code: int
) -> None:
    """A report that says passed comes with a canary that did not fail; everything else is not passed."""
    foreign.write({**GOOD, "test_a.py": ONE_BAD, **files})
    answer = foreign.tests("-q", canary=True)
    assert answer["results"].get("test_a.py::test_bad") == bad, answer["output"]
    assert answer["canary_failed"] is canary_failed
    assert answer["exit_code"] == exit_code


def test_the_projects_own_sitecustomize_runs(foreign: ServerClient) -> None:
    foreign.write(
        {"src/sitecustomize.py": "HERE = 1\n", "test_a.py": "import sitecustomize\ndef test(): sitecustomize.HERE\n"}
    )
    answer = foreign.tests("-q", canary=True)
    assert answer["exit_code"] == 0, answer["output"]
    assert answer["canary_failed"] is True


def test_k40_tests_and_single_tests_have_deadlines(foreign: ServerClient) -> None:
    foreign.write({"test_a.py": "import time\ndef test_a(): time.sleep(60)\ndef test_b(): pass\n"})
    answer = foreign.tests("-q", canary=True, test_timeout_s=0.5)
    assert answer["results"] == {"test_a.py::test_a": "failed", "test_a.py::test_b": "passed"}
    assert answer["canary_failed"] is True
    began = time.monotonic()
    answer = foreign.tests("-q", timeout_s=2)
    assert answer["timed_out"] is True
    assert time.monotonic() - began < 15


def test_commands_find_the_images_environment_and_python(foreign: ServerClient, foreign_folder: Path) -> None:
    """A plain pytest command is the image's, too."""
    foreign.write({"test_a.py": "import sys\ndef test(): print(sys.executable)\n"})
    said: dict[str, Any] = foreign.run("echo $MARK; python -m pytest -q -s")
    assert said["output"].startswith(f"the image's\n{foreign_folder}/bin/python\n")
    assert foreign.run("python -m pytest -q -s")["output"].startswith(f"{foreign_folder}/bin/python\n")


def test_many_arguments(foreign: ServerClient) -> None:
    """More than a program's arguments may have in all."""
    foreign.write({"test_a.py": "def test(): pass\n"})
    answer = foreign.tests("-q", *["test_a.py::test"] * 10, *[f"--deselect={'x' * 100_000}"] * 30)
    assert answer["results"] == {"test_a.py::test": "passed"}


def test_an_image_without_a_python_says_so(foreign: ServerClient) -> None:
    answer = foreign.tests("-q", canary=True, env={"PATH": "/nowhere"})
    assert answer["exit_code"] == 127
    assert answer["results"] == {}
    assert answer["canary_failed"] is None
    assert "no Python" in answer["output"]


def test_k47_a_reset_plants_the_seed_again(foreign: ServerClient) -> None:
    foreign.run("rm -r kept; mkdir other; touch other/x")
    assert foreign.run("ls")["output"] == "other\n"
    foreign.call("reset")
    assert foreign.run("ls; cat kept/a.txt")["output"] == "kept\nas it was\n"


def test_a_seed_that_is_not_complete_is_refused(tmp_path: Path, foreign_folder: Path) -> None:
    from agentrl.sandbox.server.files import FileError
    from agentrl.sandbox.server.seed import plant

    (tmp_path / "work").mkdir()
    (tmp_path / "seed" / "tree").mkdir(parents=True)
    with pytest.raises(FileError, match="no complete work tree"):
        plant(str(tmp_path / "seed"), str(tmp_path / "work"))

"""The server's resident pytest: right results, the real command's semantics, and code that fakes results
(K45)."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from judged_tests import CHANGE_IN_PLACE, CONFTEST, EVERY_OUTCOME, FORGE, ONE_BAD, PATCH_REPORT

if TYPE_CHECKING:
    ServerClient = Any


GOOD = {"pkg/__init__.py": "", "pkg/a.py": "def f(x):\n    return x + 1\n"}


def test_every_outcome_and_odd_ids(server: ServerClient) -> None:
    server.write({"tests/test_all.py": EVERY_OUTCOME})
    answer = server.tests("-q", canary=True)
    at = "tests/test_all.py::"
    assert answer["results"] == {
        f"{at}test_passes": "passed",
        f"{at}test_fails": "failed",
        f"{at}test_setup": "error",
        f"{at}test_teardown": "error",
        f"{at}test_skipped": "skipped",
        f"{at}test_skips_itself": "skipped",
        f"{at}test_xfails": "xfailed",
        f"{at}test_xpasses": "xpassed",
        f"{at}test_strict": "failed",
        f"{at}test_ids[a b]": "passed",
        f"{at}test_ids[[x]]": "passed",
        f"{at}test_ids[\\xe9::y]": "passed",
    }
    assert answer["collected"] == 12
    assert answer["exit_code"] == 1
    assert answer["canary_failed"] is True
    assert "12 items" in server.tests(canary=True)["output"]


def test_canary_changes_neither_exit_code_nor_output(server: ServerClient) -> None:
    server.write({**GOOD, "test_a.py": "from pkg.a import f\ndef test_f(): assert f(1) == 2\n"})
    without, with_canary = server.tests("-q"), server.tests("-q", canary=True)
    assert without["canary_failed"] is None
    assert with_canary["canary_failed"] is True
    assert with_canary["exit_code"] == without["exit_code"] == 0
    assert with_canary["results"] == without["results"] == {"test_a.py::test_f": "passed"}
    assert "1 passed" in with_canary["output"]
    assert "failed" not in with_canary["output"]
    assert sorted(path.name for path in server.work.iterdir() if path.name[0] != ".") == ["pkg", "test_a.py"]


def test_selection_by_id_with_a_space(server: ServerClient) -> None:
    server.write({"test_all.py": EVERY_OUTCOME})
    answer = server.tests("-q", "test_all.py::test_ids[a b]", canary=True)
    assert answer["results"] == {"test_all.py::test_ids[a b]": "passed"}
    assert answer["exit_code"] == 0


def test_nothing_collected_and_usage_error(server: ServerClient) -> None:
    assert server.tests("-q", canary=True)["exit_code"] == 5
    missing = server.tests("nothing_here.py", canary=True)
    assert missing["exit_code"] == 4
    assert missing["results"] == {}


def test_import_error_is_the_files_error(server: ServerClient) -> None:
    server.write({"test_a.py": "import nothing_of_that_name\ndef test(): pass\n"})
    answer = server.tests("-q", canary=True)
    assert answer["exit_code"] == 2
    assert answer["results"] == {"test_a.py": "error"}


def test_stopping_at_the_first_failure_keeps_the_canary(server: ServerClient) -> None:
    server.write({**GOOD, "test_a.py": ONE_BAD.replace("f(1) == 2", "f(1) == 5")})
    answer = server.tests("-q", "-x", canary=True)
    assert answer["results"] == {"test_a.py::test_good": "failed"}
    assert answer["canary_failed"] is True


def test_tests_see_changed_files_and_environment(server: ServerClient) -> None:
    server.write(
        {
            "test_a.py": "import os\ndef test(): assert os.environ['X'] == '1'\n",
            "sub/test_b.py": "def t(): 0\n",
        }
    )
    assert server.tests("-q", env={"X": "1"})["exit_code"] == 0
    assert server.tests("-q", env={"X": "2"})["exit_code"] == 1
    server.write({"test_a.py": "def test(): pass\n"})
    assert server.tests("-q")["exit_code"] == 0
    assert server.tests("-q", cwd="sub")["exit_code"] == 5


def test_editor_packages_are_the_work_trees_own(server: ServerClient) -> None:
    """The server uses cachetools and charset_normalizer itself; a repository of that name must test its
    own."""
    server.write({"a.txt": "x\n", "cachetools/__init__.py": "OWN = 1\n", "charset_normalizer.py": "OWN = 2\n"})
    server.edit("view", "a.txt")
    test = "import cachetools as a, charset_normalizer as b\ndef test(): assert a.OWN + b.OWN == 3\n"
    server.write({"test_a.py": test})
    assert server.tests("-q")["exit_code"] == 0


@pytest.mark.parametrize(
    ("body", "exit_code"),
    [
        ("import os\ndef test_b(): os._exit(0)\n", 3),
        ("import os\ndef test_b(): os._exit(9)\n", 9),
        ("import os\ndef test_b(): os.kill(os.getpid(), 11)\n", 139),
    ],
)
def test_crash_gives_partial_results(server: ServerClient, body: str, exit_code: int) -> None:
    server.write({"test_a.py": f"def test_a(): pass\n{body}"})
    answer = server.tests("-q", canary=True)
    assert answer["results"] == {"test_a.py::test_a": "passed"}
    assert answer["collected"] == 2
    assert answer["exit_code"] == exit_code
    assert answer["canary_failed"] is False


def test_k40_tests_have_a_deadline(server: ServerClient) -> None:
    server.write({"test_a.py": "import time\ndef test_a(): pass\ndef test_b(): time.sleep(300)\n"})
    answer = server.tests("-q", timeout_s=2, canary=True)
    assert answer["timed_out"] is True
    assert answer["exit_code"] is None
    assert answer["results"] == {"test_a.py::test_a": "passed"}


# --- K45: code that fakes results ---------------------------------------------------------------------------

_PATCH_RUNTEST = "import pytest\npytest.Function.runtest = lambda self: None\n"
_PATCH_CALL_INFO = """
import _pytest.runner as r
_real = r.CallInfo.from_call.__func__
def fake(cls, func, when, reraise=None):
    call = _real(cls, func, when, reraise)
    call.excinfo = None
    return call
r.CallInfo.from_call = classmethod(fake)
"""
_SPARE_OUR_FOLDER = """
import _pytest.python as p
_real = p.Function.runtest
def fake(self):
    if ".agentrl" in str(self.path) or self not in self.session.items:
        _real(self)
p.Function.runtest = fake
"""
_PATCH_AND_RESTORE = """
import _pytest.python as p
_real = p.Function.runtest
def fake(self):
    p.Function.runtest = _real if self.name == "test_bad" else fake
p.Function.runtest = fake
"""
_CALL_NO_HOOK = """
import pytest
def pytest_collection_finish(session):
    real = session.config.pluginmanager._inner_hookexec
    def spare(name, impls, arguments, first):
        bad = name == "pytest_pyfunc_call" and arguments["pyfuncitem"].name in ("test_bad",)
        return True if bad else real(name, impls, arguments, first)
    session.config.pluginmanager._inner_hookexec = spare
"""
_HOOK_THAT_SPARES = """
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    session, module = pyfuncitem.session, pyfuncitem.parent
    strange = ".agentrl" in str(pyfuncitem.path) or pyfuncitem not in session.items or module.parent is session
    return None if strange or module.path.parent != session.config.rootpath else True
"""


_PRINT = "print('PASSED test_a.py::test_bad')\nprint('2 passed in 0s')\n"
_FINISH = "def pytest_sessionfinish(session):\n    session.exitstatus = 0\n"
_DESELECT = "def pytest_collection_modifyitems(items):\n    items.clear()\n"
_EXIT = "import pytest\npytest.exit('enough', returncode=0)\n"
_LOAD_PLUGIN = "[pytest]\naddopts = -p pkg.plugin\n"


@pytest.mark.parametrize(
    ("files", "bad", "canary_failed", "exit_code"),
    [
        ({"pkg/__init__.py": PATCH_REPORT}, "failed", False, 1),
        ({"pkg/__init__.py": _PATCH_RUNTEST}, "passed", False, 0),
        ({"pkg/__init__.py": _PATCH_CALL_INFO}, "failed", False, 1),
        ({"pkg/__init__.py": _SPARE_OUR_FOLDER}, "passed", False, 0),
        ({"pkg/__init__.py": _PATCH_AND_RESTORE}, "passed", False, 0),
        ({"pkg/__init__.py": CHANGE_IN_PLACE}, "passed", False, 0),
        ({"conftest.py": _HOOK_THAT_SPARES}, "passed", False, 0),
        ({"conftest.py": _CALL_NO_HOOK}, "passed", False, 0),
        ({"conftest.py": CONFTEST}, "failed", True, 1),
        (
            {"pytest.ini": _LOAD_PLUGIN, "pkg/plugin.py": CONFTEST},
            "failed",
            True,
            1,
        ),
        ({"sitecustomize.py": PATCH_REPORT}, "failed", True, 1),
        ({"pkg/__init__.py": FORGE}, "failed", True, 1),
        (
            {"pkg/__init__.py": _PRINT},
            "failed",
            True,
            1,
        ),
        ({"pkg/__init__.py": "import os\nos._exit(0)\n"}, None, None, 3),
        ({"pkg/__init__.py": "import sys\nsys.exit(0)\n"}, None, None, 3),
        ({"pkg/__init__.py": _EXIT}, None, True, 2),
        (
            {"conftest.py": _FINISH},
            "failed",
            True,
            1,
        ),
        ({"conftest.py": _DESELECT}, None, True, 5),
        ({"conftest.py": "import os\ndef pytest_unconfigure():\n    os._exit(0)\n"}, "failed", True, 3),
    ],
)
def test_k45_faked_results_are_seen(
    server: ServerClient, files: dict[str, str], bad: str | None, canary_failed: bool | None, exit_code: int
) -> None:
    """A report that says passed comes with a canary that did not fail; everything else is not passed."""
    server.write({**GOOD, "test_a.py": ONE_BAD, **files})
    answer = server.tests("-q", canary=True)
    assert answer["results"].get("test_a.py::test_bad") == bad
    assert answer["canary_failed"] is canary_failed
    assert answer["exit_code"] == exit_code


def test_k45_a_fake_that_spares_strangers_is_seen_by_what_was_raised(server: ServerClient) -> None:
    """Forcing only the tests of some name leaves the canary's outcome alone; the exception and the patch were seen
    all the same."""
    spare = PATCH_REPORT.replace(
        'report.outcome, report.longrepr = "passed", None',
        'report.outcome = "passed" if "test_a" in item.nodeid else report.outcome',
    )
    server.write({**GOOD, "test_a.py": ONE_BAD, "pkg/__init__.py": spare})
    answer = server.tests("-q", canary=True)
    assert answer["results"] == {"test_a.py::test_good": "passed", "test_a.py::test_bad": "failed"}
    assert answer["canary_failed"] is False
    assert answer["exit_code"] == 1


def test_k45_the_canary_lies_among_the_tests_asked_for_and_is_gone_afterwards(server: ServerClient) -> None:
    note = "def pytest_runtest_call(item):\n    open('/dev/stderr', 'a').write(f'ran {item.path} {item.name}\\n')\n"
    body = "def test_a(): pass\n"
    server.write({"conftest.py": note, "sub/__init__.py": "", "sub/deep/__init__.py": "", "sub/deep/test_a.py": body})
    answer = server.tests("-q", "-s", "sub/deep/test_a.py::test_a", canary=True, env={"PYTHONDONTWRITEBYTECODE": ""})
    assert answer["canary_failed"] is True
    ran = re.findall(r"ran (\S+)/(\w+)\.py (\w+)", answer["output"])
    assert ran[0] == (f"{server.work}/sub/deep", "test_a", "test_a")
    assert len(ran) == 2
    assert ran[1][0] == f"{server.work}/sub/deep"
    assert re.fullmatch(r"test_[a-z]+_[a-z]+", ran[1][1])
    left = [path.name for path in (server.work / "sub/deep").rglob("*.py*")]
    assert not [name for name in left if ran[1][1] in name], left


_LOOKS_AROUND = """
import os, subprocess
def test():
    fds = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd") if int(n) > 2]
    pipes = {os.readlink(fd) for fd in fds if os.path.exists(fd) and "pipe" in os.readlink(fd)}
    assert len(pipes) <= 2, pipes  # the report's, and the copy that pytest made of stdout
    below = subprocess.run(["ls", "/proc/self/fd"], capture_output=True, text=True).stdout.split()
    assert below == ["0", "1", "2", "3"], below
"""


def test_k45_tests_cannot_speak_to_the_host(server: ServerClient) -> None:
    """No descriptor of the server's is open in a test, and none of the report's in a program that it
    starts."""
    server.write({"test_a.py": _LOOKS_AROUND})
    answer = server.tests("-q")
    assert answer["exit_code"] == 0, answer["output"]


# --- plain pytest commands through `run` --------------------------------------------------------------------

SEMANTICS = """
import os, sys
print("argv", [os.path.basename(sys.argv[0]), *sys.argv[1:]], "cwd", os.getcwd(), os.environ.get("PWD"))
print("first", sys.path[0] == os.getcwd(), "main", sys.modules["__main__"].__name__)
print("tty", sys.stdout.isatty(), sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors)
print("stdin", sys.stdin.read() if not sys.stdin.closed else None, "bytecode", sys.dont_write_bytecode)
print("foreign", sorted({"cachetools", "openhands_aci", "binaryornot"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "arguments", ["-q -s -p no:randomly", "-q -s 'tests/test_a.py::test_p[a b]'", "--version", "--nope"]
)
def test_resident_command_is_like_the_real_one(server: ServerClient, server_tools: Any, arguments: str) -> None:
    """The same command through the resident runner and through a new interpreter: same output, same exit
    code."""
    test = "import pytest\n@pytest.mark.parametrize('s', ['a b'])\ndef test_p(s): assert s == 'c'\n"
    server.write({"conftest.py": SEMANTICS, "tests/test_a.py": test})
    resident = server.run(f"python -m pytest {arguments}", stdin="aGk=")
    real = subprocess.run(
        [sys.executable, "-S", "-m", "pytest", *shlex.split(arguments)],
        cwd=server.work,
        input=b"hi",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=30,
        env={
            "PATH": "/usr/bin:/bin",
            "PWD": str(server.work),  # as bash would
            "PYTHONPATH": f"{server_tools}/pytest",
            "PYTHONDONTWRITEBYTECODE": "1",
            "LANG": "C.UTF-8",
        },
    )

    def plain(text: str) -> str:
        return re.sub(r" in \d+\.\d+s\b.*", "", text)

    assert plain(resident["output"]) == plain(real.stdout.decode())
    assert resident["exit_code"] == real.returncode


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("pytest", []),
        ("pytest -q tests/test_a.py::test_b", ["-q", "tests/test_a.py::test_b"]),
        ("  python3 -m pytest -k 'a and not b' \"x y\" ", ["-k", "a and not b", "x y"]),
        ("cd /tmp && python -m pytest -x 2>&1", ["-x"]),
    ],
)
def test_plain_pytest_commands(command: str, arguments: list[str]) -> None:
    from agentrl.sandbox.server.commands import parse_pytest

    parsed = parse_pytest(command, "/")
    assert parsed is not None
    assert parsed.arguments == arguments
    assert parsed.cwd == ("/tmp" if command.startswith("cd") else "/")


@pytest.mark.parametrize(
    "command",
    [
        "",
        "pytest; rm x",
        "pytest | tail",
        "pytest && echo",
        "pytest $HOME",
        "pytest tests/*.py",
        "pytest test_a.py::test[a]",
        "pytest `x`",
        'pytest "$X"',
        "pytest ~/x",
        "X=1 pytest",
        "pytest > out",
        "pytest 2>&1 | tail -5",
        "pytest 'unclosed",
        "pytest\nrm x",
        "python -m pytest2",
        "python test.py",
        "cd /nowhere/at/all && pytest",
        "cd 'a b' && pytest",
    ],
)
def test_what_a_shell_must_read_goes_to_the_shell(command: str) -> None:
    from agentrl.sandbox.server.commands import parse_pytest

    assert parse_pytest(command, "/") is None


def test_a_file_that_hides_a_loaded_module_asks_for_a_new_interpreter(server: ServerClient) -> None:
    from agentrl.sandbox.server.commands import _shadows

    assert not _shadows(str(server.work))
    (server.work / "json.py").write_text("")
    assert _shadows(str(server.work))

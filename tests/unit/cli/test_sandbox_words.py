"""`agentrl sandbox …`: help at once, and the words after `--`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from agentrl.cli.main import app
from agentrl.run import debug_run
from agentrl.run.debug import Choice
from agentrl.run.debug_colon import COMMANDS as COLONS
from agentrl.run.verify_task import Verdict

COMMANDS = ("run", "shell", "replay", "grade", "verify", "ps", "stats", "reap", "build")
LIGHT = """
import sys
sys.argv = ["agentrl", "sandbox", "--help"]
from agentrl.cli.main import run
try:
    run()
finally:
    loaded = {name.split(".")[0] for name in sys.modules}
    heavy = loaded & {"docker", "pyarrow", "numpy", "torch", "rich", "datasets", "aiohttp"}
    assert not heavy, heavy
"""


def test_help_names_every_command_and_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f"  {command} " in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "agentrl.cli.main", "sandbox", command, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert "Usage" in done.stdout


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `run_command` was called with."""
    found: dict[str, Any] = {}

    def take(choice: Choice, task: str, words: list[str], *, timeout_s: float) -> int:
        found.update(choice=choice, task=task, words=words, timeout_s=timeout_s)
        return 7

    monkeypatch.setattr(debug_run, "run_command", take)
    return found


def test_words_after_dashes_are_the_commands_own(called: dict[str, Any]) -> None:
    words = ["sandbox", "run", "--timeout-s", "9", "task-1", "--sandbox.cpus", "2", "--", "ls", "--help", "--", "-la"]
    assert typer.main.get_command(app).main(words, standalone_mode=False) == 7
    assert (called["task"], called["timeout_s"]) == ("task-1", 9)
    assert called["words"] == ["ls", "--help", "--", "-la"]
    assert called["choice"].overrides == ["--sandbox.cpus", "2"]


def test_no_dashes_no_command(called: dict[str, Any]) -> None:
    typer.main.get_command(app).main(["sandbox", "run", "task-1"], standalone_mode=False)
    assert called["words"] == []
    with pytest.raises(typer.TyperException):
        typer.main.get_command(app).main(["sandbox", "run", "--", "ls"], standalone_mode=False)


def table(name: str) -> list[tuple[str, str]]:
    """(first cell without back-ticks, second) of a marked table of docs/debugging.md."""
    page = (Path(__file__).parents[3] / "docs/debugging.md").read_text(encoding="utf-8")
    marked = re.search(rf"<!-- {name}:.*?-->\n(.*?)<!-- /{name} -->", page, re.DOTALL)
    assert marked is not None
    return re.findall(r"^\| `([^`]+)` \| (.+) \|$", marked[1], re.MULTILINE)


def test_the_page_lists_the_shells_words() -> None:
    assert table("colon") == [(f":{name} {word.usage}".rstrip(), word.meaning) for name, word in COLONS.items()]


def test_the_page_lists_the_verdicts() -> None:
    assert [verdict for verdict, _ in table("verdicts")] == [verdict.value for verdict in Verdict]

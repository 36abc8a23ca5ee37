"""What the debugging commands share: settings, tasks, sessions, what is printed, what is kept."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import (
    ConfigError,
    DatasetError,
    DiskFullError,
    InfrastructureError,
    NoSandboxBackendError,
    UsageError,
)
from agentrl.run.debug import (
    AGENT_SETTINGS,
    GRADE_SETTINGS,
    TASK_SETTINGS,
    Choice,
    all_tasks,
    find_task,
    near,
    no_verdict_by_accident,
    resolve,
)
from agentrl.run.debug_run import read_patch
from agentrl.run.debug_session import ShellSession, _difference, _parse
from agentrl.run.debug_text import exit_code_of, file_name, grade_lines, printable, write_grade_log
from agentrl.run.sandboxes import size, span, table
from agentrl.trajectory import Split
from agentrl.wire import ChatMessage, CommandResult, Grade, Task


class Rows:
    """An environment without a catalogue: `count` rows, the last two held out; train wraps around."""

    name = "rows"
    grade_unsubmitted = True

    def __init__(self, count: int) -> None:
        self.count = count

    def tasks(self, split: Split, *, start: int, count: int, seed: int = 0) -> list[Task]:
        held, train = {Split.FRESH: [0], Split.UNSEEN: [1]}, max(self.count - 2, 0)
        numbers = [2 + index % train for index in range(start, start + count)] if train else []
        numbers = numbers if split is Split.TRAIN else held[split][start : start + count]
        return [Task(id=f"row-{n}", environment=self.name, split=split, data={}) for n in numbers]

    def prompt(self, task: Task) -> list[ChatMessage]:
        return [ChatMessage(role="user", content=task.id)]


TASK = Task(id="owner__repo-1", environment="rows", split=Split.TRAIN, data={})


# --- settings -----------------------------------------------------------------------------------------------------


def test_options_become_settings(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    choice = Choice(
        data=rows, backend="bubblewrap", overrides=["--sandbox.memory-mb", "99", "--environment.prompt=short"]
    )
    config = resolve(choice, reads=TASK_SETTINGS)
    assert config.environment.options == {"dataset": str(rows), "prompt": "short"}
    assert (config.sandbox.backend, config.sandbox.memory_mb, config.environment.name) == ("bubblewrap", 99, "swe-gym")
    assert resolve(Choice(env="answer"), reads=TASK_SETTINGS).environment.name == "answer"


@pytest.mark.parametrize(
    ("override", "reads", "says"),
    [
        ("--train.dtype=bfloat16", GRADE_SETTINGS, "train.dtype"),
        ("--rollout.groups=2", GRADE_SETTINGS, "rollout.groups"),
        ("--rollout.grade-timeout-s=2", TASK_SETTINGS, "rollout.grade_timeout_s"),
        ("--agent.tools.observations=compact", GRADE_SETTINGS, "agent.tools.observations"),
        ("--sandbox.size=2", GRADE_SETTINGS, "--jobs"),
        ("--sandbox.image=x", GRADE_SETTINGS, "environment.image"),
        ("--sandbox.sise=2", GRADE_SETTINGS, "sandbox.sise"),
    ],
)
def test_settings_without_effect_are_refused(override: str, reads: tuple[str, ...], says: str) -> None:
    """K52: a setting that the command never reads is an error that names it."""
    with pytest.raises(ConfigError) as caught:
        resolve(Choice(overrides=[override]), reads=reads)
    assert says in str(caught.value)


def test_settings_with_effect_are_taken() -> None:
    given = ["--agent.tools.observations=compact", "--rollout.infrastructure-retries=0", "--sandbox.cpus=2"]
    config = resolve(Choice(overrides=given), reads=AGENT_SETTINGS)
    assert config.agent.tools.observations == "compact"
    assert (config.rollout.infrastructure_retries, config.sandbox.cpus) == (0, 2)


def test_data_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no"):
        resolve(Choice(data=tmp_path / "nowhere"), reads=TASK_SETTINGS)


# --- tasks --------------------------------------------------------------------------------------------------------


def test_a_task_of_any_split_by_its_id() -> None:
    environment: Any = Rows(6)
    for wanted in ("row-0", "row-1", "row-5"):
        assert find_task(environment, wanted).id == wanted
    with pytest.raises(DatasetError) as caught:
        find_task(environment, "row-55")
    assert "did you mean row-5" in caught.value.remedy


def test_every_task_once() -> None:
    environment: Any = Rows(6)
    assert sorted(task.id for task in all_tasks(environment, None)) == [f"row-{n}" for n in range(6)]
    assert len(all_tasks(environment, 4)) == 4
    with pytest.raises(DatasetError, match="no task"):
        all_tasks(Nothing(0), None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        all_tasks(Rows(100_000), None)  # type: ignore[arg-type]
    assert caught.value.remedy == "give --tasks N"
    assert len(all_tasks(Rows(100_000), 7)) == 7  # type: ignore[arg-type]


class Nothing(Rows):
    def tasks(self, split: Split, *, start: int, count: int, seed: int = 0) -> list[Task]:
        return []


def test_near_names() -> None:
    assert near("alpah", ["alpha", "beta"]) == "did you mean alpha?"
    assert near("x", []) == "there is none"
    assert near("x", [f"name-{n}" for n in range(9)]).endswith("… (9 in all)")


# --- exit codes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "becomes", "code"),
    [
        (NoSandboxBackendError("none"), InfrastructureError, 3),
        (DiskFullError("full"), InfrastructureError, 3),
        (OSError(28, "No space left on device"), InfrastructureError, 3),
        (ZeroDivisionError("x"), InfrastructureError, 3),
        (UsageError("what"), UsageError, 2),
        (DatasetError("row"), DatasetError, 2),
        (InfrastructureError("gone"), InfrastructureError, 3),
    ],
)
def test_nothing_but_a_verdict_ends_with_1(error: Exception, becomes: type[Any], code: int) -> None:
    with pytest.raises(becomes) as caught, no_verdict_by_accident():
        raise error
    assert caught.value.exit_code == code


def ended(exit_code: int | None, **changes: Any) -> CommandResult:
    values = {"output": "", "output_bytes": 0, "timed_out": False, "out_of_memory": False, "duration_s": 1.0}
    return CommandResult(exit_code=exit_code, **{**values, **changes})


def test_a_commands_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(ended(7), timeout_s=5, interrupted=False) == 7
    assert capsys.readouterr().err == ""
    assert exit_code_of(ended(None, timed_out=True), timeout_s=5, interrupted=False) == 124
    assert "stopped after 5 s" in capsys.readouterr().err
    assert exit_code_of(ended(137, out_of_memory=True), timeout_s=5, interrupted=False) == 137
    assert "sandbox.memory_mb" in capsys.readouterr().err
    assert exit_code_of(ended(None, timed_out=True), timeout_s=5, interrupted=True) == 130


# --- what is printed and kept -------------------------------------------------------------------------------------


def test_what_a_sandbox_says_cannot_drive_the_terminal() -> None:
    assert printable("\x1b[31mred\x1b[0m\ttab\n") == "\x1b[31mred\x1b[0m\ttab\n"
    for hostile in ("\x1b]0;title\x07", "\x1b[2J", "\x1b[6n", "\x9b2J", "a\x08b", "\x1bc"):
        shown = printable(hostile)
        assert "\x1b" not in shown
        assert "\x07" not in shown
        assert "\x9b" not in shown
        assert "\x08" not in shown
    printable("\udc80").encode()


def test_a_grade_in_lines() -> None:
    tests = {f"t::{n}": "passed" for n in range(3)} | {"t::bad": "failed", "t::gone": "missing"}
    lines = grade_lines(Grade(reward=0, resolved=False, tests=tests, log="how\nwhy"))
    assert lines[0] == "not resolved (reward 0)"
    assert lines[1] == "tests: 3 passed, 1 failed, 1 missing"
    assert [line.split() for line in lines[2:4]] == [["failed", "t::bad"], ["missing", "t::gone"]]
    assert lines[4:] == ["  how", "  why"]
    many = grade_lines(Grade(reward=0, resolved=False, tests={f"t::{n}": "failed" for n in range(999)}))
    assert len(many) < 60
    assert "959 more" in many[-1]
    assert grade_lines(Grade(reward=1, resolved=True, log="how")) == ["resolved (reward 1)"]


def test_the_log_of_a_grade_holds_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grade = Grade(reward=0.5, resolved=False, log="how it went", tests={"t::a": "failed"}, output="E  boom \udcff")
    path = write_grade_log(tmp_path / "new" / "x.log", TASK, "img", "--- a\udcfe", grade)
    data = path.read_bytes()
    for part in (
        b"task: owner__repo-1",
        b"image: img",
        b"patch: 6 bytes",
        b"how it went",
        b"failed   t::a",
        b"boom \xff",
    ):
        assert part in data
    monkeypatch.chdir(tmp_path)
    first, second = (write_grade_log(None, TASK, "img", "", grade) for _ in range(2))
    assert first.parent == Path("runs/sandbox")
    assert first.name.startswith("grade-owner__repo-1-")
    assert first.is_file()
    with pytest.raises(UsageError, match="cannot be written"):
        write_grade_log(path / "below a file", TASK, "img", "", grade)
    assert second.is_file()


def test_a_task_id_in_a_file_name() -> None:
    assert file_name("a/../b c") == "a-..-b-c"
    assert file_name("../../etc") == "etc"
    assert file_name("///") == "task"


def test_a_patch_is_never_stripped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\n--- a\r\n+++ b\n\xff \n\n"
    (tmp_path / "p").write_bytes(data)
    assert read_patch(str(tmp_path / "p")).encode("utf-8", "surrogateescape") == data
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert read_patch("-").encode("utf-8", "surrogateescape") == data
    with pytest.raises(UsageError, match="cannot be read"):
        read_patch(str(tmp_path / "nowhere"))


def test_sizes_spans_and_tables() -> None:
    assert [size(n) for n in (None, 900, 5_000_000, 2_340_000_000)] == ["?", "1 kB", "5 MB", "2.3 GB"]
    assert [span(s) for s in (0.4, 59, 120, 7200, 200_000)] == ["0 s", "59 s", "2 min", "2 h", "2 d"]
    assert table([("A", "LONG"), ("aaaa", "b")]) == ["A     LONG", "aaaa  b"]


# --- sessions -----------------------------------------------------------------------------------------------------


def test_what_a_bash_leaves_is_read_bounded() -> None:
    assert _parse(b"A=1\0B=two\nlines\0BAD\xff=x\0C=\xff\0=x\0D E=x\0_=/bin/env\0PWD=/x\0nothing") == {
        "A": "1",
        "B": "two\nlines",
    }
    assert _difference({"A": "1", "B": "2"}, {"A": "1", "C": "3"}) == {"C": "3", "B": None}


class FakeBench:
    """Answers `bash -n` as bash would not: tests of what is asked at all."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def run(self, command: str, **options: Any) -> CommandResult:
        self.asked.append(command)
        return ended(2, output="bash: line 1: syntax error: unexpected end of file")


def test_plain_lines_are_not_checked_for_their_end() -> None:
    bench = FakeBench()
    session = ShellSession(bench)  # type: ignore[arg-type]
    for line in ("ls -la", "pytest -q tests", "git diff | head"):
        assert session.is_complete(line)
    assert bench.asked == []
    assert not session.is_complete("ls \\")
    assert bench.asked == []
    assert not session.is_complete("for i in 1 2")
    assert bench.asked == ["bash -n"]

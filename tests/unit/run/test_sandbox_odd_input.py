"""Debugging commands on input that nobody meant: bytes, sizes, signals, closed streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError, DiskFullError, UsageError
from agentrl.run import debug_bench, debug_run, debug_text
from agentrl.run.debug import TASK_SETTINGS, Choice, no_verdict_by_accident, resolve
from agentrl.run.debug_colon import MOST_S, ShellError, run_colon
from agentrl.run.debug_run import grade_command, read_patch
from agentrl.run.debug_session import ShellSession, bash_line, bash_word
from agentrl.run.debug_shell import Shell
from agentrl.run.signals import Interrupted, ReaderGone
from agentrl.run.verify import Ledger
from agentrl.run.verify_task import TaskVerdict, Verdict

# --- options and files --------------------------------------------------------------------------------------------


def test_a_data_name_that_no_file_can_have() -> None:
    for name in ("a" * 5000, "a\0b"):
        with pytest.raises(ConfigError, match="there is no"):
            resolve(Choice(data=Path(name)), reads=TASK_SETTINGS)


def test_a_patch_without_end_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(debug_run, "PATCH_BYTES", 3)
    (tmp_path / "p").write_bytes(b"123")
    assert read_patch(str(tmp_path / "p")) == "123"
    with pytest.raises(UsageError, match="more than"):
        read_patch("/dev/zero")


def test_a_patch_of_a_closed_stdin_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert read_patch("-") == ""


def test_a_log_that_cannot_be_written_is_found_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(debug_run, "open_task", lambda *_, **__: pytest.fail("too late"))
    with pytest.raises(UsageError, match="log cannot be written"):
        grade_command(Choice(), "x", patch=None, reference=True, log=tmp_path)
    kept = tmp_path / "kept"
    kept.write_text("before")
    debug_text.check_log(kept)
    assert kept.read_text() == "before"


def test_a_full_disk_is_told_once_and_typed() -> None:
    """K43: what the disk refused is not tried again, with another error, when the file is closed."""
    with pytest.raises(DiskFullError), Ledger(Path("/dev/full"), resume=False) as ledger:
        ledger.add(TaskVerdict(task="one", verdict=Verdict.VALID))


def test_a_folder_as_the_verdicts_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Is a directory"):
        Ledger(tmp_path, resume=False)


# --- bytes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"plain", b"it's \xe9", b"\xff\xfe'\"\\ $x `y`\n!", "ü".encode()])
def test_any_bytes_are_one_word_of_bash(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    word = bash_word(text)
    word.encode()  # as a sandbox takes it
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, timeout=30, check=True)
    assert done.stdout == data


def test_a_line_of_any_bytes() -> None:
    assert bash_line("echo 'ü' $HOME") == "echo 'ü' $HOME"
    done = subprocess.run(["bash", "-c", bash_line("echo \udcff; echo b")], capture_output=True, timeout=30, check=True)
    assert done.stdout == b"\xff\nb\n"


# --- the shell's session ------------------------------------------------------------------------------------------


class BashBench:
    """A bench whose sandbox is a bash of this machine in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.sandbox = self
        self.workdir = str(folder)
        self.was_interrupted = False

    def run(self, command: str, *, cwd: str, env: dict[str, str], **_: Any) -> Any:
        base = {"PATH": os.environ["PATH"]}
        done = subprocess.run(
            ["bash", "-c", command], cwd=cwd, env=base | env, capture_output=True, timeout=60, check=False
        )
        return done.stdout.decode()

    def read_file(self, path: str, **_: Any) -> bytes:
        return Path(path).read_bytes()

    def call(self, work: Any) -> Any:
        return work


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShellSession:
    monkeypatch.setattr("agentrl.run.debug_session._STATE", str(tmp_path / "state"))
    (tmp_path / "work").mkdir()
    made = ShellSession(BashBench(tmp_path / "work"))  # type: ignore[arg-type]
    made.begin()
    return made


def said(session: ShellSession, line: str) -> Any:
    return session.run(line, timeout_s=60)


def test_a_line_that_removes_its_folder_keeps_the_variables(session: ShellSession, tmp_path: Path) -> None:
    """The environment must not be lost with the folder: without PATH nothing runs any more."""
    said(session, "export KEPT=1; mkdir gone; cd gone; rmdir ../gone")
    assert session.changed["KEPT"] == "1"
    assert None not in session.changed.values(), "nothing is unset"
    assert said(session, "echo $KEPT; env | grep -c ^PATH=") == "1\n1\n"


def test_a_folder_with_a_line_end_in_its_name(session: ShellSession, tmp_path: Path) -> None:
    said(session, "mkdir $'a\\nb'; cd $'a\\nb'; export X=2")
    assert session.cwd == f"{tmp_path}/work/a\nb"
    assert session.changed["X"] == "2"


def test_variables_too_large_to_pass_on_are_not_kept(session: ShellSession, capsys: pytest.CaptureFixture[str]) -> None:
    said(session, "export X=1")
    before = dict(session.changed)
    said(session, "export BIG=$(head -c 200000 /dev/zero | tr '\\0' x) Y=2; cd /")
    assert session.changed == before
    assert session.cwd == "/"
    assert "too large" in capsys.readouterr().err
    assert said(session, "echo $X ${#BIG}") == "1 0\n"


class Lines:
    """A bench of which nothing is asked."""

    was_interrupted = False


def test_a_line_with_nul_is_refused_and_the_shell_lives(capsys: pytest.CaptureFixture[str]) -> None:
    shell = Shell(Lines(), timeout_s=1)  # type: ignore[arg-type]
    shell._run("echo a\0b")
    assert shell.code == 2
    assert not shell.is_over
    assert "NUL" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", str(MOST_S + 1), "9" * 30])
def test_a_time_limit_that_no_sandbox_takes(seconds: str) -> None:
    shell = Shell(Lines(), timeout_s=5)  # type: ignore[arg-type]
    with pytest.raises(ShellError, match="time limit"):
        run_colon(shell, f"timeout {seconds}")
    assert shell.timeout_s == 5
    run_colon(shell, f"timeout {MOST_S}")
    assert shell.timeout_s == MOST_S


# --- signals and readers that go away -----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_gives_everything_back(number: signal.Signals) -> None:
    """K41: a terminal that is closed, or SIGTERM, leaves no sandbox behind; a second signal does not cut it short."""
    before = signal.getsignal(number)
    given_back = False

    def work() -> None:
        nonlocal given_back
        try:
            os.kill(os.getpid(), number)
            pytest.fail("not interrupted")
        finally:
            os.kill(os.getpid(), number)
            given_back = True

    with pytest.raises(Interrupted), debug_bench._ended_by_signals():
        work()
    assert given_back
    assert signal.getsignal(number) is before


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with debug_bench._ended_by_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_reader_that_went_away_is_no_verdict() -> None:
    with pytest.raises(ReaderGone), no_verdict_by_accident():
        raise BrokenPipeError
    program = (
        "import sys; from agentrl.cli import main; from agentrl.run.signals import ReaderGone\n"
        "def app(**_): raise ReaderGone\n"
        "main.app = app; sys.exit(main.run())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (141, b"", b"")


def test_a_verdict_is_one_line_of_json_whatever_a_test_is_called(tmp_path: Path) -> None:
    from agentrl.run.verify_task import _text

    with Ledger(tmp_path / "o", resume=False) as ledger:
        ledger.add(TaskVerdict(task="t\n2", verdict=Verdict.FLAKY, differ=[_text("t::a\udcff")]))
    (line,) = (tmp_path / "o").read_bytes().splitlines()
    assert json.loads(line)["differ"] == ["t::a?"]

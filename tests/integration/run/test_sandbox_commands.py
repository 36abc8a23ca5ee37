"""`agentrl sandbox …` as people use it, on bubblewrap: real processes, real sandboxes."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest
from sandbox_command import COMMAND, GENERATED, INSTANCE, MINED, sandbox

pytestmark = [pytest.mark.bubblewrap, pytest.mark.usefixtures("bubblewrap")]

# --- run ----------------------------------------------------------------------------------------------------------


def test_run_gives_output_and_exit_code(tmp_path: Path) -> None:
    done = sandbox("run", GENERATED, "--", "ls; echo oops >&2; exit 7", cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    assert {"pytest.ini", "oops"} <= set(done.stdout.split())
    words = sandbox("run", INSTANCE, "--data", str(MINED), "--", "printf", "%s|", "a b", "$HOME", cwd=tmp_path)
    assert (words.returncode, words.stdout) == (0, "a b|$HOME|")


def test_run_stops_at_its_time_limit(tmp_path: Path) -> None:
    done = sandbox("run", GENERATED, "--timeout-s", "1", "--", "echo begun; sleep 60", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (124, "begun\n")
    assert "stopped after 1 s" in done.stderr


def test_ctrl_c_ends_the_command_and_shows_its_output(tmp_path: Path) -> None:
    words = [*COMMAND, "run", "--backend", "bubblewrap", GENERATED, "--", "echo begun; touch /tmp/x; sleep 60"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    end = time.monotonic() + 60
    while not sleeping(process.pid) and time.monotonic() < end:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "begun\n")
    assert "interrupted" in err


def sleeping(pid: int) -> bool:
    """Whether a process below `pid` is the command's `sleep 60`."""
    below = [pid]
    while below:
        for task in Path(f"/proc/{below.pop()}/task").glob("*/children"):
            try:
                children = [int(word) for word in task.read_text().split()]
                found = any(Path(f"/proc/{child}/cmdline").read_bytes() == b"sleep\x0060\0" for child in children)
            except OSError:
                continue
            if found:
                return True
            below += children
    return False


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "generated-fresh-zero", "--", "ls"], "generated-fresh-zero"),
        (["run", GENERATED], "no command is given"),
        (["run", GENERATED, "--rollout.groups", "3", "--", "ls"], "rollout.groups"),
        (["grade", GENERATED], "--patch FILE or --reference"),
        (["grade", GENERATED, "--patch", "/nowhere.patch"], "/nowhere.patch"),
        (["grade", "nobody__nothing-1", "--reference", "--data", str(MINED)], "nobody__nothing-1"),
        (["verify", "swe-gym"], "--tasks N"),
        (["replay", "/nowhere/train-1"], "no run folder"),
    ],
)
def test_what_cannot_be_meant_is_exit_2(words: list[str], says: str, tmp_path: Path) -> None:
    done = sandbox(*words, cwd=tmp_path)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_no_backend_is_an_infrastructure_failure(tmp_path: Path) -> None:
    """Exit code 1 would say `not resolved`."""
    words = [*COMMAND, "grade", GENERATED, "--reference", "--backend", "docker"]
    environment = os.environ | {"DOCKER_HOST": "unix:///nowhere.sock"}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 3, done.stderr
    assert "Docker" in done.stderr


# --- grade --------------------------------------------------------------------------------------------------------


def test_grade_a_reference_and_an_empty_patch(tmp_path: Path) -> None:
    good = sandbox("grade", INSTANCE, "--data", str(MINED), "--reference", cwd=tmp_path)
    assert good.returncode == 0, good.stderr
    assert good.stdout.startswith(f"{INSTANCE}: resolved (reward 1)")
    (log,) = (tmp_path / "runs/sandbox").glob("grade-*.log")
    assert f"log: {log.relative_to(tmp_path)}" in good.stdout
    assert "resolved: True" in log.read_text()

    (tmp_path / "empty.patch").write_bytes(b"")
    kept = tmp_path / "kept.log"
    words = ["--data", str(MINED), "--patch", "empty.patch", "--log", str(kept)]
    bad = sandbox("grade", INSTANCE, *words, cwd=tmp_path)
    assert bad.returncode == 1, bad.stderr
    assert "not resolved (reward 0)" in bad.stdout
    row = next(row for line in MINED.read_text().splitlines() if (row := json.loads(line))["instance_id"] == INSTANCE)
    failing = row["FAIL_TO_PASS"] if isinstance(row["FAIL_TO_PASS"], list) else json.loads(row["FAIL_TO_PASS"])
    assert failing[0] in bad.stdout
    assert "AssertionError" in kept.read_text() or "Error" in kept.read_text()


def test_grade_a_patch_from_stdin(tmp_path: Path) -> None:
    row = next(row for line in MINED.read_text().splitlines() if (row := json.loads(line))["instance_id"] == INSTANCE)
    words = ["grade", INSTANCE, "--data", str(MINED), "--patch", "-"]
    done = sandbox(*words, stdin=row["patch"].encode(), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


# --- shell --------------------------------------------------------------------------------------------------------

SESSION = rb"""
mkdir -p sub && cd sub && export FOO='a
b'
echo "$PWD|$FOO"; (exit 3)
unset HOME
echo "${HOME-none}"; cd ..; rmdir sub
for n in 1 2
do echo n$n
done
cd /nowhere; exit 9
echo still here in $PWD
:view pytest.ini 1 1
:task
:nope
:reference
:diff
:grade
"""


def test_a_shell_from_stdin(tmp_path: Path) -> None:
    """Folder and exported variables stay, `exit` in a line is the line's, the tools are the agent's."""
    done = sandbox("shell", GENERATED, stdin=SESSION, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in ("/testbed/sub|a\nb\n", "\nnone\n", "\nn1\nn2\n"):
        assert part in done.stdout
    assert "cat -n" in done.stdout
    assert "--- user\n" in done.stdout
    assert "\n+    return bonus * high\n" in done.stdout
    assert "resolved (reward 1)" in done.stdout
    assert f"task {GENERATED}" in done.stderr
    assert "no command :nope" in done.stderr
    assert "hidden" not in done.stderr


def test_exit_leaves_a_shell_and_a_dead_sandbox_does_not(tmp_path: Path) -> None:
    lines = b"touch here\n:timeout 1\nsleep 30\nls here\n:reset\nls here\nexit 4\necho never\n"
    done = sandbox("shell", GENERATED, stdin=lines, cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert "stopped after 1 s" in done.stderr
    assert done.stdout.count("\nhere\n") == 1
    assert "No such file" in done.stdout
    assert "never" not in done.stdout


def test_ctrl_c_at_the_terminal_ends_a_line_and_not_the_shell(tmp_path: Path) -> None:
    words = [*COMMAND, "shell", "--backend", "bubblewrap", GENERATED]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(words[0], words, os.environ | {"TERM": "dumb", "XDG_STATE_HOME": str(tmp_path)})
    seen = typed(terminal, b"", 60)
    seen += typed(terminal, b"printf 'be%s' gun; sleep 60\n", 2, wait=False)
    seen += typed(terminal, b"\x03", 30)
    seen += typed(terminal, b"printf '\\033]0;t\\007al%s\\n' ive\n", 30)
    seen += typed(terminal, b"exit 5\n", 10, wait=False)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    assert "sleep 60" in (tmp_path / "agentrl/shell_history").read_text()
    assert b"begun" in seen
    assert b"interrupted" in seen
    assert rb"\x1b]0;t\x07alive" in seen, "what the sandbox says does not reach the terminal as it is"


def typed(terminal: int, text: bytes, timeout_s: float, *, wait: bool = True) -> bytes:
    """Type `text`; what the terminal then shows until the prompt comes back, or for `timeout_s`."""
    os.write(terminal, text)
    shown, end = b"", time.monotonic() + timeout_s
    while (left_s := end - time.monotonic()) > 0 and not (wait and shown.endswith(b"$ ")):
        if select.select([terminal], [], [], left_s)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the shell is gone
                break
    return shown


# --- the machine --------------------------------------------------------------------------------------------------


def test_ps_and_stats_answer(tmp_path: Path) -> None:
    for name in ("ps", "stats", "reap"):
        done = sandbox(name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()

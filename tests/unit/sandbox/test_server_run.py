"""The server's `run`, its protocol, and what it leaves running: nothing."""

from __future__ import annotations

import base64
import json
import os
import resource
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    ServerClient = Any


def _pid_in(text: str) -> int:
    return int(text.split()[0])


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _run_apart(code: str) -> None:
    """In an interpreter of its own: `Processes` changes the process it is made in."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_run_gives_output_and_exit_code(server: ServerClient) -> None:
    answer = server.run("echo out; echo err >&2; pwd; exit 7")
    assert answer["output"] == f"out\nerr\n{server.work}\n"
    assert answer["exit_code"] == 7
    assert answer["output_bytes"] == len(answer["output"])
    assert answer["timed_out"] is False
    assert answer["out_of_memory"] is False


def test_run_starts_afresh_each_time(server: ServerClient) -> None:
    server.run("cd / && export MARK=1")
    assert server.run('echo "$PWD ${MARK-unset}"')["output"] == f"{server.work} unset\n"


def test_run_takes_cwd_environment_and_stdin(server: ServerClient) -> None:
    (server.work / "sub").mkdir()
    answer = server.run(
        'echo "$PWD $X"; wc -l',
        cwd="sub",
        env={"X": "a b"},
        stdin=base64.b64encode(b"line\n" * 100_000).decode(),
    )
    assert answer["output"] == f"{server.work}/sub a b\n100000\n"


def test_stdin_that_nobody_reads_does_not_block(server: ServerClient) -> None:
    data = base64.b64encode(b"x" * 5_000_000).decode()
    answer = server.run("exit 3", stdin=data)
    assert answer["exit_code"] == 3
    assert answer["duration_s"] < 5


def test_k48_environment_is_an_allow_list(server: ServerClient) -> None:
    names = {line.split("=")[0] for line in server.run("env")["output"].splitlines()}
    assert {"PAGER", "GIT_PAGER", "LANG", "HOME", "PATH"} <= names
    assert not {name for name in names if name.startswith("AGENTRL")}


def test_output_is_cut_to_head_and_tail(server: ServerClient) -> None:
    answer = server.run("printf A; head -c 3000000 /dev/zero | tr '\\0' x; printf B", output_limit=1000)
    text = answer["output"]
    assert text.startswith("A" + "x" * 499 + "\n[... 2999002 bytes left out ...]\n" + "x" * 499 + "B")
    assert answer["output_bytes"] == 3_000_002


def test_cut_does_not_split_a_character(server: ServerClient) -> None:
    answer = server.run("for i in $(seq 2000); do printf 'é'; done", output_limit=1001)
    assert "\ufffd" not in answer["output"]
    assert answer["output"].startswith("é" * 250 + "\n[...")


def test_bytes_pass_through(server: ServerClient) -> None:
    answer = server.run(r"printf 'a\0b\r\nc\033[31m\377d'")
    assert answer["output"] == "a\0b\r\nc\033[31m\ufffdd"


def test_k40_deadline_kills_the_whole_group(server: ServerClient) -> None:
    started = time.monotonic()
    answer = server.run("trap '' TERM INT HUP; sleep 300 & echo $!; sleep 300", timeout_s=0.5)
    assert answer["timed_out"] is True
    assert answer["exit_code"] is None
    assert time.monotonic() - started < 5
    assert not _alive(_pid_in(answer["output"]))
    assert server.run("echo usable")["output"] == "usable\n"


def test_k40_setsid_daemon_dies_with_its_command(server: ServerClient) -> None:
    answer = server.run("setsid sh -c 'echo $$ > pid; exec sleep 300' >/dev/null 2>&1 & sleep 0.3")
    assert answer["exit_code"] == 0
    assert not _alive(_pid_in((server.work / "pid").read_text()))
    assert server.call("ping")["processes"] == 0


def test_k40_orphan_without_pipe_or_group_dies_with_its_command(server: ServerClient) -> None:
    """Nothing shows it but that it is our child by then: not the leader's group, not its output."""
    script = "setsid bash -c 'trap \"\" TERM HUP; echo $BASHPID > pid; sleep 300' </dev/null >/dev/null 2>&1 &"
    server.run('bash -c "$SCRIPT"; until [ -s pid ]; do sleep 0.01; done', env={"SCRIPT": script})
    assert not _alive(_pid_in((server.work / "pid").read_text()))
    assert server.call("ping")["processes"] == 0


def test_processes_that_were_there_before_are_spared() -> None:
    """By the counting of the server itself: no child, no walk through /proc; a child, and it is found."""
    code = """
import os, signal, time
from agentrl.sandbox.server.processes import Processes
processes = Processes()
assert processes.nothing_below() and processes.below() == set()
early = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "300")
before = processes.below()
assert before == {early} and not processes.nothing_below()
late = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "300")
assert processes.kill_new(before)
assert processes.below() == {early}
os.kill(early, signal.SIGKILL)
assert processes.kill_new(set()) and processes.nothing_below()
"""
    _run_apart(code)


def test_background_child_that_holds_the_pipe_does_not_block(server: ServerClient) -> None:
    answer = server.run("sleep 300 & echo done", timeout_s=10)
    assert answer["output"] == "done\n"
    assert answer["exit_code"] == 0
    assert answer["duration_s"] < 5


def test_leader_that_closed_its_output_is_waited_for(server: ServerClient) -> None:
    answer = server.run("exec >/dev/null 2>&1; sleep 0.3; exit 5")
    assert answer["exit_code"] == 5
    assert answer["duration_s"] >= 0.3


def test_death_by_signal_is_128_plus_n(server: ServerClient) -> None:
    assert server.run("kill -TERM $$")["exit_code"] == 143


def test_k42_kill_without_a_counter_is_taken_for_want_of_memory() -> None:
    from agentrl.sandbox.server.memory import OomCounter

    counter = OomCounter("/nowhere")
    assert counter.read() is None
    assert counter.happened(None, 137)
    assert not counter.happened(None, None)
    assert not counter.happened(None, 1)


@pytest.mark.parametrize(("file", "text"), [("memory.events", "oom 3\noom_kill 2\n")])
def test_k42_kills_are_counted_by_the_control_group(tmp_path: Any, file: str, text: str) -> None:
    from agentrl.sandbox.server.memory import OomCounter

    (tmp_path / file).write_text(text)
    counter = OomCounter(str(tmp_path))
    before = counter.read()
    assert before == 2
    assert not counter.happened(before, 137)
    (tmp_path / file).write_text(text.replace("oom_kill 2", "oom_kill 3"))
    assert counter.happened(before, 1)


def test_k48_commands_inherit_no_descriptor_of_the_server(server: ServerClient) -> None:
    assert server.run("ls /proc/self/fd")["output"].split() == ["0", "1", "2", "3"]  # 3: the listing's own


def test_k48_what_the_server_was_started_with_is_not_passed_on() -> None:
    code = """
import os
os.dup2(os.open("/dev/null", os.O_RDONLY), 40, inheritable=True)
from agentrl.sandbox.server.processes import Processes
Processes()
assert not os.get_inheritable(40) and os.get_inheritable(1)
"""
    _run_apart(code)


def test_a_folder_that_is_gone_later_is_no_matter(server: ServerClient) -> None:
    (server.work / "sub").mkdir()
    assert server.run("rmdir ../sub; echo gone", cwd="sub")["output"] == "gone\n"
    assert server.run("pwd")["output"] == f"{server.work}\n"
    assert server.ask("run", command="pwd", timeout_s=5, cwd="sub")["ok"] is False


def test_the_shell_is_named_unless_the_caller_names_one(server: ServerClient) -> None:
    assert server.run("env | grep ^SHELL=")["output"] == "SHELL=/bin/bash\n"
    assert server.run("env | grep ^SHELL=", env={"SHELL": "/bin/zsh"})["output"] == "SHELL=/bin/zsh\n"


def test_long_command(server: ServerClient) -> None:
    answer = server.run("x='" + "y" * 300_000 + "'; echo ${#x}")
    assert answer["output"] == "300000\n"


def test_signals_to_the_server_do_not_end_it(server: ServerClient) -> None:
    pid = server.process.pid
    answer = server.run(f"for s in INT TERM HUP USR1 USR2 QUIT; do kill -$s {pid}; done; echo sent")
    assert answer["output"] == "sent\n"
    assert server.call("ping")["processes"] == 0


def test_commands_do_not_inherit_ignored_signals(server: ServerClient) -> None:
    ignored = int(server.run("grep SigIgn /proc/self/status")["output"].split()[1], 16)
    assert ignored & 0x7FFFFFFF == 0  # signals 1 to 31; 32 and 33 are the C library's own, out of Python's reach


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"nonsense",
        b"[1]",
        b"\xff\xfe",
        b'{"id": 1}',
        b'{"id": 1, "op": "fly"}',
        b'{"id": 1, "op": "run"}',
        b'{"id": 1, "op": "run", "command": 3}',
        b'{"id": 1, "op": "run", "command": "a\\u0000b"}',
        b'{"id": 1, "op": "run", "command": "true", "timeout_s": -1}',
        b'{"id": 1, "op": "run", "command": "true", "timeout_s": NaN}',
        b'{"id": 1, "op": "run", "command": "true", "cwd": "/nowhere"}',
        b'{"id": 1, "op": "run", "command": "true", "stdin": "*"}',
        b'{"id": 1, "op": "run", "command": "true", "env": {"A": 1}}',
        b'{"id": 1, "op": "tests", "arguments": "x"}',
        b'{"id": 1, "op": "edit", "command": "view"}',
        b'{"id": 1, "op": "write", "files": {"a": 1}}',
        b'{"id": 1, "op": "unpack", "tar": "QUJD"}',
        b"[" * 100_000,
    ],
)
def test_malformed_requests_get_an_error_answer(server: ServerClient, line: bytes) -> None:
    server.send_line(line)
    answer = server.receive()
    assert answer["ok"] is False
    assert answer["error"]["kind"] in ("bad_request", "failed")
    assert answer["error"]["message"]
    assert server.call("ping")["ok"]


def test_k41_end_of_stdin_ends_the_server_and_all_below(new_server: ServerClient) -> None:
    """At once, not when the command in progress has come to its deadline."""
    new_server.run("true")
    command = "trap '' INT; setsid sleep 300 & echo $! > pid; mv pid told; sleep 300"
    new_server.send_line(json.dumps({"id": 9, "op": "run", "command": command, "timeout_s": 300}).encode())
    end = time.monotonic() + 20
    while not (new_server.work / "told").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert new_server.close() == 0
    assert not _alive(_pid_in((new_server.work / "told").read_text()))


def test_reset_outside_a_sandbox_spares_other_processes(server: ServerClient) -> None:
    server.run("mkdir -p a/b && chmod 000 a/b && echo x > f && ln -s / link && mkfifo pipe")
    deep = server.run("for i in $(seq 200); do mkdir d && cd d || exit 1; done")
    assert deep["exit_code"] == 0
    os.chmod(server.work, 0o500)
    server.call("reset")
    assert os.listdir(server.work) == []
    assert os.listdir(server.scratch) == []
    assert os.path.isdir("/usr")


def test_server_cannot_be_traced_or_read(server: ServerClient) -> None:
    """Its memory belongs to root once it is not dumpable."""
    owner = os.stat(f"/proc/{server.process.pid}/mem").st_uid
    assert owner == 0
    status = server.run("cat /proc/self/oom_score_adj; python3 -c 'import ctypes; print(ctypes.CDLL(None).prctl(3))'")
    assert status["output"].splitlines()[-1] == "1"


def test_reset_refuses_a_server_whose_limits_were_changed(new_server: ServerClient) -> None:
    """Its own user may change them, and everything started later would inherit them."""
    pid = new_server.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    new_server.call("reset")
    assert new_server.run(f"prlimit --pid {pid} --nofile=200:{hard}")["exit_code"] == 0
    answer = new_server.ask("reset")
    assert answer["ok"] is False
    assert "RLIMIT_NOFILE" in answer["error"]["message"]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    new_server.call("reset")
    os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid) + 1)
    assert "niceness" in new_server.ask("reset")["error"]["message"]

"""What every backend must give, run over each: the same server, the same promises."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import tarfile
import time
from typing import Any

import pytest

from agentrl.errors import SandboxDeadError, SandboxError
from agentrl.wire.protocols import Sandbox


def sh(house: Any, command: str, *, timeout_s: float = 30.0, **options: Any) -> Any:
    """The result of one command in a fresh sandbox."""

    async def body(box: Sandbox) -> Any:
        return await box.run(command, timeout_s=timeout_s, **options)

    return house.lease(body)


def archive(**files: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("__", "/").replace("_py", ".py"))
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


async def strike(box: Any) -> None:
    """SIGKILL the sandbox's PID 1 from outside."""
    machine = box._session.machine
    if hasattr(machine, "server_pidfd"):
        signal.pidfd_send_signal(machine.server_pidfd, signal.SIGKILL)
    else:
        state = await machine._backend.state(machine.container)
        os.kill(state["Pid"], signal.SIGKILL)


# --- operations
# ---------------------------------------------------------------------------------------------------


def test_run_gives_exit_code_output_and_takes_stdin_cwd_and_environment(house: Any) -> None:
    result = sh(house, "cat; pwd; echo $K; echo err >&2; exit 3", stdin=b"in\n", env={"K": "v"}, cwd="/tmp")
    assert (result.exit_code, result.output) == (3, "in\n/tmp\nv\nerr\n")
    assert not result.timed_out
    assert not result.out_of_memory


def test_output_is_cut_to_head_and_tail(house: Any) -> None:
    result = sh(house, "seq 1 2000000", output_limit=1000)
    assert result.output.startswith("1\n2\n")
    assert result.output.endswith("\n2000000\n")
    assert len(result.output) < 1200
    assert result.output_bytes == 14888896


def test_files_edits_archives_and_tests(house: Any) -> None:
    async def body(box: Sandbox) -> None:
        await box.unpack(archive(mod_py="def one():\n    return 2\n", sub__test_mod_py="from mod import one\n"))
        await box.write_files({"test_mod.py": b"from mod import one\n\ndef test_one():\n    assert one() == 1\n"})
        assert await box.read_file("sub/test_mod.py") == b"from mod import one\n"
        assert await box.read_file("missing") is None
        report = await box.run_tests(["-q", "test_mod.py"], timeout_s=60)
        assert report.results == {"test_mod.py::test_one": "failed"}
        edited = await box.edit("str_replace", path="mod.py", old_str="2", new_str="1", timeout_s=30)
        assert edited.ok, edited.text
        report = await box.run_tests(["-q", "test_mod.py"], timeout_s=60, canary=True)
        assert report.results == {"test_mod.py::test_one": "passed"}
        assert report.canary_failed is True
        assert not (await box.edit("view", path="nowhere.py", timeout_s=30)).ok
        assert (await box.run("git init -q . && git add -A && git status -s | wc -l", timeout_s=30)).output == "3\n"
        with pytest.raises(SandboxError, match="refused unpack"):
            await box.unpack(b"no tar at all")

    house.lease(body)


# --- isolation
# ----------------------------------------------------------------------------------------------------


def test_identity_and_privileges(house: Any) -> None:
    out = sh(house, "id -u; id -g; grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status").output.split()
    assert out == ["1000", "1000", "CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]


def test_k48_environment_is_the_allow_list(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_SECRET_TOKEN", "hunter2")
    out = sh(house, "env | cut -d= -f1 | sort; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'").output
    assert "hunter2" not in out
    names = {line for line in out.split() if "=" not in line}
    assert names <= {
        *("PATH", "HOME", "LANG", "PAGER", "GIT_PAGER", "MANPAGER", "PIP_PROGRESS_BAR", "TQDM_DISABLE"),
        *("PYTHONDONTWRITEBYTECODE", "HOSTNAME", "PWD", "SHELL", "SHLVL", "_"),
    }
    assert {"PATH", "HOME", "LANG", "PAGER"} <= names


def test_k44_no_network(house: Any) -> None:
    code = "import socket; s = socket.socket(); s.settimeout(3); print(s.connect_ex(('1.1.1.1', 53)))"
    out = sh(house, f'python3 -c "{code}"; grep -c : /proc/net/dev; cat /proc/net/route | wc -l').output.split()
    assert out[0] == "101"  # network is unreachable
    assert out[1:] == ["1", "1"]  # the loopback alone, no route but the heading


def test_k44_no_host_files(house: Any) -> None:
    here = os.path.abspath(__file__)
    out = sh(house, f"ls /; test -e {here} && echo seen; find /testbed /tmp /root /home /mnt -mindepth 1").output
    assert "seen" not in out
    assert "/testbed/" not in out  # nothing hidden waits there either
    assert "/tmp/" not in out
    known = "bin boot dev etc home lib lib32 lib64 libx32 media mnt opt proc root run sbin srv sys testbed tmp"
    entries = {line for line in out.splitlines() if not line.startswith(("/", "find:"))}
    assert entries <= {*known.split(), "usr", "var"}, entries


def test_only_the_work_tree_tmp_and_shm_can_be_written(house: Any) -> None:
    places = sh(
        house,
        "for d in / /etc /usr /opt /opt/agentrl /opt/agentrl/server /var /dev /proc/sys/kernel "
        "/testbed /tmp /dev/shm; do (echo x > $d/probe) 2>/dev/null && echo $d; done; "
        "touch /opt/agentrl/server/main.py 2>&1",
    ).output
    assert places.splitlines()[:3] == ["/testbed", "/tmp", "/dev/shm"]
    assert "Read-only" in places or "denied" in places


def test_no_kernel_setting_can_be_opened_for_writing(house: Any) -> None:
    """A host's root that is mapped into the sandbox still owns /proc/sys/kernel/core_pattern: an escape."""
    code = """
import os, stat
for folder, _, names in os.walk("/proc"):
    if folder.split("/")[2:3] and folder.split("/")[2].isdigit() or folder.startswith("/proc/pressure"):
        continue
    for name in names:
        path = os.path.join(folder, name)
        try:
            if stat.S_ISREG(os.stat(path).st_mode):  # Docker masks some by /dev/null
                os.close(os.open(path, os.O_WRONLY))
                print(path)
        except OSError:
            pass
"""
    result = sh(house, "python3 -", stdin=code.encode())
    assert (result.exit_code, result.output) == (0, "")


def test_the_server_cannot_be_reached_from_inside(house: Any) -> None:
    """Answers cannot be forged: PID 1's descriptors and memory are closed to its own user."""

    async def body(box: Sandbox) -> None:
        forged = '{"id": 99, "ok": true, "exit_code": 0}'
        result = await box.run(
            f"for n in 0 1 2 3 4 5 6 7; do echo '{forged}' > /proc/1/fd/$n && echo wrote; done 2>/dev/null; "
            "cat /proc/1/mem 2>&1 | head -c 100; kill -9 1; kill -STOP 1; echo over",
            timeout_s=20,
        )
        assert "wrote" not in result.output
        assert result.output.endswith("over\n")
        assert (await box.run("echo fine", timeout_s=10)).output == "fine\n"

    house.lease(body)


# --- limits and deadlines
# -----------------------------------------------------------------------------------------


def test_k40_a_deadline_kills_the_whole_group_and_the_sandbox_lives(house: Any) -> None:
    async def body(box: Any) -> None:
        began = time.monotonic()
        result = await box.run("(setsid sleep 600 &) ; nohup sleep 601 & sleep 602", timeout_s=1)
        assert time.monotonic() - began < 60  # not the commands' 600
        assert result.timed_out
        assert result.exit_code is None
        assert (await box.run("pgrep -c sleep", timeout_s=10)).output == "0\n"
        assert (await box.ping()).processes == 0

    house.lease(body)


def test_a_fork_bomb_is_held(house: Any) -> None:
    async def body(box: Any) -> None:
        result = await box.run("bomb() { bomb | bomb & }; bomb; sleep 1; echo over", timeout_s=5)
        assert result.timed_out or result.exit_code is not None
        assert (await box.ping()).processes == 0
        assert (await box.run("echo fine", timeout_s=10)).output == "fine\n"

    house.lease(body)


def test_k42_a_memory_hog_is_told_apart_from_a_failing_command(house: Any) -> None:
    result = None

    async def body(box: Sandbox) -> None:
        nonlocal result
        result = await box.run('python3 -c "x = bytearray(2_000_000_000)"; echo code $?', timeout_s=60)

    try:
        house.lease(body)
    except SandboxError:
        return  # the sandbox as a whole: an infrastructure failure, never a grade
    assert result is not None
    assert result.out_of_memory or "MemoryError" in result.output, result
    assert sh(house, "echo fine").output == "fine\n"


def test_k42_a_command_that_kills_itself_is_not_out_of_memory(house: Any) -> None:
    result = sh(house, "kill -9 $$")
    assert (result.exit_code, result.out_of_memory) == (137, False)


def test_file_systems_are_sized(house: Any) -> None:
    fill = "head -c 200M /dev/zero 2>/dev/null > $d/f; stat -c %s $d/f; rm $d/f"
    out = sh(house, f"for d in /testbed /tmp /dev/shm; do {fill}; done").output
    assert [int(size) for size in out.split()] == [32 * 1024 * 1024] * 3


def test_whatever_the_agent_does_to_its_own_tree_is_a_result(house: Any) -> None:
    """K42: a shut or emptied tree is a failing command, never a failing machine; the next lease finds a whole one."""

    async def body(box: Sandbox) -> None:
        await box.write_files({"pkg/mod.py": b"one = 1\n"})
        assert (await box.run("chmod 0 /testbed", timeout_s=10)).exit_code == 0
        shut = await box.run("ls", timeout_s=10)
        assert (shut.exit_code, shut.output) == (1, "bash: cd: /testbed: Permission denied\n")
        assert not (await box.edit("view", path="/testbed/pkg/mod.py", timeout_s=30)).ok
        assert (await box.run("chmod 755 /testbed; ls -A /testbed", timeout_s=10, cwd="/")).output == "pkg\n"
        gone = "rm -rf /testbed/* /testbed/.[!.]*; rmdir /testbed; mv /testbed /tmp/x; ln -s / /tmp/x; ls -A | wc -l"
        assert (await box.run(gone, timeout_s=10)).output.endswith("0\n")
        names = "mkdir $'\\xff'; cd $'\\xff'; echo x > $'b\\xe9'; ls -A | wc -l"
        assert (await box.run(names, timeout_s=10)).output == "1\n"
        await box.run("chmod 0 /testbed /tmp /dev/shm", timeout_s=10)

    house.lease(body)

    async def again(box: Sandbox) -> str:
        return (await box.run("stat -c %a /testbed /tmp /dev/shm; ls -A /testbed /tmp | wc -w", timeout_s=10)).output

    assert house.lease(again) == "755\n1777\n1777\n2\n"


# --- life and death
# -----------------------------------------------------------------------------------------------


def test_reset_leaves_nothing(house: Any) -> None:
    look = "find /testbed /tmp /dev/shm /dev/mqueue -mindepth 1 2>/dev/null; pgrep -c sleep; ipcs | grep -c ^0x"

    async def main() -> None:
        ids = []
        for _ in range(6):
            async with house.pool.lease(house.config.image, timeout_s=60) as box:
                ids.append(box.id)
                assert (await box.run(look, timeout_s=10)).output == "0\n0\n"
                assert (await box.ping()).processes == 0
                await box.run(
                    "mkdir -p a/b; touch a/b/c .hid /tmp/.x /dev/shm/y; ln -s / l; chmod 0 a; "
                    "ipcmk -M 1000; ipcmk -Q; (setsid sleep 600 &)",
                    timeout_s=10,
                )
                await box.write_files({"f": b"x"})
        assert len(set(ids)) < 6  # at least one was used again

    house.runner.run(main())


def test_a_server_whose_limits_the_agent_changed_is_not_used_again(house: Any) -> None:
    async def main() -> None:
        failures = house.pool.stats().failures
        async with house.pool.lease(house.config.image, timeout_s=60) as box:
            changed = await box.run("prlimit --pid 1 --nofile=100:200 && renice -n 5 -p 1", timeout_s=10)
            assert changed.exit_code == 0, changed.output
        for _ in range(3):
            async with house.pool.lease(house.config.image, timeout_s=60) as other:
                assert other.id != box.id
        async with asyncio.timeout(30):  # its reset, which fails, is counted in the background
            while house.pool.stats().failures == failures:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    house.runner.run(main())


def test_k42_killed_from_outside_is_seen_at_once_and_replaced(house: Any) -> None:
    async def main() -> None:
        failures = house.pool.stats().failures
        async with house.pool.lease(house.config.image, timeout_s=60, label="struck") as box:
            task = asyncio.create_task(box.run("sleep 60", timeout_s=90))
            await asyncio.sleep(0.5)
            began = time.monotonic()
            await strike(box)
            await asyncio.wait([task])
        assert time.monotonic() - began < 40  # not the command's 60
        error = task.exception()
        assert isinstance(error, SandboxDeadError)
        assert "run" in error.where
        assert box.id in str(error)
        assert house.pool.stats().failures == failures + 1
        async with house.pool.lease(house.config.image, timeout_s=60) as other:
            assert other.id != box.id
            assert (await other.run("echo fine", timeout_s=10)).output == "fine\n"

    house.runner.run(main())


def test_a_cancelled_lease_holder_leaves_a_working_pool(house: Any) -> None:
    async def main() -> None:
        async def hold() -> None:
            async with house.pool.lease(house.config.image, timeout_s=60) as box:
                await box.run("sleep 60", timeout_s=90)

        task = asyncio.create_task(hold())
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with house.pool.lease(house.config.image, timeout_s=60) as box:
            assert (await box.run("echo fine", timeout_s=10)).output == "fine\n"

    house.runner.run(main())

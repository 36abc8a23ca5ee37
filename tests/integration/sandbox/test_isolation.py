"""What hostile code in a sandbox gets of its neighbours, of earlier and later leases, and of what is kept from it:
nothing, on every backend.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from pathlib import Path
from typing import Any

import pytest
from attacks import SYSCALL, python_in, until_it_sleeps

from agentrl.errors import SandboxError
from agentrl.trajectory import Split
from agentrl.wire.protocols import Sandbox
from agentrl_envs.swe_gym import SweGymEnvironment

# --- other sandboxes, and who comes later -------------------------------------------------------------------


PLANT = (
    SYSCALL
    + """
import socket, subprocess, sys
token = sys.argv[1]
for path in ("/tmp/", "/dev/shm/", "/testbed/", "/dev/mqueue/"):
    try:
        open(path + token, "w").write(token)
    except OSError:
        pass
libc.shmget(0x5EC2E7, 4096, 0o1666); libc.semget(0x5EC2E7, 1, 0o1666); libc.msgget(0x5EC2E7, 0o1666)
librt = ctypes.CDLL(None, use_errno=True)
librt.mq_open(b"/secret", os.O_CREAT | os.O_RDWR, 0o666, None)
call(248 if platform.machine() == "x86_64" else 217, 0, 0, 0, 0, -4)
s = socket.socket(socket.AF_UNIX); s.bind("\\0agentrl-secret"); s.listen()
subprocess.Popen(["sleep", "30"], env={"TOKEN": token})
if len(sys.argv) > 2:
    subprocess.run(["sleep", sys.argv[2]])
"""
)
LOOK = (
    SYSCALL
    + """
import socket
got = []
for path in ("/tmp", "/dev/shm", "/testbed", "/dev/mqueue"):
    try:
        got += [path + "/" + name for name in os.listdir(path) if "tok" in name]
    except OSError:
        pass
got += [kind for kind, open_ in (("shm", libc.shmget(0x5EC2E7, 0, 0)), ("sem", libc.semget(0x5EC2E7, 0, 0)),
                                 ("msg", libc.msgget(0x5EC2E7, 0))) if open_ != -1]
if libc.mq_open(b"/secret", os.O_RDWR) != -1:
    got.append("mqueue")
s = socket.socket(socket.AF_UNIX)
if s.connect_ex("\\0agentrl-secret") == 0:
    got.append("abstract socket")
try:
    got += ["keys"] * any(" user " in line for line in open("/proc/keys"))
except OSError:
    pass
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if b"sleep" in open(f"/proc/{pid}/cmdline", "rb").read():
            got.append("process")
    except OSError:
        pass
print(json.dumps(got))
"""
)


def test_sandboxes_do_not_see_each_other(house: Any) -> None:
    """Files, processes, System V and POSIX objects, abstract sockets, keys of a neighbour at work."""
    sign = f"50.{secrets.randbelow(10**9)}"

    async def main() -> None:
        async with (
            house.pool.lease(house.config.image, timeout_s=60) as one,
            house.pool.lease(house.config.image, timeout_s=60) as two,
        ):
            await one.write_files({"/tmp/plant.py": PLANT.encode()})
            planted = asyncio.create_task(one.run(f"python3 /tmp/plant.py tok-1 {sign}", timeout_s=60))
            await until_it_sleeps(sign)
            assert await python_in(two, LOOK) == []
            assert not planted.done()
            await one.interrupt()
            await planted

    house.runner.run(main())


def test_k44_nothing_outlives_a_lease(house: Any) -> None:
    async def main() -> None:
        ids: list[str] = []
        for _ in range(4):
            async with house.pool.lease(house.config.image, timeout_s=60) as box:
                ids.append(box.id)
                assert await python_in(box, LOOK) == []
                await box.write_files({"/tmp/plant.py": PLANT.encode()})
                assert (await box.run("python3 /tmp/plant.py tok-1", timeout_s=20)).exit_code == 0
        assert len(set(ids)) < 4

    house.runner.run(main())


MEMORY = '''
def test_look():
    """Search the memory of this process, a warm fork of the server, for what its earlier lease-holders were told."""
    import re
    needle = b"hidden" + b"-"
    found = set()
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            span, mode = line.split()[:2]
            low, high = (int(each, 16) for each in span.split("-"))
            if "r" in mode and "[v" not in line:
                try:
                    memory.seek(low)
                    found |= {hit.decode() for hit in re.findall(needle + b"[a-z0-9-]{32,}", memory.read(high - low))}
                except OSError:
                    pass
    print("FOUND", sorted(found))
'''


def test_k44_hidden_tests_of_an_earlier_grading_are_nowhere(house: Any) -> None:
    """Not on the file systems, and not in the memory of the server that an agent's pytest is a fork of."""
    token = f"hidden-{secrets.token_hex(20)}"
    hidden = "".join(f"# {token}-{n}\ndef test_{n}():\n    assert True\n\n\n" for n in range(80))
    patch = b"diff --git a/x b/x\n" + f"+{token}-patch\n".encode() * 400

    async def main() -> None:
        graded = set()
        for _ in range(3):
            async with house.pool.lease(house.config.image, timeout_s=60, grading=True) as box:
                await box.write_files({"tests/test_hidden.py": hidden.encode()})
                await box.run("cat > /dev/null", stdin=patch, timeout_s=20)
                report = await box.run_tests(["-q", "tests/test_hidden.py"], canary=True, timeout_s=60)
                assert len(report.results) == 80
                graded.add(box.id)
            async with house.pool.lease(house.config.image, timeout_s=60) as box:
                assert box.id not in graded
                await box.write_files({"test_look.py": MEMORY.encode()})
                search = await box.run("python -m pytest -q -s -p no:cacheprovider test_look.py", timeout_s=60)
                assert "FOUND []" in search.output
                files = f"grep -rl {token[:20]} /testbed /tmp /dev/shm 2>/dev/null | wc -l"
                assert (await box.run(files, timeout_s=30)).output == "0\n"

    house.runner.run(main())


# --- what the agent leaves for the server's own hands -------------------------------------------------------


def test_links_of_the_agent_lead_the_server_nowhere(house: Any) -> None:
    """Reading and writing files is done by the server, whom the agent may not read: a link must not borrow that."""

    async def body(box: Sandbox) -> None:
        links = "ln -s /proc/self/environ env; ln -s /proc/1/maps maps; ln -s /proc/self/mem mem; ln -s / root; "
        links += (
            "ln -s /proc/1/fd fds; ln -s /etc etc; ln -s /dev/zero zero; mkfifo fifo; ln -s loop loop; ln -s /proc proc"
        )
        await box.run(links, timeout_s=10)
        for name in ("zero", "fifo", "loop", "fds/0", "fds/3", "etc/shadow"):
            assert await box.read_file(name, limit_bytes=1000) is None, name
        for name in ("mem", "maps", "env", "root/proc/1/mem"):
            assert await box.read_file(name, limit_bytes=1000) is None, name
        for name in ("etc/passwd", "root/usr/x", "proc/sys/kernel/core_pattern", "proc/1/mem", "root/opt/agentrl/x"):
            with pytest.raises(SandboxError, match="refused write"):
                await box.write_files({name: b"mine"})
        await box.write_files({"zero": b"a file now"})
        assert (
            await box.run("cat zero; test -c /dev/zero && echo intact", timeout_s=10)
        ).output == "a file nowintact\n"

    house.lease(body)


def test_later_commits_cannot_be_read_from_what_is_unpacked(house: Any) -> None:
    """K44: the tree of a task has one commit and no object beside it."""
    rows = Path(__file__).parents[2] / "data" / "mined" / "instances.jsonl"
    environment = SweGymEnvironment({"dataset": str(rows), "fresh_fraction": 1.0})
    task = environment.tasks(Split.FRESH, start=0, count=1)[0]

    async def body(box: Sandbox) -> list[str]:
        await environment.prepare(task, box)
        look = "git log --all --oneline | wc -l; git fsck --unreachable --no-reflogs 2>/dev/null | wc -l; "
        look += "git reflog | wc -l; git remote | wc -l; git stash list | wc -l; "
        look += "git cat-file --batch-check --batch-all-objects | grep -c commit; ls .git/ | grep -c _HEAD; echo"
        return (await box.run(look, timeout_s=30)).output.split()

    commits, unreachable, reflog, remotes, stashes, objects, heads = house.lease(body)
    assert (commits, objects) == ("1", "1")
    assert (unreachable, remotes, stashes, heads) == ("0", "0", "0", "0")
    assert int(reflog) <= 1


# --- exhausting what is shared ------------------------------------------------------------------------------


def test_one_sandbox_cannot_exhaust_what_another_needs(house: Any) -> None:
    """Descriptors, timers, pipes, memory files, sparse files: refused within the sandbox; the neighbour works."""
    code = """
import ctypes, json, os, resource, signal
limits = {name: resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1]
          for name in ("NOFILE", "FSIZE", "CORE", "MSGQUEUE")}
got = {}
resource.setrlimit(resource.RLIMIT_NOFILE, (limits["NOFILE"],) * 2)
held = []
try:
    while len(held) < 20000:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
got["files"] = len(held)
for fd in held:
    os.close(fd)
try:
    os.truncate(os.open("/testbed/sparse", os.O_CREAT | os.O_RDWR), 1 << 40); got["sparse"] = True
except OSError:
    got["sparse"] = False
try:
    os.truncate(os.memfd_create("m"), 1 << 40); got["memory file"] = True
except OSError:
    got["memory file"] = False
inotify = 0
while ctypes.CDLL(None).inotify_init() >= 0 and inotify < 500:
    inotify += 1
print(json.dumps([limits, got]), flush=True)
import subprocess, sys; subprocess.run(["sleep", sys.argv[1]])
"""
    sign = f"50.{secrets.randbelow(10**9)}"

    async def main() -> Any:
        async with (
            house.pool.lease(house.config.image, timeout_s=60) as one,
            house.pool.lease(house.config.image, timeout_s=60) as two,
        ):
            await one.write_files({"greedy.py": code.encode()})
            greedy = asyncio.create_task(one.run(f"python3 greedy.py {sign}", timeout_s=60))
            await until_it_sleeps(sign)
            steps = "python3 -c 'import multiprocessing as m; print(m.Pool(2).map(abs, [-1, 2]))'; seq 3 | sort -r"
            assert (await two.run(steps, timeout_s=30)).output == "[1, 2]\n3\n2\n1\n"
            assert not greedy.done()
            await one.interrupt()
            return json.loads((await greedy).output.splitlines()[0])

    limits, got = house.runner.run(main())
    disk = 32 << 20
    assert limits == {"NOFILE": 4096, "FSIZE": disk + 4096, "CORE": 0, "MSGQUEUE": 0}
    assert got["files"] < 4096
    assert (got["sparse"], got["memory file"]) == (False, False)


def test_no_credential_of_the_host_is_in_any_environment(house: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """K48: not in a command's, not in a test's, not in that of any process that can be read."""
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "WANDB_API_KEY", "SSH_AUTH_SOCK"):
        monkeypatch.setenv(name, "s3cr3t-value")

    async def body(box: Sandbox) -> str:
        await box.write_files({"test_env.py": b"import os\ndef test_env():\n    print(dict(os.environ))\n"})
        first = await box.run("cat /proc/*/environ 2>/dev/null; env; pytest -q -s test_env.py", timeout_s=60)
        report = await box.run_tests(["-q", "-s", "test_env.py"], timeout_s=60)
        assert report.results == {"test_env.py::test_env": "passed"}
        return first.output

    output = house.lease(body)
    assert "s3cr3t" not in output
    assert "SSH_AUTH" not in output
    assert os.environ["HF_TOKEN"] == "s3cr3t-value"

"""What hostile code in a sandbox tries against its host, and does not get, on every backend.

Each test is one way out or one thing to steal. What is asserted is what the attacker holds afterwards, not how he was
refused, save where the refusal itself is the promise.
"""

from __future__ import annotations

import json
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attacks import EPERM, SYSCALL, python, python_in

from agentrl.wire.protocols import Sandbox

# --- network ------------------------------------------------------------------------------------------------


@contextmanager
def host_listeners() -> Iterator[tuple[int, str, list[bytes]]]:
    """A TCP port on all addresses of the host and an abstract Unix socket, and what was said to them."""
    name = f"agentrl-test-{uuid.uuid4().hex}"
    heard: list[bytes] = []
    tcp = socket.create_server(("", 0))
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(f"\0{name}")
    unix.listen()

    def accept(listener: socket.socket) -> None:
        try:
            while True:
                heard.append(listener.accept()[0].recv(100))
        except OSError:
            return

    for listener in (tcp, unix):
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
    try:
        yield tcp.getsockname()[1], name, heard
    finally:
        for listener in (tcp, unix):
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def test_k44_no_way_onto_any_network(house: Any) -> None:
    """IPv4, IPv6, cloud metadata, the host's own ports, names, and sockets that know no network name space."""
    with host_listeners() as (port, name, heard):
        addresses = [socket.gethostbyname(socket.gethostname()), "127.0.0.1", "172.17.0.1"]
        code = f"""
import json, socket
got = {{}}
def reach(label, family, address):
    s = socket.socket(family, socket.SOCK_STREAM)
    s.settimeout(3)
    try:
        s.connect(address); s.send(b"out"); got[label] = "connected"
    except OSError as error:
        got[label] = type(error).__name__
for host in {addresses!r}:
    reach(host, socket.AF_INET, (host, {port}))
reach("v4", socket.AF_INET, ("1.1.1.1", 53))
reach("metadata", socket.AF_INET, ("169.254.169.254", 80))
reach("v6", socket.AF_INET6, ("2606:4700:4700::1111", 53))
reach("abstract", socket.AF_UNIX, "\\0{name}")
try:
    got["name"] = str(socket.getaddrinfo("example.com", 80))
except OSError as error:
    got["name"] = type(error).__name__
got["interfaces"] = [name for _, name in socket.if_nameindex()]
for family in ("AF_VSOCK", "AF_PACKET", "AF_ALG", "AF_BLUETOOTH", "AF_CAN"):
    for kind in (1, 2, 3, 5):
        try:
            socket.socket(getattr(socket, family), kind); got[family] = "open"
        except OSError as error:
            got.setdefault(family, error.errno)
for label, arguments in (("raw", (2, 3, 1)), ("icmp6 raw", (10, 3, 58)), ("sctp", (2, 1, 132)), ("audit", (16, 3, 9))):
    try:
        socket.socket(*arguments); got[label] = "open"
    except OSError as error:
        got[label] = "refused"
print(json.dumps(got))
"""
        got = python(house, code)
        assert not heard
    # Docker's newer kernels give each name space its unconfigured tunnels: they lead nowhere without CAP_NET_ADMIN.
    assert "lo" in got.pop("interfaces")
    assert "connected" not in got.values()
    assert got.pop("name") == "gaierror"
    assert {got.pop(each) for each in ("raw", "icmp6 raw", "sctp", "audit")} == {"refused"}
    assert {got.pop(family) for family in ("AF_VSOCK", "AF_PACKET", "AF_ALG", "AF_BLUETOOTH", "AF_CAN")} == {EPERM}
    assert set(got.values()) <= {"OSError", "ConnectionRefusedError", "TimeoutError"}, got


def test_no_socket_of_the_host_is_in_sight(house: Any) -> None:
    """Docker's, containerd's, and our own channel, which is gone once the server has connected."""
    code = """
import json, os, stat
found = []
for folder, folders, names in os.walk("/"):
    if folder.split("/")[1:2] == ["proc"]:
        folders[:] = []
        continue
    for name in [*names, *folders]:
        path = os.path.join(folder, name)
        try:
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                found.append(path)
        except OSError:
            pass
listening = [line for line in open("/proc/net/unix").read().splitlines()[1:] if line.split()[3] == "00010000"]
print(json.dumps([found, listening]))
"""
    assert python(house, code) == [[], []]
    sockets = ["/run/agentrl/socket", "/var/run/docker.sock", "/run/docker.sock"]
    code = f"import json, socket\nerrors = [socket.socket(socket.AF_UNIX).connect_ex(each) for each in {sockets}]\n"
    assert 0 not in python(house, f"{code}print(json.dumps(errors))")


# --- files of the host --------------------------------------------------------------------------------------


def test_k44_no_file_of_the_host_by_any_name(house: Any, tmp_path: Path) -> None:
    token = f"host-{uuid.uuid4().hex}"
    (tmp_path / token).write_text(token)
    tmp_path.chmod(0o755)
    code = f"""
import json, os
got = []
roots = ["/"]
for pid in os.listdir("/proc"):
    if pid.isdigit():
        for name in ("root", "cwd"):
            roots.append(f"/proc/{{pid}}/{{name}}")
        try:
            roots += [f"/proc/{{pid}}/fd/{{fd}}" for fd in os.listdir(f"/proc/{{pid}}/fd")]
        except OSError:
            pass
for root in roots:
    for path in ({str(tmp_path / token)!r}, "/etc/hostname/../../{token}"):
        for climb in ("", "/..", "/../../.."):
            if os.path.exists(root + climb + path):
                got.append(root + climb + path)
try:
    os.readlink("/proc/1/root"); got.append("root of PID 1")
except OSError:
    pass
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        if b"pytest" in open(f"/proc/{{pid}}/cmdline", "rb").read():
            got.append("a process of the host")
    except OSError:
        pass
print(json.dumps(got))
"""
    assert python(house, code) == []
    find = f"find / -xdev -name {token} 2>/dev/null; find /testbed /tmp /dev /run -name {token} 2>/dev/null; echo '[]'"

    async def body(box: Sandbox) -> str:
        return (await box.run(find, timeout_s=60)).output

    assert house.lease(body) == "[]\n"


def test_no_device_but_the_harmless_ones(house: Any) -> None:
    code = """
import json, os, stat
seen = []
for folder, _, names in os.walk("/dev"):
    for name in names:
        mode = os.stat(path := os.path.join(folder, name)).st_mode if os.path.exists(os.path.join(folder, name)) else 0
        if stat.S_ISBLK(mode) or stat.S_ISCHR(mode):
            seen.append(path)
made = []
for kind, major, minor in ((stat.S_IFCHR, 1, 1), (stat.S_IFBLK, 8, 0), (stat.S_IFCHR, 5, 1)):
    try:
        os.mknod(f"/tmp/d{major}-{minor}", kind | 0o666, os.makedev(major, minor)); made.append((major, minor))
    except OSError:
        pass
print(json.dumps([seen, made]))
"""
    seen, made = python(house, code)
    harmless = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts/ptmx", "console"}
    assert {path.removeprefix("/dev/") for path in seen} <= harmless
    assert made == []


def test_nothing_of_the_kernel_can_be_read_or_written(house: Any) -> None:
    """kcore, kmsg, addresses of symbols, tables of the whole host; sysrq, core_pattern, anything in /sys."""
    code = """
import json, os, stat
got = []
for name in ("kcore", "kmsg", "vmallocinfo", "slabinfo", "pagetypeinfo", "timer_list", "keys", "kpageflags"):
    try:
        with open(f"/proc/{name}", "rb", 0) as file:
            if file.read(64):
                got.append(name)
    except OSError:
        pass
try:
    got += ["kallsyms"] * any(int(line.split()[0], 16) for line in open("/proc/kallsyms"))
except OSError:
    pass
for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe",
             "/proc/sys/vm/drop_caches", "/proc/sys/user/max_user_namespaces"):
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            os.close(os.open(path, os.O_WRONLY)); got.append(path)
    except OSError:
        pass
for folder, _, names in os.walk("/sys"):
    for name in names:
        try:
            os.close(os.open(os.path.join(folder, name), os.O_WRONLY)); got.append(os.path.join(folder, name))
        except OSError:
            pass
print(json.dumps(got[:20]))
"""
    assert python(house, code, timeout_s=120) == []


def test_control_groups_cannot_be_written_or_mounted(house: Any) -> None:
    code = (
        SYSCALL
        + """
got = []
for folder, folders, names in os.walk("/sys/fs/cgroup"):
    for path in [folder, *(os.path.join(folder, name) for name in names)]:
        if os.access(path, os.W_OK):
            got.append(path)
    try:
        os.mkdir(os.path.join(folder, "mine")); got.append(folder)
    except OSError:
        pass
for kind in (b"cgroup", b"cgroup2", b"proc", b"tmpfs", b"overlay"):
    if libc.mount(b"none", b"/tmp", kind, 0, b"memory") == 0:
        got.append(kind.decode())
print(json.dumps(got[:20]))
"""
    )
    assert python(house, code) == []


# --- privileges ---------------------------------------------------------------------------------------------


def test_the_kernel_s_dangerous_calls_are_refused(house: Any) -> None:
    """By ctypes, past every library: EPERM from the filter, on both backends alike."""
    code = (
        SYSCALL
        + """
x = platform.machine() == "x86_64"
numbers = {
    "mount": 165 if x else 40, "umount2": 166 if x else 39, "pivot_root": 155 if x else 41,
    "chroot": 161 if x else 51, "unshare": 272 if x else 97, "setns": 308 if x else 268,
    "keyctl": 250 if x else 219, "add_key": 248 if x else 217, "request_key": 249 if x else 218,
    "bpf": 321 if x else 280, "perf_event_open": 298 if x else 241, "userfaultfd": 323 if x else 282,
    "ptrace": 101 if x else 117, "process_vm_readv": 310 if x else 270, "process_vm_writev": 311 if x else 271,
    "kcmp": 312 if x else 272, "open_by_handle_at": 304 if x else 265, "kexec_load": 246 if x else 104,
    "init_module": 175 if x else 105, "finit_module": 313 if x else 273, "delete_module": 176 if x else 106,
    "reboot": 169 if x else 142, "swapon": 167 if x else 224, "acct": 163 if x else 89,
    "settimeofday": 164 if x else 170, "clock_settime": 227 if x else 112, "quotactl": 179 if x else 60,
    "sethostname": 170 if x else 161, "syslog": 103 if x else 116, "fanotify_init": 300 if x else 262,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsmount": 432, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442,
}
answers = {name: call(number, 0, 0, 0, 0, 0) for name, number in numbers.items()}
answers["personality"] = call(135 if x else 92, 0x0040000)
answers["clone of a user name space"] = call(56 if x else 220, 0x10000011, 0, 0, 0, 0)
answers["clone3"] = call(435, 0, 0)
answers["a call of the future"] = call(1000)
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
answers["Seccomp"] = int(status["Seccomp"])
answers["PID 1"] = int(dict(line.split(":", 1) for line in open("/proc/1/status") if ":" in line)["Seccomp"])
print(json.dumps(answers))
"""
    )
    answers = python(house, code)
    assert (answers.pop("Seccomp"), answers.pop("PID 1")) == (2, 2)
    enosys = 38
    assert answers.pop("clone3") == enosys
    assert answers.pop("a call of the future") == enosys
    assert {name: number for name, number in answers.items() if number != EPERM} == {}


def test_work_as_usual_under_the_filter(house: Any) -> None:
    """Threads, processes, asyncio, sockets, name look-up of localhost, pseudo terminals, git and pytest."""
    code = """
import asyncio, concurrent.futures, json, multiprocessing, os, pty, socket, subprocess, tempfile, threading
def double(x): return 2 * x
if __name__ == "__main__":
    got = []
    worker = threading.Thread(target=lambda: got.append("thread")); worker.start(); worker.join()
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            got.append(sum(pool.map(double, range(10))))
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        got.append(sum(pool.map(double, range(10))))
    async def talk():
        async def serve(reader, writer):
            writer.write((await reader.readline()).upper()); writer.close()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        writer.write(b"hello\\n")
        line = await reader.readline()
        process = await asyncio.create_subprocess_exec("echo", "sub", stdout=subprocess.PIPE)
        return line.decode() + (await process.communicate())[0].decode()
    got.append(asyncio.run(talk()))
    from multiprocessing import shared_memory
    memory = shared_memory.SharedMemory(create=True, size=1000); memory.close(); memory.unlink()
    os.close(os.eventfd(0)); os.close(os.memfd_create("m")); os.mkfifo("/tmp/fifo")
    a, b = pty.openpty(); got.append(os.ttyname(b).startswith("/dev/pts/"))
    got.append([name for name in ("AF_UNIX", "AF_INET", "AF_INET6") if socket.socket(getattr(socket, name))])
    print(json.dumps(got))
"""

    async def body(box: Sandbox) -> tuple[Any, str]:
        await box.write_files({"usual.py": code.encode(), "test_it.py": b"def test_it(tmp_path): pass\n"})
        ran = await box.run("python3 usual.py", timeout_s=60)
        assert ran.exit_code == 0, ran.output
        steps = "git init -q . && git add -A && git -c user.name=n -c user.email=e commit -qm m && git stash list "
        steps += "&& python3 -m pytest -q test_it.py && PATH=$PATH:/x pytest -q test_it.py"
        return json.loads(ran.output.splitlines()[-1]), (await box.run(steps, timeout_s=60)).output

    got, output = house.lease(body)
    assert got == ["thread", 90, 90, 90, 90, "HELLO\nsub\n", True, ["AF_UNIX", "AF_INET", "AF_INET6"]]
    assert output.count("1 passed") == 2


def test_no_setuid_program_raises_and_no_name_space_can_be_made(house: Any) -> None:
    async def body(box: Sandbox) -> str:
        raising = "for f in $(find / -xdev -perm /6000 -type f 2>/dev/null); do echo $f; done > /tmp/list; "
        raising += "cp /usr/bin/id /tmp/myid && chmod 6755 /tmp/myid && /tmp/myid -u; "
        raising += "su -c id root </dev/null 2>&1 | grep -c uid=0; "
        raising += "unshare -Ur id -u 2>/dev/null; unshare -T true 2>/dev/null && echo time; "
        raising += "unshare -n true 2>/dev/null && echo net; chroot / true 2>/dev/null && echo chroot; "
        raising += "grep -c nosuid /proc/self/mounts; echo over"
        return (await box.run(raising, timeout_s=60)).output

    lines = house.lease(body).split()
    assert lines[0] == "1000"  # a set-id bit of one's own means nothing on these file systems
    assert lines[1] == "0"
    assert int(lines[2]) >= 3
    assert lines[3:] == ["over"]


def test_the_server_can_be_neither_traced_nor_read_nor_stopped(house: Any) -> None:
    async def body(box: Any) -> None:
        code = (
            SYSCALL
            + """
import signal
got = []
x = platform.machine() == "x86_64"
for name in ("mem", "maps", "environ", "syscall", "stack", "fd/0", "root", "cwd", "map_files", "auxv", "pagemap"):
    try:
        path = f"/proc/1/{name}"
        got += [name] if (os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(10)) else []
    except OSError:
        pass
for request in (16, 0x4206):  # PTRACE_ATTACH, PTRACE_SEIZE
    if call(101 if x else 117, request, 1, 0, 0) == 0:
        got.append("traced")
for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGTERM, signal.SIGUSR1):
    os.kill(1, number)
print(json.dumps(got))
"""
        )
        assert await python_in(box, code) == []
        assert (await box.run("echo alive", timeout_s=10)).output == "alive\n"

    house.lease(body)

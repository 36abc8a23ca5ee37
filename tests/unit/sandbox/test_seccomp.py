"""The system-call filter, run in an interpreter of classic BPF: which call of which machine gets which answer."""

from __future__ import annotations

import errno
import json
import re
import struct
from pathlib import Path

import pytest

from agentrl.sandbox import seccomp, syscalls

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386 = 0x40000003
X32 = 0x40000000
ALLOW, EPERM, ENOSYS = "allow", errno.EPERM, errno.ENOSYS


def answer(program: bytes, audit: int, number: int, *arguments: int) -> str | int:
    """What the kernel would do: an independent reading of struct sock_filter over struct seccomp_data."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<iIQ6Q", number if number < 1 << 31 else number - (1 << 32), audit, 0, *padded)
    lines = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    accumulator = at = 0
    while True:
        code, jump_true, jump_false, k = lines[at]
        at += 1
        if code == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            assert k % 4 == 0
            accumulator = struct.unpack_from("<I", data, k)[0]
        elif code in (0x15, 0x25, 0x45):  # BPF_JMP | BPF_{JEQ, JGT, JSET} | BPF_K
            holds = {0x15: accumulator == k, 0x25: accumulator > k, 0x45: bool(accumulator & k)}[code]
            at += jump_true if holds else jump_false
        else:
            assert code == 0x06  # BPF_RET | BPF_K
            assert k == 0x7FFF0000 or k >> 16 == 0x5
            return ALLOW if k == 0x7FFF0000 else k & 0xFFFF


class Machine:
    def __init__(self, name: str) -> None:
        program = seccomp.program(name)
        assert program is not None
        self.program, self.audit, self.architecture = program, AUDIT[name], syscalls.ARCHITECTURES[name]

    def call(self, name: str, *arguments: int) -> str | int:
        number = self.architecture.number(name)
        assert number is not None
        return answer(self.program, self.audit, number, *arguments)


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request: pytest.FixtureRequest) -> Machine:
    return Machine(request.param)


def test_every_call_on_the_list_is_refused(machine: Machine) -> None:
    seen = 0
    for name in syscalls.DENIED:
        number = machine.architecture.number(name)
        if number is not None:
            assert answer(machine.program, machine.audit, number) == (ENOSYS if name == "clone3" else EPERM), name
            seen += 1
    assert seen > 55


def test_numbers_off_the_list_are_allowed_up_to_the_newest_known_and_unknown_above(machine: Machine) -> None:
    ruled = {machine.architecture.number(name) for name in syscalls._NUMBERS}
    for number in range(syscalls.LAST_KNOWN + 1):
        if number not in ruled:
            assert answer(machine.program, machine.audit, number) == ALLOW, number
    for number in (syscalls.LAST_KNOWN + 1, 512, 1000, 0x7FFFFFFF, 0xFFFFFFFF):
        assert answer(machine.program, machine.audit, number) == ENOSYS, number


def test_other_architectures_and_x32_numbers_are_refused(machine: Machine) -> None:
    for audit in {*AUDIT.values(), I386, 0} - {machine.audit}:
        assert answer(machine.program, audit, 1) == ENOSYS
    assert answer(machine.program, machine.audit, X32 | 1) == ENOSYS
    assert answer(machine.program, machine.audit, X32 | 165) == ENOSYS


def test_clone_is_for_threads_and_processes_not_for_name_spaces(machine: Machine) -> None:
    thread, process = 0x3D0F00, 0x1200011
    assert machine.call("clone", thread) == machine.call("clone", process) == ALLOW
    for bit in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert machine.call("clone", process | bit) == EPERM, hex(bit)


def test_sockets_are_unix_internet_or_routing(machine: Machine) -> None:
    stream, protocols = 1, (*range(18), 33, 58, 132, 136, 255, 262)
    open_ = {
        (family, protocol)
        for family in range(50)
        for protocol in protocols
        if machine.call("socket", family, stream, protocol) == ALLOW
    }
    internet = {(family, protocol) for family in (2, 10) for protocol in (0, 1, 6, 17, 58)}
    assert open_ == internet | {(1, protocol) for protocol in protocols} | {(16, 0)}
    assert machine.call("socket", 40, stream) == EPERM  # AF_VSOCK
    assert [machine.call("socketpair", family) for family in (1, 2, 30)] == [ALLOW, EPERM, EPERM]


def test_personality_and_terminal_input(machine: Machine) -> None:
    harmless = (0, 8, 0x20000, 0x20008, 0xFFFFFFFF)
    assert {machine.call("personality", value) for value in harmless} == {ALLOW}
    assert machine.call("personality", 0x0040000) == EPERM  # ADDR_NO_RANDOMIZE
    assert machine.call("ioctl", 0, 0x5412) == machine.call("ioctl", 0, 0x541C) == EPERM
    assert machine.call("ioctl", 0, 0x5401) == machine.call("ioctl", 0x5412, 0x5413) == ALLOW


def test_high_halves_of_arguments_hide_nothing(machine: Machine) -> None:
    """The kernel reads 32 bits of these; a filter that compared 64 was once passed by setting a higher one."""
    high = 1 << 32
    assert machine.call("ioctl", 0, high | 0x5412) == EPERM
    assert machine.call("socket", high | 40, 1) == EPERM
    assert machine.call("clone", high | 0x10000000) == EPERM
    assert machine.call("socket", high | 2, 1, high | 6) == ALLOW


def test_the_program_is_one_that_the_kernel_takes(machine: Machine) -> None:
    lines = [struct.unpack_from("=HBBI", machine.program, at) for at in range(0, len(machine.program), 8)]
    assert len(lines) * 8 == len(machine.program)
    assert len(lines) <= 4096
    for at, (code, jump_true, jump_false, _) in enumerate(lines):
        if code & 0x7 == 0x5:
            assert at + 1 + max(jump_true, jump_false) < len(lines)
    assert lines[-1][0] == 0x06


def test_no_filter_for_a_machine_whose_numbers_are_unknown() -> None:
    assert seccomp.program("riscv64") is None
    assert seccomp.program() == seccomp.program(__import__("platform").machine())


def test_the_docker_profile_states_the_same_policy() -> None:
    profile = json.loads(seccomp.docker_profile())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    by_name: dict[str, list[dict[str, object]]] = {}
    for rule in profile["syscalls"]:
        for name in rule["names"]:
            by_name.setdefault(name, []).append(rule)
    allowed = {name for name, rules in by_name.items() if any(r["action"] == "SCMP_ACT_ALLOW" for r in rules)}
    assert not allowed & syscalls.DENIED
    assert allowed - set(syscalls.ALLOWED_NAMES) == {"clone", "personality", "socket", "socketpair"}
    assert by_name["clone3"] == [{"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS}]
    assert [rule["args"] for rule in by_name["clone"]] == [
        [{"index": 0, "value": 0x7E020000, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}]
    ]
    sockets = {tuple(c["valueTwo"] for c in rule["args"]) for rule in by_name["socket"]}  # type: ignore[attr-defined]
    internet = {(family, protocol) for family in (2, 10) for protocol in (0, 1, 6, 17, 58)}
    assert sockets == {(1,), (16, 0)} | internet


HEADERS = {
    "x86_64": (Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), r"__NR_(\w+) (\d+)"),
    "aarch64": (Path("/usr/include/asm-generic/unistd.h"), r"__NR(?:3264)?_(\w+)\s+(\d+)"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_numbers_are_those_of_the_kernel_s_headers(name: str) -> None:
    path, pattern = HEADERS[name]
    if not path.exists():
        pytest.skip(f"{path} is not here (linux-libc-dev)")
    kernel = {call: int(number) for call, number in re.findall(pattern, path.read_text())}
    for call in syscalls._NUMBERS:
        number = syscalls.ARCHITECTURES[name].number(call)
        if call in kernel:
            assert number == kernel[call], call
        else:
            assert number is None or number > 450, call  # newer than the header
    if name == "x86_64":  # where every call has a place on one list
        never_built = {"afs_syscall", "tuxcall", "security", "getpmsg", "putpmsg", "vserver"}
        judged = {*syscalls._NUMBERS, *syscalls.ALLOWED_NAMES, *never_built, "epoll_ctl_old", "epoll_wait_old"}
        assert set(kernel) - judged == set()

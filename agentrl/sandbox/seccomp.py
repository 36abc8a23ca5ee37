"""The system-call filter of a sandbox: what its processes may not ask of the kernel, whoever they become.

One policy, about Docker's default profile without capabilities, in two forms:

- `program(machine)`: a classic BPF program for `bwrap --seccomp FD`. It denies by list and refuses every number newer
  than the list knows, so a call that a later kernel adds is closed until somebody has looked at it.
- `docker_profile()`: the same as the JSON that Docker takes. It allows by list, and everything else is refused.

Beyond Docker's default (of 20.10) it closes: sockets of other families than Unix, Internet and routing (AF_VSOCK
reaches a virtual machine's host past every network name space), io_uring, and ptrace with its relatives (process_vm_*,
kcmp, pidfd_getfd). ptrace would be contained without that, since the server (PID 1) is not dumpable, but it is a wide
part of the kernel that no tool in the images needs: gdb and strace do not work in a sandbox.

Answers: EPERM; ENOSYS for clone3 (its flags lie in memory where no filter can look, and the C library then takes
clone), for unknown numbers, and for calls of another architecture than the machine's (32-bit programs, x32), as from a
kernel that lacks them. Arguments are compared by their low 32 bits, as the kernel reads them.
"""

from __future__ import annotations

import errno
import functools
import json
import platform
import struct
from typing import NamedTuple

from agentrl.sandbox.syscalls import ALLOWED_NAMES, ARCHITECTURES, DENIED, LAST_KNOWN, Architecture

# Name spaces by clone: mount, cgroup, uts, ipc, user, pid, net. (A time name space has no bit in clone.)
CLONE_NEW_FLAGS = 0x7E020000
# Linux, its 32-bit uname, its old uname, both, "which is it?"
HARMLESS_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
NETLINK_ROUTE = 0
INET_PROTOCOLS = (0, 1, 6, 17, 58)  # default, ICMP, TCP, UDP, ICMPv6: others load kernel modules
TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX: typing into a terminal for somebody else

_ALLOW = 0x7FFF0000
_EPERM = 0x00050000 | errno.EPERM
_ENOSYS = 0x00050000 | errno.ENOSYS
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, JGT, JSET, RET
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data


class Instruction(NamedTuple):
    """One `struct sock_filter`."""

    code: int
    jump_true: int
    jump_false: int
    k: int


def program(machine: str | None = None) -> bytes | None:
    """The filter for a machine (`uname -m`; None: this one) as the bytes of its instructions, each `struct
    sock_filter`; None for a machine whose system-call numbers are not known here."""
    architecture = ARCHITECTURES.get(machine or platform.machine())
    return None if architecture is None else _assemble(architecture)


@functools.cache
def _assemble(architecture: Architecture) -> bytes:
    lines = [
        Instruction(_LOAD, 0, 0, _ARCHITECTURE),
        Instruction(_EQUAL, 1, 0, architecture.audit),
        Instruction(_RETURN, 0, 0, _ENOSYS),
        Instruction(_LOAD, 0, 0, _NUMBER),
        Instruction(_GREATER, 0, 1, LAST_KNOWN),  # x32 numbers have a high bit and end here too
        Instruction(_RETURN, 0, 0, _ENOSYS),
    ]
    for name in sorted(DENIED):
        number = architecture.number(name)
        if number is not None:
            answer = _ENOSYS if name == "clone3" else _EPERM
            lines += [Instruction(_EQUAL, 0, 1, number), Instruction(_RETURN, 0, 0, answer)]
    for name, rule in _rules().items():
        number = architecture.number(name)
        if number is not None:
            lines += [Instruction(_EQUAL, 0, len(rule), number), *rule]
    lines.append(Instruction(_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _rules() -> dict[str, list[Instruction]]:
    """What decides on the calls whose arguments matter. Each rule ends in a return on every path."""
    return {
        "clone": [_argument(0), Instruction(_ANY_BIT, 0, 1, CLONE_NEW_FLAGS), *_end(_EPERM, _ALLOW)],
        "personality": [_argument(0), *_one_of(HARMLESS_PERSONALITIES, _ALLOW), *_end(_EPERM)],
        "ioctl": [_argument(1), *_one_of(TERMINAL_INPUT, _EPERM), *_end(_ALLOW)],
        "socketpair": [_argument(0), *_one_of((AF_UNIX,), _ALLOW), *_end(_EPERM)],
        "socket": _socket_rule(),
    }


def _socket_rule() -> list[Instruction]:
    internet = [_argument(2), *_one_of(INET_PROTOCOLS, _ALLOW), *_end(_EPERM)]
    netlink = [_argument(2), *_one_of((NETLINK_ROUTE,), _ALLOW), *_end(_EPERM)]
    return [
        _argument(0),
        *_one_of((AF_UNIX,), _ALLOW),
        Instruction(_EQUAL, 0, len(netlink), AF_NETLINK),
        *netlink,
        Instruction(_EQUAL, 1, 0, AF_INET),
        Instruction(_EQUAL, 0, len(internet), AF_INET6),
        *internet,
        *_end(_EPERM),
    ]


def _argument(index: int) -> Instruction:
    """Load the low half of an argument (both architectures are little-endian)."""
    return Instruction(_LOAD, 0, 0, _ARGUMENTS + 8 * index)


def _one_of(values: tuple[int, ...], answer: int) -> list[Instruction]:
    return [line for value in values for line in (Instruction(_EQUAL, 0, 1, value), Instruction(_RETURN, 0, 0, answer))]


def _end(*answers: int) -> list[Instruction]:
    return [Instruction(_RETURN, 0, 0, answer) for answer in answers]


# --- Docker -------------------------------------------------------------------------------------------------


@functools.cache
def docker_profile() -> str:
    """The policy for `--security-opt seccomp=…`: the JSON text itself. For x86_64 and aarch64 daemons.

    Unlike the BPF program it does not look at ioctl, which libseccomp can compare only with all 64 bits: containers
    have no terminal to type into.
    """
    conditional: list[tuple[str, list[tuple[int, int]]]] = [
        *(("personality", [(0, value)]) for value in HARMLESS_PERSONALITIES),
        ("socketpair", [(0, AF_UNIX)]),
        ("socket", [(0, AF_UNIX)]),
        ("socket", [(0, AF_NETLINK), (2, NETLINK_ROUTE)]),
        *(("socket", [(0, family), (2, proto)]) for family in (AF_INET, AF_INET6) for proto in INET_PROTOCOLS),
    ]
    syscalls: list[dict[str, object]] = [{"names": list(ALLOWED_NAMES), "action": "SCMP_ACT_ALLOW"}]
    for name, arguments in conditional:
        conditions = [_masked(index, 0xFFFFFFFF, value) for index, value in arguments]
        syscalls.append({"names": [name], "action": "SCMP_ACT_ALLOW", "args": conditions})
    syscalls.append({"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [_masked(0, CLONE_NEW_FLAGS, 0)]})
    syscalls.append({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS})
    return json.dumps(
        {
            "defaultAction": "SCMP_ACT_ERRNO",
            "archMap": [
                {"architecture": name, "subArchitectures": []} for name in ("SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64")
            ],
            "syscalls": syscalls,
        }
    )


def _masked(index: int, mask: int, value: int) -> dict[str, object]:
    """The condition argument & mask == value."""
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}

"""Hostile programs in a sandbox, for the tests of escapes and of isolation."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

from agentrl.wire.protocols import Sandbox

EPERM = 1
SYSCALL = """
import ctypes, json, os, platform
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    value = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(each) for each in arguments])
    return 0 if value >= 0 else ctypes.get_errno()
"""
"""The beginning of a program that asks the kernel past every library: `call(number, …)` gives 0 or the errno."""


def python(house: Any, code: str, *, timeout_s: float = 60.0) -> Any:
    """What a program of the agent prints as JSON on its last line, in a sandbox of `house`."""

    async def body(box: Sandbox) -> Any:
        return await python_in(box, code, timeout_s=timeout_s)

    return house.lease(body)


async def python_in(box: Sandbox, code: str, *, timeout_s: float = 60.0) -> Any:
    """The same in `box`."""
    result = await box.run("python3 -", stdin=code.encode(), timeout_s=timeout_s)
    assert result.exit_code == 0, result
    return json.loads(result.output.splitlines()[-1])


async def until_it_sleeps(seconds: str, *, timeout_s: float = 30.0) -> None:
    """Wait until some process of this machine, in whatever sandbox, is `sleep SECONDS`: a program's sign to us."""
    end = time.monotonic() + timeout_s
    while b"sleep\0%s\0" % seconds.encode() not in _command_lines():
        assert time.monotonic() < end, f"no program came to its `sleep {seconds}`"
        await asyncio.sleep(0.05)


def _command_lines() -> set[bytes]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            found.add((folder / "cmdline").read_bytes())
    return found

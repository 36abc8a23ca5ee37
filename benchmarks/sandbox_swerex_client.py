"""SWE-ReX's own client, driven over stdin and stdout by `benchmarks/sandbox.py`: JSON lines, one answer each.

Runs in an interpreter of its own that finds SWE-ReX's packages and not ours.

    {"op": "connect", "ports": [...], "token": "..."}                 → {"ready_s": [...]}
    {"op": "prepare", "command": "..."}                               → {}
    {"op": "load", "way": "session", "count": n, "seconds": s, "command": "..."}
        → {"latencies_s": [...], "seconds": wall, "cpu_s": of this process}
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from typing import Any

from swerex.runtime.abstract import BashAction, Command, CreateBashSessionRequest  # type: ignore[import-not-found]
from swerex.runtime.remote import RemoteRuntime  # type: ignore[import-not-found]

START_TIMEOUT_S = 120.0
COMMAND_TIMEOUT_S = 60.0


class Client:
    """One `RemoteRuntime` per container, each with one bash session."""

    def __init__(self) -> None:
        self._runtimes: list[Any] = []

    async def connect(self, *, ports: list[int], token: str) -> dict[str, Any]:
        """Wait for each server and open its session; seconds until each was ready."""
        logger = logging.getLogger("swerex")
        logger.setLevel(logging.ERROR)
        began = time.perf_counter()

        async def one(port: int) -> float:
            runtime = RemoteRuntime(logger=logger, host="http://127.0.0.1", port=port, auth_token=token, timeout=5.0)
            self._runtimes.append(runtime)
            # Not its own `wait_until_alive`: that sleeps in the loop's thread, and several at once never end.
            async with asyncio.timeout(START_TIMEOUT_S):
                while not await runtime.is_alive():  # noqa: ASYNC110 - there is nothing to be told by
                    await asyncio.sleep(0.1)
            await runtime.create_session(CreateBashSessionRequest())
            await runtime.run_in_session(BashAction(command="cd /testbed", timeout=COMMAND_TIMEOUT_S))
            return time.perf_counter() - began

        return {"ready_s": await asyncio.gather(*(one(port) for port in ports))}

    async def prepare(self, *, command: str) -> dict[str, Any]:
        """Run `command` once in every container."""
        await asyncio.gather(*(self._execute(runtime, command) for runtime in self._runtimes))
        return {}

    async def load(self, *, way: str, count: int, seconds: float, command: str) -> dict[str, Any]:
        """Run `command` over and over in the first `count` containers for `seconds`."""
        run = self._in_session if way == "session" else self._execute
        runtimes = self._runtimes[:count]
        await asyncio.gather(*(run(runtime, command) for runtime in runtimes))
        latencies: list[float] = []
        cpu, began = time.process_time(), time.perf_counter()

        async def one(runtime: Any) -> None:
            last = time.perf_counter()
            while last < began + seconds:
                await run(runtime, command)
                now = time.perf_counter()
                latencies.append(now - last)
                last = now

        await asyncio.gather(*(one(runtime) for runtime in runtimes))
        wall, used = time.perf_counter() - began, time.process_time() - cpu
        return {"latencies_s": latencies, "seconds": wall, "cpu_s": used}

    async def _in_session(self, runtime: Any, command: str) -> None:
        done = await runtime.run_in_session(BashAction(command=command, timeout=COMMAND_TIMEOUT_S))
        if done.exit_code != 0:
            raise RuntimeError(f"exit code {done.exit_code}: {done.output[:200]}")

    async def _execute(self, runtime: Any, command: str) -> None:
        done = await runtime.execute(Command(command=command, shell=True, cwd="/testbed", timeout=COMMAND_TIMEOUT_S))
        if done.exit_code != 0:
            raise RuntimeError(f"exit code {done.exit_code}: {done.stdout[:200]}{done.stderr[:200]}")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # SWE-ReX prints

    async def serve() -> None:
        client = Client()
        for line in sys.stdin:  # blocks the loop between requests, when nothing runs in it
            request = json.loads(line)
            answer = await getattr(client, request.pop("op"))(**request)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

    asyncio.run(serve())


if __name__ == "__main__":
    main()

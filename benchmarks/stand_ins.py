"""Stand-ins that only wait: a sandbox pool and a policy, for measuring what the orchestrator itself costs.

They answer at once, after a delay that takes no CPU: the sandbox from the work tree that was unpacked into it (edits
are kept, every command and every test succeeds), the policy with the turns of a script, here the environment's own
expert in the policy's own tokens. `tests/unit/test_stand_ins.py` and `tests/integration/test_stand_ins_twins.py` hold
them to one contract with the real sandbox and the real server.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import posixpath
import random
import re
import tarfile
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from agentrl.chat import ChatFormat
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.policy import local_model
from agentrl.rollout.cursor import TaskCursor
from agentrl.rollout.groups import GroupRequest
from agentrl.run.environments import load_environment
from agentrl.trajectory import FinishReason, Split
from agentrl.wire import (
    CommandResult,
    EditCommand,
    EditResult,
    Environment,
    Expert,
    Generation,
    SamplingParams,
    Sandbox,
    TestReport,
)

WORKDIR = "/testbed"
TESTS_PASS = "3 passed in 0.01s\n"
_NORMAL = NormalDist()
_Z95 = _NORMAL.inv_cdf(0.95)
_TEST = re.compile(r"^def (test_\w+)", re.MULTILINE)
_GREP = re.compile(r'grep -rn "([^"]*)"')


@dataclass(frozen=True, slots=True)
class Delay:
    """Lognormal seconds: the median, and how many times as long the slowest twentieth takes (1: all alike)."""

    median_s: float
    p95_ratio: float = 1.0

    def seconds(self, name: str) -> float:
        """The same for the same name."""
        if self.p95_ratio == 1.0:
            return self.median_s
        share = (zlib.crc32(name.encode()) + 0.5) / 2**32
        return self.median_s * math.exp(math.log(self.p95_ratio) / _Z95 * _NORMAL.inv_cdf(share))


# --- the sandbox --------------------------------------------------------------------------------------------------


class LatencySandbox:
    """Satisfies `Sandbox`: holds the unpacked files in memory and runs nothing."""

    workdir = WORKDIR

    def __init__(self, name: str, image: str, label: str, pool: LatencyPool) -> None:
        self.id, self.image = name, image
        self._label, self._pool = label, pool
        self._calls = itertools.count()
        self._files: dict[str, str] = {}

    async def run(
        self,
        command: str,
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        output_limit: int | None = None,
    ) -> CommandResult:
        """Success: the lines a `grep -rn` finds, that tests pass, or nothing, by the command's look."""
        took = await self._tool(timeout_s)
        late = took >= timeout_s
        output = "" if late else self._output(command)
        return CommandResult(
            exit_code=None if late else 0,
            output=output,
            output_bytes=len(output.encode()),
            timed_out=late,
            out_of_memory=False,
            duration_s=took,
        )

    async def edit(self, command: EditCommand, *, path: str, timeout_s: float, **arguments: Any) -> EditResult:
        """`view` and `str_replace` of files in the work tree."""
        await self._tool(timeout_s)
        name = posixpath.relpath(path, WORKDIR) if path.startswith("/") else path
        text = self._files.get(name)
        if text is None:
            return EditResult(ok=False, text=f"ERROR: the path {path} does not exist.")
        if command == "view":
            return EditResult(ok=True, text=text, content=text)
        old, new = arguments["old_str"], arguments["new_str"]
        if old not in text:
            return EditResult(ok=False, text=f"ERROR: `{old}` did not appear verbatim in {path}.")
        self._files[name] = text.replace(old, new, 1)
        return EditResult(ok=True, text=f"The file {path} has been edited.", content=self._files[name])

    async def run_tests(
        self,
        arguments: Sequence[str],
        *,
        timeout_s: float,
        canary: bool = False,
        test_timeout_s: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> TestReport:
        """Every test function of the named files passes."""
        took = min(self._pool.tests.seconds(self._label), timeout_s)
        await asyncio.sleep(took)
        names = [name for name in arguments if name in self._files]
        results = {f"{name}::{test}": "passed" for name in names for test in _TEST.findall(self._files[name])}
        return TestReport(
            exit_code=0,
            results=results,
            collected=len(results),
            output=TESTS_PASS,
            timed_out=False,
            canary_failed=True if canary else None,
            duration_s=took,
        )

    async def write_files(self, files: Mapping[str, bytes], *, timeout_s: float = 30.0) -> None:
        await asyncio.sleep(self._pool.transfer_s)
        self._files.update({name: data.decode() for name, data in files.items()})

    async def read_file(self, path: str, *, limit_bytes: int = 1_000_000, timeout_s: float = 30.0) -> bytes | None:
        """A file of the work tree; of any archive outside it, the whole tree."""
        await asyncio.sleep(self._pool.transfer_s)
        if path.endswith(".tar"):
            return _write(self._files)[:limit_bytes]
        text = self._files.get(path)
        return None if text is None else text.encode()[:limit_bytes]

    async def unpack(self, archive: bytes, *, timeout_s: float = 60.0) -> None:
        await asyncio.sleep(self._pool.transfer_s)
        self._files = _read(archive)

    async def _tool(self, timeout_s: float) -> float:
        """Wait as long as a tool call takes; seconds waited."""
        took = min(self._pool.tool.seconds(f"{self._label}/{next(self._calls)}"), timeout_s)
        self._pool.waited_s[self._label] += took
        await asyncio.sleep(took)
        return took

    def _output(self, command: str) -> str:
        if "pytest" in command:
            return TESTS_PASS
        wanted = _GREP.match(command)
        if wanted is None:
            return ""
        return "".join(
            f"./{name}:{number}:{line}\n"
            for name, text in self._files.items()
            for number, line in enumerate(text.splitlines(), start=1)
            if wanted[1] in line
        )


# The tars of text files that environments and sandboxes exchange, read and written without `tarfile`, whose cost would
# be counted as the orchestrator's.
_BLOCK = 512
_REGULAR = b"0\0"


def _read(archive: bytes) -> dict[str, str]:
    """The files of a tar that holds nothing else. Raises `ValueError` for any other."""
    files: dict[str, str] = {}
    at = 0
    while at < len(archive) and archive[at]:
        head = archive[at : at + _BLOCK]
        if head[156:157] not in _REGULAR:
            raise ValueError(f"not a plain file in a tar: type {head[156:157]!r}")
        size = int(head[124:135], 8)
        files[head[:100].rstrip(b"\0").decode()] = archive[at + _BLOCK : at + _BLOCK + size].decode()
        at += _BLOCK + -(-size // _BLOCK) * _BLOCK
    return files


def _write(files: Mapping[str, str]) -> bytes:
    parts = []
    for name, text in files.items():
        data = text.encode()
        info = tarfile.TarInfo(name)
        info.size = len(data)
        parts += [info.tobuf(tarfile.USTAR_FORMAT), data, bytes(-len(data) % _BLOCK)]
    return b"".join([*parts, bytes(2 * _BLOCK)])


class LatencyPool:
    """Satisfies `SandboxPool`. `starters` sandboxes start at once.

    `waited_s` sums, by label, the seconds that tool calls took: what a client without tools has to wait between turns
    to ask at the same pace.
    """

    def __init__(
        self,
        *,
        tool: Delay,
        tests: Delay | None = None,
        start: Delay = Delay(0.0),
        transfer_s: float = 0.0,
        starters: int = 64,
    ) -> None:
        self.tool = tool
        self.tests = tests or tool
        self.transfer_s = transfer_s
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        self._start = start
        self._starting = asyncio.Semaphore(starters)
        self._numbers = itertools.count()

    @asynccontextmanager
    async def lease(
        self, image: str, *, timeout_s: float, label: str = "", grading: bool = False
    ) -> AsyncIterator[Sandbox]:
        async with self._starting:
            await asyncio.sleep(self._start.seconds(f"{label}/{'grading' if grading else 'start'}"))
        yield LatencySandbox(f"stand-in-{next(self._numbers)}", image, label, self)

    async def close(self) -> None:
        """Nothing to close."""


# --- the tasks and the policy that is used with them ---------------------------------------------------------------


def generated_groups(count: int, *, group_size: int, seed: int = 0) -> tuple[Environment, list[GroupRequest]]:
    """The environment of generated tasks, and its first `count` training groups."""
    environment = load_environment(RunConfig().environment)
    return environment, TaskCursor(environment, Split.TRAIN, seed=seed).take(count, group_size=group_size)


def expert_of(environment: Environment) -> Expert:
    """The environment's scripted solver. Raises `ConfigError` where it has none."""
    expert: Expert | None = getattr(environment, "expert", None)
    if expert is None:
        raise ConfigError(f"environment {environment.name} has no expert", remedy="use one that has")
    return expert


def tiny_chat() -> ChatFormat:
    """The shipped policy's chat."""
    return ChatFormat.load(local_model("tiny"))


# --- the policy ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Script:
    """One task's turns as sampled ids, each int32 [N]. Shared by all rollouts of the task."""

    turns: tuple[np.ndarray, ...]


def expert_scripts(requests: Sequence[GroupRequest], expert: Expert, chat: ChatFormat) -> dict[str, Script]:
    """Group id → the expert's way through the group's task, where every command succeeds."""
    return {request.group_id: _script(request, expert, chat) for request in requests}


def _script(request: GroupRequest, expert: Expert, chat: ChatFormat) -> Script:
    turns = expert.turns(request.task, rng=random.Random(request.index), profile="perfect")
    said: list[np.ndarray] = []
    call = next(turns, None)
    while call is not None:
        said.append(np.array(chat.say("", [call]), dtype=np.int32))
        try:
            call = turns.send(TESTS_PASS)
        except StopIteration:
            call = None
    return Script(tuple(said))


class LatencyPolicy:
    """Satisfies `PolicyRouter`: each trajectory's session says its group's script, turn by turn.

    `turns` and `tokens` count what was sampled, `active` the sessions that are open.
    """

    def __init__(self, scripts: Mapping[str, Script], *, turn: Delay, max_model_len: int, version: int = 0) -> None:
        self.max_model_len = max_model_len
        self.scripts, self.turn, self.version = scripts, turn, version
        self.turns = self.tokens = self.active = 0

    @contextmanager
    def session(self, trajectory_id: str) -> Iterator[ScriptedClient]:
        self.active += 1
        try:
            yield ScriptedClient(self, self.scripts[trajectory_id.rpartition("-")[0]])
        finally:
            self.active -= 1


class ScriptedClient:
    """Satisfies `PolicyClient` for one trajectory. Ends its turn where the script's turn ends, or `max_tokens`."""

    def __init__(self, policy: LatencyPolicy, script: Script) -> None:
        self._policy = policy
        self._turns = iter(script.turns)

    @property
    def max_model_len(self) -> int:
        return self._policy.max_model_len

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float
    ) -> Generation:
        took = self._policy.turn.seconds(request_id)
        await asyncio.sleep(took)
        whole = next(self._turns)
        ids = whole[: min(params.max_tokens, max(0, self.max_model_len - len(prompt_ids)))]
        self._policy.turns += 1
        self._policy.tokens += len(ids)
        return Generation(
            token_ids=ids,
            logprobs=np.full(len(ids), -0.5, dtype=np.float32),
            versions=np.full(len(ids), self._policy.version, dtype=np.int32),
            finish_reason=FinishReason.STOP if len(ids) == len(whole) else FinishReason.LENGTH,
            prompt_tokens=len(prompt_ids),
            decode_s=took,
        )

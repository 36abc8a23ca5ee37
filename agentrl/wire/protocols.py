"""The seams between rooms: what a sandbox, an environment, a policy client and a trainer must answer.

A third party implements one of these in one file and registers it by entry point (`agentrl.envs`,
`agentrl.teachers`); docs/environments.md shows one whole.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np

from agentrl.trajectory import FinishReason, Split
from agentrl.wire.messages import Batch, Saved, StepResult, WeightManifest

EditCommand = Literal["view", "create", "str_replace", "insert", "undo_edit"]


class CommandResult(msgspec.Struct, frozen=True, kw_only=True):
    """A command's end inside a sandbox. `exit_code` is None where the deadline killed it.

    `output` is stdout and stderr in order, decoded with replacement, cut to head and tail with a line that says how
    many bytes are left out; `output_bytes` counts all of it.
    """

    exit_code: int | None
    output: str
    output_bytes: int
    timed_out: bool
    out_of_memory: bool
    duration_s: float


class EditResult(msgspec.Struct, frozen=True, kw_only=True):
    """The editor's answer. `text` is what the editor says; `content` the file after the call (view, or an edit)."""

    ok: bool
    text: str
    content: str | None = None


class TestReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the resident test runner saw, written by the runner itself and not parsed from output.

    `results` maps node id → passed | failed | error | skipped | xfailed | xpassed. `collected` counts the tests found.
    `canary_failed` is True where the test that must fail, run in the same session, did fail: False means that
    something in the session fakes results.
    """

    exit_code: int | None
    results: dict[str, str]
    collected: int
    output: str
    timed_out: bool
    canary_failed: bool | None
    duration_s: float


@runtime_checkable
class Sandbox(Protocol):
    """One isolated machine with a work tree. Every call has a deadline and raises `SandboxError` only where the
    sandbox itself failed: what the agent's command does wrong is a result, never an exception."""

    @property
    def id(self) -> str: ...

    @property
    def image(self) -> str: ...

    @property
    def workdir(self) -> str: ...

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
        """Run `command` in a fresh bash; the whole process group is dead when this returns."""
        ...

    async def edit(self, command: EditCommand, *, path: str, timeout_s: float, **arguments: Any) -> EditResult:
        """One call of the openhands-aci editor as the agent's user."""
        ...

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
        """Run pytest with `arguments` and report per test. A single test that takes longer than `test_timeout_s`
        fails, and the session goes on; `timeout_s` bounds the session."""
        ...

    async def write_files(self, files: Mapping[str, bytes], *, timeout_s: float = 30.0) -> None:
        """Write files (paths relative to the work tree, or absolute), making folders."""
        ...

    async def read_file(self, path: str, *, limit_bytes: int = 1_000_000, timeout_s: float = 30.0) -> bytes | None:
        """The file's bytes, at most `limit_bytes`; None where there is none."""
        ...

    async def unpack(self, archive: bytes, *, timeout_s: float = 60.0) -> None:
        """Unpack a tar into the work tree (which is emptied first)."""
        ...


class SandboxPool(Protocol):
    """Where sandboxes come from. A leased sandbox is fresh: nothing of an earlier lease is left in it."""

    def lease(
        self, image: str, *, timeout_s: float, label: str = "", grading: bool = False
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A sandbox for the `async with` block; it is wiped or thrown away afterwards. One that was leased for
        `grading` has been told hidden tests, and no agent ever gets it."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class Prefetching(Protocol):
    """What a pool may have beside `SandboxPool`."""

    def prefetch(self, images: Sequence[str]) -> None:
        """Have the images of tasks to come, in the background and in this order. Returns at once, never fails."""
        ...


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed call of a tool."""

    name: str
    arguments: dict[str, Any]


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A chat message. `role`: system | user | assistant | tool."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One problem. `data` is the environment's own (a SWE-Gym row, generated files, …) and never shown to the agent."""

    id: str
    environment: str
    split: Split
    data: dict[str, Any]


class Grade(msgspec.Struct, frozen=True, kw_only=True):
    """What grading found: `reward` in [0, 1], `resolved`, and a log a person can read.

    `tests` maps each named test to its status; `output` is all that the tests printed, as far as it was kept.
    """

    reward: float
    resolved: bool
    log: str = ""
    tests: dict[str, str] = {}
    output: str = ""


@runtime_checkable
class Environment(Protocol):
    """Tasks, prompts and grading. Made as `cls(options: Mapping[str, Any])`; `ConfigError` on unknown options."""

    name: str
    grade_unsubmitted: bool
    """False: an episode that ends without `submit` gets reward 0 ungraded (else a policy learns not to submit).
    True: whatever stands in the work tree is graded."""

    def tasks(self, split: Split, *, start: int, count: int, seed: int = 0) -> list[Task]:
        """Tasks [start, start + count) of a split, the same for the same arguments: `start` is the data position.
        A finite split wraps around in `train` and ends (shorter list) in the others."""
        ...

    def tool_names(self, task: Task) -> tuple[str, ...]:
        """The tools offered to the agent, by name (`agentrl.agent.tools`)."""
        ...

    def prompt(self, task: Task) -> list[ChatMessage]:
        """System and user message. Never shows hidden tests or the reference patch."""
        ...

    def image(self, task: Task) -> str:
        """The image the task's sandboxes start from."""
        ...

    async def prepare(self, task: Task, sandbox: Sandbox) -> None:
        """Put the task's repository into the work tree, history cut at the base commit."""
        ...

    async def collect(self, task: Task, sandbox: Sandbox) -> str:
        """The agent's change as a patch (`git diff --binary`), never stripped."""
        ...

    async def grade(self, task: Task, sandbox: Sandbox, patch: str) -> Grade:
        """Grade `patch` in `sandbox`, a fresh one: prepare, apply, restore the test files, run the named tests."""
        ...

    def reference_patch(self, task: Task) -> str:
        """The patch that solves the task."""
        ...


@runtime_checkable
class Delaying(Protocol):
    """What an environment may have beside `Environment`: tools that take longer than their own work, as a CI service
    or a large test suite would. For studies of schedules."""

    def tool_delay_s(self, task: Task, *, rollout: str, call: int) -> float:
        """Seconds added to tool call number `call` (from 0) of `rollout`, the same for the same arguments; or 0."""
        ...


@runtime_checkable
class Privileged(Protocol):
    """What an environment may have beside `Environment`: what a teacher is told that is the student itself. Without it
    that teacher is told the reference patch."""

    def hint(self, task: Task) -> str:
        """Text that tells how the task is solved. Never shown to the agent."""
        ...


@runtime_checkable
class TaskCatalog(Protocol):
    """What an environment may have beside `Environment`, for the commands that work on single tasks."""

    def find(self, task_id: str) -> Task:
        """The task of that id, of whatever split and kind. Raises `DatasetError` that names close ids."""
        ...

    def every(self) -> list[Task] | None:
        """Each task once, of whatever split and kind, in the data's order; None where there is no end of them."""
        ...


@runtime_checkable
class RecipeUser(Protocol):
    """What an environment may have beside `Environment`, where images of recipes suit some of its tasks."""

    def use_recipes(self, names: frozenset[str]) -> None:
        """Which recipes there are: `agentrl/NAME` is an image that can be built. Called once, before anything else."""
        ...


class Expert(Protocol):
    """A scripted solver of an environment's tasks, for demonstrations. An environment may have one as `expert`
    (attribute; None or absent where it has none)."""

    @property
    def profiles(self) -> tuple[str, ...]: ...

    def turns(self, task: Task, *, rng: random.Random, profile: str) -> Generator[ToolCall, str, None]:
        """Yields one tool call a turn and is sent its observation; `submit` is the last. `ConfigError` on an unknown
        profile."""
        ...


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Every field is sent with every request, so that no server default can creep in."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    pattern: str = ""
    """A regular expression that the text must match; log-probabilities are then of what it leaves over."""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens: token_ids int32 [N], logprobs float32 [N] (after temperature), versions int32 [N]."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class PolicyClient(Protocol):
    """Token ids in, token ids out."""

    @property
    def max_model_len(self) -> int: ...

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float
    ) -> Generation:
        """Sample one continuation. Raises `PolicyError` where the server fails, never for a short window: a prompt
        that leaves no room gives an empty generation with finish reason `length`."""
        ...


class PolicyRouter(Protocol):
    """Several policy servers behind one door. A trajectory stays with one server, whose cache holds its prefix."""

    @property
    def max_model_len(self) -> int: ...

    def session(self, trajectory_id: str) -> AbstractContextManager[PolicyClient]:
        """A client for all requests of one trajectory's episode. The server is chosen at the first of them, by KV
        load; leaving the block tells the router that the trajectory holds no KV room any more."""
        ...


class Trainer(Protocol):
    """The trainer as the orchestrator sees it; every call has a deadline and raises `TrainerError`."""

    async def train(self, batch: Batch, *, timeout_s: float) -> StepResult: ...

    async def publish(self, version: int, *, timeout_s: float) -> WeightManifest: ...

    async def save(self, step: int, state: bytes, *, score: float | None, timeout_s: float) -> Saved: ...

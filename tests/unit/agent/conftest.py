"""Stand-ins for an episode's policy, sandbox and environment: nothing here samples or runs anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from agentrl.chat import ChatFormat, FolderTokenizer, chatml_template
from agentrl.chat.tiny_tokenizer import train_tiny_tokenizer
from agentrl.config import AgentConfig, ToolsConfig
from agentrl.trajectory import FinishReason, Split
from agentrl.wire import (
    ChatMessage,
    CommandResult,
    EditCommand,
    EditResult,
    Generation,
    SamplingParams,
    Task,
)

# A busy machine is no failure of a property.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


class SpyTokenizer:
    """Keeps every text that was encoded."""

    def __init__(self, inner: FolderTokenizer) -> None:
        self._inner = inner
        self.encoded: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        return self._inner.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode(ids)

    def token_id(self, token: str) -> int | None:
        return self._inner.token_id(token)


@dataclass
class Reply:
    """What the scripted policy gives for one request; `before` runs first (a wait, an error …)."""

    ids: Sequence[int]
    finish: FinishReason = FinishReason.STOP
    version: int = 3
    before: Callable[[], Any] | None = None


@dataclass
class ScriptedPolicy:
    """A `PolicyClient` that answers request after request from a script, at most `max_tokens` of it."""

    script: list[Reply]
    max_model_len: int = 4096
    requests: list[tuple[tuple[int, ...], SamplingParams, str, float]] = field(default_factory=list)
    cancelled: int = 0

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float
    ) -> Generation:
        self.requests.append((tuple(prompt_ids), params, request_id, timeout_s))
        reply = self.script[len(self.requests) - 1]
        try:
            if reply.before is not None:
                waiting = reply.before()
                if asyncio.iscoroutine(waiting):
                    await waiting
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        ids = np.asarray(reply.ids[: params.max_tokens], dtype=np.int32)
        cut = len(ids) < len(reply.ids)
        return Generation(
            token_ids=ids,
            logprobs=self.logprobs_of(len(self.requests) - 1, len(ids)),
            versions=np.full(len(ids), reply.version, dtype=np.int32),
            finish_reason=FinishReason.LENGTH if cut else reply.finish,
            prompt_tokens=len(prompt_ids),
            queue_s=0.25,
            prefill_s=0.5,
            decode_s=1.0,
        )

    @staticmethod
    def logprobs_of(request: int, count: int) -> np.ndarray:
        """Different for every token, so that a shift by one shows."""
        return -(request + 1 + np.arange(count) / 1024).astype(np.float32)


def ended(output: str = "", exit_code: int | None = 0, **changes: Any) -> CommandResult:
    values: dict[str, Any] = {"timed_out": False, "out_of_memory": False, "duration_s": 0.1}
    return CommandResult(
        **{
            "exit_code": exit_code,
            "output": output,
            "output_bytes": len(output.encode()),
            **values,
            **changes,
        }
    )


@dataclass
class FakeSandbox:
    """A `Sandbox` of canned answers that records every call."""

    commands: dict[str, CommandResult | Exception] = field(default_factory=dict)
    edits: dict[str, EditResult] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    id: str = "fake"
    image: str = "none"
    workdir: str = "/testbed"

    async def run(self, command: str, **options: Any) -> CommandResult:
        self.calls.append(("run", {"command": command, **options}))
        answer = self.commands.get(command, ended(f"ran {command}"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def edit(self, command: EditCommand, **options: Any) -> EditResult:
        self.calls.append((command, options))
        return self.edits.get(command, EditResult(ok=True, text=f"{command} done", content="x = 1\n"))

    async def run_tests(self, arguments: Sequence[str], **_: Any) -> Any:
        raise AssertionError("the agent's tools run no tests of their own")

    async def write_files(self, files: Mapping[str, bytes], *, timeout_s: float = 30.0) -> None:
        raise AssertionError("the agent's tools write through the editor")

    async def read_file(self, path: str, *, limit_bytes: int = 0, timeout_s: float = 30.0) -> bytes | None:
        raise AssertionError("the agent's tools read through the editor")

    async def unpack(self, archive: bytes, *, timeout_s: float = 60.0) -> None:
        raise AssertionError("preparing is the driver's")


class FakeEnvironment:
    name = "fake"
    grade_unsubmitted = False

    def tool_names(self, task: Task) -> tuple[str, ...]:
        return ("bash", "view", "create", "str_replace", "insert", "undo_edit", "submit")

    def prompt(self, task: Task) -> list[ChatMessage]:
        return [
            ChatMessage(role="system", content="You fix bugs."),
            ChatMessage(role="user", content="Fix f."),
        ]


TASK = Task(id="t", environment="fake", split=Split.TRAIN, data={})


@pytest.fixture(scope="session")
def tokenizer() -> FolderTokenizer:
    text = "<tool_call>\n<function=view>\n<parameter=path>\na.py\n</parameter>\n</function>\n</tool_call>\n"
    return FolderTokenizer(train_tiny_tokenizer([text, "def f(x):\n    return x\n"] * 4, vocab_size=320))


@pytest.fixture
def spy(tokenizer: FolderTokenizer) -> SpyTokenizer:
    return SpyTokenizer(tokenizer)


@pytest.fixture
def chat(spy: SpyTokenizer) -> ChatFormat:
    return ChatFormat(spy, chatml_template(), special_tokens={"eos_token": "<|im_end|>"})


@pytest.fixture
def config() -> AgentConfig:
    return AgentConfig(max_turns=6, max_turn_tokens=200, max_tokens=2000, tools=ToolsConfig(observations="compact"))


@dataclass(frozen=True)
class Kit:
    """The stand-ins, for tests to build with."""

    Reply: type[Reply] = Reply
    ScriptedPolicy: type[ScriptedPolicy] = ScriptedPolicy
    FakeSandbox: type[FakeSandbox] = FakeSandbox
    environment: FakeEnvironment = field(default_factory=FakeEnvironment)
    task: Task = TASK

    @staticmethod
    def ended(*args: Any, **changes: Any) -> CommandResult:
        return ended(*args, **changes)


@pytest.fixture
def kit() -> Kit:
    return Kit()

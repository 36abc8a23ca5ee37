"""One episode: the agent samples a turn, its calls run in the sandbox, their results are read, and so on.

    prompt ─▶ sample a turn ─▶ run its calls ─▶ append the results ─▶ sample a turn …
                 │ window full: TOKENS   │ submit: SUBMITTED   │ last turn: TURNS   │ deadline: TIME

Sampled ids are kept as they came; only the environment's text is tokenised, once. Every ending keeps what
was sampled and is graded by the driver; only failing machines raise. Holds no resource of its own, so it may
be cancelled anywhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from agentrl.agent.execute import ToolRunner
from agentrl.agent.result import EpisodeResult, StopReason
from agentrl.agent.segments import SegmentBuilder
from agentrl.agent.tools import tool_schemas
from agentrl.chat import NO_CALL, ChatFormat, Conversation, MalformedCall, call_pattern, parse_calls
from agentrl.config import AgentConfig
from agentrl.trajectory import FinishReason, Segment, TurnTiming
from agentrl.wire import Delaying, Environment, PolicyClient, SamplingParams, Sandbox, Task

# A server that aborts without a token is being updated: ask again, not at once.
_ABORT_PAUSE_S = 0.05
# The episode's own deadline strikes first; the client's is only a backstop.
_CLIENT_GRACE_S = 5.0


async def run_episode(
    *,
    task: Task,
    environment: Environment,
    sandbox: Sandbox,
    policy: PolicyClient,
    chat: ChatFormat,
    config: AgentConfig,
    sampling: SamplingParams,
    request_id: str,
    on_sealed: Callable[[int, Segment], None] = lambda index, segment: None,
    clock: Callable[[], float] = time.monotonic,
) -> EpisodeResult:
    """Let the policy work on `task` in a sandbox that is already prepared.

    `sampling` gives temperature, top_p and top_k; its max_tokens and stop tokens are set here, turn by turn.
    `on_sealed` takes each segment with its number as soon as nothing is added to it any more.
    Raises `SandboxError` and `PolicyError` where a machine failed, `RecordError` where the server's streams
    disagree.
    """
    names = environment.tool_names(task)
    tools = tool_schemas(names) if config.tools.described_by == "template" else None
    runner = ToolRunner(names=names, sandbox=sandbox, config=config.tools)
    pattern = call_pattern(runner.parameter_schemas, chat.call_format) if config.tools.calls == "required" else ""
    episode = _Episode(
        conversation=Conversation(chat, environment.prompt(task), tools),
        runner=runner,
        policy=policy,
        chat=chat,
        config=config,
        sampling=msgspec.structs.replace(sampling, stop_token_ids=chat.stop_token_ids, pattern=pattern),
        request_id=request_id,
        tool_delay_s=_tool_delay(environment, task, request_id),
        on_sealed=on_sealed,
        clock=clock,
    )
    return await episode.run()


def _tool_delay(environment: Environment, task: Task, rollout: str) -> Callable[[int], float]:
    """Seconds that the environment adds to the rollout's tool call of a number (from 0)."""
    if not isinstance(environment, Delaying):
        return lambda _: 0.0
    return lambda call: environment.tool_delay_s(task, rollout=rollout, call=call)


@dataclass(frozen=True, slots=True)
class _Turn:
    """A sampled turn: ids over all parts, how sampling ended (None: time was over), timing."""

    ids: list[int]
    finish: FinishReason | None
    timing: TurnTiming


class _Episode:
    """The state of one episode. `_segment` is the open segment, `_sealed` those before it."""

    def __init__(
        self,
        *,
        conversation: Conversation,
        runner: ToolRunner,
        policy: PolicyClient,
        chat: ChatFormat,
        config: AgentConfig,
        sampling: SamplingParams,
        request_id: str,
        tool_delay_s: Callable[[int], float],
        on_sealed: Callable[[int, Segment], None],
        clock: Callable[[], float],
    ) -> None:
        self._conversation = conversation
        self._runner = runner
        self._policy = policy
        self._chat = chat
        self._config = config
        self._sampling = sampling
        self._request_id = request_id
        self._tool_delay_s = tool_delay_s
        self._on_sealed = on_sealed
        self._clock = clock
        self._window = min(config.max_tokens, policy.max_model_len)
        self._deadline = clock() + config.episode_timeout_s
        self._segment = SegmentBuilder(conversation.prompt_ids, turn=0)
        self._sealed: list[Segment] = []
        self._turns: list[TurnTiming] = []

    def _time_left_s(self) -> float:
        return self._deadline - self._clock()

    async def run(self) -> EpisodeResult:
        turn = 0
        stop: StopReason | None = None
        while stop is None:
            stop = await self._turn(turn)
            turn += 1
        if self._segment.has_agent_tokens or not self._sealed:
            self._seal()
        counts = {**self._runner.counts, "turns": len(self._turns), "rewrites": len(self._sealed) - 1}
        return EpisodeResult(
            segments=tuple(self._sealed),
            turns=tuple(self._turns),
            stop=stop,
            info={name: float(count) for name, count in counts.items()},
        )

    async def _turn(self, turn: int) -> StopReason | None:
        """Sample one turn and act on it. The reason to stop, None to go on."""
        if self._time_left_s() <= 0:
            return StopReason.TIME
        if len(self._segment) >= self._window:
            return StopReason.TOKENS
        said = await self._sample(turn)
        self._turns.append(said.timing)
        if said.finish is None:
            return StopReason.TIME
        cut = said.finish is FinishReason.LENGTH
        if cut and (not said.ids or len(self._segment) >= self._window):
            return StopReason.TOKENS
        started = self._clock()
        results, submitted = await self._act(self._chat.agent_text(said.ids), cut=cut)
        self._turns[-1] = _with_tool_time(said.timing, self._clock() - started)
        if submitted:
            return StopReason.SUBMITTED
        if turn + 1 >= self._config.max_turns:
            return StopReason.TURNS
        if self._time_left_s() <= 0:
            return StopReason.TIME
        return self._append(turn, said.ids, results)

    async def _sample(self, turn: int) -> _Turn:
        """Sample a turn, in several parts where the server aborts; all parts share one budget of tokens."""
        budget = min(self._config.max_turn_tokens, self._window - len(self._segment))
        ids: list[int] = []
        spent = {"queue_s": 0.0, "prefill_s": 0.0, "decode_s": 0.0}
        finish: FinishReason | None = None
        part = 0
        try:
            async with asyncio.timeout(self._time_left_s()) as deadline:
                while finish is None:
                    generation = await self._policy.generate(
                        self._segment.ids[:],
                        msgspec.structs.replace(self._sampling, max_tokens=budget - len(ids)),
                        request_id=f"{self._request_id}.{turn}.{part}",
                        timeout_s=self._time_left_s() + _CLIENT_GRACE_S,
                    )
                    new = self._segment.add_sampled(generation, turn=turn, where=f"{self._request_id}, turn {turn}")
                    ids += new
                    for name in spent:
                        spent[name] += getattr(generation, name)
                    part += 1
                    if generation.finish_reason is not FinishReason.ABORT:
                        finish = generation.finish_reason
                    elif len(ids) >= budget:
                        finish = FinishReason.LENGTH
                    elif not new:
                        await asyncio.sleep(_ABORT_PAUSE_S)
        except TimeoutError:
            if not deadline.expired():
                raise
        return _Turn(ids, finish, TurnTiming(**spent, finish_reason=finish or FinishReason.ABORT))

    async def _act(self, text: str, *, cut: bool) -> tuple[list[str], bool]:
        """(observations of the calls in order, whether the agent submitted); nothing runs after a submit."""
        calls = parse_calls(text, self._chat.call_format, self._runner.parameter_schemas, cut=cut)
        results: list[str] = []
        for call in calls or [MalformedCall(NO_CALL)]:
            number = self._runner.counts["sandbox_calls"]
            result = await self._runner.execute(call, time_left_s=self._time_left_s())
            if self._runner.counts["sandbox_calls"] > number:
                await self._wait_for_tool(number)
            if result.submitted:
                return results, True
            results.append(result.text)
        return results, False

    async def _wait_for_tool(self, number: int) -> None:
        """What the environment adds to a call that the sandbox carried out, at most to the episode's deadline."""
        delay_s = min(self._tool_delay_s(number), self._time_left_s())
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    def _seal(self) -> None:
        """Nothing is added to the open segment any more."""
        self._sealed.append(self._segment.seal())
        self._on_sealed(len(self._sealed) - 1, self._sealed[-1])

    def _append(self, turn: int, sampled: list[int], results: list[str]) -> StopReason | None:
        """Append what the environment says, or open a new segment where the template rewrote history."""
        following = self._conversation.answer(sampled, results)
        before = 0 if following.rewritten else len(self._segment)
        if before + len(following.ids) >= self._window:
            return StopReason.TOKENS
        if following.rewritten:
            self._seal()
            self._segment = SegmentBuilder(following.ids, turn=turn + 1)
        else:
            self._segment.add_environment(following.ids, turn=turn)
        return None


def _with_tool_time(timing: TurnTiming, tool_s: float) -> TurnTiming:
    return TurnTiming(
        queue_s=timing.queue_s,
        prefill_s=timing.prefill_s,
        decode_s=timing.decode_s,
        tool_s=tool_s,
        finish_reason=timing.finish_reason,
    )

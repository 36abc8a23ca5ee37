"""Episodes with a scripted policy: what is recorded, and how each one ends."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.agent import EpisodeResult, StopReason, run_episode
from agentrl.chat import ChatFormat, chatml_template, render_call
from agentrl.config import AgentConfig
from agentrl.errors import PolicyRequestError, RecordError, SandboxDeadError
from agentrl.trajectory import FinishReason, Purpose, Segment, SpanKind
from agentrl.wire import Generation, SamplingParams, ToolCall

VIEW = render_call(ToolCall(name="view", arguments={"path": "a.py"}), "qwen3_coder")
SUBMIT = render_call(ToolCall(name="submit", arguments={}), "qwen3_coder")
SAMPLING = SamplingParams(max_tokens=1, temperature=0.7)


class Bench:
    """One episode's parts; `play` runs it."""

    def __init__(self, chat: ChatFormat, config: AgentConfig, kit: Any) -> None:
        self.chat, self.config, self.kit = chat, config, kit
        self.sandbox = kit.FakeSandbox()
        self.now = 0.0
        self.sealed: list[tuple[int, Segment, int]] = []
        """Number, segment, and how many requests had been made by then."""

    def ids(self, text: str, *, end: bool = True) -> list[int]:
        ids = self.chat.tokenizer.encode(text)
        return [*ids, self.chat.end_of_turn] if end else ids

    def says(self, text: str, **changes: Any) -> Any:
        return self.kit.Reply(self.ids(text), **changes)

    def play(self, *script: Any, max_model_len: int = 4096, **changes: Any) -> EpisodeResult:
        self.policy = self.kit.ScriptedPolicy(list(script), max_model_len=max_model_len)
        return asyncio.run(self.run(self.policy, **changes))

    async def run(self, policy: Any, **changes: Any) -> EpisodeResult:
        return await run_episode(
            task=self.kit.task,
            environment=self.kit.environment,
            sandbox=self.sandbox,
            policy=policy,
            chat=self.chat,
            config=self.config.model_copy(update=changes),
            sampling=SAMPLING,
            request_id="r1",
            clock=lambda: self.now,
            on_sealed=lambda index, segment: self.sealed.append((index, segment, len(policy.requests))),
        )


@pytest.fixture
def bench(chat: ChatFormat, config: AgentConfig, kit: Any) -> Bench:
    return Bench(chat, config, kit)


def test_the_record_of_an_episode_exactly(bench: Bench) -> None:
    """K1, K5, K6: first and last sampled token, separators, streams, all where they belong."""
    said = [bench.ids(VIEW), bench.ids(SUBMIT)]
    result = bench.play(bench.kit.Reply(said[0], version=3), bench.kit.Reply(said[1], version=4))
    prompt = bench.chat.open(bench.kit.environment.prompt(bench.kit.task))
    observation = bench.chat.observe(["x = 1"])
    segment = result.segments[0]
    assert segment.token_ids.tolist() == prompt + said[0] + observation + said[1]
    a, b = len(prompt), len(prompt) + len(said[0])
    c, d = b + len(observation), b + len(observation) + len(said[1])
    assert [(s.kind, s.start, s.stop, s.turn, s.purpose) for s in segment.spans] == [
        (SpanKind.PROMPT, 0, a, 0, None),
        (SpanKind.AGENT, a, b, 0, Purpose.ACT),
        (SpanKind.ENVIRONMENT, b, c, 0, None),
        (SpanKind.AGENT, c, d, 1, Purpose.ACT),
    ]
    of = bench.policy.logprobs_of
    assert segment.logprobs[a:b].tolist() == of(0, b - a).tolist()
    assert segment.logprobs[c:d].tolist() == of(1, d - c).tolist()
    assert np.isnan(segment.logprobs[~segment.agent_mask]).all()
    assert segment.versions[a:b].tolist() == [3] * (b - a)
    assert segment.versions[c:d].tolist() == [4] * (d - c)
    assert segment.token_ids[b - 1] == bench.chat.end_of_turn
    assert segment.agent_mask[b - 1]
    assert not segment.agent_mask[b]
    assert (result.stop, result.submitted) == (StopReason.SUBMITTED, True)
    assert dict(result.info) == {
        "tool_calls": 2,
        "sandbox_calls": 1,
        "bad_calls": 0,
        "edits": 0,
        "tests": 0,
        "submitted": 1,
        "turns": 2,
        "rewrites": 0,
    }
    assert [(t.queue_s, t.prefill_s, t.decode_s, t.finish_reason) for t in result.turns] == [
        (0.25, 0.5, 1.0, FinishReason.STOP)
    ] * 2


def test_every_request_carries_the_exact_context_and_every_sampling_field(bench: Bench) -> None:
    result = bench.play(bench.says(VIEW), bench.says(SUBMIT))
    whole = result.segments[0].token_ids.tolist()
    (first, params, name, _), (second, later, other, _) = bench.policy.requests
    assert list(first) == whole[: len(first)]
    assert list(second) == whole[: len(second)]
    assert len(second) == len(whole) - len(bench.ids(SUBMIT))
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 1.0, 0)
    assert params.stop_token_ids == later.stop_token_ids == (bench.chat.end_of_turn,)
    assert params.max_tokens == bench.config.max_turn_tokens
    assert name != other


def test_nothing_sampled_is_tokenised_and_the_environment_s_text_once(bench: Bench, spy: Any) -> None:
    """K2."""
    replies = [bench.says(VIEW), bench.says("no call at all"), bench.says(SUBMIT)]
    spy.encoded.clear()
    bench.play(*replies)
    prompt = bench.chat.render(bench.kit.environment.prompt(bench.kit.task), add_generation_prompt=True)
    assert spy.encoded == [
        prompt,
        bench.chat.observe_text(["x = 1"]),
        bench.chat.observe_text(["Error: no valid tool call."]),
    ]


def test_ids_that_no_encoder_would_choose_are_kept(bench: Bench) -> None:
    """K2: the agent spells its call byte by byte; the ids stay as sampled and the call is made."""
    spelled = [token for letter in VIEW for token in bench.chat.tokenizer.encode(letter)]
    assert spelled != bench.chat.tokenizer.encode(VIEW)
    sampled = [*spelled, bench.chat.end_of_turn]
    result = bench.play(bench.kit.Reply(sampled), bench.says(SUBMIT))
    segment = result.segments[0]
    assert segment.token_ids[segment.agent_mask].tolist() == sampled + bench.ids(SUBMIT)


def test_text_without_a_call_is_a_bad_call_and_the_episode_goes_on(bench: Bench) -> None:
    """K12."""
    result = bench.play(bench.says("Done!"), bench.says("<tool_call>\nsubmit"), bench.says(SUBMIT))
    assert result.submitted
    assert result.info["bad_calls"] == 2
    assert result.info["tool_calls"] == 1
    text = bench.chat.decode(result.segments[0].token_ids.tolist())
    assert "<tool_response>\nError: no valid tool call.\n</tool_response>" in text
    assert "Error: no valid tool call: <function=NAME> is missing." in text


def test_several_calls_of_one_turn_and_nothing_after_submit(bench: Bench) -> None:
    result = bench.play(bench.says(f"{VIEW}\n{VIEW}"), bench.says(f"{VIEW}\n{SUBMIT}\n{VIEW}"))
    assert [name for name, _ in bench.sandbox.calls] == ["view"] * 3
    assert result.info["tool_calls"] == 4
    text = bench.chat.decode(result.segments[0].token_ids.tolist())
    assert "<tool_response>\nx = 1\n</tool_response>\n<tool_response>\nx = 1\n</tool_response><|im_end|>" in text


def test_an_aborted_generation_resumes_with_what_is_left_of_its_budget(bench: Bench) -> None:
    """K10: remaining = budget − produced, immutable parameters, both versions kept, one span."""
    said = bench.ids(VIEW)
    parts = [
        bench.kit.Reply(said[:5], FinishReason.ABORT, version=3),
        bench.kit.Reply([], FinishReason.ABORT, version=3),
        bench.kit.Reply(said[5:], version=4),
    ]
    result = bench.play(*parts, bench.says(SUBMIT), max_turn_tokens=len(said))
    requests = bench.policy.requests
    assert [params.max_tokens for _, params, _, _ in requests[:3]] == [
        len(said),
        len(said) - 5,
        len(said) - 5,
    ]
    assert list(requests[2][0]) == list(requests[0][0]) + said[:5]
    assert len({name for _, _, name, _ in requests}) == 4
    segment = result.segments[0]
    span = segment.spans[1]
    assert segment.token_ids[span.start : span.stop].tolist() == said
    assert segment.versions[span.start : span.stop].tolist() == [3] * 5 + [4] * (len(said) - 5)
    assert [s.kind for s in segment.spans].count(SpanKind.AGENT) == 2
    assert result.turns[0].decode_s == 3.0
    assert len(result.turns) == 2


def test_an_abort_at_the_end_of_the_budget_is_a_length_stop(bench: Bench) -> None:
    """K10: a budget that is used up is never asked for again."""
    budget = len(bench.ids(SUBMIT))
    said = bench.ids("word " * budget, end=False)[:budget]
    result = bench.play(bench.kit.Reply(said, FinishReason.ABORT), bench.says(SUBMIT), max_turn_tokens=budget)
    assert result.turns[0].finish_reason is FinishReason.LENGTH
    assert len(bench.policy.requests) == 2


def test_a_turn_stopped_by_its_cap_is_closed_by_the_environment(bench: Bench) -> None:
    """K1: the end-of-turn token that was not sampled is not the agent's."""
    said = bench.ids("x = 1 and so on", end=False)[:4]
    result = bench.play(bench.kit.Reply(said, FinishReason.LENGTH), bench.says(SUBMIT))
    segment = result.segments[0]
    agent, environment = segment.spans[1], segment.spans[2]
    assert segment.token_ids[agent.start : agent.stop].tolist() == said
    assert segment.token_ids[environment.start] == bench.chat.end_of_turn
    expected = [bench.chat.end_of_turn, *bench.chat.observe(["Error: no valid tool call."])]
    assert segment.token_ids[environment.start : environment.stop].tolist() == expected


def test_a_call_cut_by_the_cap_is_not_executed(bench: Bench) -> None:
    call = render_call(ToolCall(name="create", arguments={"path": "a.py", "file_text": "one\ntwo"}), "qwen3_coder")
    half = bench.ids(call.split("two")[0], end=False)
    result = bench.play(bench.kit.Reply(half, FinishReason.LENGTH), bench.says(SUBMIT))
    assert bench.sandbox.calls == []
    assert result.info["bad_calls"] == 1


def test_a_full_window_ends_cleanly(bench: Bench) -> None:
    """K11: max_tokens never exceeds what is left, and no request is made for a full window."""
    prompt = len(bench.chat.open(bench.kit.environment.prompt(bench.kit.task)))
    long = bench.ids("word " * 50, end=False)
    result = bench.play(bench.kit.Reply(long), max_tokens=prompt + 10)
    assert bench.policy.requests[0][1].max_tokens == 10
    assert (result.stop, result.submitted) == (StopReason.TOKENS, False)
    assert len(result.segments[0]) == prompt + 10
    assert result.segments[0].spans[-1].kind is SpanKind.AGENT
    assert result.turns[0].finish_reason is FinishReason.LENGTH


def test_a_prompt_longer_than_the_window_asks_for_nothing(bench: Bench) -> None:
    """K11: no negative max_tokens, no retry."""
    for limits in ({"max_tokens": 16}, {"max_model_len": 20}):
        result = bench.play(**limits)
        assert bench.policy.requests == []
        assert result.stop is StopReason.TOKENS
        assert [span.kind for span in result.segments[0].spans] == [SpanKind.PROMPT]


def test_a_server_that_finds_no_room_ends_the_episode(bench: Bench) -> None:
    result = bench.play(bench.kit.Reply([], FinishReason.LENGTH))
    assert result.stop is StopReason.TOKENS
    assert len(bench.policy.requests) == 1


def test_an_observation_that_does_not_fit_is_left_out(bench: Bench) -> None:
    said = bench.ids(VIEW)
    prompt = len(bench.chat.open(bench.kit.environment.prompt(bench.kit.task)))
    needed = prompt + len(said) + len(bench.chat.observe(["x = 1"]))
    result = bench.play(bench.kit.Reply(said), max_tokens=needed)
    assert result.stop is StopReason.TOKENS
    assert len(result.segments[0]) == prompt + len(said)
    fits = bench.play(bench.kit.Reply(said), bench.kit.Reply(bench.ids(SUBMIT)), max_tokens=needed + 1)
    assert len(fits.segments[0]) == needed + 1


def test_the_turn_cap(bench: Bench) -> None:
    result = bench.play(bench.says(VIEW), bench.says(VIEW), max_turns=2)
    assert result.stop is StopReason.TURNS
    assert (result.info["turns"], len(bench.policy.requests), len(bench.sandbox.calls)) == (2, 2, 2)
    assert result.segments[0].spans[-1].kind is SpanKind.AGENT


def test_time_over_between_turns(bench: Bench) -> None:
    def later() -> None:
        bench.now += 100.0

    result = bench.play(bench.says(VIEW, before=later), episode_timeout_s=60.0)
    assert result.stop is StopReason.TIME
    assert result.segments[0].agent_mask.sum() == len(bench.ids(VIEW))


def test_time_over_while_sampling_keeps_what_came_before(bench: Bench) -> None:
    slow = bench.says(VIEW, before=lambda: asyncio.sleep(30))
    result = bench.play(bench.says(VIEW), slow, episode_timeout_s=0.2)
    assert result.stop is StopReason.TIME
    assert bench.policy.cancelled == 1
    assert result.segments[0].agent_mask.sum() == len(bench.ids(VIEW))
    assert result.info["turns"] == 2


def test_a_command_never_gets_more_time_than_the_episode_has(bench: Bench) -> None:
    run = render_call(ToolCall(name="bash", arguments={"command": "sleep 9"}), "qwen3_coder")
    bench.play(bench.says(run), bench.says(SUBMIT), episode_timeout_s=7.0)
    assert bench.sandbox.calls[0][1]["timeout_s"] == 7.0


def test_cancelling_leaves_nothing_running(bench: Bench) -> None:
    async def scenario() -> int:
        policy = bench.kit.ScriptedPolicy([bench.says(VIEW, before=lambda: asyncio.sleep(30))])
        task = asyncio.create_task(bench.run(policy))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        assert policy.cancelled == 1
        return len(asyncio.all_tasks())

    assert asyncio.run(scenario()) == 1


def test_failing_machines_raise(bench: Bench) -> None:
    run = render_call(ToolCall(name="bash", arguments={"command": "x"}), "qwen3_coder")
    bench.sandbox.commands["x"] = SandboxDeadError("gone")
    with pytest.raises(SandboxDeadError):
        bench.play(bench.says(run))

    def fail() -> None:
        raise PolicyRequestError("no")

    with pytest.raises(PolicyRequestError):
        bench.play(bench.says(VIEW, before=fail))

    def late() -> None:
        raise TimeoutError("the client's own")

    with pytest.raises(TimeoutError, match="client's own"):
        bench.play(bench.says(VIEW, before=late))


def test_streams_of_different_length_are_refused(bench: Bench) -> None:
    """K4: never padded, and the error names the rollout."""

    class Short(bench.kit.ScriptedPolicy):  # type: ignore[name-defined]
        async def generate(self, *args: Any, **options: Any) -> Generation:
            made = await super().generate(*args, **options)
            return Generation(
                token_ids=made.token_ids,
                logprobs=made.logprobs[:-1],
                versions=made.versions,
                finish_reason=made.finish_reason,
                prompt_tokens=made.prompt_tokens,
            )

    with pytest.raises(RecordError, match="log-probabilities") as caught:
        asyncio.run(bench.run(Short([bench.says(VIEW)])))
    assert "r1" in caught.value.where


def test_a_template_that_strips_old_reasoning_makes_segments(spy: Any, config: AgentConfig, kit: Any) -> None:
    """K3, K30: a new segment per rewrite, counted; each sampled token is an agent token exactly once."""
    template = chatml_template().replace(
        "{{ message.content or '' }}",
        "{{ message.content.split('</think>\\n')[-1]"
        " if message.role == 'assistant' and loop.length - loop.index > 1 else message.content }}",
    )
    bench = Bench(ChatFormat(spy, template), config, kit)
    assert bench.chat.rewrites_history
    said = [bench.ids(f"<think>\nwhy {n}\n</think>\n{call}") for n, call in enumerate([VIEW, VIEW, SUBMIT])]
    result = bench.play(*[kit.Reply(ids) for ids in said])
    assert result.submitted
    assert result.info["rewrites"] == 1
    first, second = result.segments
    assert [s.kind for s in first.spans] == [
        SpanKind.PROMPT,
        SpanKind.AGENT,
        SpanKind.ENVIRONMENT,
        SpanKind.AGENT,
    ]
    assert [s.kind for s in second.spans] == [SpanKind.PROMPT, SpanKind.AGENT]
    assert first.token_ids[first.agent_mask].tolist() == said[0] + said[1]
    assert second.token_ids[second.agent_mask].tolist() == said[2]
    seen = bench.chat.decode(second.token_ids.tolist())
    assert "why 0" not in seen
    assert "why 1" in seen
    assert list(bench.policy.requests[2][0]) == second.token_ids[~second.agent_mask].tolist()
    assert second.spans[0].turn == second.spans[1].turn == 2
    assert [(index, asked) for index, _, asked in bench.sealed] == [(0, 2), (1, 3)], (
        "the first before the third request"
    )
    assert all(sealed is segment for (_, sealed, _), segment in zip(bench.sealed, result.segments, strict=True))


def test_tool_schemas_go_through_the_template_where_asked(bench: Bench) -> None:
    tools = bench.config.tools.model_copy(update={"described_by": "template"})
    result = bench.play(bench.says(SUBMIT), tools=tools)
    text = bench.chat.decode(result.segments[0].token_ids.tolist())
    assert '"name": "str_replace"' in text
    assert '"name": "str_replace"' not in bench.chat.decode(
        bench.play(bench.says(SUBMIT)).segments[0].token_ids.tolist()
    )


TOKENS = st.lists(st.integers(0, 319), max_size=40)


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(turns=st.lists(st.tuples(TOKENS, st.sampled_from(list(FinishReason))), min_size=1, max_size=5))
def test_no_sampled_tokens_crash_an_episode(bench: Bench, turns: list[tuple[list[int], FinishReason]]) -> None:
    """K12, and every sampled token is an agent token, in order, whatever it is."""
    script = [bench.kit.Reply(ids, finish) for ids, finish in turns]
    result = bench.play(*script, *[bench.says(SUBMIT) for _ in range(8)])
    asked = len(bench.policy.requests)
    sampled = [token for reply in bench.policy.script[:asked] for token in reply.ids]
    segment = result.segments[0]
    assert segment.token_ids[segment.agent_mask].tolist() == sampled
    assert segment.spans[-1].stop == len(segment)

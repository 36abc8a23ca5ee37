"""`agentrl sandbox replay`: turns out of a record, comparing, and naming trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from agentrl.agent.segments import SegmentBuilder
from agentrl.chat import ChatFormat, MalformedCall, chatml_template
from agentrl.config import RunConfig
from agentrl.config.load import dump_toml
from agentrl.errors import DatasetError, RunFolderError, UsageError
from agentrl.policy import local_model
from agentrl.run.replay_record import (
    call_line,
    find_trajectory,
    only_numbers_differ,
    read_texts,
    recorded_turns,
)
from agentrl.trajectory import (
    FinishReason,
    Outcome,
    OutcomeKind,
    Purpose,
    Segment,
    Span,
    SpanKind,
    Split,
    Trajectory,
    TurnTiming,
    write_rows,
)
from agentrl.wire import ChatMessage, Generation, ToolCall

PROMPT = [ChatMessage(role="user", content="Fix f.")]


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat.load(local_model("tiny"))


def sampled(ids: Sequence[int], finish: FinishReason = FinishReason.STOP) -> Generation:
    return Generation(
        token_ids=np.asarray(ids, np.int32),
        logprobs=np.full(len(ids), -1.0, np.float32),
        versions=np.zeros(len(ids), np.int32),
        finish_reason=finish,
        prompt_tokens=1,
    )


def trajectory(
    segments: Sequence[Segment], finishes: Sequence[FinishReason], *, name: str = "train-000001-0"
) -> Trajectory:
    return Trajectory(
        trajectory_id=name,
        group_id=name[:-2],
        task_id="task",
        environment="swe-gym",
        split=Split.TRAIN,
        segments=tuple(segments),
        outcome=Outcome(OutcomeKind.FAILED),
        reward=0.0,
        turns=tuple(TurnTiming(finish_reason=finish) for finish in finishes),
    )


def recorded(chat: ChatFormat, says: Sequence[str], reads: Sequence[list[str]], last: FinishReason) -> Trajectory:
    """One segment: each text of `says`, each but the last followed by what was read."""
    builder = SegmentBuilder(chat.open(PROMPT), turn=0)
    for turn, text in enumerate(says):
        builder.add_sampled(sampled(chat.tokenizer.encode(text)), turn=turn, where="here")
        if turn < len(reads):
            builder.add_environment(chat.close_turn(builder.ids) + chat.observe(reads[turn]), turn=turn)
    finishes = [FinishReason.STOP] * (len(says) - 1) + [last]
    return trajectory([builder.seal()], finishes)


def test_turns_of_one_segment(chat: ChatFormat) -> None:
    found = recorded_turns(
        recorded(
            chat, ["first<|im_end|>", "second", "third<|im_end|>"], [["one"], ["two", "three"]], FinishReason.STOP
        ),
        window=10_000,
    )
    assert [turn.turn for turn in found] == [0, 1, 2]
    assert [chat.decode(turn.ids) for turn in found] == ["first<|im_end|>", "second", "third<|im_end|>"]
    assert [turn.ran for turn in found] == [True, True, True]
    assert [turn.read is None for turn in found] == [False, False, True]
    assert read_texts(chat, found[0], ["one"]) == ("", "")
    texts = read_texts(chat, found[1], ["two", "3"])
    assert texts is not None
    assert "three" in texts[0]
    assert "three" not in texts[1]
    assert read_texts(chat, found[2], []) is None


@pytest.mark.parametrize(
    ("finish", "window_full", "ran"),
    [
        (FinishReason.STOP, True, True),
        (FinishReason.LENGTH, False, True),  # its turn's own limit: the calls ran, and the episode ended otherwise
        (FinishReason.LENGTH, True, False),
        (FinishReason.ABORT, False, False),
    ],
)
def test_what_an_ended_episode_never_ran(chat: ChatFormat, finish: FinishReason, window_full: bool, ran: bool) -> None:
    found = recorded(chat, ["first", "second"], [["one"]], finish)
    tokens = len(found.segments[0])
    turns = recorded_turns(found, window=tokens if window_full else tokens + 1)
    assert [turn.ran for turn in turns] == [True, ran]
    assert turns[1].cut == (finish is FinishReason.LENGTH)


def test_segments_are_walked_in_order_and_a_rewritten_prompt_is_compared(chat: ChatFormat) -> None:
    """K3: where the template rewrote history, what was read stands at the end of the next segment's prompt."""
    template = chatml_template().replace(
        "{{ message.content or '' }}",
        "{{ message.content.split('</think>\\n')[-1]"
        " if message.role == 'assistant' and loop.length - loop.index > 1 else message.content }}",
    )
    stripping = ChatFormat(chat.tokenizer, template, special_tokens={"eos_token": "<|im_end|>"})
    said = ChatMessage(role="assistant", content="<think>\nwhy\n</think>\ncall")
    read = ChatMessage(role="tool", content="it says 12")
    first = SegmentBuilder(stripping.open(PROMPT), turn=0)
    first.add_sampled(sampled(stripping.tokenizer.encode(said.content)), turn=0, where="here")
    second = SegmentBuilder(stripping.open([*PROMPT, said, read]), turn=1)
    second.add_sampled(sampled(stripping.tokenizer.encode("submit")), turn=1, where="here")
    turns = recorded_turns(trajectory([first.seal(), second.seal()], [FinishReason.STOP] * 2), window=10_000)
    assert [(turn.turn, turn.segment) for turn in turns] == [(0, 0), (1, 1)]
    assert turns[0].read is None
    assert turns[0].reopened is not None
    same = read_texts(stripping, turns[0], ["it says 12"])
    assert same is not None
    assert same[0] == same[1]
    other = read_texts(stripping, turns[0], ["it says 13"])
    assert other is not None
    assert "12" in other[0]
    assert "why" not in other[0]
    assert other[0] == other[1].replace("13", "12")
    assert only_numbers_differ(*other)


def test_a_summary_is_no_turn_of_calls(chat: ChatFormat) -> None:
    ids = chat.open(PROMPT) + chat.tokenizer.encode("a summary")
    start = len(chat.open(PROMPT))
    spans = (Span(SpanKind.PROMPT, 0, start, 0), Span(SpanKind.AGENT, start, len(ids), 0, Purpose.SUMMARISE))
    logprobs = np.array([np.nan] * start + [-1.0] * (len(ids) - start), np.float32)
    versions = np.array([-1] * start + [0] * (len(ids) - start), np.int32)
    segment = Segment(np.asarray(ids, np.int32), spans, logprobs, versions)
    (turn,) = recorded_turns(trajectory([segment], [FinishReason.STOP]), window=10_000)
    assert turn.purpose is Purpose.SUMMARISE


def test_only_numbers_differ() -> None:
    assert only_numbers_differ("2 passed in 0.13s at 0x7f2a", "2 passed in 1.2s at 0x11")
    assert not only_numbers_differ("2 passed", "2 failed")


def test_a_call_in_one_line() -> None:
    assert call_line(ToolCall(name="bash", arguments={"command": "ls\n  -la"})) == "bash ls -la"
    assert call_line(ToolCall(name="submit", arguments={})) == "submit"
    assert len(call_line(ToolCall(name="create", arguments={"file_text": "x" * 500}))) <= 72
    assert call_line(MalformedCall("Error: no call.")) == "(malformed) Error: no call."


# --- naming -------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, chat: ChatFormat) -> Path:
    folder = tmp_path / "runs" / "mine"
    (folder / "trajectories").mkdir(parents=True)
    (folder / "config.toml").write_text(dump_toml(RunConfig()))
    for step, names in ((1, ["train-000001-0", "train-000001-1"]), (2, ["train-000010-0"])):
        items = []
        for name in names:
            found = recorded(chat, [f"say {name}"], [], FinishReason.STOP)
            items.append((trajectory(found.segments, [FinishReason.STOP], name=name), None))
        write_rows(folder / "trajectories" / f"step_{step:06d}-train.parquet", items, run="mine")
    return folder


def test_a_trajectory_by_its_id_or_the_beginning_of_it(run: Path, chat: ChatFormat) -> None:
    for wanted, name in (("train-000001-1", "train-000001-1"), ("train-00001", "train-000010-0")):
        folder, found = find_trajectory(f"{run}/{wanted}")
        assert (folder, found.trajectory_id) == (run, name)
        assert name in chat.decode(found.segments[0].token_ids.tolist())


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("{run}/train-00000", UsageError, ["2 trajectories begin", "train-000001-0, train-000001-1"]),
        ("{run}/train-000001-7", UsageError, ["no trajectory 'train-000001-7'", "did you mean train-000001-"]),
        ("{run}", UsageError, ["is a run with 3 trajectories", "train-000001-0"]),
        ("{run}/x", UsageError, ["no trajectory 'x'", "there are: train-000001-0"]),
        ("train-000001-0", UsageError, ["names no trajectory", "RUN/TRAJECTORY"]),
        ("/nowhere/train-000001-0", RunFolderError, ["no run folder"]),
    ],
)
def test_names_that_mean_nothing(run: Path, name: str, error: type[Exception], says: list[str]) -> None:
    with pytest.raises(error) as caught:
        find_trajectory(name.format(run=run))
    for part in says:
        assert part in str(caught.value)


def test_a_broken_trajectory_file_is_named_where_it_matters(run: Path) -> None:
    """K48: one damaged file does not take the others' trajectories away."""
    (run / "trajectories" / "step_000003-train.parquet").write_bytes(b"PAR1 and no more")
    assert find_trajectory(f"{run}/train-000001-0")[1].trajectory_id == "train-000001-0"
    with pytest.raises(DatasetError) as caught:
        find_trajectory(f"{run}/train-000003-0")
    assert "step_000003" in caught.value.where

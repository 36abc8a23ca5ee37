"""`agentrl sandbox replay`: a recorded trajectory's tool calls once more, in a fresh sandbox.

The calls are read from the agent's own tokens, go through the agent's own tool runner, and what comes back is compared
with what the agent read then.
"""

from __future__ import annotations

import difflib
from collections import Counter
from dataclasses import replace

from agentrl.agent import ToolRunner, tool_schemas
from agentrl.chat import NO_CALL, ChatFormat, MalformedCall, parse_calls
from agentrl.config import RunConfig
from agentrl.errors import UsageError
from agentrl.run.debug import Choice, find_task, no_verdict_by_accident, resolve
from agentrl.run.debug_bench import Bench, open_bench
from agentrl.run.debug_shell import COMMAND_TIMEOUT_S, Shell
from agentrl.run.debug_text import note, printable
from agentrl.run.environments import load_environment
from agentrl.run.folder import CONFIG
from agentrl.run.replay_record import (
    RecordedTurn,
    call_line,
    find_trajectory,
    only_numbers_differ,
    read_texts,
    recorded_turns,
)
from agentrl.trajectory import OutcomeKind, Purpose, Trajectory
from agentrl.wire import Environment

_READS = ("environment", "sandbox", "agent.tools")
_DIFF_LINES = 40
_DIFF_WIDTH = 200

SAME, NUMBERS, DIFFERS, UNRECORDED, NOT_RUN = "same", "numbers differ", "differs", "not recorded", "not run"


def replay_command(choice: Choice, name: str, *, to: int | None, shell: bool) -> int:
    """Replay RUN/TRAJECTORY up to turn `to`: 0 where all is as recorded, 1 where it is not.

    With `shell` a shell follows in the same sandbox, whose last exit code it is then.
    Raises UsageError of every kind, InfrastructureError.
    """
    run, trajectory = find_trajectory(name)
    config = resolve(replace(choice, file=run / CONFIG), reads=_READS)
    tools = config.agent.tools
    chat = ChatFormat.load(run / "tokenizer", call_format=tools.call_format, template=tools.chat_template)
    turns = recorded_turns(trajectory, window=min(config.agent.max_tokens, config.policy.max_model_len))
    _check(trajectory, turns, to)
    environment = load_environment(config.environment, recipes=config.sandbox.recipes)
    task = find_task(environment, trajectory.task_id)
    with no_verdict_by_accident(), open_bench(config, environment, task, note=note, spare=int(shell)) as bench:
        _head(trajectory, environment, chat, config, bench)
        replayed = Replay(bench, chat, config)
        for turn in turns:
            if to is None or turn.turn <= to:
                replayed.turn(turn)
        if to is None:
            replayed.patch(trajectory)
        code = replayed.summary(trajectory)
        return Shell(bench, timeout_s=COMMAND_TIMEOUT_S).loop() if shell else code


def _check(trajectory: Trajectory, turns: list[RecordedTurn], to: int | None) -> None:
    """Raise UsageError for a trajectory with nothing to replay, or a turn that it lacks."""
    where = f"trajectory {trajectory.trajectory_id}"
    if not turns:
        cause = trajectory.outcome.cause or "no token was sampled"
        raise UsageError(f"there is nothing to replay: {cause}", where=where, remedy="name another trajectory")
    last = turns[-1].turn
    if to is not None and to > last:
        raise UsageError(f"there is no turn {to}", where=where, remedy=f"its turns are 0 to {last}")


def _head(trajectory: Trajectory, environment: Environment, chat: ChatFormat, config: RunConfig, bench: Bench) -> None:
    reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
    print(
        f"trajectory {trajectory.trajectory_id}: task {trajectory.task_id}, {trajectory.outcome.kind.value}, "
        f"reward {reward}, {len(trajectory.segments)} segment(s); replayed in {bench.sandbox.id}"
    )
    schemas = (
        tool_schemas(environment.tool_names(bench.task)) if config.agent.tools.described_by == "template" else None
    )
    first = trajectory.segments[0]
    if chat.open(environment.prompt(bench.task), schemas) != first.token_ids[: first.spans[0].stop].tolist():
        note("the task's prompt is not the recorded one: the data set, its options or the template have changed")


class Replay:
    """Carries out turn after turn, prints each, and counts."""

    def __init__(self, bench: Bench, chat: ChatFormat, config: RunConfig) -> None:
        self._bench, self._chat, self._config = bench, chat, config
        names = bench.environment.tool_names(bench.task)
        self._runner = ToolRunner(names=names, sandbox=bench.sandbox, config=config.agent.tools)
        self._counts: Counter[str] = Counter()
        self._submitted = False
        self._patch = ""

    def turn(self, turn: RecordedTurn) -> None:
        """Carry out one turn's calls and compare. Raises SandboxError where the sandbox failed."""
        if turn.purpose is Purpose.SUMMARISE:
            print(f"turn {turn.turn}: a summary of the context, no calls")
            return
        text = self._chat.agent_text(turn.ids)
        calls = parse_calls(text, self._chat.call_format, self._runner.parameter_schemas, cut=turn.cut)
        shown = printable("; ".join(call_line(call) for call in calls)) or "(no call)"
        calls = calls or [MalformedCall(NO_CALL)]
        if not turn.ran:
            self._tell(turn, NOT_RUN, f"{shown} (the episode ended while it was sampled)")
            return
        results: list[str] = []
        for call in calls:
            result = self._bench.call(self._runner.execute(call, time_left_s=self._config.agent.episode_timeout_s))
            if result.submitted:
                self._submitted = True
                break
            results.append(result.text)
        self._compare(turn, shown, results)

    def _compare(self, turn: RecordedTurn, shown: str, results: list[str]) -> None:
        texts = read_texts(self._chat, turn, results)
        if texts is None:
            self._tell(turn, UNRECORDED, f"{shown} (the episode ended here)")
        elif texts[0] == texts[1]:
            self._tell(turn, SAME, shown)
        else:
            self._tell(turn, NUMBERS if only_numbers_differ(*texts) else DIFFERS, shown)
            _show_diff(*texts)

    def _tell(self, turn: RecordedTurn, verdict: str, shown: str) -> None:
        self._counts[verdict] += 1
        print(f"turn {turn.turn:<3} {verdict:14} {shown}", flush=True)

    def patch(self, trajectory: Trajectory) -> None:
        """Compare the change that the work tree holds now with the recorded one, where one was collected."""
        environment = self._bench.environment
        collected = self._submitted or environment.grade_unsubmitted
        if not collected or trajectory.outcome.kind is OutcomeKind.INFRASTRUCTURE:
            return
        now = self._bench.call(environment.collect(self._bench.task, self._bench.sandbox))
        self._patch = SAME if now == trajectory.patch else DIFFERS
        print(f"change   {self._patch}")
        if now != trajectory.patch:
            _show_diff(trajectory.patch, now)

    def summary(self, trajectory: Trajectory) -> int:
        """The last line; the exit code."""
        counted = ", ".join(f"{count} {verdict}" for verdict, count in self._counts.items())
        change = f"; the change is {'the same' if self._patch == SAME else 'another'}" if self._patch else ""
        print(f"{trajectory.trajectory_id}: {counted or 'no calls'}{change}", flush=True)
        return int(bool(self._counts[DIFFERS] + self._counts[NUMBERS]) or self._patch == DIFFERS)


def _show_diff(before: str, after: str) -> None:
    """A short unified diff, recorded against replayed."""
    lines = list(
        difflib.unified_diff(before.splitlines(), after.splitlines(), "recorded", "replayed", lineterm="", n=1)
    )
    for line in lines[:_DIFF_LINES]:
        print(f"      {printable(line[:_DIFF_WIDTH])}")
    if len(lines) > _DIFF_LINES:
        print(f"      … {len(lines) - _DIFF_LINES} more lines")

"""A scripted expert for generated tasks: only its actions are scripted, every observation is the sandbox's
own.

It looks for what is broken, views its file, edits, runs the tests, and submits. Profiles mix in what
real policies do badly (submitting without a fix, a wrong edit that nobody tests), because a start that fails
by shared bad choices is one that reinforcement learning can improve.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, field

import msgspec

from agentrl.errors import ConfigError
from agentrl.wire import Task, ToolCall
from agentrl_envs.swe_gym.generated.problem import GeneratedTask

TEST_COMMAND = "python -m pytest"


@dataclass(frozen=True, slots=True)
class Profile:
    """Chances: the right edit, testing after an edit, submitting with no edit at all, another try after a
    failure."""

    right: float
    test: float
    no_fix: float = 0.0
    retry: float = 1.0


PROFILES = {
    "perfect": Profile(right=1.0, test=1.0),
    "thorough": Profile(right=0.95, test=1.0),
    "careful": Profile(right=0.92, test=0.9),
    "sloppy": Profile(right=0.35, test=0.6, no_fix=0.1, retry=0.5),
    "submit_without_fix": Profile(right=1.0, test=1.0, no_fix=1.0),
    "wrong_edit_untested": Profile(right=0.0, test=0.0),
}
# What the shipped policy's warm start is made of: (profile, share).
WARM_START = (("submit_without_fix", 0.25), ("wrong_edit_untested", 0.35), ("careful", 0.4))
_TRIES = 2


@dataclass(slots=True)
class _Editor:
    """The expert's own picture of the file: its text, and the lines around the fault as they stand."""

    task: GeneratedTask
    text: str = field(init=False)
    lines: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.text = self.task.files[self.task.file]
        self.lines = list(self.task.bad)

    def wrong_lines(self) -> list[int]:
        return [at for at, (now, good) in enumerate(zip(self.lines, self.task.good, strict=True)) if now != good]

    def replace(self, at: int, line: str) -> ToolCall:
        """The call that puts `line` in place of line `at`: the shortest run of lines that occurs once in the
        file."""
        start = at
        while True:
            old = "\n".join(self.lines[start : at + 1]).lstrip()
            if self.text.count(old) == 1 or start == 0:
                break
            start -= 1
        new = "\n".join([*self.lines[start:at], line]).lstrip()
        self.text = self.text.replace(old, new, 1)
        self.lines[at] = line
        return ToolCall(name="str_replace", arguments={"path": self.task.file, "old_str": old, "new_str": new})


class GeneratedExpert:
    """Satisfies `agentrl.wire.Expert`. Profiles: those of `PROFILES`, and `warm_start`, which draws one of
    its mix."""

    profiles = (*PROFILES, "warm_start")

    def turns(self, task: Task, *, rng: random.Random, profile: str) -> Generator[ToolCall, str, None]:
        """Yields one call a turn and is sent its observation; ends after `submit`. `ConfigError` on another
        profile."""
        if profile not in self.profiles:
            raise ConfigError(
                f"the expert has no profile {profile!r}",
                where="profile",
                remedy=f"one of {', '.join(self.profiles)}",
            )
        if profile == "warm_start":
            profile = rng.choices([name for name, _ in WARM_START], [share for _, share in WARM_START])[0]
        return _turns(msgspec.convert(task.data, GeneratedTask), rng, PROFILES[profile])


def _turns(task: GeneratedTask, rng: random.Random, profile: Profile) -> Generator[ToolCall, str, None]:
    yield _bash(f'grep -rn "{task.search}" .')
    yield ToolCall(name="view", arguments={"path": task.file})
    if rng.random() >= profile.no_fix:
        editor = _Editor(task)
        for _ in range(_TRIES):
            right = rng.random() < profile.right
            for at, line in _right_edits(editor) if right else _wrong_edit(editor, rng):
                yield editor.replace(at, line)
            if rng.random() >= profile.test:
                break
            observation = yield _bash(TEST_COMMAND)
            if not _failed(observation) or rng.random() >= profile.retry:
                break
    yield ToolCall(name="submit", arguments={})


def _bash(command: str) -> ToolCall:
    return ToolCall(name="bash", arguments={"command": command})


def _failed(observation: str) -> bool:
    return "FAILURES" in observation or "ERRORS" in observation


def _right_edits(editor: _Editor) -> list[tuple[int, str]]:
    return [(at, editor.task.good[at]) for at in editor.wrong_lines()]


def _wrong_edit(editor: _Editor, rng: random.Random) -> list[tuple[int, str]]:
    """A plausible mutation that is not there yet and does not mend it."""
    return [rng.choice([(at, line) for at, line in editor.task.mutations if editor.lines[at] != line])]

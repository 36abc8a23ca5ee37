"""`agentrl sandbox verify`: verdicts from grades, the verdicts' file, exit codes (K46)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import (
    AgentRLError,
    DaemonUnreachableError,
    DatasetError,
    GradingTimeoutError,
    ImageMissingError,
    InfrastructureError,
    SandboxDeadError,
    UsageError,
)
from agentrl.rollout.driver import Limits
from agentrl.run import verify
from agentrl.run import verify_task as verify_task_module
from agentrl.run.debug import Choice
from agentrl.run.grading import Grader, retried
from agentrl.run.verify import Ledger, verify_command
from agentrl.run.verify_task import TaskVerdict, Verdict, _why, verify_task
from agentrl.trajectory import Split
from agentrl.wire import ChatMessage, Grade, Task

LIMITS = Limits(lease_s=5, episode_s=5, grade_s=1, rollout_s=20, retries=2)
FAILS = {"t::a": "failed", "t::b": "passed"}
PASSES = {"t::a": "passed", "t::b": "passed"}
BREAKS_B = {"t::a": "failed", "t::b": "failed"}


def grade(tests: dict[str, str]) -> Grade:
    resolved = set(tests.values()) <= {"passed"}
    return Grade(reward=float(resolved), resolved=resolved, tests=tests, log="graded")


@dataclass
class ScriptedEnvironment:
    """Grades by a script per task and kind of patch; an exception in it is raised."""

    scripts: dict[str, dict[str, list[Any]]]
    name: str = "scripted"
    grade_unsubmitted: bool = True
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    def tasks(self, split: Split, *, start: int, count: int, seed: int = 0) -> list[Task]:
        names = list(self.scripts) if split is Split.TRAIN else []
        return [Task(id=name, environment=self.name, split=split, data={}) for name in names[start : start + count]]

    def tool_names(self, task: Task) -> tuple[str, ...]:
        return ("submit",)

    def prompt(self, task: Task) -> list[ChatMessage]:
        return [ChatMessage(role="user", content=task.id)]

    def image(self, task: Task) -> str:
        return "toy/image"

    async def prepare(self, task: Task, sandbox: Any) -> None:
        return None

    async def collect(self, task: Task, sandbox: Any) -> str:
        return ""

    def reference_patch(self, task: Task) -> str:
        return "the fix"

    async def grade(self, task: Task, sandbox: Any, patch: str) -> Grade:
        kind = "fix" if patch else "none"
        self.asked.append((task.id, kind, sandbox.id))
        found = self.scripts[task.id][kind].pop(0)
        if found == "hang":
            await asyncio.sleep(60)
        if isinstance(found, BaseException):
            raise found
        return grade(found)


class CountingPool:
    """Every lease is another sandbox."""

    def __init__(self) -> None:
        self.leases = 0

    @asynccontextmanager
    async def lease(
        self, image: str, *, timeout_s: float, label: str = "", grading: bool = False
    ) -> AsyncIterator[Any]:
        self.leases += 1

        class Box:
            id = f"box {self.leases}"

        yield Box()

    async def close(self) -> None:
        return None


def judged(none: list[Any], fix: list[Any], *, runs: int = 2) -> tuple[TaskVerdict, ScriptedEnvironment]:
    environment = ScriptedEnvironment({"one": {"none": none, "fix": fix}})
    grader = Grader(environment, CountingPool(), LIMITS, lambda _: None)
    task = environment.tasks(Split.TRAIN, start=0, count=1)[0]
    return asyncio.run(verify_task(grader, task, runs=runs)), environment


def test_k46_a_test_that_fails_now_and_then_is_found_in_the_further_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = judged([FAILS], [PASSES, PASSES, PASSES, BREAKS_B], runs=6)
    assert (found.verdict, found.differ) == (Verdict.FLAKY, ["t::a", "t::b"])
    found, _ = judged([FAILS], [PASSES] * 6, runs=6)
    assert (found.verdict, found.grades) == (Verdict.VALID, 7)
    monkeypatch.setattr(verify_task_module, "_PATIENCE_S", 0.0)
    found, _ = judged([FAILS], [PASSES, PASSES, BREAKS_B], runs=6)
    assert (found.verdict, found.grades) == (Verdict.VALID, 3)


@pytest.mark.parametrize(
    ("none", "fix", "verdict", "differ", "says"),
    [
        ([FAILS], [PASSES, PASSES], Verdict.VALID, [], ""),
        ([PASSES, PASSES], [], Verdict.PASSES_UNCHANGED, [], "before the fix"),
        ([PASSES, FAILS], [], Verdict.FLAKY, ["t::a"], "no change: t::a"),
        ([FAILS], [FAILS, FAILS], Verdict.REFERENCE_FAILS, [], "t::a failed"),
        ([FAILS], [PASSES, FAILS], Verdict.FLAKY, ["t::a"], "reference: t::a"),
        ([FAILS], [FAILS, BREAKS_B], Verdict.FLAKY, ["t::b"], "reference: t::b"),
        ([FAILS], [{"t::a": "passed"}, PASSES], Verdict.FLAKY, ["t::b"], "t::b"),
        ([FAILS], [GradingTimeoutError("did not end")], Verdict.TIMEOUT, [], "reference: did not end"),
        ([GradingTimeoutError("did not end")], [], Verdict.TIMEOUT, [], "no change: did not end"),
        ([ImageMissingError("no image x", where="daemon")], [], Verdict.ERROR, [], "no image x (daemon)"),
        ([DatasetError("the test patch does not apply")], [], Verdict.ERROR, [], "DatasetError: the test patch"),
        ([SandboxDeadError("gone")] * 3, [], Verdict.ERROR, [], "SandboxDeadError: gone"),
        ([SandboxDeadError("gone")] * 2 + [FAILS], [PASSES, PASSES], Verdict.VALID, [], ""),
    ],
)
def test_a_verdict_from_grades(none: list[Any], fix: list[Any], verdict: Verdict, differ: list[str], says: str) -> None:
    """K46: passes unchanged, reference fails, flaky, error and timeout are told apart; machines are tried again."""
    none, fix = list(none), list(fix)
    found, environment = judged(none, fix)
    assert (found.verdict, found.differ) == (verdict, differ)
    assert says in found.reason
    assert none == fix == [], "everything scripted was asked for, and no more"
    assert len({box for _, _, box in environment.asked}) == len(environment.asked), "each grade has its own sandbox"


def test_why_a_reference_fails_where_no_test_does() -> None:
    log = "patch applied by: apply\nrejected: the session fakes results\noutput: 3 passed"
    assert _why(Grade(reward=0, resolved=False, tests=PASSES, log=log)) == "rejected: the session fakes results"
    assert _why(Grade(reward=0, resolved=False, log="no idea\nat all")) == "no idea; at all"
    assert _why(Grade(reward=0, resolved=False, tests=FAILS, log=log)).endswith("results; t::a failed")


def test_a_grading_that_hangs_is_a_timeout_after_one_limit() -> None:
    found, environment = judged([FAILS], ["hang"])
    assert found.verdict is Verdict.TIMEOUT
    assert found.seconds < 5
    assert [kind for _, kind, _ in environment.asked] == ["none", "fix"]


def test_a_daemon_that_is_away_is_no_verdict() -> None:
    with pytest.raises(DaemonUnreachableError):
        judged([DaemonUnreachableError("away")] * 3, [])


def test_retries_stop_at_the_budget_and_at_what_is_final() -> None:
    """K42: machines are tried again within the budget, a row's fault is not."""
    for error, final, tries in (
        (SandboxDeadError("x"), (), 3),
        (SandboxDeadError("x"), (SandboxDeadError,), 1),
        (ImageMissingError("x"), (), 1),
        (ValueError("x"), (), 1),
    ):
        seen: list[str] = []

        async def attempt(error: Exception = error, seen: list[str] = seen) -> None:
            seen.append("")
            raise error

        notes: list[str] = []
        with pytest.raises(type(error)):
            asyncio.run(retried(attempt, retries=2, note=notes.append, final=final))
        assert (len(seen), len(notes)) == (tries, tries - 1)


# --- the file -----------------------------------------------------------------------------------------------------


def line(task: str, verdict: Verdict = Verdict.VALID) -> bytes:
    return json.dumps({"task": task, "verdict": verdict.value, "seconds": 1.5}).encode() + b"\n"


def test_a_torn_last_line_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(line("one") + line("two", Verdict.FLAKY) + b'{"task":"thr')
    with Ledger(path, resume=True) as ledger:
        assert {name: each.verdict for name, each in ledger.known.items()} == {"one": "valid", "two": "flaky"}
        ledger.add(TaskVerdict(task="three", verdict=Verdict.VALID))
    assert [json.loads(text)["task"] for text in path.read_text().splitlines()] == ["one", "two", "three"]


def test_a_used_file_is_refused_and_a_strange_one_named(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(line("one"))
    with pytest.raises(UsageError, match="is used"):
        Ledger(path, resume=False)
    path.write_bytes(line("one") + b"no verdict\n" + line("two"))
    with pytest.raises(DatasetError) as caught:
        Ledger(path, resume=True)
    assert "line 2" in str(caught.value)
    with pytest.raises(UsageError, match="cannot be written"):
        Ledger(tmp_path, resume=True)


def test_two_verifications_of_one_file(tmp_path: Path) -> None:
    with Ledger(tmp_path / "out.jsonl", resume=False), pytest.raises(UsageError, match="another verification"):
        Ledger(tmp_path / "out.jsonl", resume=True)


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command on a scripted environment."""

    def run(scripts: dict[str, dict[str, list[Any]]], **options: Any) -> tuple[int, ScriptedEnvironment]:
        environment = ScriptedEnvironment(scripts)

        @asynccontextmanager
        async def pool(config: Any, *, size: int, image: str | None = None) -> AsyncIterator[CountingPool]:
            assert size <= 2
            yield CountingPool()

        monkeypatch.setattr(verify, "load_environment", lambda config, *, recipes: environment)
        monkeypatch.setattr(verify, "debug_pool", pool)
        settings = {"jobs": 2, "tasks": None, "runs": 2, "resume": False, **options}
        return verify_command(Choice(), **settings), environment

    return run


def good() -> dict[str, list[Any]]:
    return {"none": [FAILS], "fix": [PASSES, PASSES]}


def test_all_valid_is_0_and_one_bad_is_1(scripted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = scripted({"a": good(), "b": good()}, out=tmp_path / "ok.jsonl")
    assert code == 0
    bad = {"none": [PASSES, PASSES], "fix": []}
    code, _ = scripted({"a": good(), "b": bad, "c": good()}, out=tmp_path / "bad.jsonl")
    assert code == 1
    shown = capsys.readouterr().out
    assert "passes unchanged: b: every named test passes" in shown
    lines = [json.loads(text) for text in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert {each["task"]: each["verdict"] for each in lines} == {"a": "valid", "b": "passes unchanged", "c": "valid"}


def test_resume_skips_what_has_a_line_and_counts_it(scripted: Any, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(line("a", Verdict.FLAKY) + line("elsewhere") + b'{"torn')
    code, environment = scripted({"a": good(), "b": good()}, out=path, resume=True)
    assert code == 1, "the flaky one of the first sitting counts"
    assert {name for name, _, _ in environment.asked} == {"b"}
    assert [json.loads(text)["task"] for text in path.read_text().splitlines()] == ["a", "elsewhere", "b"]


def test_the_first_tasks_only(scripted: Any, tmp_path: Path) -> None:
    code, environment = scripted({"a": good(), "b": good()}, out=tmp_path / "out.jsonl", tasks=1)
    assert (code, {name for name, _, _ in environment.asked}) == (0, {"a"})


def test_no_task_is_a_usage_error(scripted: Any, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no task"):
        scripted({}, out=tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_what_is_written_stays_when_the_machine_fails(scripted: Any, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    away = {"none": [DaemonUnreachableError("away")] * 3, "fix": []}
    with pytest.raises(InfrastructureError) as caught:
        scripted({"a": good(), "b": away}, out=path, jobs=1)
    assert caught.value.exit_code == 3
    assert [json.loads(text)["task"] for text in path.read_text().splitlines()] == ["a"]


def test_a_fault_of_the_program_is_no_verdict(scripted: Any, tmp_path: Path) -> None:
    """Exit code 1 says that a task is bad: a crash of ours must not say it."""
    with pytest.raises(AgentRLError) as caught:
        scripted({"a": {"none": [ZeroDivisionError("x")], "fix": []}}, out=tmp_path / "out.jsonl")
    assert caught.value.exit_code == 3
    assert "a fault of the program" in caught.value.what

"""How a run's teachers are asked: what is configured reaches them, and every task finds one before anything starts."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from teacher_toys import segment
from toy_parts import ToyEnvironment, ToyTeacher

from agentrl.config import RunConfig
from agentrl.errors import DeadlineError, NoTeacherError, UnknownEnvironmentError
from agentrl.run import teachers
from agentrl.run.placement import Placement
from agentrl.run.routing import check_teachers
from agentrl.run.teachers import StudentScores, TeacherParts, make_scorer
from agentrl.trajectory import Split
from agentrl.wire import ScoreRequest, Task, TokenScores

LOCAL = {"model": "t", "kind": "transformers"}


def config(*, divergence: str = "sampled", **distill: Any) -> RunConfig:
    settings = {"teachers": [LOCAL], **distill}
    return RunConfig.model_validate(
        {"distill": settings, "train": {"divergence": {"name": divergence}}, "policy": {"max_model_len": 4096}}
    )


class Student(StudentScores):
    """Its most likely tokens at position t are 10 t and 10 t + 1. Row t of an answer speaks of token t + 1."""

    async def __call__(self, token_ids: Any, *, top_k: int, timeout_s: float) -> TokenScores:
        at = np.arange(1, len(token_ids), dtype=np.int32)
        values = np.zeros(len(at), np.float32)
        ids = np.stack([10 * at + number for number in range(top_k)], axis=1)
        return TokenScores(logprobs=values, top1=values > 0, top_ids=ids, top_logprobs=np.zeros(ids.shape, np.float32))


def asked(of: RunConfig) -> ScoreRequest:
    """What the teacher is asked about a segment."""
    requests: list[ScoreRequest] = []

    async def keep(request: ScoreRequest) -> None:
        requests.append(request)

    async def run() -> None:
        scorer = make_scorer(of, {"toy": ToyTeacher(before=keep)}, None, Student())  # type: ignore[arg-type]
        task = Task(id="t", environment="toy", split=Split.TRAIN, data={})
        await scorer.begin(segment(), task=task, trajectory_id="r", index=0)

    asyncio.run(run())
    return requests[0]


def test_the_students_candidates_are_those_of_each_scored_token() -> None:
    request = asked(config(divergence="reverse_kl", support="student", top_k=2))
    assert request.candidates is not None
    scored = np.flatnonzero(segment().agent_mask)
    assert request.candidates.tolist() == [[10 * at, 10 * at + 1] for at in scored]


@pytest.mark.parametrize("support", ["teacher", "full"])
def test_otherwise_the_teacher_chooses(support: str) -> None:
    assert asked(config(divergence="reverse_kl", support=support)).candidates is None


def test_format_tokens_are_left_out_if_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = segment().agent_mask
    first = np.arange(len(whole)) == np.flatnonzero(whole)[0]
    monkeypatch.setattr("agentrl.run.teachers.format_mask", lambda chat, of: first)
    assert asked(config(mask_format=True)).mask.tolist() == (whole & ~first).tolist()
    assert asked(config()).mask.tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("distill", "after"),
    [
        ({"teachers": [{"model": "self"}], "privileged": "tests"}, True),
        ({"teachers": [{"model": "self"}]}, False),
        ({}, False),
    ],
)
def test_only_who_reads_what_tests_printed_waits_for_grading(distill: dict[str, Any], after: bool) -> None:
    scorer = make_scorer(config(**distill), {}, None, Student())  # type: ignore[arg-type]
    assert scorer.after_grading is after


@pytest.mark.parametrize(
    ("divergence", "distill", "top_k", "any_token"),
    [
        ("sampled", {}, 0, False),
        ("jsd", {"top_k": 5}, 5, False),
        ("forward_kl", {"support": "student", "top_k": 5}, 0, True),
        ("reverse_kl", {"support": "full"}, None, True),
    ],
)
def test_what_a_teacher_is_made_for(
    divergence: str, distill: dict[str, Any], top_k: int | None, any_token: bool, tmp_path: Path
) -> None:
    of = config(divergence=divergence, **distill)
    parts = TeacherParts(
        stack=AsyncExitStack(),
        config=of,
        folder=SimpleNamespace(logs=tmp_path, path=tmp_path),  # type: ignore[arg-type]
        environment=ToyEnvironment(),
        chat=None,  # type: ignore[arg-type]
        student=tmp_path,
        placement=Placement((None,), (None,), 2, colocated=True, teachers=(None,)),
        score_student=Student(),
    )
    spec = parts._spec(of.distill.teachers[0])
    assert (spec.top_k, spec.any_token) == (top_k, any_token)


def test_a_probe_has_the_time_that_a_segment_has_and_always_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two minutes, or more where `distill.timeout_s` is; a kind that keeps no time limit holds nothing up."""
    monkeypatch.setattr(teachers, "_conversation", lambda *_: [1, 2, 3])
    given: list[float] = []

    class Patient(ToyTeacher):
        async def probe(self, token_ids: Any, *, timeout_s: float) -> list[str]:
            given.append(timeout_s)
            await asyncio.sleep(0 if timeout_s > 1 else 60)
            return ["fit"]

    def probe(timeout_s: float) -> list[str]:
        notes: list[str] = []
        asyncio.run(
            teachers.probe_teachers(
                {"toy": Patient()},
                None,  # type: ignore[arg-type]
                ToyEnvironment(),
                notes.append,
                timeout_s=timeout_s,
            )
        )
        return notes

    assert probe(7) == probe(500) == ["teacher toy: fit"]
    assert given == [120, 500]
    monkeypatch.setattr(teachers, "_PROBE_TIMEOUT_S", 0.05)
    with pytest.raises(DeadlineError, match=r"teacher toy was to be probed within 0\.05 s"):
        probe(0.05)


# --- every task finds its teacher -------------------------------------------------------------------------------


class Families(ToyEnvironment):
    """Tasks of two kinds in turn."""

    def tasks(self, split: Split, *, start: int, count: int, seed: int = 0) -> list[Task]:
        families = [("even", "odd")[index % 2] for index in range(start, start + count)]
        found = super().tasks(split, start=start, count=count, seed=seed)
        return [
            Task(id=task.id, environment=task.environment, split=split, data={"family": family})
            for task, family in zip(found, families, strict=True)
        ]


def routed(route: str, *names: str) -> RunConfig:
    return config(teachers=[{**LOCAL, "name": name} for name in names], route=route)


def test_every_task_of_a_first_step_has_its_teacher() -> None:
    assert check_teachers(config(), Families()) == []
    assert check_teachers(routed("family", "even", "odd"), Families()) == []
    (line,) = check_teachers(routed("environment", "toy", "other"), Families())
    assert line == f"teacher other serves none of the first {RunConfig().rollout.groups} tasks"


@pytest.mark.parametrize(("route", "value"), [("family", "odd"), ("environment", "toy"), ("nothing", "None")])
def test_a_task_without_a_teacher_is_named(route: str, value: str) -> None:
    with pytest.raises(NoTeacherError, match=f"no teacher is named '{value}', which task train-task-.* has as {route}"):
        check_teachers(routed(route, "even", "b"), Families())


def test_a_kind_that_is_not_installed() -> None:
    with pytest.raises(UnknownEnvironmentError, match="no kind of teacher 'oracle' is installed"):
        check_teachers(config(teachers=[{"model": "t", "kind": "oracle"}]), Families())

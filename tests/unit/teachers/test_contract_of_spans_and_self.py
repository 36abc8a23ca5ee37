"""The contract of teachers, on the one that reads other tokens and the one that is the student."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import byte_vocabularies
import pytest
import teacher_contract as contract
from teacher_toys import ANSWER, TINY, ToyModel, request, segment, teacher_spec
from toy_parts import ToyEnvironment

from agentrl.chat import ChatFormat
from agentrl.wire import ScoreRequest, Task, Teacher, TokenScores
from agentrl_teachers.byte_teacher import ByteTeacher
from agentrl_teachers.own import SelfTeacher

CHAT = ChatFormat.load(TINY)
TOP_K = 4


class Environment(ToyEnvironment):
    def hint(self, task: Task) -> str:
        return "Return the sum as it is."


async def by_the_student(token_ids: object, *, top_k: int, timeout_s: float) -> TokenScores:
    return ToyModel().scores(token_ids, top_k=top_k)  # type: ignore[arg-type]


def case(prompt: str, **how: object) -> contract.Case:
    numbers = itertools.count()

    def new() -> ScoreRequest:
        number = next(numbers)
        return replace(request(segment(f"{number}. {ANSWER}", ANSWER, prompt=prompt)), trajectory_id=f"r{number}")

    def too_long() -> ScoreRequest:
        return replace(request(segment(*[ANSWER] * 20, prompt=prompt)), trajectory_id="long")

    return contract.Case(request=new, too_long=too_long, **how)  # type: ignore[arg-type]


def spans(folder: Path) -> tuple[Teacher, contract.Case]:
    vocabulary = byte_vocabularies.GreedyVocabulary([b"I look", b" at it", b"cat ", b"para", b"meter", b"total"])
    source = byte_vocabularies.RuledSource(vocabulary, max_model_len=1200)
    spec = teacher_spec(folder, top_k=0, cache=folder / "cache", align_bytes=True)
    return ByteTeacher(source, spec, identity="ruled"), case("<|im_start|>user\nGo.", same_tokens=False)


def own(folder: Path) -> tuple[Teacher, contract.Case]:
    spec = teacher_spec(
        folder,
        environment=Environment(),
        score_student=by_the_student,
        open_chat=lambda task, messages: CHAT.open(messages),
        top_k=TOP_K,
    )
    prompt = CHAT.render(Environment().prompt(request().task), add_generation_prompt=True)
    return SelfTeacher(spec), case(prompt, candidates=TOP_K)


@pytest.mark.parametrize("made", [spans, own], ids=["spans", "self"])
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: contract.Check, made: Callable[[Path], tuple[Teacher, contract.Case]], tmp_path: Path) -> None:
    async def run() -> None:
        await check(*made(tmp_path))

    asyncio.run(run())

"""The contract of teachers, on `TokenTeacher`: over a source in this process, and over a server's HTTP interface."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import teacher_contract as contract
import teacher_stand_in
from teacher_toys import ANSWER, ToySource, request, segment, teacher_spec

from agentrl.wire import Teacher
from agentrl_teachers.servers import open_server
from agentrl_teachers.token_teacher import TokenTeacher

TOP_K = 4


def case() -> contract.Case:
    numbers = itertools.count()

    def new() -> contract.ScoreRequest:
        number = next(numbers)
        return replace(request(segment(f"{number}. {ANSWER}", ANSWER)), trajectory_id=f"r{number}")

    def too_long() -> contract.ScoreRequest:
        return replace(request(segment(*[ANSWER] * 20)), trajectory_id="long")

    return contract.Case(request=new, too_long=too_long, candidates=TOP_K)


@asynccontextmanager
async def over_source(folder: Path) -> AsyncIterator[Teacher]:
    yield TokenTeacher(ToySource(), teacher_spec(folder, top_k=TOP_K, cache=folder / "cache"), identity="toy")


@asynccontextmanager
async def over_http(folder: Path) -> AsyncIterator[Teacher]:
    async with (
        teacher_stand_in.serving() as server,
        open_server(teacher_spec(folder, model=server.url, top_k=TOP_K)) as teacher,
    ):
        yield teacher


@pytest.mark.parametrize("opened", [over_source, over_http], ids=["source", "http"])
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: contract.Check, opened: type, tmp_path: Path) -> None:
    async def run() -> None:
        async with opened(tmp_path) as teacher:
            await check(teacher, case())

    asyncio.run(run())

"""The distillation page's teacher is a whole one, and what its tables name is what the code has."""

from __future__ import annotations

import asyncio
import re
import sys
import tomllib
import types
import typing
from pathlib import Path

import numpy as np
import pytest
from teacher_contract import CHECKS, Case
from teacher_toys import ANSWER, request, segment, teacher_spec

from agentrl.config import DistillConfig, DivergenceConfig
from agentrl_teachers import probe

PAGE = Path(__file__).resolve().parents[3] / "docs" / "distillation.md"


@pytest.fixture(scope="module")
def example() -> types.ModuleType:
    (source,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    module = types.ModuleType("docs_distillation")
    sys.modules[module.__name__] = module
    exec(compile(source, PAGE.name, "exec"), module.__dict__)  # noqa: S102 - our own page
    return module


def test_the_examples_teacher_keeps_the_contract(example: types.ModuleType, tmp_path: Path) -> None:
    numbers = iter(range(1000))
    case = Case(
        request=lambda: request(segment(f"{next(numbers)} {ANSWER}", ANSWER)),
        too_long=lambda: request(segment(ANSWER * 200)),
        candidates=4,
    )

    async def whole() -> None:
        for check in CHECKS:
            async with example.open_nearby(teacher_spec(tmp_path)) as teacher:
                await check(teacher, case)

    asyncio.run(whole())


def test_the_examples_scores_are_what_it_says(example: types.ModuleType, tmp_path: Path) -> None:
    asked = request(segment(ANSWER))

    async def whole() -> np.ndarray:
        async with example.open_nearby(teacher_spec(tmp_path)) as teacher:
            return (await teacher.score(asked, timeout_s=5)).logprobs

    found = asyncio.run(whole())
    before, own = asked.segment.token_ids[:-1], asked.segment.token_ids[1:]
    ways = np.exp(-np.abs(np.arange(1024) - before[:, None]) / 100).sum(axis=1)
    expected = -np.abs(own - before) / 100 - np.log(ways)
    np.testing.assert_allclose(found[asked.mask], expected[asked.mask[1:]], rtol=1e-5)
    assert np.isnan(found[~asked.mask]).all()


def table(heading: str) -> list[str]:
    """The first column of a table in a section, without back-ticks; its head left out."""
    text = PAGE.read_text()
    section = text[text.index(f"## {heading}\n") :].split("\n## ")[0]
    return re.findall(r"^\| `(\w+)` ", section, re.M)


def test_tables_name_what_there_is() -> None:
    divergences = typing.get_args(DivergenceConfig.model_fields["name"].annotation)
    assert [name for name in table("What is trained") if name != "train"] == list(divergences)
    with (PAGE.parents[1] / "pyproject.toml").open("rb") as file:
        kinds = tomllib.load(file)["project"]["entry-points"]["agentrl.teachers"]
    assert table("Teachers") == list(kinds)
    named = set(re.findall(r"`distill\.(\w+)", PAGE.read_text()))
    assert len(named) > 8
    assert named <= set(DistillConfig.model_fields)


def test_the_probes_numbers_are_those_of_the_code() -> None:
    text = PAGE.read_text()
    section = text[text.index("## Before a run begins") : text.index("## What is trained")]
    sample = probe._VOCABULARY_SAMPLE
    assert f"one of {2 * sample:,} tokens or more, that of at least {sample:,} evenly chosen ones" in section
    assert f"up to {probe._PROBED} are asked for here all the same" in section
    for dtype, nats in probe.REPEATED.items():
        assert f"{nats:g}".replace("0.0001", "1e-4") in section, dtype

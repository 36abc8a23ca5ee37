"""Scores on disk: the same ones come back, and a damaged file is one that is not there."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from teacher_toys import ANSWER, ToyModel, ToySource, request, segment, teacher_spec

from agentrl.trajectory import TeacherScores
from agentrl.wire import ScoreRequest
from agentrl_teachers.cache import REFERENCE, ScoreCache, key_of
from agentrl_teachers.token_teacher import TokenTeacher


def ask(teacher: TokenTeacher, *requests: ScoreRequest) -> list[TeacherScores]:
    async def run() -> list[TeacherScores]:
        return [await teacher.score(one, timeout_s=10) for one in requests]

    return asyncio.run(run())


def teacher(folder: Path, source: ToySource, *, identity: str = "toy", top_k: int = 4) -> TokenTeacher:
    return TokenTeacher(source, teacher_spec(folder, cache=folder / "cache", top_k=top_k), identity=identity)


def same(first: TeacherScores, second: TeacherScores) -> bool:
    fields = ("logprobs", "top1", "candidate_ids", "candidate_logprobs")
    return all(np.array_equal(getattr(first, f), getattr(second, f), equal_nan=f.endswith("probs")) for f in fields)


def test_a_score_on_disk_is_exactly_the_same_and_asks_nobody(tmp_path: Path) -> None:
    source = ToySource()
    (first,) = ask(teacher(tmp_path, source), request())
    later = teacher(tmp_path, source)
    (second,) = ask(later, request())
    assert same(first, second)
    assert (source.asked, later.cache_hits) == (1, 1)


def test_what_a_score_depends_on_is_in_its_name(tmp_path: Path) -> None:
    """Other tokens, another part of them, other candidates or another teacher: asked anew."""
    source = ToySource()
    asked = request()
    part = asked.mask.copy()
    part[np.flatnonzero(part)[0]] = False
    ask(teacher(tmp_path, source), asked, replace(asked, mask=part), request(segment(ANSWER)))
    ask(teacher(tmp_path, source, top_k=5), asked)
    ask(teacher(tmp_path, source, identity="toy, other weights"), asked)
    assert source.asked == 5
    ask(teacher(tmp_path, source), asked, replace(asked, mask=part), request(segment(ANSWER)))
    assert source.asked == 5


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_file_is_asked_for_again_and_replaced(damage: str, tmp_path: Path) -> None:
    source = ToySource()
    (first,) = ask(teacher(tmp_path, source), request())
    (path,) = (tmp_path / "cache").glob("*/*/*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes({"cut": data[: len(data) // 2], "flipped": data, "empty": b""}[damage])
    (second,) = ask(teacher(tmp_path, source), request())
    assert same(first, second)
    assert source.asked == 2
    ask(teacher(tmp_path, source), request())
    assert source.asked == 2


def test_another_model_under_the_same_name_is_seen_by_the_probe(tmp_path: Path) -> None:
    """A server at an address got another model: what the old one said is forgotten."""
    ids = request().segment.token_ids.tolist()
    old, new = ToySource(), ToySource(ToyModel(1))

    def probed(source: ToySource) -> tuple[TokenTeacher, list[str]]:
        found = teacher(tmp_path, source)
        return found, asyncio.run(found.probe(ids, timeout_s=10))

    (first,) = ask(probed(old)[0], request())
    again, notes = probed(old)
    assert same(first, ask(again, request())[0])
    assert (again.cache_hits, any("another model" in note for note in notes)) == (1, False)
    other, notes = probed(new)
    assert any("another model" in note for note in notes)
    assert not same(first, ask(other, request())[0])
    assert other.cache_hits == 0


@pytest.mark.parametrize("lost", ["damaged", "gone"])
def test_scores_of_nobody_knows_whom_are_forgotten(lost: str, tmp_path: Path) -> None:
    """Without what the teacher said when they were made, it cannot be known that they are its."""
    ids = request().segment.token_ids.tolist()
    first = teacher(tmp_path, ToySource())
    asyncio.run(first.probe(ids, timeout_s=10))
    ask(first, request())
    (path,) = (tmp_path / "cache").glob(f"*/*/{REFERENCE}")
    path.write_bytes(b"?") if lost == "damaged" else path.unlink()
    second = teacher(tmp_path, ToySource(ToyModel(1)))
    assert any("another model" in note for note in asyncio.run(second.probe(ids, timeout_s=10)))
    ask(second, request())
    assert second.cache_hits == 0
    third = teacher(tmp_path, ToySource(ToyModel(1)))
    assert not any("another model" in note for note in asyncio.run(third.probe(ids, timeout_s=10)))
    ask(third, request())
    assert third.cache_hits == 1


def test_a_full_disk_costs_the_cache_and_no_score(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    source = ToySource()
    for _ in range(2):
        (found,) = ask(teacher(tmp_path, source), request())
        assert np.array_equal(found.mask, request().mask)
    assert source.asked == 2


def test_the_oldest_go_when_the_folder_is_full(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path, max_bytes=10_000)
    cache.write(REFERENCE, [np.ones(3, np.float32)])
    values = [np.full(200, number, np.float32) for number in range(40)]
    for number, value in enumerate(values):
        cache.write(key_of(number), [value])
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 10_000
    assert cache.read(key_of(0)) is None
    assert cache.read(REFERENCE) is not None, "by which it is known whose the others are"
    found = cache.read(key_of(39))
    assert found is not None
    assert np.array_equal(found[0], values[39])
    assert not list(tmp_path.glob("*/*.part"))


def test_a_write_that_was_cut_off_leaves_nothing_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: Path, target: Path) -> None:
        raise OSError("killed here")

    monkeypatch.setattr(Path, "replace", killed)
    cache = ScoreCache(tmp_path)
    cache.write(key_of(1), [np.zeros(3, np.float32)])
    assert cache.read(key_of(1)) is None
    assert not list(tmp_path.glob("*/*"))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["<f4", "<i4", "|b1"]), st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=4
    )
)
def test_any_arrays_come_back(tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[str, int, int]]) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(0, 9, shape).astype(dtype) for dtype, *shape in shapes]
    cache = ScoreCache(tmp_path_factory.mktemp("cache"))
    cache.write(key_of("k"), arrays)
    found = cache.read(key_of("k"))
    assert found is not None
    for one, other in zip(arrays, found, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


def test_keys_do_not_run_into_each_other() -> None:
    arrays = [np.array([1, 2], np.int32), np.array([3], np.int32)]
    parts = [("a", "bc"), ("ab", "c"), (1, "a"), ("1", "a"), (None, "a"), tuple(arrays), (np.concatenate(arrays),)]
    assert len({key_of(*one) for one in parts}) == len(parts)

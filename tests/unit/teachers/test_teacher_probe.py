"""K37: what the probe finds before a run begins, and what it refuses with the reason and the remedy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from teacher_stand_in import StandInTeacher, serving
from teacher_toys import TEXT, TINY, ToyModel, ToySource, request, teacher_spec

from agentrl.errors import ConfigError, DeadlineError, TeacherError, TeacherStartError, TeacherUnfitError
from agentrl.wire import TokenScores
from agentrl_teachers import probe as probing
from agentrl_teachers.folder_text import FolderText, folder_identity
from agentrl_teachers.servers import _window, open_server
from agentrl_teachers.spelling import spelling_of
from agentrl_teachers.token_teacher import TokenTeacher

PROMPT = request().segment.token_ids.tolist()


def probe(folder: Path, source: Any, **changes: Any) -> list[str]:
    teacher = TokenTeacher(source, teacher_spec(folder, **changes), identity="toy")
    return asyncio.run(teacher.probe(PROMPT, timeout_s=10))


def served(folder: Path, change: Any = None, **changes: Any) -> tuple[list[str], StandInTeacher, TokenTeacher]:
    """The probe of a stand-in that `change` has changed."""

    async def run() -> tuple[list[str], StandInTeacher, Any]:
        async with serving() as server:
            if change is not None:
                change(server)
            async with open_server(teacher_spec(folder, model=server.url, **changes)) as teacher:
                notes = await teacher.probe(PROMPT, timeout_s=10)
                await teacher.score(request(), timeout_s=10)
                return notes, server, teacher

    return asyncio.run(run())


def test_a_fit_teacher_says_what_was_found(tmp_path: Path) -> None:
    notes, server, _ = served(tmp_path)
    text = "\n".join(notes)
    assert "same tokenizer (1024 tokens, fingerprint " in text
    assert "same chat template" in text
    assert f"scores {len(PROMPT)} tokens" in text
    assert "the same when asked again" in text
    whole = [sent for sent in server.requests if sent["prompt"] == PROMPT]
    assert len(whole) >= 2


@pytest.mark.parametrize(("allowed", "wanted"), [(20, 32), (5, 16), (1, 4), (7, 8)])
def test_as_many_candidates_as_the_server_allows(allowed: int, wanted: int, tmp_path: Path) -> None:
    """max_logprobs 20 answers 400 to more: the probe finds the most there is, and that many are asked for."""

    def change(server: StandInTeacher) -> None:
        server.max_logprobs = allowed

    notes, server, _ = served(tmp_path, change, top_k=wanted)
    assert f"{allowed} candidates per token instead of {wanted}: the server gives no more" in notes
    assert server.requests[-1]["prompt_logprobs"] == allowed


@pytest.mark.parametrize(("allowed", "given"), [(20, 16), (5, 5), (0, 0)])
def test_candidates_are_asked_for_by_the_probe_alone_where_none_are_wanted(
    allowed: int, given: int, tmp_path: Path
) -> None:
    """The divergence `sampled` wants none, and their sum shows what the values are; a server may give none."""

    def change(server: StandInTeacher) -> None:
        server.max_logprobs = allowed

    notes, server, _ = served(tmp_path, change, top_k=0)
    *probed, scored = [sent["prompt_logprobs"] for sent in server.requests if sent["prompt"] == PROMPT]
    assert (probed, scored) == ([given, given], 0)
    assert any("gives no candidates" in note for note in notes) == (given == 0)
    assert not any("instead of" in note for note in notes)


def test_no_candidates_at_all_are_refused_where_they_are_wanted(tmp_path: Path) -> None:
    def change(server: StandInTeacher) -> None:
        server.max_logprobs = 0

    with pytest.raises(TeacherUnfitError, match="gives no candidates") as caught:
        served(tmp_path, change, top_k=16)
    assert "--max-logprobs" in caught.value.remedy
    served(tmp_path, change, top_k=0)


def test_a_shorter_context_is_refused(tmp_path: Path) -> None:
    assert probe(tmp_path, ToySource(max_model_len=257))
    with pytest.raises(TeacherUnfitError, match="a window of 256 tokens, a segment has up to 256") as caught:
        probe(tmp_path, ToySource(max_model_len=256))
    assert "agent.max_tokens=255" in caught.value.remedy


def test_a_model_with_too_few_positions_is_refused_before_its_server_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 300}))
    assert _window(tmp_path, teacher_spec(tmp_path, longest=299, max_model_len=512)) == 300
    assert _window(tmp_path, teacher_spec(tmp_path, longest=200, max_model_len=256)) == 256
    with pytest.raises(TeacherUnfitError, match="300 positions, and a segment has up to 300"):
        _window(tmp_path, teacher_spec(tmp_path, longest=300, max_model_len=512))


class Shifted(ToySource):
    """Another vocabulary: two tokens have changed places."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__()
        self._swap = {one: other, other: one}

    async def encode(self, text: str, *, timeout_s: float) -> list[int]:
        return [self._swap.get(token, token) for token in TEXT.encode(text)]


@pytest.mark.parametrize("token", [7, 300, 700, 1022])
def test_another_tokenizer_is_refused_wherever_it_differs(token: int, tmp_path: Path) -> None:
    """Two tokens swapped anywhere in the vocabulary are found."""
    with pytest.raises(TeacherUnfitError, match="another tokenizer than the student") as caught:
        probe(tmp_path, Shifted(token, token + 1))
    assert "distill.align=bytes" in caught.value.remedy


def test_of_a_large_vocabulary_evenly_chosen_tokens_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fourth token of 1,024 where 256 are enough."""
    whole = probing._vocabulary_text(TEXT).split("\n")
    monkeypatch.setattr(probing, "_VOCABULARY_SAMPLE", 256)
    chosen = probing._vocabulary_text(TEXT).split("\n")
    assert len(whole) / 5 < len(chosen) < len(whole) / 3
    assert set(chosen) < set(whole)
    with pytest.raises(TeacherUnfitError, match="another tokenizer than the student"):
        probe(tmp_path, Shifted(700, 701))


class Ending(ToySource):
    """A tokenizer that adds a token of its own at the end, or the beginning."""

    def __init__(self, before: list[int], after: list[int]) -> None:
        super().__init__()
        self._before, self._after = before, after

    async def encode(self, text: str, *, timeout_s: float) -> list[int]:
        return [*self._before, *TEXT.encode(text), *self._after]


@pytest.mark.parametrize(("before", "after"), [([1], []), ([], [2])])
def test_a_tokenizer_that_adds_tokens_is_refused(before: list[int], after: list[int], tmp_path: Path) -> None:
    with pytest.raises(TeacherUnfitError, match="another tokenizer"):
        probe(tmp_path, Ending(before, after))


def test_another_chat_template_is_a_note(tmp_path: Path) -> None:
    def change(server: StandInTeacher) -> None:
        server.template = "<|im_start|>something else"

    notes, *_ = served(tmp_path, change)
    assert any("another chat template" in note for note in notes)


@pytest.mark.parametrize("status", [400, 500, 503])
def test_a_template_that_cannot_be_asked_for_is_a_note(status: int, tmp_path: Path) -> None:
    """The student's own prompts are scored: no template of the teacher's is needed."""

    def change(server: StandInTeacher) -> None:
        server.template_status = status

    notes, *_ = served(tmp_path, change)
    assert any(f"chat template not compared (teacher teacher answered {status}: as told)" in note for note in notes)


class Wavering(ToySource):
    """Other scores each time it is asked, by `by` nats."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self._by = by

    async def score(
        self, token_ids: Sequence[int], *, top_k: int, timeout_s: float, positions: np.ndarray | None = None
    ) -> TokenScores:
        found = await super().score(token_ids, top_k=top_k, timeout_s=timeout_s)
        for values in (found.logprobs, found.top_logprobs):
            values[:] -= self._by * self.asked
        return found


def test_a_repeated_prompt_must_give_the_same(tmp_path: Path) -> None:
    probe(tmp_path, Wavering(5e-5), top_k=0)
    with pytest.raises(TeacherUnfitError, match="a repeated prompt other scores") as caught:
        probe(tmp_path, Wavering(2e-3), top_k=0)
    assert "bfloat16" in caught.value.remedy
    probe(tmp_path, Wavering(2e-3), top_k=0, dtype="bfloat16")


def _raised(by: float, scale: float) -> Any:
    def fault(given: list[Any]) -> list[Any]:
        for entries in given[1:]:
            for entry in entries.values():
                entry["logprob"] = entry["logprob"] * scale + by
        return given

    def change(server: StandInTeacher) -> None:
        server.fault, server.faults = fault, 1000

    return change


@pytest.mark.parametrize("top_k", [0, 16], ids=["sampled", "candidates"])
@pytest.mark.parametrize(("by", "scale"), [(9.0, 1.0), (0.0, 0.3)], ids=["logits", "hot"])
def test_values_that_are_not_normalised_are_refused(by: float, scale: float, top_k: int, tmp_path: Path) -> None:
    """Logits, and log-probabilities that a temperature divided: also where the run wants no candidates."""
    with pytest.raises(TeacherUnfitError, match="cannot be scores") as caught:
        served(tmp_path, _raised(by, scale), top_k=top_k)
    assert "--logprobs-mode raw_logprobs" in caught.value.remedy


def test_a_server_without_log_probabilities_is_refused(tmp_path: Path) -> None:
    def change(server: StandInTeacher) -> None:
        server.fault, server.faults = (lambda _: None), 1000  # type: ignore[assignment, return-value]

    with pytest.raises(TeacherUnfitError, match="0 prompt log-probabilities"):
        served(tmp_path, change)


def test_a_server_that_hangs_is_a_deadline(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving() as server, open_server(teacher_spec(tmp_path, model=server.url)) as teacher:
            server.delay_s = 30.0
            with pytest.raises(DeadlineError):
                await teacher.probe(PROMPT, timeout_s=0.1)

    asyncio.run(run())


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://127.0.0.1:9/v1/"])
def test_no_server_at_the_address(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl_teachers.openai_source._RETRY_DELAYS_S", (0.001,))

    async def run() -> None:
        async with open_server(teacher_spec(tmp_path, model=url)):
            pass

    with pytest.raises(TeacherStartError, match="is no running vLLM server") as caught:
        asyncio.run(run())
    assert "vllm serve" in caught.value.remedy


@pytest.mark.parametrize(("top_k", "wanted"), [(None, "the whole vocabulary"), (0, "those that the student chooses")])
def test_no_candidate_source_for_tokens_that_it_does_not_choose(top_k: int | None, wanted: str, tmp_path: Path) -> None:
    """Else every rollout would be lost, one after another."""
    with pytest.raises(TeacherUnfitError, match=f"own most likely tokens only, and is to score {wanted}"):
        probe(tmp_path, ToySource(), top_k=top_k, any_token=True)


class AnyToken(ToySource):
    """Scores any token; `wrong` adds to those that are asked for by name."""

    def __init__(self, *, wrong: float = 0.0, padding: int = 0) -> None:
        super().__init__(ToyModel())
        self._wrong, self._padding = wrong, padding

    async def score_candidates(
        self, token_ids: Sequence[int], *, positions: np.ndarray, candidates: np.ndarray | None, timeout_s: float
    ) -> tuple[TokenScores, np.ndarray]:
        rows = self.model.table[np.asarray(token_ids)[positions - 1]]
        if candidates is None:
            found = np.pad(rows, ((0, 0), (0, self._padding)), constant_values=-40.0)
        else:
            found = np.take_along_axis(rows, np.maximum(candidates, 0), axis=1) + self._wrong
        return self.model.scores(token_ids, top_k=0), found.astype(np.float32)


def test_candidates_by_name_and_the_whole_vocabulary(tmp_path: Path) -> None:
    """Students' candidates keep their places (−1: none), and a vocabulary padded further is cut to the student's."""
    asked = request()
    ids = asked.segment.token_ids
    positions = np.flatnonzero(asked.mask)
    wanted = np.stack([ids[positions], np.full(len(positions), 17), np.full(len(positions), -1)], axis=1).astype(
        np.int32
    )
    table = ToyModel().table

    async def run() -> None:
        teacher = TokenTeacher(AnyToken(padding=8), teacher_spec(tmp_path, top_k=None), identity="toy")
        await teacher.probe(PROMPT, timeout_s=10)
        some = await teacher.score(request(candidates=wanted), timeout_s=10)
        assert some.candidate_ids is not None
        assert some.candidate_logprobs is not None
        assert np.array_equal(some.candidate_ids, wanted)
        assert np.array_equal(some.candidate_logprobs[:, 0], some.logprobs[positions])
        assert np.abs(some.candidate_logprobs[:, 1] - table[ids[positions - 1], 17]).max() < 1e-5
        assert np.isnan(some.candidate_logprobs[:, 2]).all()
        whole = await teacher.score(asked, timeout_s=10)
        assert whole.candidate_ids is None
        assert whole.candidate_logprobs is not None
        assert np.abs(whole.candidate_logprobs - table[ids[positions - 1]]).max() < 1e-5

    asyncio.run(run())


def test_scores_by_name_that_are_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TeacherUnfitError, match="asked for by name"):
        probe(tmp_path, AnyToken(wrong=-0.5))


def test_what_a_folder_says(tmp_path: Path) -> None:
    ids = TEXT.encode("<|im_start|>naïve – 中文\n")
    assert b"".join(TEXT.token_bytes(ids)).decode() == "<|im_start|>naïve – 中文\n"
    with pytest.raises(TeacherError, match="token 5000 is none"):
        TEXT.token_bytes([5000])
    assert folder_identity(TINY, "a") != folder_identity(TINY, "b")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        FolderText(tmp_path)


def test_spellings() -> None:
    assert b"".join(map(spelling_of(["Ġa", "ĠÃ¤"], " a ä", where=""), ["Ġa", "Ċ", "<|im_end|>"])) == b" a\n<|im_end|>"
    assert b"".join(map(spelling_of(["▁a"], "a", where=""), ["▁b", "<0xE4>"])) == b" b\xe4"
    with pytest.raises(TeacherUnfitError, match="do not make up the text"):
        spelling_of(["A"], "a", where="")

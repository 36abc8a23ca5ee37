"""A teacher with another tokenizer: whole spans count, and only those that are the agent's alone."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import byte_vocabularies
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from teacher_toys import TEXT, request, teacher_spec

from agentrl.errors import TeacherRefusedError, TeacherUnfitError
from agentrl.trajectory import Purpose, Segment, Source, Span, SpanKind, TeacherScores
from agentrl.wire import ScoreRequest
from agentrl_teachers.byte_teacher import ByteTeacher, pieces
from agentrl_teachers.making import teacher_over
from agentrl_teachers.token_teacher import TokenTeacher

TURNS = [
    "<|im_start|>user\nfix `total()`: it adds 10 too much<|im_end|>\n<|im_start|>assistant\n",
    "<tool_call>\ngrep -rn 'def total' .\n</tool_call><|im_end|>",
    "\n<|im_start|>tool\nnaïve.py:3: def total(x): # 中文\n<|im_end|>\n<|im_start|>assistant\n",
    "    return sum(x)\n",
    "<|im_end|>\n",
]
WORDS = [
    b"return ",
    b"total",
    b"turn",
    b" su",
    b"m(x)\n",
    b">\n",
    b"<|",
    b"def total(",
    b"\xe4\xb8\xad\xe6\x96",
    b"ool_c",
]


def segment(turns: list[list[int]]) -> Segment:
    """Turns of ids: the environment's, the agent's, and so on."""
    spans, at = [], 0
    for number, ids in enumerate(turns):
        agent = number % 2 == 1
        kind = SpanKind.AGENT if agent else SpanKind.PROMPT if number == 0 else SpanKind.ENVIRONMENT
        spans.append(Span(kind, at, at + len(ids), number, Purpose.ACT if agent else None))
        at += len(ids)
    mask = np.concatenate([np.full(len(ids), number % 2 == 1) for number, ids in enumerate(turns)])
    return Segment(
        token_ids=np.concatenate([np.asarray(ids, np.int32) for ids in turns]),
        spans=tuple(spans),
        logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        source=Source.SAMPLED,
    )


def scored(teacher: ByteTeacher | TokenTeacher, asked: ScoreRequest) -> TeacherScores:
    scores = asyncio.run(teacher.score(asked, timeout_s=10))
    scores.check(asked.segment)
    assert not (scores.mask & ~asked.mask).any()
    return scores


def byte_teacher(
    words: list[bytes], *, control: tuple[str, ...] = byte_vocabularies.CONTROL, **changed: object
) -> tuple[ByteTeacher, byte_vocabularies.RuledSource]:
    source = byte_vocabularies.RuledSource(byte_vocabularies.GreedyVocabulary(words, control))
    spec = teacher_spec(Path("/nowhere"), top_k=0, align_bytes=True, **changed)
    return ByteTeacher(source, spec, identity="ruled"), source


class StudentsOwn(byte_vocabularies.RuledSource):
    """A source with the student's tokenizer."""

    def __init__(self) -> None:
        self.max_model_len = 4096
        self.asked = []

    async def encode(self, text: str, *, timeout_s: float) -> list[int]:
        return TEXT.encode(text)

    async def token_bytes(self, token_ids: object, *, timeout_s: float) -> list[bytes]:
        return TEXT.token_bytes(token_ids)  # type: ignore[arg-type]


def by_hand(made: Segment, words: list[bytes], control: tuple[str, ...]) -> dict[tuple[int, int], float]:
    """(student start, stop) of each span within one agent turn → Σ log p of the teacher's tokens, the slow way."""
    vocabulary = byte_vocabularies.GreedyVocabulary(words, control)
    ours = TEXT.token_bytes(made.token_ids.tolist())
    ids: list[int] = []
    student_ends, teacher_ends = {0: 0}, {0: 0}
    at = 0
    for start, stop in pieces(made):
        for token in vocabulary.encode(b"".join(ours[start:stop])):
            ids.append(token)
            teacher_ends[at := at + len(vocabulary.tokens[token])] = len(ids)
    at = 0
    for number, token in enumerate(ours):
        student_ends[at := at + len(token)] = number + 1
    logprobs = byte_vocabularies.ruled_scores(ids).logprobs
    common = sorted(student_ends.keys() & teacher_ends.keys())
    return {
        (student_ends[p], student_ends[q]): float(logprobs[teacher_ends[p] - 1 : teacher_ends[q] - 1].sum())
        for p, q in itertools.pairwise(common)
        if p > 0
    }


@pytest.mark.parametrize("control", [byte_vocabularies.CONTROL, ()], ids=["control", "text"])
def test_the_chain_rule_goes_over_the_whole_span(control: tuple[str, ...]) -> None:
    """K39: every teacher token of a span counts, and the span's tokens share the sum."""
    made = segment([TEXT.encode(turn) for turn in TURNS])
    teacher, _ = byte_teacher(WORDS, control=control)
    scores = scored(teacher, request(made))
    expected = {span: total for span, total in by_hand(made, WORDS, control).items() if made.agent_mask[span[0]]}
    assert scores.mask.sum() == made.agent_mask.sum()
    assert any(stop - start > 1 for start, stop in expected)
    for number, ((start, stop), total) in enumerate(expected.items()):
        assert scores.spans is not None
        assert set(scores.spans[start:stop].tolist()) == {number}
        assert scores.logprobs[start:stop] == pytest.approx([total / (stop - start)] * (stop - start), abs=1e-5)


def test_another_last_token_of_a_span_changes_its_score() -> None:
    """K39: the score is not the first token's."""
    made = segment([TEXT.encode(TURNS[0]), TEXT.encode("return x")])
    fine, _ = byte_teacher([])
    coarse, _ = byte_teacher([b"return x"])
    one, other = scored(fine, request(made)), scored(coarse, request(made))
    assert one.logprobs[made.agent_mask].sum() < other.logprobs[made.agent_mask].sum()


@settings(max_examples=25, deadline=None)
@given(turns=st.lists(st.text(alphabet="ab(x)\n =_é中😀", min_size=1, max_size=30), min_size=2, max_size=6))
def test_a_teacher_with_the_students_tokenizer_says_what_a_token_teacher_says(turns: list[str]) -> None:
    made = segment([TEXT.encode(turn) for turn in turns])
    spec = teacher_spec(Path("/nowhere"), top_k=0)
    tokens = scored(TokenTeacher(StudentsOwn(), spec, identity=""), request(made))
    spans = scored(ByteTeacher(StudentsOwn(), spec, identity=""), request(made))
    assert np.array_equal(tokens.logprobs, spans.logprobs, equal_nan=True)
    assert tokens.top1 is not None
    assert spans.top1 is not None
    assert np.array_equal(tokens.top1[made.agent_mask], spans.top1[made.agent_mask])
    assert spans.spans is not None
    assert spans.spans[made.agent_mask].tolist() == list(range(int(made.agent_mask.sum())))


@settings(max_examples=25, deadline=None)
@given(
    turns=st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=20), min_size=2, max_size=5),
    words=st.lists(st.binary(min_size=2, max_size=4), max_size=8),
    draw=st.randoms(use_true_random=False),
)
def test_any_ids_and_any_vocabulary_give_scores_that_fit(turns: list[list[int]], words: list[bytes], draw) -> None:  # type: ignore[no-untyped-def]
    """Random ids are seldom UTF-8, and a mask may begin and end anywhere in a turn."""
    made = segment(turns)
    mask = made.agent_mask & np.array([draw.random() < 0.8 for _ in range(len(made))])
    teacher, _ = byte_teacher(words)
    scores = scored(teacher, request(made, mask=mask))
    assert scores.spans is not None
    for number in range(int(scores.spans.max()) + 1):
        tokens = np.flatnonzero(scores.spans == number)
        assert tokens.tolist() == list(range(tokens[0], tokens[-1] + 1))
        assert len(set(scores.logprobs[tokens].tolist())) == 1


def test_a_character_sampled_in_half_costs_itself_alone() -> None:
    whole = TEXT.encode("中")
    assert len(whole) == 3
    made = segment([TEXT.encode(TURNS[0]), [*TEXT.encode("return x"), *whole[:2], *TEXT.encode("\nreturn y")]])
    scores = scored(byte_teacher([])[0], request(made))
    lost = np.flatnonzero(made.agent_mask & ~scores.mask)
    assert made.token_ids[lost].tolist() == whole[:2]


def test_a_span_with_a_token_that_is_not_asked_for_stays_unscored() -> None:
    made = segment([TEXT.encode(TURNS[0]), TEXT.encode("a(b)")])
    assert [len(token) for token in TEXT.token_bytes(made.token_ids[made.agent_mask].tolist())] == [1, 1, 1, 1]
    mask = made.agent_mask.copy()
    mask[-2] = False
    teacher, source = byte_teacher([b"(b"])
    scores = scored(teacher, request(made, mask=mask))
    assert np.flatnonzero(scores.mask).tolist() == [len(made) - 4, len(made) - 1]
    assert source.vocabulary.tokens.index(b"(b") in source.asked[0]


def test_nothing_to_score_asks_nothing() -> None:
    made = segment([TEXT.encode(TURNS[0]), TEXT.encode("x")])
    teacher, source = byte_teacher([])
    assert not scored(teacher, request(made, mask=np.zeros(len(made), np.bool_))).mask.any()
    assert source.asked == []


def test_the_teacher_reads_each_turn_as_it_would_have_written_it() -> None:
    """A word that crosses from what the agent read into what it wrote is no token of the teacher's."""
    made = segment([TEXT.encode("<|im_start|>a\n"), TEXT.encode("b")])
    teacher, source = byte_teacher([b"a\nb", b"\nb"])
    scored(teacher, request(made))
    assert [source.vocabulary.tokens[token] for token in source.asked[0]] == [b"<|im_start|>", b"a", b"\n", b"b"]


def test_a_turn_that_cannot_be_read_ends_the_reading_of_the_others() -> None:
    ended: list[str] = []

    class Refusing(byte_vocabularies.RuledSource):
        async def encode(self, text: str, *, timeout_s: float) -> list[int]:
            if text == "no":
                raise TeacherRefusedError("it does not read that", where="here")
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                ended.append(text)
                raise
            return []

    async def run() -> list[str]:
        spec = teacher_spec(Path("/nowhere"), top_k=0, align_bytes=True)
        teacher = ByteTeacher(Refusing(byte_vocabularies.GreedyVocabulary([])), spec, identity="")
        made = segment([TEXT.encode(text) for text in ("a", "no", "b")])
        with pytest.raises(TeacherRefusedError, match="does not read that"):
            await teacher.score(request(made), timeout_s=20)
        return sorted(ended)

    assert asyncio.run(run()) == ["a", "b"]


def test_the_probe_says_how_the_two_tokenizers_meet() -> None:
    teacher, _ = byte_teacher(WORDS, control=("<|im_end|>",))
    notes = asyncio.run(teacher.probe(TEXT.encode("".join(TURNS)), timeout_s=10))
    assert "another tokenizer" in notes[0]
    assert "100.0% of them lie in" in notes[0]
    assert "no control token <|im_start|>, and reads" in notes[1]


def test_a_window_too_short_for_the_teachers_own_tokens_is_refused() -> None:
    """K37: bytes for tokens: a segment of 256 of the student's is longer than 512 of the teacher's."""
    teacher, source = byte_teacher([])
    source.max_model_len = 512
    with pytest.raises(TeacherUnfitError, match="takes about"):
        asyncio.run(teacher.probe(TEXT.encode("".join(TURNS)), timeout_s=10))


def test_a_teacher_that_reads_another_text_is_refused() -> None:
    """K37: a tokenizer that drops what it does not know."""

    class Lossy(byte_vocabularies.RuledSource):
        async def encode(self, text: str, *, timeout_s: float) -> list[int]:
            return self.vocabulary.encode(text.replace(" ", "").replace("\n", "").lower().encode())

    spec = teacher_spec(Path("/nowhere"), top_k=0, align_bytes=True)
    teacher = ByteTeacher(Lossy(byte_vocabularies.GreedyVocabulary([])), spec, identity="")
    with pytest.raises(TeacherUnfitError, match="does not read the student's text"):
        asyncio.run(teacher.probe(TEXT.encode("".join(TURNS)), timeout_s=10))


@pytest.mark.parametrize(("align_bytes", "kind"), [(True, ByteTeacher), (False, TokenTeacher)])
def test_the_setting_decides_how_a_source_is_read(align_bytes: bool, kind: type) -> None:
    spec = teacher_spec(Path("/nowhere"), top_k=0, align_bytes=align_bytes)
    assert type(teacher_over(StudentsOwn(), spec, identity="")) is kind

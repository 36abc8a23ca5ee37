"""Spans of two tokenizations: the same bytes on both sides, as fine as can be, and none where the texts differ."""

from __future__ import annotations

import itertools

import byte_vocabularies
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_teachers.alignment import align, equal_blocks

WORDS = st.lists(st.binary(min_size=2, max_size=5), max_size=12)
TEXT = st.text(alphabet="ab \n_é中😀<|im_end|>", max_size=60)


def cut(text: bytes, bounds: set[int]) -> list[bytes]:
    inside = sorted(bound for bound in bounds if 0 < bound < len(text))
    return [text[a:b] for a, b in itertools.pairwise([0, *inside, len(text)]) if a < b]


@given(text=st.binary(max_size=80), first=st.sets(st.integers(1, 79)), second=st.sets(st.integers(1, 79)))
def test_spans_are_the_pieces_between_common_boundaries(text: bytes, first: set[int], second: set[int]) -> None:
    student, teacher = cut(text, first), cut(text, second)
    spans = align(student, teacher)
    common = sorted({0, len(text), *(first & second)} & set(range(len(text) + 1)))
    texts = [text[a:b] for a, b in itertools.pairwise(common)]
    assert [b"".join(student[a:b]) for a, b in spans.student] == texts
    assert [b"".join(teacher[a:b]) for a, b in spans.teacher] == texts
    covered = [number for a, b in spans.student for number in range(a, b)]
    assert covered == list(range(len(student)))


@given(text=st.binary(min_size=1, max_size=80), bounds=st.sets(st.integers(1, 79)))
def test_one_tokenization_with_itself_has_a_span_for_each_token(text: bytes, bounds: set[int]) -> None:
    tokens = cut(text, bounds)
    spans = align(tokens, tokens)
    assert spans.student.tolist() == spans.teacher.tolist() == [[n, n + 1] for n in range(len(tokens))]


@settings(max_examples=60)
@given(text=TEXT, ours=WORDS, theirs=WORDS)
def test_two_vocabularies_say_the_same_bytes_in_each_span(text: str, ours: list[bytes], theirs: list[bytes]) -> None:
    student = byte_vocabularies.GreedyVocabulary(ours)
    teacher = byte_vocabularies.GreedyVocabulary(theirs, control=())
    one = [student.tokens[i] for i in student.encode(text.encode())]
    other = [teacher.tokens[i] for i in teacher.encode(text.encode())]
    spans = align(one, other)
    for (a, b), (c, d) in zip(spans.student, spans.teacher, strict=True):
        assert b"".join(one[a:b]) == b"".join(other[c:d]) != b""
    assert sum(b - a for a, b in spans.student) == len(one)


def test_bytes_that_are_no_text_have_no_span_and_spoil_no_other() -> None:
    student = [b"ab", b"\xe4", b"c", b"\n", b"d"]
    teacher = [b"a", b"b", b"\xef\xbf\xbd", b"c\n", b"d"]
    spans = align(student, teacher)
    assert [b"".join(student[a:b]) for a, b in spans.student] == [b"ab", b"c\n", b"d"]
    assert [b"".join(teacher[a:b]) for a, b in spans.teacher] == [b"ab", b"c\n", b"d"]


def test_a_space_put_before_the_text_costs_its_first_token_only() -> None:
    spans = align([b"def", b" f", b"("], [b" def", b" f", b"("])
    assert (spans.student.tolist(), spans.teacher.tolist()) == ([[1, 2], [2, 3]], [[1, 2], [2, 3]])


def test_a_token_of_no_bytes_belongs_to_the_span_it_begins() -> None:
    spans = align([b"a", b"", b"b"], [b"a", b"b"])
    assert (spans.student.tolist(), spans.teacher.tolist()) == ([[0, 1], [1, 3]], [[0, 1], [1, 2]])


def test_nothing_has_no_spans() -> None:
    assert len(align([], [])) == 0
    assert len(align([b"a"], [])) == 0


@given(
    lines=st.lists(st.tuples(st.binary(max_size=6), st.none() | st.binary(max_size=6)), max_size=8),
)
def test_equal_blocks_are_equal_and_in_order(lines: list[tuple[bytes, bytes | None]]) -> None:
    first = b"\n".join(one for one, _ in lines)
    second = b"\n".join(one if other is None else other for one, other in lines)
    blocks = equal_blocks(first, second)
    ends = (0, 0)
    for a, b, size in blocks:
        assert size > 0
        assert a >= ends[0]
        assert b >= ends[1]
        assert first[a : a + size] == second[b : b + size]
        ends = (a + size, b + size)
    if first == second:
        assert np.sum([size for *_, size in blocks]) == len(first)


def test_two_places_that_differ_leave_what_stands_between_them() -> None:
    blocks = equal_blocks(b"one\nt\xffwo\nthree\nf\xffour", b"one\nt\xef\xbf\xbdwo\nthree\nf\xef\xbf\xbdour")
    assert [size for *_, size in blocks] == [5, len("wo\nthree\nf"), 3]

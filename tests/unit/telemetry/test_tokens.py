"""Token pieces: their text is the text, characters cut between tokens included."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agentrl.telemetry.tokens import TokenDecoder

ESCAPE = re.compile(r"(?:\\x[0-9a-f]{2})+")


def byte_tokenizer() -> Tokenizer:
    """One token per byte: every character above U+007F is cut."""
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


TOKENIZER = byte_tokenizer()
DECODER = TokenDecoder(TOKENIZER)


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_characters="\\", exclude_categories=["Cs"]), max_size=30))
def test_pieces_without_escapes_join_to_the_text(text: str) -> None:
    pieces = DECODER.pieces(ids_of(text))
    assert len(pieces) == len(text.encode())
    assert "".join(ESCAPE.sub("", piece) for piece in pieces) == text


def test_a_character_of_three_bytes() -> None:
    assert DECODER.pieces(ids_of("a€b")) == ["a", "\\xe2", "\\x82", "€", "b"]
    assert [DECODER.whole(i) for i in ids_of("a€")] == [True, False, False, False]


def test_bytes_that_never_become_a_character() -> None:
    euro, end = ids_of("€"), ids_of("<|end|>")[0]
    assert DECODER.pieces([euro[0], *ids_of("a")]) == ["\\xe2", "a"]
    assert DECODER.pieces([euro[0], end, *ids_of("€")]) == ["\\xe2", "<|end|>", "\\xe2", "\\x82", "€"]
    assert DECODER.pieces([euro[2]]) == ["\\xac"]
    assert DECODER.special(end)
    assert not DECODER.special(euro[0])


def test_merged_tokens(fake: ModuleType) -> None:
    tokenizer = fake.make_tokenizer()
    ids = tokenizer.encode("return high\n    € <|im_end|>").ids
    pieces = TokenDecoder(tokenizer).pieces(ids)
    assert "".join(ESCAPE.sub("", piece) for piece in pieces) == "return high\n    € <|im_end|>"
    assert len(ids) < 20
    assert pieces[-1] == "<|im_end|>"


def test_sentencepiece_style() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"▁the": 0, "<0xE2>": 1, "<0x82>": 2, "<0xAC>": 3}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert TokenDecoder(tokenizer).pieces([0, 1, 2, 3]) == [" the", "\\xe2", "\\x82", "€"]


def test_unknown_ids_and_no_tokenizer(tmp_path: Path) -> None:
    assert DECODER.pieces([9999]) == ["⟨9999⟩"]
    none = TokenDecoder.of_run(tmp_path)
    assert not none.has_text
    assert none.pieces([1, 2]) == ["⟨1⟩", "⟨2⟩"]


@pytest.mark.parametrize("ids", [[], [0]])
def test_short_inputs(ids: list[int]) -> None:
    assert len(DECODER.pieces(ids)) == len(ids)

"""The tiny policy's tokenizer: what makes copying learnable, and what others read of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.chat import FolderTokenizer, load_tokenizer_folder
from agentrl.chat.tiny_tokenizer import SPECIAL_TOKENS, train_tiny_tokenizer
from agentrl.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> FolderTokenizer:
    return load_tokenizer_folder(tiny_folder).tokenizer


@pytest.mark.parametrize("around", ["{}", " {}", "\n    {}", "({})", "`{}`", "def {}(", ".{},", "return {}", "={}"])
@pytest.mark.parametrize("name", ["clamp_width", "width", "zorblat", "_value", "low_2"])
def test_an_identifier_has_the_same_tokens_wherever_it_stands(
    tokenizer: FolderTokenizer, around: str, name: str
) -> None:
    alone = tokenizer.encode(name)
    within = tokenizer.encode(around.format(name))
    assert any(within[i : i + len(alone)] == alone for i in range(len(within)))


def test_a_tag_and_its_line_break_are_one_piece_and_control_tokens_come_first(
    tokenizer: FolderTokenizer,
) -> None:
    assert [tokenizer.token_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    for tag in ("</parameter>\n", "<parameter=path>\n"):
        assert len(tokenizer.encode(tag)) == 1


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_survives(tokenizer: FolderTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_folder_is_what_transformers_reads(tiny_folder: Path) -> None:
    from transformers import AutoTokenizer

    settings_ = json.loads((tiny_folder / "tokenizer_config.json").read_text())
    assert "tool_response" in settings_["chat_template"]
    assert not (tiny_folder / "chat_template.jinja").exists()
    loaded = AutoTokenizer.from_pretrained(str(tiny_folder))
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert loaded.encode("def f(x):\n", add_special_tokens=False) == load_tokenizer_folder(
        tiny_folder
    ).tokenizer.encode("def f(x):\n")


def test_training_is_repeatable_and_bounded() -> None:
    texts = ["alpha beta alpha_beta gamma\n"] * 4
    first, second = (train_tiny_tokenizer(texts, vocab_size=270) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 270
    with pytest.raises(ConfigError, match="too small"):
        train_tiny_tokenizer(texts, vocab_size=100)

"""The tiny policy's tokenizer: byte-level BPE in which an identifier has the same tokens wherever it stands.

Copying names from the issue and the file into a call is most of what the tiny policy must learn, so no word
carries its leading space, digits stand alone, and a tag is one piece with the line break after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl.chat.format import END_OF_TURN, START_OF_TURN
from agentrl.chat.template import chatml_template
from agentrl.errors import ConfigError

PAD = "<|endoftext|>"
SPECIAL_TOKENS = (
    PAD,
    START_OF_TURN,
    END_OF_TURN,
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
_PIECES = "|".join(
    (
        r"</?[a-z_]+(?:=[a-z_]+)?>\n?",  # a tag and the line break after it
        r"\b(?:return|if|for|def|not|from|import|assert|True|False|None) ?",
        r" (?:in|or|and|not in|is|else) ",
        r"_?[A-Za-z]+",
        r"[0-9]",
        r"\n *",  # a line break and the indentation after it
        r"[^A-Za-z0-9_\n<]+",
        r"<",
        r"_",
    )
)
_SMALLEST = len(SPECIAL_TOKENS) + 256
_SPLIT_SPECIAL = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))


def train_tiny_tokenizer(texts: Iterable[str], *, vocab_size: int = 1024) -> Tokenizer:
    """Train on whole rendered chats. Texts with too few merges give fewer than `vocab_size` tokens."""
    if vocab_size < _SMALLEST:
        raise ConfigError(
            f"vocab_size {vocab_size} is too small", remedy=f"at least {_SMALLEST}: control tokens and bytes"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The trainer does not split at control tokens; left in, they would spend merges on their own spelling.
    pieces = (piece for text in texts for piece in _SPLIT_SPECIAL.split(text) if piece)
    tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


def save_tiny_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Write the folder that transformers and vLLM read, chat template included."""
    from transformers import PreTrainedTokenizerFast

    shell = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        chat_template=chatml_template(),
    )
    shell.save_pretrained(str(folder), save_jinja_files=False)

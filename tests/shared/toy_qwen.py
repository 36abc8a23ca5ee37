"""The architecture of the trainer tests' model: the policy's own, at toy size."""

from __future__ import annotations

from transformers import Qwen3Config

VOCABULARY = 48


def toy_config(*, positions: int) -> Qwen3Config:
    """Two layers over `VOCABULARY` tokens and `positions` positions, tied, with weights large enough to matter."""
    return Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )

"""The tiny policy's architecture and its hand-built starting weights.

Architecture: plain Qwen3 (served by vLLM as it is), 0.92M parameters at a vocabulary of 1,024. Only the
starting weights differ from a usual initialisation: they hold an *induction circuit*, the two-layer circuit
with which transformers copy (Olsson et al. 2022, "In-context learning and induction heads"). With ordinary
weights this size does not learn to copy within a million and a half tokens; with these it does within some
tens of steps.

The circuit, in the notation of a residual stream x of width d that holds four kinds of directions:

    u      one unit vector that every token's embedding contains: a constant to build position from
    P      [hd, d] orthonormal rows: a projection of "which token am I"
    P2     [hd, d] orthonormal rows, orthogonal to P and u: room for "which token stands before me"
    V      [d, KV·hd] orthonormal columns: room to carry a token's identity to the head

    layer 0, first KV head: the *previous-token head*
        Queries and keys read only u, so that after the rotary embedding their product depends on the distance
        alone, Σ_f cos((distance − 1)·f), and peaks at distance 1. Values carry P·x, and the output writes it
        along P2: "the token before me is …".

    layer 1, every head: the *match-and-copy heads*
        Queries read P (my token), keys read P2 (the token before you), so a token looks at what followed its own
        earlier occurrences. Values carry Vᵀ·x, and one head of each group writes V·Vᵀ·x back: the tied output
        head then favours that token.

Everything else starts as halved noise, and training is free to change all of it.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

_COPY_GAIN = 1.7
_POSITION_GAIN = 2.0
_OUTPUT_GAIN = 0.25
_NOISE = 0.5
_SLOWEST_FREQUENCY = 0.15
"""Radians per token. Slower rotary frequencies hardly tell neighbours apart and would only blur the peak."""


def tiny_config(vocab_size: int) -> Qwen3Config:
    """Qwen3, width 128, 4 layers, 4 heads on 2 KV heads of 32, tied embeddings, 2,048 positions."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        attention_dropout=0.0,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )


@torch.no_grad()
def build_tiny_model(vocab_size: int, seed: int) -> Qwen3ForCausalLM:
    """A tiny policy with the induction circuit in its starting weights; the same for the same arguments."""
    config = tiny_config(vocab_size)
    model = Qwen3ForCausalLM(config).float().eval()
    draw = torch.Generator().manual_seed(seed)
    _ordinary_weights(model, draw)
    _install_circuit(model, draw)
    return model


def _ordinary_weights(model: Qwen3ForCausalLM, draw: torch.Generator) -> None:
    """Halved Gaussian matrices, std d^−½ (outputs smaller, by depth), so that the circuit stands out; norms
    at 1."""
    width, layers = model.config.hidden_size, model.config.num_hidden_layers
    for name, parameter in model.model.layers.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0)
            continue
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = width**-0.5 / (math.sqrt(2 * layers) if writes else 1.0)
        parameter.normal_(0.0, _NOISE * std, generator=draw)
    model.model.norm.weight.fill_(1.0)


def _install_circuit(model: Qwen3ForCausalLM, draw: torch.Generator) -> None:
    config = model.config
    width, size, groups = config.hidden_size, config.head_dim, config.num_key_value_heads
    per_group = config.num_attention_heads // groups
    basis = _orthonormal(width, width, draw)
    constant = basis[:, 0]
    mine = basis[:, 1 : 1 + size].T
    before = basis[:, 1 + size : 1 + 2 * size].T
    carried = _orthonormal(width, groups * size, draw)

    model.model.embed_tokens.weight.normal_(0.0, width**-0.5, generator=draw).add_(constant)

    attention = model.model.layers[0].self_attn
    query, key = _previous_token_pair(size, theta=config.rope_parameters["rope_theta"])
    attention.k_proj.weight[:size] += torch.outer(key, constant)
    for head in range(per_group):
        attention.q_proj.weight[head * size : (head + 1) * size] += torch.outer(query, constant)
    attention.v_proj.weight[:size] = mine
    attention.o_proj.weight[:, :size] = _OUTPUT_GAIN * before.T
    attention.q_norm.weight.fill_(_POSITION_GAIN)
    attention.k_norm.weight.fill_(_POSITION_GAIN)

    attention = model.model.layers[1].self_attn
    for head in range(config.num_attention_heads):
        attention.q_proj.weight[head * size : (head + 1) * size] += mine
    for group in range(groups):
        rows = slice(group * size, (group + 1) * size)
        attention.k_proj.weight[rows] += before
        attention.v_proj.weight[rows] = carried[:, rows].T
        writer = group * per_group * size  # the group's first head writes; its twin is left to training
        attention.o_proj.weight[:, writer : writer + size] += _OUTPUT_GAIN * carried[:, rows]
    attention.q_norm.weight.fill_(_COPY_GAIN)
    attention.k_norm.weight.fill_(_COPY_GAIN)


def _previous_token_pair(size: int, *, theta: float) -> tuple[Float[Tensor, " hd"], Float[Tensor, " hd"]]:
    """Query and key vectors, before rotation, whose rotated product peaks one token back.

    A rotary pair (x_f, x_{f+hd/2}) turns by position·f. The key points along the first axis at every used
    frequency; the query is turned back by one step, so at distance δ the pair contributes cos((δ − 1)·f).
    """
    frequency = theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    used = (frequency > _SLOWEST_FREQUENCY).float()
    key = torch.cat([used, torch.zeros(size // 2)])
    query = torch.cat([used * frequency.cos(), -used * frequency.sin()])
    return query, key


def _orthonormal(rows: int, columns: int, draw: torch.Generator) -> Float[Tensor, "rows columns"]:
    """Random orthonormal columns."""
    return torch.linalg.qr(torch.randn(rows, columns, generator=draw))[0]

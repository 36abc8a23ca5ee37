"""One real policy server for all integration tests of a session.

`policy_server` serves the shipped policy (or, where the checkout has none, a small random model) with a
hostile `generation_config.json` beside it. Its weights change under the tests' hands: whoever needs
particular weights delivers them first, as version `policy_server.next_version()`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentrl.config import PolicyConfig
from agentrl.policy import VllmServer, model_location

WINDOW = 1024


@dataclass
class SharedServer:
    """The session's server, the folder of its model, and the counter of its policy versions."""

    server: VllmServer
    model: Path
    vocabulary: int
    max_model_len: int = WINDOW
    version: int = field(default=0)

    def next_version(self) -> int:
        """A version that no test has used."""
        self.version += 1
        return self.version


def random_model(folder: Path) -> None:
    """A small random Qwen3 with tied embeddings and a word-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.1,
        eos_token_id=0,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = {"<eos>": 0, "<unk>": 1} | {f"w{i}": i for i in range(2, 512)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")
    wrapped.save_pretrained(folder)


@pytest.fixture(scope="session")
def policy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose generation_config.json would bend sampling if it were read."""
    folder = tmp_path_factory.mktemp("policy") / "model"
    shipped = Path(model_location("tiny"))
    if (shipped / "config.json").is_file():
        shutil.copytree(shipped, folder)
    else:
        random_model(folder)
    hostile = {"top_k": 20, "top_p": 0.5, "temperature": 0.1, "repetition_penalty": 1.5, "do_sample": True}
    path = folder / "generation_config.json"
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | hostile))
    return folder


@pytest.fixture(scope="session")
def policy_config(policy_model: Path) -> PolicyConfig:
    """Small prefill chunks, so that prompts longer than 256 tokens are prefilled in pieces."""
    return PolicyConfig(
        model=str(policy_model),
        max_model_len=WINDOW,
        max_num_batched_tokens=256,
        max_num_seqs=32,
        kv_cache_mb=64,
    )


@pytest.fixture(scope="session")
def policy_server(
    policy_config: PolicyConfig, policy_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedServer]:
    """The session's server (20 to 60 s to start, 1.6 GB)."""
    log = tmp_path_factory.mktemp("logs") / "policy.log"
    server = asyncio.run(VllmServer.start(policy_config, log_path=log))
    try:
        vocabulary = json.loads((policy_model / "config.json").read_text())["vocab_size"]
        yield SharedServer(server=server, model=policy_model, vocabulary=vocabulary)
    finally:
        server.stop()

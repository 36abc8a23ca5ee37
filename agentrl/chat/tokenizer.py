"""A tokenizer folder read with the `tokenizers` library alone, so that the orchestrator never loads torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from agentrl.errors import ConfigError

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class TextTokenizer(Protocol):
    """Text ↔ token ids. Nothing is added around the text and nothing is left out of the decoded one."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name; None where the vocabulary lacks it."""
        ...


class FolderTokenizer:
    """The `tokenizer.json` of a model folder."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    @property
    def size(self) -> int:
        """How many tokens there are, added ones included."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def added(self) -> Mapping[int, str]:
        """Tokens beside the model's own (control tokens, …) by id."""
        return {index: str(token.content) for index, token in self._backend.get_added_tokens_decoder().items()}

    def token(self, token_id: int) -> str | None:
        """The name of a token as the vocabulary writes it; None for an id that is none."""
        return self._backend.id_to_token(token_id)


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """What a model folder says about text; special tokens by role (`eos_token`, …)."""

    tokenizer: FolderTokenizer
    special_tokens: dict[str, str]
    chat_template: str | None


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    beside = folder / "chat_template.jinja"
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    named = settings.get("chat_template")
    if isinstance(named, list):
        named = next((entry["template"] for entry in named if entry.get("name") == "default"), None)
    return named


def load_tokenizer_folder(folder: str | Path) -> TokenizerFolder:
    """Read the tokenizer, its settings and the template. Raises `ConfigError` where they cannot be read."""
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            "the model folder has no tokenizer.json",
            where=str(folder),
            remedy="save it there: AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)",
        )
    settings: dict[str, Any] = {}
    try:
        backend = Tokenizer.from_file(str(path))
        if (folder / "tokenizer_config.json").is_file():
            settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ConfigError(f"the tokenizer cannot be read: {error}", where=str(folder)) from error
    backend.no_truncation()
    backend.no_padding()
    special = {}
    for name in _SPECIAL:
        token = settings.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if token is not None:
            special[name] = str(token)
    return TokenizerFolder(FolderTokenizer(backend), special, _template(folder, settings))

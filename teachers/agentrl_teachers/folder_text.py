"""A model folder's tokenizer and chat template, for sources whose model is a folder. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from agentrl.chat import ChatFormat, load_tokenizer_folder
from agentrl.errors import ConfigError, TeacherRefusedError
from agentrl.wire import ChatMessage
from agentrl_teachers.spelling import spelling_of

SAMPLE = "def f(x):\n    return x + 1  # naïve – 中文\n"


class FolderText:
    """Text ↔ ids as the model of `folder` has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found = load_tokenizer_folder(folder)
        self._added = self._found.tokenizer.added
        sample = self._found.tokenizer.encode(SAMPLE)
        self._spelling = spelling_of([self._name(token) for token in sample], SAMPLE, where=str(folder))

    @property
    def size(self) -> int:
        """Tokens of the tokenizer; the model's vocabulary may be padded beyond it."""
        return self._found.tokenizer.size

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, control tokens recognised, none added."""
        return self._found.tokenizer.encode(text)

    def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes of each token, a control token's those of its name. `TeacherRefusedError` for ids that are none."""
        return [
            self._added[token].encode() if token in self._added else self._spelling(self._name(token))
            for token in map(int, token_ids)
        ]

    def open_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The messages by the folder's own template, generation prompt last. `ConfigError` where there is none."""
        if self._found.chat_template is None:
            raise ConfigError("the model has no chat template", where=str(self.folder))
        found = self._found
        return ChatFormat(found.tokenizer, found.chat_template or "", special_tokens=found.special_tokens).open(
            messages
        )

    def _name(self, token_id: int) -> str:
        name = self._found.tokenizer.token(token_id)
        if name is None:
            raise TeacherRefusedError(
                f"token {token_id} is none of the teacher's tokenizer",
                where=str(self.folder),
                remedy="a teacher with the student's tokenizer, or distill.align=bytes",
            )
        return name


class FolderSource:
    """What every `Source` and `ChatSource` has in common whose model is a folder: its text."""

    def __init__(self, text: FolderText, *, name: str) -> None:
        self._text = text
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    async def encode(self, text: str, *, timeout_s: float) -> list[int]:
        """See `Source`."""
        return self._text.encode(text)

    async def token_bytes(self, token_ids: Sequence[int], *, timeout_s: float) -> list[bytes]:
        """See `Source`."""
        return self._text.token_bytes(token_ids)

    async def open_chat(self, messages: Sequence[ChatMessage], *, timeout_s: float) -> list[int]:
        """See `ChatSource`."""
        return self._text.open_chat(messages)


def vocabulary_of(folder: Path) -> int | None:
    """The model's vocabulary size, padding included, by its config.json; None where it does not say."""
    try:
        described = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        return None
    size = described.get("vocab_size") or described.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) else None


def positions_of(folder: Path) -> int | None:
    """How many positions the model has, by its config.json; None where it does not say."""
    described = json.loads((folder / "config.json").read_bytes())
    found = described.get("max_position_embeddings") or described.get("text_config", {}).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def folder_identity(folder: Path, *parts: str) -> str:
    """What names a model's scores: the folder, its files with size and time of change, and `parts` (kind, dtype)."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".json"))
    described = [f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in files]
    return "\n".join([*parts, str(folder.resolve()), *described])

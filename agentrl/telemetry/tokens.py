"""Token ids as text, one piece per token.

A byte-level tokenizer may cut a character of several bytes between tokens. Decoding token by token would
show U+FFFD twice; here the token that *completes* a character shows it, and the tokens before show the bytes
they carry (`\\xe2\\x82`). So the pieces of a text, without those escapes, join to the text.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenDecoder:
    """Pieces of one tokenizer. Without a tokenizer every token is shown as its id."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, str] = {}
        self._byte_level = False
        if tokenizer is not None:
            self._added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
            self._byte_level = "ByteLevel" in _types(json.loads(tokenizer.to_str()).get("decoder"))
        self._bytes: dict[int, bytes | str] = {}

    @classmethod
    def of_run(cls, run_dir: Path) -> TokenDecoder:
        """The decoder of `run_dir/tokenizer/tokenizer.json`; ids where it is missing."""
        path = run_dir / "tokenizer" / "tokenizer.json"
        return cls(Tokenizer.from_file(str(path)) if path.is_file() else None)

    @property
    def has_text(self) -> bool:
        """False where tokens are shown as ids because the run has no tokenizer."""
        return self._tokenizer is not None

    def special(self, token_id: int) -> bool:
        """True for the tokenizer's added tokens (`<|im_end|>` …), which are no text of anybody."""
        return token_id in self._added

    def whole(self, token_id: int) -> bool:
        """True where the token's bytes are whole characters, so that its piece is the same in any context."""
        raw = self._raw(token_id)
        if isinstance(raw, str):
            return True
        try:
            raw.decode()
        except UnicodeDecodeError:
            return False
        return True

    def alone(self, token_id: int) -> str:
        """The piece of a token out of any context."""
        return self.pieces([token_id])[0]

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """One text per token, see the module's docstring."""
        utf8 = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        pending, texts = b"", []
        for token_id in token_ids:
            raw = self._raw(token_id)
            if isinstance(raw, str):
                # What is pending was shown where it stood and never became a character.
                utf8.reset()
                pending = b""
                texts.append(raw)
                continue
            text = utf8.decode(raw).removeprefix(_escaped(pending)) if raw else ""
            pending = utf8.getstate()[0]
            # A token inside a character (neither its first nor its last bytes) shows its own bytes only.
            texts.append(text + _escaped(pending[-len(raw) :] if raw else b""))
        return texts

    def _raw(self, token_id: int) -> bytes | str:
        """A token's bytes; text for added tokens and for ids that the tokenizer does not know."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_raw(token_id)
        return self._bytes[token_id]

    def _find_raw(self, token_id: int) -> bytes | str:
        if token_id in self._added:
            return self._added[token_id]
        token = self._tokenizer.id_to_token(token_id) if self._tokenizer is not None else None
        if token is None:
            return f"⟨{token_id}⟩"
        if self._byte_level:
            table = _byte_of_character()
            return bytes(table[c] for c in token) if all(c in table for c in token) else token
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _escaped(data: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in data)


def _types(decoder: Any) -> set[str]:
    """Names of a decoder and of its parts, as tokenizer.json spells them."""
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*(_types(part) for part in decoder.get("decoders", ())))


@cache
def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet (GPT-2's): printable bytes stand for themselves, the others for 256 + n."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in plain}
    for n, byte in enumerate(b for b in range(256) if b not in plain):
        table[chr(256 + n)] = byte
    return table

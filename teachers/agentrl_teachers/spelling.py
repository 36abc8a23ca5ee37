"""How a vocabulary writes its tokens, and the bytes that they stand for.

Two spellings are in use: byte-level (each byte as one printable character, GPT-2's table) and metaspace (`▁` for a
space, `<0xE4>` for a byte that is no text of its own). Which one a vocabulary has is found out on a text, and proven
on it: the tokens' bytes must make up the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from agentrl.errors import TeacherUnfitError

Spelling = Callable[[str], bytes]

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


def _alphabet() -> dict[str, int]:
    """GPT-2's table: printable bytes are themselves, the others follow from U+0100 on in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_ALPHABET = _alphabet()


def byte_level(token: str) -> bytes:
    """The bytes of a byte-level token; a control token's name, which is no such spelling, stands for itself."""
    if all(character in _ALPHABET for character in token):
        return bytes(_ALPHABET[character] for character in token)
    return token.encode()


def metaspace(token: str) -> bytes:
    """The bytes of a metaspace token."""
    if (found := _BYTE.fullmatch(token)) is not None:
        return bytes([int(found[1], 16)])
    return token.replace(_SPACE, " ").encode()


def spelling_of(tokens: Sequence[str], text: str, *, where: str) -> Spelling:
    """The spelling by which `tokens` make up `text` (metaspace ones may put a space before it). Raises
    `TeacherUnfitError` where none does."""
    expected = text.encode()
    if b"".join(map(byte_level, tokens)) == expected:
        return byte_level
    if b"".join(map(metaspace, tokens)).removeprefix(b" ") == expected.removeprefix(b" "):
        return metaspace
    raise TeacherUnfitError(
        "the teacher's tokens do not make up the text that they stand for",
        where=where,
        remedy="choose a teacher with a byte-level or byte-fallback tokenizer (Qwen, Llama, SmolLM2, Mistral …)",
    )

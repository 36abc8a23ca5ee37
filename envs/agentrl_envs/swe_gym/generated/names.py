"""Words for generated code: module, function and argument names, with a held-out set for the unseen split.

An identifier is drawn either from a list of nouns or built from syllables, so that a policy learns to copy
names instead of remembering them. Held-out words appear in the unseen split and never in training.
"""
# ruff: noqa: SIM905 - words on a line read better than a list of literals

from __future__ import annotations

import keyword
import random
import sys
from dataclasses import dataclass

NOUNS = tuple(
    "width price order node score rate level user file page cell edge coupon batch query stock event image "
    "color speed angle depth weight track frame budget".split()
)
HELD_NOUNS = tuple(
    "sector ticket rider cargo beacon bucket pixel shard lane crate harbor lantern meadow orchard puzzle saddle".split()
)
SCALARS = tuple("value limit size base step mark bonus start stop low high key fallback point factor".split())
HELD_SCALARS = tuple("amount quota margin target ceiling weightage threshold".split())
LISTS = tuple("items values rows nums data parts entries marks".split())
HELD_LISTS = ("points", "cells", "samples")
STRINGS = ("text", "name", "label", "line", "word", "prefix")
MAPPINGS = ("table", "index", "mapping", "config")
ACCUMULATORS = ("result", "acc", "best", "out", "found", "total")

_ONSETS = "bcdfghjklmnprstvwz"
_VOWELS = "aeiou"
_CODAS = ("", "n", "r", "t", "x", "ck", "ll", "sh", "m")

# A module of such a name would shadow, or be shadowed by, what the interpreter or the test runner imports.
# The names beside the running interpreter's own list are of other Python versions and of packages found in
# sandboxes, so that a seed gives the same task wherever it is generated.
RESERVED = frozenset(
    {
        *sys.stdlib_module_names,
        *keyword.kwlist,
        *keyword.softkwlist,
        *"asynchat asyncore distutils imp smtpd cgi cgitb crypt nis pipes telnetlib uu xdrlib".split(),
        *"py pip six nox tox git rich jinja numpy pluggy pytest conftest test tests main".split(),
        # what a generated function already calls something
        *"range len sum abs".split(),
    }
)


@dataclass(slots=True)
class NameSource:
    """Draws words: half from the nouns, half made of syllables; held-out nouns alone where `held`."""

    rng: random.Random
    held: bool

    def word(self) -> str:
        """One lower-case word that is no reserved name; a held-out one exactly where `held`."""
        if self.held:
            return self.rng.choice(HELD_NOUNS)
        while self.rng.random() < 0.5:
            word = self._syllables()
            if word not in RESERVED and word not in HELD_NOUNS:
                return word
        return self.rng.choice(NOUNS)

    def scalars(self, count: int) -> list[str]:
        """`count` different argument names; half of the held-out draws use held-out words."""
        return self.rng.sample(HELD_SCALARS if self._held_half() else SCALARS, count)

    def list_name(self) -> str:
        """An argument name for a list."""
        return self.rng.choice(HELD_LISTS if self._held_half() else LISTS)

    def constants(self) -> list[int]:
        """Three different constants from 2 to 29: multiples of four are held out."""
        return self.rng.sample([n for n in range(2, 30) if (n % 4 == 0) == self.held], 3)

    def _held_half(self) -> bool:
        return self.held and self.rng.random() < 0.5

    def _syllables(self) -> str:
        pairs = [self.rng.choice(_ONSETS) + self.rng.choice(_VOWELS) for _ in range(self.rng.randint(1, 2))]
        return "".join(pairs) + self.rng.choice(_CODAS)

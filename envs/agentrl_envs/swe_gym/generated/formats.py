"""The files that settings are kept in, and the code that reads them: INI, JSON, and a table (CSV).

A store is part → key → value. Every format puts a setting on one line, or (table) a part on one.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from configparser import ConfigParser
from dataclasses import dataclass
from typing import Any

Store = Mapping[str, Mapping[str, int | str]]


@dataclass(frozen=True, slots=True)
class Format:
    """`render` gives a store's lines, `parse` reads their text back with the standard library, as `reading` does.

    `reading` is Python text, with {path} and {function}: a function of (part, key). `faults`: the kinds of fault
    that the format can show.
    """

    suffix: str
    render: Callable[[Store], list[str]]
    parse: Callable[[str], dict[str, dict[str, Any]]]
    reading: str
    faults: tuple[str, ...]


def _render_ini(store: Store) -> list[str]:
    blocks = [[f"[{part}]", *(f"{key} = {value}" for key, value in keys.items())] for part, keys in store.items()]
    return [line for block in blocks for line in [*block, ""]][:-1]


def _parse_ini(text: str) -> dict[str, dict[str, Any]]:
    parser = ConfigParser()
    parser.read_string(text)
    return {part: {key: int(value) for key, value in parser[part].items()} for part in parser.sections()}


def _parse_csv(text: str) -> dict[str, dict[str, Any]]:
    rows = list(csv.DictReader(text.splitlines()))
    return {row["name"]: {key: int(value) for key, value in row.items() if key != "name"} for row in rows}


def _render_csv(store: Store) -> list[str]:
    header = ["name", *next(iter(store.values()))]
    return [",".join(header), *(",".join([part, *map(str, keys.values())]) for part, keys in store.items())]


FORMATS = (
    Format(
        "ini",
        _render_ini,
        _parse_ini,
        "from configparser import ConfigParser\n\nDATA = ConfigParser()\nDATA.read('{path}')\n\n\n"
        "def {function}(part, key):\n    return int(DATA[part][key])\n",
        ("value", "value", "key", "missing"),
    ),
    Format(
        "json",
        lambda store: json.dumps(store, indent=1).split("\n"),
        json.loads,
        "import json\n\nDATA = json.load(open('{path}'))\n\n\ndef {function}(part, key):\n    return DATA[part][key]\n",
        ("value", "value", "key", "missing", "type"),
    ),
    Format(
        "csv",
        _render_csv,
        _parse_csv,
        "import csv\n\nDATA = {{row['name']: row for row in csv.DictReader(open('{path}'))}}\n\n\n"
        "def {function}(part, key):\n    return int(DATA[part][key])\n",
        ("value", "value", "value", "part"),
    ),
)

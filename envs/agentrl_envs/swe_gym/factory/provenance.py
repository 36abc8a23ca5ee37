"""Where a task comes from: the repository's name, the version and the licence that its tree states."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_NAME_PART = re.compile(r"[A-Za-z0-9_.-]+")
_LICENCE_FILE = re.compile(r"(?:licen[cs]e|copying|unlicense)(?:[.-][a-z0-9.-]+)?", re.IGNORECASE)
_VERSION_FILES = re.compile(
    r"(?:pyproject\.toml|setup\.cfg|setup\.py|(?:src/)?[^/]+/(?:__init__|__version__|_version|version|about)\.py)"
)
_VERSION = re.compile(r"""^\s*(?:__version__|version)\s*[:=]\s*(?:str\s*=\s*)?["']?v?(\d+(?:\.\d+)?)""", re.MULTILINE)
_VERSION_TUPLE = re.compile(r"^\s*(?:__version__|VERSION|version_info)\s*=\s*\((\d+(?:\s*,\s*\d+)+)", re.MULTILINE)

# The first text found in a licence's beginning decides.
_LICENCES = (
    ("GNU AFFERO GENERAL PUBLIC LICENSE", "AGPL-3.0"),
    ("GNU LESSER GENERAL PUBLIC LICENSE", "LGPL"),
    ("GNU GENERAL PUBLIC LICENSE Version 3", "GPL-3.0"),
    ("GNU GENERAL PUBLIC LICENSE Version 2", "GPL-2.0"),
    ("Apache License Version 2.0", "Apache-2.0"),
    ("Mozilla Public License Version 2.0", "MPL-2.0"),
    ("Mozilla Public License, version 2.0", "MPL-2.0"),
    ("PYTHON SOFTWARE FOUNDATION LICENSE", "PSF-2.0"),
    ("This is free and unencumbered software released into the public domain", "Unlicense"),
    ("Permission is hereby granted, free of charge", "MIT"),
    ("Permission to use, copy, modify, and/or distribute this software for any purpose", "ISC"),
)
_BSD = "Redistribution and use in source and binary forms"
_BSD_3 = ("Neither the name", "may not be used to endorse or promote", "names of its contributors may")


def repository_name(given: str | None, *, origin: str, source: Path) -> str:
    """`owner/repo`: as given, else from the URL of its origin, else from the file's or folder's name.

    Empty where `given` is no such name.
    """
    if given is not None:
        parts = given.split("/")
        return given if len(parts) == 2 and all(map(_is_name, parts)) else ""
    parts = [part for part in re.split(r"[/:]", origin.removesuffix("/").removesuffix(".git")) if part]
    remote = "://" in origin or re.match(r"[\w.-]+@[\w.-]+:", origin) is not None
    if remote and len(parts) > 2 and all(map(_is_name, parts[-2:])):
        return "/".join(parts[-2:])
    stem = source.name.removesuffix(".bundle").removesuffix(".git")
    owner, _, repo = stem.rpartition("__")
    clean = [re.sub(r"[^A-Za-z0-9_.-]+", "-", part).strip(".-") for part in (owner or "local", repo)]
    return "/".join(part or "repository" for part in clean)


def _is_name(part: str) -> bool:
    return _NAME_PART.fullmatch(part) is not None and part.strip(".-") != ""


def is_licence_file(path: str) -> bool:
    """True for a file of a tree's top folder that states the licence."""
    return _LICENCE_FILE.fullmatch(path) is not None


def is_version_file(path: str) -> bool:
    """True for a file that may state the version."""
    return _VERSION_FILES.fullmatch(path) is not None


def licence(texts: Mapping[str, str]) -> str:
    """The SPDX name that the licence files' texts mean; `unknown` where none is known."""
    for _, text in sorted(texts.items()):
        flat = " ".join(text[:20_000].split())
        for words, name in _LICENCES:
            if words.lower() in flat[: 4000 if name.startswith(("GPL", "LGPL", "AGPL")) else None].lower():
                return name
        if _BSD.lower() in flat.lower():
            return "BSD-3-Clause" if any(words.lower() in flat.lower() for words in _BSD_3) else "BSD-2-Clause"
    return "unknown"


def version(texts: Mapping[str, str], *, tag: str) -> str:
    """The version that a tree states, else the last tag's, as SWE-Gym rows have it: `4.2` of 4.2.13. Empty where
    neither tells."""
    order = sorted(texts, key=lambda path: (path.count("/"), not path.endswith((".toml", ".cfg")), path))
    for path in order:
        if found := _VERSION.search(texts[path]):
            return found[1]
        if found := _VERSION_TUPLE.search(texts[path]):
            return ".".join(re.findall(r"\d+", found[1])[:2])
    found = re.search(r"\d+(?:\.\d+)?", tag)
    return found[0] if found else ""

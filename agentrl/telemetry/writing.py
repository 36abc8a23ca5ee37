"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from agentrl.errors import disk_full_is_typed


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path`, making its folder; a reader finds the old file or all of the new one.

    Raises `DiskFullError`, and then leaves the old file.
    """
    scratch = path.with_name(f".{path.name}.tmp")
    with disk_full_is_typed(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)

"""HTML documents that need nothing from outside and run no script but ours.

Trajectories hold what a policy and a sandbox wrote: hostile text. Three fences stand between it and the
reader's browser: text reaches the page as JSON whose `<`, `>` and `&` are escaped; the scripts put it in with
`textContent` alone; and the Content-Security-Policy names our scripts by hash (report) or by origin
(viewer), so that an injected one would not run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib import resources
from typing import Any

VIEWER_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; "
    "frame-ancestors 'none'"
)


@cache
def asset(name: str) -> str:
    """A script or style sheet of ours. `name` comes from our code, never from a request."""
    return (resources.files("agentrl.telemetry") / "assets" / name).read_text(encoding="utf-8")


def data_block(name: str, value: Any) -> str:
    """`value` as a JSON block that the scripts read by id. Raises ValueError on NaN."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    text = text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return f'<script type="application/json" id="{escape(name)}">{text}</script>'


def _head(title: str, extra: str) -> str:
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{extra}\n<title>{escape(title)}</title>\n"
        '<link rel="icon" href="data:,">\n'
    )


def self_contained(title: str, body: str, data: Mapping[str, Any], scripts: Sequence[str]) -> str:
    """A document with style, data and `scripts` (sources) inside. `body` is HTML that is already escaped."""
    hashes = " ".join(f"'sha256-{_digest(source)}'" for source in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = _head(title, f'<meta http-equiv="Content-Security-Policy" content="{policy}">')
    blocks = "\n".join(data_block(name, value) for name, value in data.items())
    code = "\n".join(f"<script>{source}</script>" for source in scripts)
    style = f"<style>{asset('style.css')}</style>"
    return f"{head}{style}\n</head>\n<body>\n{body}\n{blocks}\n{code}\n</body>\n</html>\n"


def served(title: str, body: str, data: Mapping[str, Any], scripts: Sequence[str]) -> str:
    """A document of the viewer: `scripts` are asset names, fetched from the same origin."""
    blocks = "\n".join(data_block(name, value) for name, value in data.items())
    code = "\n".join(f'<script src="/assets/{escape(name)}"></script>' for name in scripts)
    head = _head(title, '<link rel="stylesheet" href="/assets/style.css">')
    return f"{head}</head>\n<body>\n{body}\n{blocks}\n{code}\n</body>\n</html>\n"


def _digest(source: str) -> str:
    return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()

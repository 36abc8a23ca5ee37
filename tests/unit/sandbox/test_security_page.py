"""`docs/security.md` names tests and places: they exist, and no row of what is known to go wrong lacks one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "security.md"


@cache
def test_functions() -> dict[str, str]:
    """Name → docstring of every test function of the repository."""
    found: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name] = ast.get_docstring(node) or ""
    return found


test_functions.__test__ = False  # type: ignore[attr-defined]


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    assert len(named) > 20
    assert named - test_functions().keys() == set()


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`((?:agentrl|tests|benchmarks)/[\w/.]+)`", PAGE.read_text()))
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_escape_is_on_the_page() -> None:
    sources = [(ROOT / f"tests/integration/sandbox/test_{name}.py").read_text() for name in ("escapes", "isolation")]
    nodes = [node for source in sources for node in ast.parse(source).body]
    written = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    page = PAGE.read_text()
    assert [name for name in written if name.startswith("test_") and f"`{name}`" not in page] == []


@pytest.mark.parametrize("row", [f"k{number}" for number in range(40, 49)])
def test_every_known_failure_of_sandboxes_has_a_test(row: str) -> None:
    pattern = re.compile(rf"(?:\b|_){row}(?:\b|_)", re.IGNORECASE)
    assert [name for name, says in test_functions().items() if pattern.search(name) or pattern.search(says)]


def test_k48_no_setting_takes_a_credential() -> None:
    """So that a saved configuration has none to hide."""
    settings = re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE)
    assert len(settings) > 50
    words = re.compile(r"secret|password|credential|api_?key|access_?token|auth")
    assert [name for name in settings if words.search(name)] == []

"""What a path of a repository is to a task: test, source, or neither."""

from __future__ import annotations

import re

_TEST_FOLDERS = frozenset({"test", "tests"})
_TEST_MODULE = re.compile(r"(?:test_[^/]*|[^/]*_test|tests?)\.py")
# Beside Python these may change with a fix: words about it, and settings.
_HARMLESS = frozenset(
    {".md", ".rst", ".txt", ".cfg", ".toml", ".ini", ".yml", ".yaml", ".in", ".json", ".csv", ".cff", ".pyi", ".po", ""}
)
# Python that tests do not exercise as the product.
_NO_PRODUCT = frozenset({"setup.py", "conf.py", "conftest.py", "noxfile.py", "tasks.py", "fabfile.py", "__main__.py"})
_NO_PRODUCT_FOLDERS = frozenset(
    {"doc", "docs", "example", "examples", "benchmark", "benchmarks", "scripts", "tools", "misc", "vendor", "_vendor"}
)


def is_test(path: str) -> bool:
    """True for what judges: test modules, conftest.py, and whatever lies in a folder of tests."""
    *folders, name = path.split("/")
    return bool(_TEST_FOLDERS & set(folders)) or name == "conftest.py" or is_test_module(path)


def is_test_module(path: str) -> bool:
    """True for a file that pytest collects tests from by its name."""
    return _TEST_MODULE.fullmatch(path.rsplit("/", 1)[-1]) is not None


def is_source(path: str) -> bool:
    """True for Python that is no test."""
    return path.endswith(".py") and not is_test(path)


def is_product(path: str) -> bool:
    """True for Python that is worth breaking: no test, no documentation, no build script."""
    *folders, name = path.split("/")
    return is_source(path) and name not in _NO_PRODUCT and not _NO_PRODUCT_FOLDERS & set(folders)


def is_harmless(path: str) -> bool:
    """True for what may change beside Python without making the change one of another language."""
    name = path.rsplit("/", 1)[-1]
    dot = name.rfind(".")
    return (name[dot:].lower() if dot > 0 else "") in _HARMLESS


def is_utf8(path: str) -> bool:
    """False for a name that is no UTF-8 (it holds surrogates)."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True

"""JUnit XML, as pytest's `--junitxml` writes it, as statuses of tests by node id.

The file names no node ids. They are put together from `file`, where the writer gave it (xunit1, pytest's own legacy
family), or else from `classname`, whose dots may be folders, modules or classes: the ids that are asked for decide.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable

_LIMIT_BYTES = 32 * 1024 * 1024


def parse_junit(data: bytes, *, named: Iterable[str] = ()) -> dict[str, str] | None:
    """Node id → passed | failed | error | skipped | xfailed. `named`: ids that may occur. None where the file is no
    JUnit XML, is over 32 MiB, or declares entities (which nothing of ours writes)."""
    if len(data) > _LIMIT_BYTES or b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        return None
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError:
        return None
    if root.tag not in ("testsuites", "testsuite"):
        return None
    known = {_dotted(test): test for test in named}
    statuses: dict[str, str] = {}
    for case in root.iter("testcase"):
        test = _node_id(case, known)
        status = _status(case)
        if statuses.get(test, "passed") not in ("failed", "error"):  # a failed teardown is a second entry
            statuses[test] = status
    return statuses


def _status(case: ElementTree.Element) -> str:
    if case.find("error") is not None:
        return "error"
    if case.find("failure") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "xfailed" if "xfail" in (skipped.get("type") or "") else "skipped"


def _node_id(case: ElementTree.Element, known: dict[str, str]) -> str:
    owner, name = case.get("classname") or "", case.get("name") or ""
    dotted = f"{owner}.{name}" if owner else name
    if dotted in known:
        return known[dotted]
    file = case.get("file")
    if not name:  # a file that could not be collected
        return file or f"{owner.replace('.', '/')}.py"
    if file is None:
        file, classes = _guess(owner)
    else:
        module = file.removesuffix(".py").replace("/", ".").replace("\\", ".")
        classes = owner.removeprefix(module).strip(".").split(".") if owner.startswith(module) else []
    return "::".join([file.replace("\\", "/"), *[each for each in classes if each], name])


def _guess(owner: str) -> tuple[str, list[str]]:
    """(file, classes) of a dotted name: the module is the last part that looks like one of tests."""
    parts = owner.split(".")
    module = next(
        (at for at in range(len(parts), 0, -1) if parts[at - 1].startswith("test") or parts[at - 1].endswith("_test")),
        next((at for at in range(len(parts), 0, -1) if not parts[at - 1][:1].isupper()), len(parts)),
    )
    return "/".join(parts[:module]) + ".py", parts[module:]


def _dotted(test: str) -> str:
    """A node id as `classname.name`."""
    head, bracket, option = test.partition("[")
    file, *rest = head.split("::")
    return ".".join([file.removesuffix(".py").replace("/", "."), *rest]) + bracket + option

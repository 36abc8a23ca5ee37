"""Which tests reach which function: one run of the suite in a sandbox under `cover_plugin`."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from agentrl.wire import Sandbox
from agentrl_envs.swe_gym.grading import PYTEST_OPTIONS

_IMPORT, _MANY = -1, -2
_FOLDER = "/tmp/agentrl-cover"
_MAP_BYTES = 10 * 1024 * 1024


class _Map(msgspec.Struct, frozen=True):
    tests: list[str]
    functions: dict[str, dict[int, list[int]]]
    lines: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Reach:
    """The tests that call a function. `is_whole`: others may as well (it runs at import, or too many call it)."""

    tests: frozenset[str]
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Coverage:
    """`lines`: those that run in some test, by path."""

    tests: Sequence[str]
    functions: Mapping[str, Mapping[int, Sequence[int]]]
    lines: Mapping[str, frozenset[int]]

    def reach(self, path: str, first_line: int, last_line: int) -> Reach:
        """Tests that call the function of these lines, or one inside it."""
        numbers: set[int] = set()
        for line, tests in self.functions.get(path, {}).items():
            if first_line <= line <= last_line:
                numbers.update(tests)
        found = frozenset(self.tests[number] for number in numbers if 0 <= number < len(self.tests))
        return Reach(found, bool(numbers & {_IMPORT, _MANY}))


async def traced_run(
    sandbox: Sandbox, archive: bytes, *, sources: Iterable[str], files: Sequence[str], timeout_s: float
) -> Coverage | None:
    """Run test files under the plugin; None where that does not work with this repository's tests."""
    program = importlib.resources.files("agentrl_envs.swe_gym.factory").joinpath("cover_plugin.py").read_bytes()
    await sandbox.unpack(archive)
    told = json.dumps({"paths": sorted(sources), "import": _IMPORT, "many": _MANY}).encode()
    await sandbox.write_files({f"{_FOLDER}/agentrl_cover.py": program, f"{_FOLDER}/watch.json": told})
    await sandbox.run_tests(
        [*PYTEST_OPTIONS, "--continue-on-collection-errors", "-p", "agentrl_cover", *files],
        timeout_s=timeout_s,
        cwd=sandbox.workdir,
        env={"PYTHONPATH": _FOLDER, "COVER_FOLDER": _FOLDER},
    )
    data = await sandbox.read_file(f"{_FOLDER}/map.json", limit_bytes=_MAP_BYTES)
    if data is None or len(data) >= _MAP_BYTES:
        return None
    try:
        found = msgspec.json.decode(data, type=_Map)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return Coverage(found.tests, found.functions, {path: frozenset(lines) for path, lines in found.lines.items()})

"""What the families of generated tasks share: the problem's record, splits by content, and the hidden tests' frame.

Splits are disjoint by content: the SHA-256 of a repository's sources falls into one of sixteen buckets, each
split owns some of them, and generation goes on to the seed's next attempt until a repository falls into one
of its own.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping

import msgspec

from agentrl.errors import AgentRLError
from agentrl.trajectory import Split

# Short, and the same every time: no header, no summary, no seconds; a failure is one line with both values.
PYTEST_INI = "[pytest]\naddopts = -qq --tb=line -rN -p no:cacheprovider\nconsole_output_style = classic\n"
HIDDEN_TEST = "test_hidden.py"

_BUCKETS: Mapping[Split, range] = {
    Split.FRESH: range(4),
    Split.UNSEEN: range(4, 8),
    Split.TRAIN: range(8, 16),
}
_ATTEMPTS = 2000

# An endless loop in a candidate must be the candidate's failure, however busy the machine: a limit in CPU
# seconds.
_CPU_LIMIT = """import signal


def _out_of_time(*_):
    raise TimeoutError("the tests used more CPU time than they may")


signal.signal(signal.SIGPROF, _out_of_time)
signal.setitimer(signal.ITIMER_PROF, 1.0, 0.2)

"""

# `==` belongs to the candidate where it returns an object of its own: types are compared too, to the letter. The
# order of a dict is nobody's promise.
_SAME = """

def _same(got, want):
    if type(got) is not type(want):
        return False
    if type(want) in (list, tuple):
        return len(got) == len(want) and all(map(_same, got, want))
    if type(want) in (dict, set, frozenset):
        got, want = (list(v.items() if type(v) is dict else v) for v in (got, want))
        return len(got) == len(want) and all(any(_same(g, w) for g in got) for w in want)
    return got == want

"""


class GeneratedTask(msgspec.Struct, frozen=True, kw_only=True):
    """One generated problem.

    `files`: the repository as the agent sees it. `file`: path of the one that carries the fault; `solution`: that
    file, mended. `broken`: what the issue names, a function or a setting (`part.key`); `search`: the text to look
    for. `good` and `bad` are the lines around the fault, one for one (a good one may be several), `mutations` every
    wrong line that the family knows for them (line, text).
    `fail_to_pass` and `pass_to_pass` map the node id of a hidden test to what it asserts.
    """

    family: str
    files: dict[str, str]
    issue: str
    file: str
    broken: str
    search: str
    good: list[str]
    bad: list[str]
    mutations: list[tuple[int, str]]
    solution: str
    hidden_test: str
    fail_to_pass: dict[str, str]
    pass_to_pass: dict[str, str]
    content_hash: str


class Case(msgspec.Struct, frozen=True):
    """One call: its text, what it should give, and what the broken repository gives (text of a value or error)."""

    call: str
    expected: str
    got: str
    fails: bool

    @property
    def function(self) -> str:
        """The name of the function that is called."""
        return self.call.split("(")[0]


def draw(
    seed: int, split: Split, *, stream: str, attempt: Callable[[random.Random, Split], GeneratedTask | None]
) -> GeneratedTask:
    """The first attempt of (`stream`, `seed`) that gives a task."""
    for number in range(_ATTEMPTS):
        task = attempt(random.Random(f"{stream}{split.value}/{seed}/{number}"), split)
        if task is not None:
            return task
    raise AgentRLError(
        f"no task within {_ATTEMPTS} attempts",
        where=f"seed {seed} of split {split.value}",
        remedy="report this seed",
    )


def content_hash(sources: Mapping[str, str]) -> str:
    """SHA-256 (hex) of the sources' names and text: what makes two generated problems the same."""
    digest = hashlib.sha256()
    for name, text in sorted(sources.items()):
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()


def belongs(digest: str, split: Split) -> bool:
    """Whether `split` owns the repository of that `content_hash`."""
    return int(digest[:8], 16) % 16 in _BUCKETS[split]


def hidden_test(imports: Iterable[str], cases: Iterable[Case]) -> tuple[str, dict[str, str], dict[str, str]]:
    """The hidden test file, and its FAIL_TO_PASS and PASS_TO_PASS tests (node id → assertion)."""
    tests: list[str] = []
    failing: dict[str, str] = {}
    passing: dict[str, str] = {}
    for case in cases:
        name = f"test_{len(tests) + 1}_{case.function}"
        tests.append(f"def {name}():\n    assert _same({case.call}, {case.expected})\n")
        kind = failing if case.fails else passing
        kind[f"{HIDDEN_TEST}::{name}"] = f"{case.call} == {case.expected}"
    return _CPU_LIMIT + "\n".join(imports) + _SAME + "\n" + "\n".join(tests), failing, passing


def visible_test(module: str, case: Case) -> str:
    """The one test that the agent sees: it fails."""
    name = case.function
    return f"from {module} import {name}\n\ndef test_{name}():\n    assert {case.call} == {case.expected}\n"

"""Small repositories with one injected bug each, deterministic from an integer seed.

A repository has one to three modules of one to three functions, a `pytest.ini`, and one visible failing test.
Hidden tests (FAIL_TO_PASS and PASS_TO_PASS) call the broken function with other arguments and its neighbours
too. What a call gives is found by executing the generated source here: it is our own code, made of the
templates alone.

Splits are disjoint by content: the SHA-256 of a repository's modules falls into one of sixteen buckets, each
split owns some of them, and generation goes on to the seed's next attempt until a repository falls into one
of its own.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentrl.errors import AgentRLError
from agentrl.trajectory import Split
from agentrl_envs.swe_gym.generated.names import ACCUMULATORS, MAPPINGS, STRINGS, NameSource
from agentrl_envs.swe_gym.generated.templates import TEMPLATES, Arguments, Template

# Short, and the same every time: no header, no summary, no seconds; a failure is one line with both values.
PYTEST_INI = "[pytest]\naddopts = -qq --tb=line -rN -p no:cacheprovider\nconsole_output_style = classic\n"
HIDDEN_TEST = "test_hidden.py"

_BUCKETS: Mapping[Split, range] = {
    Split.FRESH: range(4),
    Split.UNSEEN: range(4, 8),
    Split.TRAIN: range(8, 16),
}
_ATTEMPTS = 2000
_DRAWS = 40
_MIN_FAILING, _MAX_FAILING, _MAX_PASSING, _MAX_NEIGHBOURS = 3, 6, 4, 4

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

    `files`: the repository as the agent sees it. `solution`: the broken module, mended. `good` and `bad` are
    the lines of the function that carries the bug, `mutations` every wrong line that its template knows
    (line, text).
    `fail_to_pass` and `pass_to_pass` map the node id of a hidden test to what it asserts.
    """

    files: dict[str, str]
    issue: str
    module: str
    function: str
    good: list[str]
    bad: list[str]
    mutations: list[tuple[int, str]]
    solution: str
    hidden_test: str
    fail_to_pass: dict[str, str]
    pass_to_pass: dict[str, str]
    content_hash: str


class _Function(msgspec.Struct, frozen=True):
    """A template with its names filled in: `lines` from `def` on, `mutations` as (line, wrong line)."""

    name: str
    template: Template
    lines: list[str]
    mutations: list[tuple[int, str]]

    @property
    def source(self) -> str:
        return "\n".join(self.lines)


class _Case(msgspec.Struct, frozen=True):
    """One call: its text, what it should give, and what the broken function gives (text of a value or error)."""

    call: str
    expected: str
    got: str
    fails: bool


def make_task(seed: int, split: Split) -> GeneratedTask:
    """The task of `seed` in `split`; the same seed gives other tasks in other splits."""
    for attempt in range(_ATTEMPTS):
        task = _attempt(random.Random(f"{split.value}/{seed}/{attempt}"), split)
        if task is not None:
            return task
    raise AgentRLError(
        f"no task within {_ATTEMPTS} attempts",
        where=f"seed {seed} of split {split.value}",
        remedy="report this seed",
    )


def content_hash(modules: Mapping[str, str]) -> str:
    """SHA-256 (hex) of the modules' names and text: what makes two generated problems the same."""
    digest = hashlib.sha256()
    for name, text in sorted(modules.items()):
        digest.update(f"{name}\0{text}\0".encode())
    return digest.hexdigest()


def _attempt(rng: random.Random, split: Split) -> GeneratedTask | None:
    """One draw; None where it repeats a name, belongs to another split, or its bug hardly shows."""
    names = NameSource(rng, held=split is Split.UNSEEN)
    repository = _repository(rng, names)
    if repository is None:
        return None
    module = rng.choice(sorted(repository))
    broken = rng.choice(repository[module])
    line, wrong = rng.choice(broken.mutations)
    bad = [*broken.lines[:line], wrong, *broken.lines[line + 1 :]]
    modules = {f"{name}.py": _module(functions) for name, functions in repository.items()}
    solution = modules[f"{module}.py"]
    modules[f"{module}.py"] = _module([(bad if f is broken else f.lines) for f in repository[module]])
    digest = content_hash(modules)
    if int(digest[:8], 16) % 16 not in _BUCKETS[split]:
        return None
    cases = _cases(rng, broken, "\n".join(bad))
    failing = [case for case in cases if case.fails]
    # equal but not the same (1 for 1.0): neither fails plainly nor passes
    passing = [case for case in cases if not case.fails and case.got == case.expected]
    if len(failing) < _MIN_FAILING:
        return None
    visible, *failing = failing[: _MAX_FAILING + 1]
    neighbours = _neighbour_cases(rng, repository, broken)
    hidden, ids = _hidden_test(repository, broken, [failing, [visible, *passing[:_MAX_PASSING]], neighbours])
    test = (
        f"from {module} import {broken.name}\n\ndef test_{broken.name}():\n"
        f"    assert {visible.call} == {visible.expected}\n"
    )
    fail_to_pass = {node: text for (kind, node), text in ids.items() if kind == "fail"}
    return GeneratedTask(
        files={**modules, f"test_{module}.py": test, "pytest.ini": PYTEST_INI},
        issue=_issue(rng, broken.name, visible),
        module=f"{module}.py",
        function=broken.name,
        good=broken.lines,
        bad=bad,
        mutations=broken.mutations,
        solution=solution,
        hidden_test=hidden,
        fail_to_pass=fail_to_pass,
        pass_to_pass={node: text for (_, node), text in ids.items() if node not in fail_to_pass},
        content_hash=digest,
    )


def _repository(rng: random.Random, names: NameSource) -> dict[str, list[_Function]] | None:
    """Modules of functions; None where a name came twice (a function's name is unique in the repository)."""
    modules = [names.word() for _ in range(rng.choice([1, 2, 2, 3]))]
    sizes = [1, 2, 2] if len(modules) > 1 else [2, 2, 3]
    repository = {name: [_function(rng, names) for _ in range(rng.choice(sizes))] for name in modules}
    functions = [function.name for group in repository.values() for function in group]
    if len(repository) != len(modules) or len(set(functions)) != len(functions):
        return None
    return repository


def _function(rng: random.Random, names: NameSource) -> _Function:
    template = rng.choice(TEMPLATES)
    a, b, c = names.scalars(3)
    k, k2, _ = names.constants()
    words = {"a": a, "b": b, "c": c, "k": k, "k2": k2, "xs": names.list_name()}
    words |= {"s": rng.choice(STRINGS), "d": rng.choice(MAPPINGS), "t": rng.choice(ACCUMULATORS)}
    name = f"{rng.choice(template.verbs)}_{names.word()}"
    if rng.random() < 0.2:
        name = f"{names.word()}_{name}"

    def head(signature: str) -> str:
        return f"def {name}({signature.format(**words)}):"

    doc = rng.choice(template.docs).format(**words)
    lines = [
        head(template.signature),
        f'    """{doc}"""',
        *("    " + text.format(**words) for text in template.body),
    ]
    wrong = [(index + 2, "    " + text.format(**words)) for index, text in template.mutations]
    wrong += [(0, head(signature)) for signature in template.wrong_signatures]
    return _Function(name, template, lines, [(index, text) for index, text in wrong if text != lines[index]])


def _module(functions: Sequence[_Function | list[str]]) -> str:
    blocks = [function.lines if isinstance(function, _Function) else function for function in functions]
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def _evaluate(source: str, name: str, calls: Sequence[Arguments]) -> list[tuple[bool, Any]]:
    """(raised, value or name of the error) of each call of function `name` in `source`."""
    namespace: dict[str, Any] = {}
    exec(source, namespace)  # noqa: S102 - made of the templates alone
    outcomes: list[tuple[bool, Any]] = []
    for arguments in calls:
        try:
            outcomes.append((False, namespace[name](*copy.deepcopy(arguments))))
        except Exception as error:  # whatever a mutation raises is what the issue reports
            outcomes.append((True, type(error).__name__))
    return outcomes


def _cases(rng: random.Random, function: _Function, broken: str, draws: int = _DRAWS) -> list[_Case]:
    """Different calls of `function`, each with what the good and the `broken` source give."""
    drawn = {repr(arguments): arguments for arguments in (function.template.arguments(rng) for _ in range(draws))}
    calls = list(drawn.values())
    cases = []
    for arguments, (raises, expected), (error, got) in zip(
        calls,
        _evaluate(function.source, function.name, calls),
        _evaluate(broken, function.name, calls),
        strict=True,
    ):
        if not raises:
            call = f"{function.name}({', '.join(map(repr, arguments))})"
            shown = got if error else repr(got)
            cases.append(_Case(call, repr(expected), shown, fails=error or got != expected))
    return cases


def _neighbour_cases(rng: random.Random, repository: Mapping[str, list[_Function]], broken: _Function) -> list[_Case]:
    """Two calls of each other function, a few in all: mending one function must not break another."""
    others = [function for group in repository.values() for function in group if function is not broken]
    cases = [case for other in others for case in _cases(rng, other, other.source, draws=2)]
    return cases[:_MAX_NEIGHBOURS]


def _hidden_test(
    repository: Mapping[str, list[_Function]], broken: _Function, groups: Sequence[Sequence[_Case]]
) -> tuple[str, dict[tuple[str, str], str]]:
    """The hidden test file, and (kind, node id) → assertion. The groups: failing, passing, and neighbours'
    calls.

    The first passing case is the visible one, which fails before the mend: it counts as FAIL_TO_PASS.
    """
    failing, passing, neighbours = groups
    used = {case.call.split("(")[0] for case in neighbours} | {broken.name}
    imports = [
        f"from {module} import {', '.join(sorted(f.name for f in functions if f.name in used))}"
        for module, functions in sorted(repository.items())
        if any(f.name in used for f in functions)
    ]
    tests: list[str] = []
    ids: dict[tuple[str, str], str] = {}
    for case in (*failing, *passing, *neighbours):
        name = f"test_{len(tests) + 1}_{case.call.split('(')[0]}"
        tests.append(f"def {name}():\n    assert _same({case.call}, {case.expected})\n")
        ids["fail" if case.fails else "pass", f"{HIDDEN_TEST}::{name}"] = f"{case.call} == {case.expected}"
    return _CPU_LIMIT + "\n".join(imports) + _SAME + "\n" + "\n".join(tests), ids


def _issue(rng: random.Random, name: str, case: _Case) -> str:
    return rng.choice(
        [
            f"`{case.call}` returns {case.got} but {case.expected} is expected.",
            f"Expected `{case.call}` to be {case.expected}, got {case.got}.",
            f"Bug in `{name}`: `{case.call}` gives {case.got}, not {case.expected}.",
        ]
    )

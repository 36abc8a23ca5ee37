"""Family `functions`: small repositories with a bug in one function each, deterministic from an integer seed.

A repository has one to three modules of one to three functions, a `pytest.ini`, and one visible failing test.
Hidden tests (FAIL_TO_PASS and PASS_TO_PASS) call the broken function with other arguments and its neighbours
too. What a call gives is found by executing the generated source here: it is our own code, made of the
templates alone.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentrl.trajectory import Split
from agentrl_envs.swe_gym.generated.names import ACCUMULATORS, MAPPINGS, STRINGS, NameSource
from agentrl_envs.swe_gym.generated.problem import (
    PYTEST_INI,
    Case,
    GeneratedTask,
    belongs,
    content_hash,
    draw,
    hidden_test,
    visible_test,
)
from agentrl_envs.swe_gym.generated.templates import TEMPLATES, Arguments, Template

_DRAWS = 40
_MIN_FAILING, _MAX_FAILING, _MAX_PASSING, _MAX_NEIGHBOURS = 3, 6, 4, 4


class _Function(msgspec.Struct, frozen=True):
    """A template with its names filled in: `lines` from `def` on, `mutations` as (line, wrong line)."""

    name: str
    template: Template
    lines: list[str]
    mutations: list[tuple[int, str]]

    @property
    def source(self) -> str:
        return "\n".join(self.lines)


def make_function_task(seed: int, split: Split) -> GeneratedTask:
    """The task of `seed` in `split`; the same seed gives other tasks in other splits."""
    return draw(seed, split, stream="", attempt=_attempt)


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
    if not belongs(digest, split):
        return None
    cases = _cases(rng, broken, "\n".join(bad))
    failing = [case for case in cases if case.fails]
    # equal but not the same (1 for 1.0): neither fails plainly nor passes
    passing = [case for case in cases if not case.fails and case.got == case.expected]
    if len(failing) < _MIN_FAILING:
        return None
    visible, *failing = failing[: _MAX_FAILING + 1]
    neighbours = _neighbour_cases(rng, repository, broken)
    # The visible case fails too, and is asked again.
    hidden, fail_to_pass, pass_to_pass = hidden_test(
        _imports(repository, broken, neighbours), [*failing, visible, *passing[:_MAX_PASSING], *neighbours]
    )
    return GeneratedTask(
        family="functions",
        files={**modules, f"test_{module}.py": visible_test(module, visible), "pytest.ini": PYTEST_INI},
        issue=_issue(rng, broken.name, visible),
        file=f"{module}.py",
        broken=broken.name,
        search=f"def {broken.name}",
        good=broken.lines,
        bad=bad,
        mutations=broken.mutations,
        solution=solution,
        hidden_test=hidden,
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
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


def _cases(rng: random.Random, function: _Function, broken: str, draws: int = _DRAWS) -> list[Case]:
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
            cases.append(Case(call, repr(expected), shown, fails=error or got != expected))
    return cases


def _neighbour_cases(rng: random.Random, repository: Mapping[str, list[_Function]], broken: _Function) -> list[Case]:
    """Two calls of each other function, a few in all: mending one function must not break another."""
    others = [function for group in repository.values() for function in group if function is not broken]
    cases = [case for other in others for case in _cases(rng, other, other.source, draws=2)]
    return cases[:_MAX_NEIGHBOURS]


def _imports(repository: Mapping[str, list[_Function]], broken: _Function, neighbours: Sequence[Case]) -> list[str]:
    """The import lines of everything that the hidden tests call."""
    used = {case.function for case in neighbours} | {broken.name}
    return [
        f"from {module} import {', '.join(sorted(f.name for f in functions if f.name in used))}"
        for module, functions in sorted(repository.items())
        if any(f.name in used for f in functions)
    ]


def _issue(rng: random.Random, name: str, case: Case) -> str:
    return rng.choice(
        [
            f"`{case.call}` returns {case.got} but {case.expected} is expected.",
            f"Expected `{case.call}` to be {case.expected}, got {case.got}.",
            f"Bug in `{name}`: `{case.call}` gives {case.got}, not {case.expected}.",
        ]
    )

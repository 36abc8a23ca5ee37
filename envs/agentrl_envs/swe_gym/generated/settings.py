"""Family `settings`: small repositories whose code is right and whose settings are wrong, deterministic from a seed.

A repository has one or two settings files (`formats.py`), each read by a module of its own name whose functions
work with its settings. In one file one setting is wrong, and the issue names it as `part.key`:

    value     another number                          type   a number in quotes
    key       its key is misspelt                     part   its part is misspelt
    missing   its line is not there

One visible test fails. Hidden tests read the file itself before any of the repository's code runs (code that
answers in the file's place does not pass), then call the module's functions, and ask for settings that must stay.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agentrl.trajectory import Split
from agentrl_envs.swe_gym.generated.formats import FORMATS, Format, Store
from agentrl_envs.swe_gym.generated.names import NameSource
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

_STORED = "stored"  # the hidden test's own reading of the file
_MAX_STAYING, _MAX_NEIGHBOURS, _MAX_MISPLACED = 3, 2, 3
_TWIN_CHANCE = 0.3
_MISSPELT = ("s", "_old", "x", "_2")
_USES: tuple[tuple[tuple[str, ...], str, Callable[[int, int], int]], ...] = (
    (("scale", "grow"), "n * {}", operator.mul),
    (("shift", "offset"), "n + {}", operator.add),
    (("gap", "distance"), "n - {}", operator.sub),
)


@dataclass(frozen=True, slots=True)
class _Unit:
    """A settings file and the module that reads it. `use` computes with setting `key` of a part: (name, kind)."""

    stem: str
    format: Format
    store: dict[str, dict[str, int | str]]
    key: str
    use: str
    kind: int

    @property
    def path(self) -> str:
        return f"{self.stem}.{self.format.suffix}"

    @property
    def read(self) -> str:
        return f"get_{self.stem}"

    @property
    def module(self) -> str:
        """The module's text."""
        value = _USES[self.kind][1].format(f"{self.read}(part, {self.key!r})")
        return f"{self.reading(self.read)}\n\ndef {self.use}(part, n):\n    return {value}\n"

    def reading(self, name: str) -> str:
        """Code that reads the file, and the function `name` that gives a setting of it."""
        return self.format.reading.format(path=self.path, function=name)

    def used(self, n: int, value: int) -> int:
        return _USES[self.kind][2](n, value)


def make_settings_task(seed: int, split: Split) -> GeneratedTask:
    """The task of `seed` in `split`; the same seed gives other tasks in other splits."""
    return draw(seed, split, stream="settings/", attempt=_attempt)


def _attempt(rng: random.Random, split: Split) -> GeneratedTask | None:
    """One draw; None where a name does not stand for one thing alone, or it belongs to another split."""
    names = NameSource(rng, held=split is Split.UNSEEN)
    units = [_unit(rng, names) for _ in range(rng.choice([1, 2, 2]))]
    unit = rng.choice(units)
    part, fault = rng.choice(sorted(unit.store)), rng.choice(unit.format.faults)
    broken = _break(rng, names, unit, part, fault)
    good, bad = unit.format.render(unit.store), unit.format.render(broken)
    sources = {each.path: _text(each.format.render(each.store)) for each in units} | {unit.path: _text(bad)}
    sources |= {f"{each.stem}.py": each.module for each in units}
    digest = content_hash(sources)
    if not belongs(digest, split):
        return None
    wanted, found = unit.store[part][unit.key], unit.format.parse(_text(bad)).get(part, {}).get(unit.key)
    visible = Case(
        f"{unit.read}({part!r}, {unit.key!r})", repr(wanted), "KeyError" if found is None else repr(found), True
    )
    files = {**sources, f"test_{unit.stem}.py": visible_test(unit.stem, visible), "pytest.ini": PYTEST_INI}
    edits = _wrong_edits(rng, names, unit, broken, part, bad)
    if len(edits) < 2 or not _plain(units, part, files):
        return None
    neighbours = [case for each in units if each is not unit for case in _staying(rng, each, each.store)]
    hidden, fail_to_pass, pass_to_pass = hidden_test(
        [unit.reading(_STORED), *(f"from {each.stem} import {each.read}, {each.use}" for each in units)],
        [*_failing(rng, unit, part), visible, *_staying(rng, unit, broken), *neighbours[:_MAX_NEIGHBOURS]],
    )
    return GeneratedTask(
        family="settings",
        files=files,
        issue=_issue(rng, f"{part}.{unit.key}", visible),
        file=unit.path,
        broken=f"{part}.{unit.key}",
        search=part,
        good=_aligned(good, bad),
        bad=bad,
        mutations=edits,
        solution=_text(good),
        hidden_test=hidden,
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        content_hash=digest,
    )


def _unit(rng: random.Random, names: NameSource) -> _Unit:
    stem, keys, kind = names.word(), names.scalars(rng.choice([2, 3])), rng.randrange(len(_USES))
    store: dict[str, dict[str, int | str]] = {
        names.word(): {key: names.constants()[0] for key in keys} for _ in range(rng.choice([2, 3]))
    }
    use = f"{rng.choice(_USES[kind][0])}_{stem}"
    return _Unit(stem, rng.choice(FORMATS), store, rng.choice(keys), use, kind)


def _break(
    rng: random.Random, names: NameSource, unit: _Unit, part: str, fault: str
) -> dict[str, dict[str, int | str]]:
    """The unit's store with the fault in it. What the store rightly holds may change too: see the comments."""
    store, key = unit.store, unit.key
    wanted = store[part][key]
    keys = dict(store[part])
    if fault == "value":
        keys[key] = wrong = next(number for number in names.constants() if number != wanted)
        if rng.random() < _TWIN_CHANCE:  # another part rightly holds the very line that is wrong here
            store[rng.choice([name for name in store if name != part] or [part])][key] = wrong
            store[part][key] = wanted
    elif fault == "type":
        keys[key] = str(wanted)
    elif fault == "missing":
        del keys[key]
        store[part] = {key: wanted, **keys}  # the line to be written comes right after the part's own
    elif fault == "key":
        misspelt = key + rng.choice(_MISSPELT)
        keys = {(misspelt if name == key else name): value for name, value in keys.items()}
    named = part + rng.choice(_MISSPELT) if fault == "part" else part
    return {(named if name == part else name): (keys if name == part else dict(store[name])) for name in store}


def _plain(units: Sequence[_Unit], part: str, files: Mapping[str, str]) -> bool:
    """Whether no name is told twice, and a search for `part` gives its own line and the visible test's alone."""
    told = [name for unit in units for name in (unit.stem, *unit.store)]
    hits = sum(part in line for text in files.values() for line in text.splitlines())
    return len(set(told)) == len(told) and hits == 2


def _failing(rng: random.Random, unit: _Unit, part: str) -> list[Case]:
    """What must hold once it is mended, beside the visible case: the file itself, and two calls that use it."""
    wanted = int(unit.store[part][unit.key])
    used = [(n, unit.used(n, wanted)) for n in rng.sample(range(2, 10), 2)]
    return [
        Case(f"{_STORED}({part!r}, {unit.key!r})", repr(wanted), "", True),
        *(Case(f"{unit.use}({part!r}, {n})", repr(value), "", True) for n, value in used),
    ]


def _staying(rng: random.Random, unit: _Unit, store: Store) -> list[Case]:
    """Settings that `store`, as it stands, holds rightly, and one call that uses such a one."""
    right = [
        (part, key, value)
        for part, keys in unit.store.items()
        for key, value in keys.items()
        if store.get(part, {}).get(key) == value
    ]
    chosen = rng.sample(right, min(_MAX_STAYING, len(right)))
    cases = [Case(f"{unit.read}({part!r}, {key!r})", repr(value), repr(value), False) for part, key, value in chosen]
    for part, key, value in right:
        if key == unit.key:
            n = rng.randint(2, 9)
            result = repr(unit.used(n, int(value)))
            return [Case(f"{unit.use}({part!r}, {n})", result, result, False), *cases]
    return cases


def _wrong_edits(
    rng: random.Random, names: NameSource, unit: _Unit, broken: Store, part: str, bad: Sequence[str]
) -> list[tuple[int, str]]:
    """Edits of one line that do not mend it: another wrong number, or the wanted one in another place."""
    wanted = unit.store[part][unit.key]
    places = [(name, key) for name, keys in broken.items() for key in keys if (name, key) != (part, unit.key)]
    wrong = [(name, key, wanted) for name, key in rng.sample(places, min(_MAX_MISPLACED, len(places)))]
    if unit.key in broken.get(part, {}):
        wrong += [(part, unit.key, number) for number in names.constants() if number != wanted]
    found = []
    for name, key, value in wrong:
        lines = unit.format.render({**broken, name: {**broken[name], key: value}})
        found += [(at, line) for at, (line, before) in enumerate(zip(lines, bad, strict=True)) if line != before]
    return found


def _aligned(good: Sequence[str], bad: Sequence[str]) -> list[str]:
    """`good` with as many entries as `bad`: a line that `bad` lacks is joined to the one before it."""
    if len(good) == len(bad):
        return list(good)
    at = next(at for at, (right, wrong) in enumerate(zip(good, bad, strict=False)) if right != wrong)
    return [*good[: at - 1], f"{good[at - 1]}\n{good[at]}", *good[at + 1 :]]


def _text(lines: Sequence[str]) -> str:
    return "\n".join(lines) + "\n"


def _issue(rng: random.Random, name: str, case: Case) -> str:
    return rng.choice(
        [
            f"Setting `{name}` gives {case.got} but {case.expected} is expected.",
            f"Expected `{name}` to be {case.expected}, got {case.got}.",
            f"Wrong setting `{name}`: {case.got}, not {case.expected}.",
        ]
    )

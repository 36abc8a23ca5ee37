"""Recipes of task images: what a repository's tests need beside the base image, pinned.

A recipe is one text file, `<owner>__<repo>-<version>.txt`, of pip requirements with exact pins, and headers among its
comments:

    # path: src                                          folder of the work tree that Python imports from
    # distribution: Flask==2.3.0                         what importlib.metadata says is installed there
    # entry-point: console_scripts flask = flask.cli:main
    # no-plugin: flaky                                   not loaded by pytest, for it exchanges what runs tests
    # sdist: docopt                                      built on this machine, because it is published as source only
    # unavailable: REASON                                there is no image, and why
    click==8.1.3 --hash=sha256:…
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from agentrl.errors import ConfigError

SHIPPED = Path(__file__).parent / "tasks"

_FILE_NAME = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
"""What Docker takes as a part of an image's name."""
_HEADER = re.compile(r"#\s*(path|distribution|entry-point|no-plugin|sdist|unavailable):\s*(.*?)\s*")
_DISTRIBUTION = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.+!_-]+)")
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.+!_-]+)((?:\s+--hash=sha256:[0-9a-f]{64})*)")
_ENTRY_POINT = re.compile(r"([\w.-]+)\s+([\w.\[\] -]*\S)\s*=\s*([\w.]+(?::[\w.]+)?)")


@dataclass(frozen=True, slots=True)
class Pin:
    """One requirement. `hashes`: of the files that may be installed; empty where the recipe gives none."""

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def line(self) -> str:
        """As pip reads it."""
        return " ".join([f"{self.name}=={self.version}", *(f"--hash=sha256:{each}" for each in self.hashes)])


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """`name` in `group` means `value` (`module:object`)."""

    group: str
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """A parsed recipe. `paths` are relative to the work tree; `sdists` and `no_plugins` are normalised names among
    the pins."""

    name: str
    text: str
    pins: tuple[Pin, ...] = ()
    paths: tuple[str, ...] = ()
    distribution: tuple[str, str] | None = None
    entry_points: tuple[EntryPoint, ...] = ()
    sdists: frozenset[str] = frozenset()
    no_plugins: frozenset[str] = frozenset()
    unavailable: str | None = None


def recipe_files(folder: Path | None = None) -> dict[str, Path]:
    """Recipe name → its file: the shipped ones and those of `folder`, which go before shipped ones of the same name.

    Raises ConfigError for a folder that is not there and for a name that no image can have.
    """
    found = {path.stem: path for path in SHIPPED.glob("*.txt")}
    if folder is not None:
        folder = folder.expanduser()
        if not folder.is_dir():
            raise ConfigError(
                f"there is no folder {folder}", where="sandbox.recipes", remedy="name a folder of recipe files (*.txt)"
            )
        found |= {path.stem: path for path in folder.glob("*.txt")}
    for name, path in found.items():
        if not _FILE_NAME.fullmatch(name) or name == "base":
            raise ConfigError(
                f"no image can be called agentrl/{name}",
                where=str(path),
                remedy="name the recipe <owner>__<repo>-<version>.txt, in lower case",
            )
    return found


def load_recipe(path: Path) -> Recipe:
    """The recipe in `path`. Raises ConfigError naming the line that is none."""
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the recipe cannot be read: {error}", where=str(path)) from error
    return parse_recipe(path.stem, text, where=str(path))


def parse_recipe(name: str, text: str, *, where: str) -> Recipe:
    """The recipe that `text` is. Raises ConfigError naming the line that is none."""
    pins: list[Pin] = []
    headers: dict[str, list[str]] = {}
    for number, line in _logical_lines(text):
        if match := _HEADER.fullmatch(line):
            headers.setdefault(match[1], []).append(match[2])
        elif line and not line.startswith("#"):
            pins.append(_pin(line, where=f"{where}, line {number}"))
    single = {key: values[-1] for key, values in headers.items()}
    recipe = Recipe(
        name=name,
        text=text,
        pins=tuple(pins),
        paths=tuple(_path(each, where) for each in headers.get("path", [])),
        distribution=_distribution(single["distribution"], where) if "distribution" in single else None,
        entry_points=tuple(_entry_point(each, where) for each in headers.get("entry-point", [])),
        sdists=_names(headers.get("sdist", [])),
        no_plugins=_names(headers.get("no-plugin", [])),
        unavailable=single.get("unavailable"),
    )
    _check(recipe, where)
    return recipe


def _names(lines: list[str]) -> frozenset[str]:
    return frozenset(normalised(name) for line in lines for name in line.split())


def normalised(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Line number and stripped text, continued lines (`\\` at the end) joined."""
    lines: list[tuple[int, str]] = []
    continued = False
    for number, line in enumerate(text.splitlines(), 1):
        ends_open = line.rstrip().endswith("\\")
        part = line.strip().removesuffix("\\").strip()
        if continued:
            first, before = lines.pop()
            lines.append((first, f"{before} {part}"))
        else:
            lines.append((number, part))
        continued = ends_open
    return lines


def _pin(line: str, *, where: str) -> Pin:
    match = _PIN.fullmatch(line.partition(" #")[0].strip())
    if match is None:
        raise ConfigError(
            f"{line[:80]!r} is no exact pin", where=where, remedy="write NAME==VERSION [--hash=sha256:HEX]… in a line"
        )
    return Pin(match[1], match[2], tuple(re.findall(r"sha256:([0-9a-f]{64})", match[3])))


def _path(text: str, where: str) -> str:
    path = PurePosixPath(text)
    if not re.fullmatch(r"[\w./-]+", text) or path.is_absolute() or ".." in path.parts:
        raise ConfigError(f"{text!r} is no folder of the work tree", where=where, remedy="write `# path: src`")
    return str(path)


def _distribution(text: str, where: str) -> tuple[str, str]:
    match = _DISTRIBUTION.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is no distribution", where=where, remedy="write `# distribution: NAME==VERSION`")
    return match[1], match[2]


def _entry_point(text: str, where: str) -> EntryPoint:
    match = _ENTRY_POINT.fullmatch(text)
    if match is None:
        remedy = "write `# entry-point: GROUP NAME = MODULE:OBJECT`"
        raise ConfigError(f"{text!r} is no entry point", where=where, remedy=remedy)
    return EntryPoint(match[1], match[2], match[3])


def _check(recipe: Recipe, where: str) -> None:
    """What no single line shows."""
    names = [normalised(pin.name) for pin in recipe.pins]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"{', '.join(twice)} is pinned twice", where=where, remedy="leave one pin of it")
    if len({bool(pin.hashes) for pin in recipe.pins}) > 1:
        bare = next(pin.name for pin in recipe.pins if not pin.hashes)
        raise ConfigError(f"{bare} has no hash, others have", where=where, remedy="give all of them hashes, or none")
    for header, named in (("sdist", recipe.sdists), ("no-plugin", recipe.no_plugins)):
        if strange := ", ".join(sorted(named.difference(names))):
            raise ConfigError(f"{header} {strange} is not pinned", where=where, remedy="pin it, or drop the header")
    if recipe.entry_points and recipe.distribution is None:
        raise ConfigError("entry points need a distribution", where=where, remedy="add `# distribution: NAME==VERSION`")
    if recipe.distribution is not None and normalised(recipe.distribution[0]) in names:
        raise ConfigError(
            f"{recipe.distribution[0]} is pinned, and is also what the work tree holds",
            where=where,
            remedy="drop the pin: tests would import the installed copy",
        )
    if recipe.unavailable == "" or not (recipe.unavailable or recipe.pins or recipe.paths):
        raise ConfigError(
            "the recipe says nothing", where=where, remedy="pin requirements, or say why it is unavailable"
        )

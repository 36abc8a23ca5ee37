"""From defaults, a preset, a TOML file and dotted overrides to one resolved configuration.

Order, the later wins: model defaults < preset < `--config FILE.toml` < dotted overrides. There is one source of
defaults (`agentrl.config.models`); a preset is a TOML file beside this module that names only what it changes.
"""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tomlkit
from pydantic import BaseModel, ValidationError

from agentrl.config.correction import expand_preset
from agentrl.config.models import RunConfig, WarmStartConfig
from agentrl.errors import ConfigError

PRESETS = Path(__file__).parent / "presets"
Model = TypeVar("Model", bound=BaseModel)


def list_presets(kind: str = "train") -> tuple[str, ...]:
    """Names of the shipped presets: of `train` (eval's too) or of `sft`."""
    return tuple(sorted(p.stem for p in (PRESETS / kind).glob("*.toml")))


def read_toml(path: Path) -> dict[str, Any]:
    """The file's tables. Raises ConfigError naming file and line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"no configuration file {path}", where=str(path), remedy="check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not TOML: {error}", where=str(path), remedy="mend the file at that line") from error
    except OSError as error:
        raise ConfigError(f"cannot read: {error.strerror}", where=str(path), remedy="check the path") from error


def read_preset(name: str, kind: str = "train") -> dict[str, Any]:
    """The tables of a shipped preset. Raises ConfigError that lists the names."""
    if name not in list_presets(kind):
        raise ConfigError(f"no preset {name!r}", where="--preset", remedy=f"one of: {', '.join(list_presets(kind))}")
    return read_toml(PRESETS / kind / f"{name}.toml")


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid onto `base`, table by table."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """`--rollout.group-size 4 --sandbox.backend=docker` as nested tables; values stay TOML literals or strings.

    Raises ConfigError for a word that is no option or an option without its value.
    """
    out: dict[str, Any] = {}
    at = 0
    while at < len(words):
        word = words[at]
        if not word.startswith("--") or len(word) < 3:
            raise ConfigError(f"unexpected argument {word!r}", where="command line", remedy="options are --KEY VALUE")
        key, equals, value = word[2:].partition("=")
        at += 1
        if not equals:
            if at >= len(words) or words[at].startswith("--"):  # a value that begins so is written --KEY=VALUE
                raise ConfigError(f"option --{key} lacks its value", where="command line", remedy=f"--{key} VALUE")
            value = words[at]
            at += 1
        _set(out, key.replace("-", "_").split("."), _literal(value))
    return out


def leaf_keys(tables: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys of the values in nested tables."""
    found: list[str] = []
    for key, value in tables.items():
        found += leaf_keys(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [f"{prefix}{key}"]
    return found


def _set(tables: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        tables = tables.setdefault(part, {})
        if not isinstance(tables, dict):
            raise ConfigError(f"--{'.'.join(path)} goes below a value", where="command line")
    tables[path[-1]] = value


def _literal(text: str) -> Any:
    """A TOML value where `text` is one (2, 0.5, true, [1]), else the string itself."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _sections(kind: Any) -> type[BaseModel] | None:
    """The model class in an annotation such as `X` or `X | None`; None for a plain value."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        for part in typing.get_args(kind):
            if found := _sections(part):
                return found
    return None


def known_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of `model`, leaves only."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        section = _sections(field.annotation)
        keys += known_keys(section, f"{prefix}{name}.") if section else [f"{prefix}{name}"]
    return keys


def _explain(error: ValidationError, model: type[BaseModel], where: str) -> ConfigError:
    """Pydantic's findings in one screen, each with its dotted key and a remedy."""
    lines: list[str] = []
    remedies: list[str] = []
    known = known_keys(model)
    for finding in error.errors()[:8]:
        key = ".".join(str(part) for part in finding["loc"])
        if finding["type"] == "extra_forbidden":
            close = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
            close = close or [k for k in known if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]][:3]
            lines.append(f"unknown key `{key}`")
            remedies.append(f"did you mean {' or '.join(f'`{c}`' for c in close)}?" if close else f"remove `{key}`")
        else:
            message = finding["msg"].removeprefix("Value error, ")
            value = f" (got {finding['input']!r})" if key and not isinstance(finding["input"], dict) else ""
            lines.append(f"{f'`{key}`: ' if key else ''}{message}{value}")
    remedy = "; ".join(remedies) or "change the value named above; `--dry-run` shows the whole configuration"
    return ConfigError("\n  ".join(lines), where=where, remedy=remedy)


def build(model: type[Model], tables: Mapping[str, Any], *, where: str) -> Model:
    """Validated `model` from nested tables. Raises ConfigError naming each key and a remedy."""
    try:
        return model.model_validate(tables)
    except ValidationError as error:
        raise _explain(error, model, where) from error


def load_config(
    *, preset: str | None = None, file: Path | None = None, overrides: Sequence[str] = (), **settings: Any
) -> RunConfig:
    """The resolved configuration of a run; `settings` are top-level values of the command itself, the last to win."""
    return _load(RunConfig, "train", preset=preset, file=file, overrides=overrides, settings=settings)


def load_warm_start(
    *, preset: str | None = None, file: Path | None = None, overrides: Sequence[str] = ()
) -> WarmStartConfig:
    """The resolved configuration of `agentrl sft`."""
    return _load(WarmStartConfig, "sft", preset=preset, file=file, overrides=overrides, settings={})


def _load(
    model: type[Model],
    kind: str,
    *,
    preset: str | None,
    file: Path | None,
    overrides: Sequence[str],
    settings: Mapping[str, Any],
) -> Model:
    tables: dict[str, Any] = {}
    if preset is not None:
        tables = _lay(tables, read_preset(preset, kind))
    if file is not None:
        tables = _lay(tables, read_toml(file))
    tables = _lay(tables, parse_overrides(overrides))
    tables = merge(tables, {k: v for k, v in settings.items() if v is not None})
    sources = [f"preset {preset}" if preset else "", str(file) if file else "", "command line" if overrides else ""]
    return build(model, tables, where=" + ".join(filter(None, sources)) or "defaults")


def _lay(tables: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`merge`, but values laid over a correction preset's name change that preset, and a name replaces all of it."""
    train, new = tables.get("train"), over.get("train")
    if (
        isinstance(train, dict)
        and isinstance(train.get("correction"), str)
        and isinstance(new, dict)
        and isinstance(new.get("correction"), dict)
    ):
        try:
            tables = {**tables, "train": {**train, "correction": expand_preset(train["correction"])}}
        except ValueError as error:
            raise ConfigError(str(error), where="train.correction", remedy="name one of them") from error
    return merge(tables, over)


def dump_toml(config: BaseModel) -> str:
    """The configuration as TOML that `load_config` reads back to an equal one. Unset (None) values are left out."""

    def plain(value: Any) -> Any:
        if isinstance(value, BaseModel):
            fields = {k: getattr(value, k) for k in type(value).model_fields} | dict(value.model_extra or {})
            return {k: plain(v) for k, v in fields.items() if v is not None}
        if isinstance(value, tuple | list):
            return [plain(v) for v in value]
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items() if v is not None}
        return str(value) if isinstance(value, Path) else value

    tables = plain(config)
    ordered = {k: v for k, v in tables.items() if not isinstance(v, dict)}
    ordered |= {k: v for k, v in tables.items() if isinstance(v, dict)}
    return tomlkit.dumps(ordered)

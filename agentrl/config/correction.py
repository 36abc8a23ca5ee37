"""Rollout-correction settings and their presets. `agentrl.train.correction` computes what they say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Level = Literal["token", "sequence", "geometric"]


_UPPER = 2.0


class RejectionRule(BaseModel):
    """Keep tokens (or whole sequences) whose statistic lies in [lower, upper]."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    stat: Literal["ratio", "k1", "k2", "k3"]
    level: Literal["token", "sequence"] = "token"
    agg: Literal["sum", "mean", "max"] | None = Field(None, description="over a sequence's agent tokens")
    lower: float | None = None
    upper: float | None = None

    @model_validator(mode="after")
    def validate_effects(self) -> RejectionRule:
        if (self.level == "sequence") != (self.agg is not None):
            raise ValueError("`agg` belongs to level `sequence` and only to it")
        if self.lower is None and self.upper is None:
            raise ValueError("a rejection rule without `lower` and `upper` rejects nothing")
        return self


class CorrectionConfig(BaseModel):
    """Importance weights of π_train / π_rollout and rejection of what is too far off.

    `clamp` (TIS) keeps w in [lower, upper]; `mask` (IcePop, MIS) zeroes w outside; `none` leaves every weight 1.
    Settings laid over a preset (`train.correction.upper` in a file, on the command line) change that value alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = "custom"
    level: Level = "token"
    action: Literal["none", "clamp", "mask"] = "clamp"
    lower: float | None = Field(None, ge=0)
    upper: float | None = Field(None, gt=0, description="2 where an action needs it and nothing is said")
    reject: tuple[RejectionRule, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def bound_action(cls, data: Any) -> Any:
        """An action without `upper` bounds at 2; `none` has no bound to fall back on."""
        if isinstance(data, dict) and data.get("action") != "none" and data.get("upper") is None:
            return {**data, "upper": _UPPER}
        return data

    @model_validator(mode="after")
    def validate_effects(self) -> CorrectionConfig:
        if self.action == "none" and (self.lower is not None or self.upper is not None):
            raise ValueError(
                "train.correction.lower/upper have no effect with action `none`; remedy: remove them, or choose "
                "the preset `off` (train.correction = off)"
            )
        if self.lower is not None and self.upper is not None and self.lower > self.upper:
            raise ValueError("train.correction.lower exceeds upper")
        return self


_PRESETS: dict[str, CorrectionConfig] = {
    "off": CorrectionConfig(name="off", action="none"),
    "token-clamp-2": CorrectionConfig(name="token-clamp-2", level="token", action="clamp", upper=2.0),
    "token-mask-2": CorrectionConfig(name="token-mask-2", level="token", action="mask", lower=0.5, upper=2.0),
    "token-mask-3": CorrectionConfig(name="token-mask-3", level="token", action="mask", lower=1 / 3, upper=3.0),
}


def preset_names() -> tuple[str, ...]:
    """The presets' names, in the order they are listed."""
    return tuple(_PRESETS)


def correction_preset(name: str) -> CorrectionConfig:
    """The preset of that name. Raises ValueError that lists the names."""
    if name not in _PRESETS:
        raise ValueError(f"no correction preset {name!r}; remedy: one of {', '.join(_PRESETS)}")
    return _PRESETS[name]


def expand_preset(value: Any) -> dict[str, Any] | Any:
    """The tables of a correction given by its preset's name; anything else as it is. Raises ValueError."""
    return correction_preset(value).model_dump(mode="json", exclude_none=True) if isinstance(value, str) else value


def named(tables: Mapping[str, Any]) -> dict[str, Any]:
    """`tables` under the name `custom` where they say something else than the preset they are named after."""
    name = tables.get("name")
    changed = name in _PRESETS and dict(tables) != _PRESETS[name].model_dump(mode="json", exclude_none=True)
    return {**tables, "name": "custom"} if changed else dict(tables)

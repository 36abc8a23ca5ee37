"""The environment's own settings: `environment.<key>` of a run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentrl.errors import ConfigError
from agentrl_envs.swe_gym.latency import ToolLatency
from agentrl_envs.swe_gym.row_files import is_local

GENERATED = "generated"
_OF_ROWS = (
    *("hub_split", "bundles", "split_file", "fresh_fraction", "unseen_repos", "kinds", "prompt"),
    *("test_timeout_s", "single_test_timeout_s"),
)
_OF_LATENCY = ("tool_latency_p95_ratio", "slow_fraction", "slow_factor")


class SweGymOptions(BaseModel):
    """Unknown keys and keys without effect are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: str = Field(
        GENERATED, min_length=1, description="generated, a .jsonl or .parquet file, a folder of them, or a hub name"
    )
    families: tuple[Literal["functions", "settings"], ...] = Field(
        ("functions",), min_length=1, description="of generated tasks; tasks of several families alternate"
    )
    hub_split: str = Field("train", description="which split of a hub data set")
    bundles: Path | None = Field(None, description="folder of git bundles; None: the folder of each data set file")
    split_file: Path | None = Field(None, description="JSON with the ids of train, fresh and unseen")
    fresh_fraction: float = Field(0.2, ge=0, le=1, description="share of rows held out as fresh, by content hash")
    unseen_repos: tuple[str, ...] = Field((), description="repositories held out as unseen")
    kinds: tuple[str, ...] = Field(("good",), description="rows kept, by x_kind where they have it", min_length=1)
    image: str | None = Field(
        None,
        description="image of every task; None: as under Images; {id} is the instance id",
    )
    prompt: Literal["full", "short"] = Field(
        "full", description="full: working advice for a capable model; short: tools and issue, for a small window"
    )
    test_timeout_s: float = Field(
        180.0,
        ge=1,
        description="allowance of a test run where the row records no duration; "
        "rollout.grade_timeout_s bounds the whole grading",
    )
    single_test_timeout_s: float = Field(
        30.0,
        ge=1,
        description="a single test that takes longer fails, and the run goes on; "
        "at most a quarter of the run's allowance",
    )
    tool_latency_median_s: float = Field(
        0.0,
        ge=0,
        description="median of the seconds added to each tool call that the sandbox carries out for a training task, "
        "as a slow service would: lognormal, the same for the same task, rollout and call; 0: none",
    )
    tool_latency_p95_ratio: float = Field(4.0, gt=1, description="the latency's 95th percentile, in medians")
    slow_fraction: float = Field(0.0, ge=0, le=1, description="share of the tasks whose latency is longer")
    slow_factor: float = Field(8.0, ge=1, description="how many times as long theirs is")

    @property
    def latency(self) -> ToolLatency:
        return ToolLatency(
            median_s=self.tool_latency_median_s,
            p95_ratio=self.tool_latency_p95_ratio,
            slow_fraction=self.slow_fraction,
            slow_factor=self.slow_factor,
        )

    @model_validator(mode="after")
    def validate_effects(self) -> SweGymOptions:
        is_file = is_local(self.dataset)
        if self.dataset == GENERATED:
            idle, reason = sorted(self.model_fields_set & set(_OF_ROWS)), "with dataset `generated`"
        elif is_file:
            idle, reason = sorted(self.model_fields_set & {"hub_split", "families"}), "with a data set file"
        else:
            idle, reason = sorted(self.model_fields_set & {"families"}), "with rows"
        if self.split_file is not None:
            clash = sorted(self.model_fields_set & {"fresh_fraction", "unseen_repos"})
            idle, reason = (idle, reason) if idle else (clash, "beside split_file")
        if not idle and self.tool_latency_median_s == 0:
            idle, reason = sorted(self.model_fields_set & set(_OF_LATENCY)), "without tool_latency_median_s"
        if not idle and self.slow_fraction == 0:
            idle, reason = sorted(self.model_fields_set & {"slow_factor"}), "without slow_fraction"
        if idle:
            names = ", ".join(f"environment.{key}" for key in idle)
            raise ValueError(f"{names}: no effect {reason}; remedy: remove it")
        if len(set(self.families)) < len(self.families):
            raise ValueError("environment.families names one family twice; remedy: name each once")
        return self


def parse_options(options: Mapping[str, Any]) -> SweGymOptions:
    """Validated options; `ConfigError` names every bad key and what it may be."""
    try:
        return SweGymOptions.model_validate(dict(options))
    except ValidationError as error:
        problems = []
        for problem in error.errors():
            key = ".".join(["environment", *map(str, problem["loc"])])
            message = problem["msg"].removeprefix("Value error, ")
            problems.append(message if not problem["loc"] else f"{key}: {message}")
        raise ConfigError(
            "; ".join(problems),
            where="environment (swe-gym)",
            remedy=f"known keys: {', '.join(SweGymOptions.model_fields)}",
        ) from error

"""What `agentrl bench schedules` runs: four schedules × seeds, each a run folder of `agentrl train`.

All runs share preset, batch, slots and latency; a schedule sets how rollouts and training follow each other, how many
updates a delivery has, and who serves and trains on which of two devices.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config import RunConfig
from agentrl.config.load import leaf_keys, load_config, parse_overrides
from agentrl.errors import ConfigError, RunFolderError
from agentrl.run.folder import is_run_folder
from agentrl.telemetry.metrics import read_metrics

PRESET = "schedules"
BASELINE = "sync-1"
MEASURE = "solve/fresh"
SCHEDULES: Mapping[str, tuple[str, ...]] = {
    f"{schedule}-{updates}": (
        f"--rollout.schedule={schedule}",
        f"--train.updates-per-step={updates}",
        f"--placement.replicas={each}",
        f"--placement.ranks={each}",
    )
    for schedule, each in (("sync", 2), ("async", 1))
    for updates in (1, 2)
}
OWN_KEYS = (
    *("rollout.schedule", "rollout.max_staleness", "train.updates_per_step", "placement.replicas", "placement.ranks"),
    *("steps", "seed", "run_dir"),
)
"""Settings in which runs of one comparison differ, or that the command's own options give."""
_INSTEAD = {
    "steps": "--deliveries",
    "seed": "--seeds",
    "run_dir": "--work",
    "rollout.max_staleness": "--max-staleness",
}


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One run of the comparison. `words` are the options of `agentrl train` that give `config`."""

    schedule: str
    seed: int
    words: tuple[str, ...]
    config: RunConfig

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def folder(self) -> Path:
        return self.config.run_dir

    def command(self) -> list[str]:
        """The words after `agentrl` that start the run, or go on with it where it was begun."""
        place = ["--run-dir", str(self.folder), "--plain"]
        if is_run_folder(self.folder):
            return ["train", self.config.environment.name, *place, "--resume"]
        return ["train", self.config.environment.name, "--preset", PRESET, *place, *self.words]


def make_plan(
    *,
    work: Path,
    seeds: int,
    deliveries: int | None = None,
    max_staleness: int | None = None,
    overrides: Sequence[str] = (),
) -> list[BenchRun]:
    """The runs, seed by seed, so that an unfinished comparison has whole seeds. `overrides` hold for all of them.

    Raises `ConfigError` for an override of what makes the comparison.
    """
    _refuse_own(overrides)
    common = [*overrides, *([] if deliveries is None else [f"--steps={deliveries}"])]
    every = [(schedule, seed) for seed in range(seeds) for schedule in SCHEDULES]
    return [_planned(work, schedule, seed, common, max_staleness) for schedule, seed in every]


def choose(plan: Sequence[BenchRun], only: Sequence[str]) -> list[BenchRun]:
    """The runs that `only` names by schedule or by run; all where it names none. Raises `ConfigError` for a name that
    is neither."""
    names = {name for run in plan for name in (run.schedule, run.name)}
    if unknown := [name for name in only if name not in names]:
        raise ConfigError(
            f"no schedule or run {unknown[0]!r} in this comparison",
            where="--only",
            remedy=f"one of {', '.join(SCHEDULES)}, or a run such as {plan[0].name}",
        )
    return [run for run in plan if not only or run.schedule in only or run.name in only]


def _planned(work: Path, schedule: str, seed: int, common: Sequence[str], max_staleness: int | None) -> BenchRun:
    words = (*SCHEDULES[schedule], f"--seed={seed}", *common)
    if max_staleness is not None and schedule.startswith("async"):
        words = (*words, f"--rollout.max-staleness={max_staleness}")
    folder = work / f"{schedule}-seed{seed}"
    return BenchRun(schedule, seed, words, load_config(preset=PRESET, overrides=words, run_dir=str(folder)))


def _refuse_own(overrides: Sequence[str]) -> None:
    for key in leaf_keys(parse_overrides(overrides)):
        if key in OWN_KEYS:
            raise ConfigError(
                f"`{key}` is what makes the comparison",
                where="command line",
                remedy=f"give {_INSTEAD[key]}" if key in _INSTEAD else "leave it out; --only chooses among schedules",
            )


def is_finished(folder: Path, steps: int) -> bool:
    """True where all `steps` are done and both ends are evaluated."""
    rows = {row.step: row.values for row in read_metrics(folder / "metrics.jsonl")}
    return all(MEASURE in rows.get(step, {}) for step in (0, steps))


def steps_done(folder: Path) -> int:
    """Steps whose figures are written."""
    rows = read_metrics(folder / "metrics.jsonl")
    return rows[-1].step if rows else 0


def check_settings(run: BenchRun) -> None:
    """Raise `ConfigError` where the run's folder holds a run with other settings: the two cannot be compared."""
    if not is_run_folder(run.folder):
        return
    before = load_config(file=run.folder / "config.toml", run_dir=str(run.folder))
    changed = sorted(_differing(settings_of(before), settings_of(run.config)))
    if changed:
        raise ConfigError(
            "\n  ".join(f"`{key}` is {now!r}, the run has {then!r}" for key, then, now in changed),
            where=str(run.folder),
            remedy="give the options that it was begun with, or begin another comparison (--work DIR)",
        )


def clear_unborn(folder: Path) -> None:
    """Remove a folder in which a run ended before it had written its configuration: it can be neither started nor
    gone on with. Raises `RunFolderError` where something else lies there."""
    if is_run_folder(folder) or not folder.exists():
        return
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    if foreign := [path for path in found if path.parent.name != "logs"]:
        raise RunFolderError(
            f"{folder} holds files of something else than a run",
            where=str(foreign[0]),
            remedy="remove it, or name another folder (--work DIR)",
        )
    shutil.rmtree(folder)


def settings_of(config: RunConfig) -> dict[str, Any]:
    """A run's settings by dotted key, but for its folder."""
    return dict(_flat(config.model_dump(mode="json", exclude={"run_dir"}, exclude_none=True)))


def _flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(key, before, now) of each setting that is not the same in both."""
    for key in before.keys() | now.keys():
        if before.get(key) != now.get(key):
            yield key, before.get(key), now.get(key)

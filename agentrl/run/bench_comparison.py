"""Runs of several schedules → the comparison: means over seeds, ratios to the baseline paired by seed, three tables and
the summary. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentrl.run.bench_figures import CONCURRENCY, OUTSIDE_TAIL, PHASES, TOKENS, RunFigures
from agentrl.run.bench_plan import BASELINE, SCHEDULES
from agentrl.run.bench_statistics import Estimate, mean_of, paired_ratio

Value = Callable[[RunFigures], float | None]
_DIGITS = 6
_BEST = "async-2"


@dataclass(frozen=True, slots=True)
class Table:
    """A table as it is shown: `note` says how it was made."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Finished runs of one comparison; each (schedule, seed) at most once."""

    runs: Sequence[RunFigures]

    @property
    def schedules(self) -> tuple[str, ...]:
        """Those with a finished run, in the order of `SCHEDULES`."""
        there = {run.schedule for run in self.runs}
        return tuple(name for name in SCHEDULES if name in there)

    def of(self, schedule: str) -> list[RunFigures]:
        """A schedule's runs by seed."""
        return sorted((run for run in self.runs if run.schedule == schedule), key=lambda run: run.seed)

    def mean(self, schedule: str, value: Value) -> Estimate:
        """Over the seeds that have the value."""
        return mean_of([found for run in self.of(schedule) if (found := value(run)) is not None])

    def ratio(self, schedule: str, value: Value) -> Estimate:
        """To the baseline, over the seeds that have the value in both."""
        base = {run.seed: value(run) for run in self.of(BASELINE)}
        pairs = [(value(run), base.get(run.seed)) for run in self.of(schedule)]
        both = [(x, y) for x, y in pairs if x is not None and y is not None]
        return paired_ratio([x for x, _ in both], [y for _, y in both])


def figure(name: str) -> Value:
    """The figure of a public name; None where a run lacks it."""
    return lambda run: run.figures.get(name)


def gain(run: RunFigures) -> float:
    """Solve rate at the end − at the start."""
    return run.gain


def per_100_updates(run: RunFigures) -> float:
    """Gain by hundred optimizer steps."""
    return run.gain_per_100_updates


def per_device_hour(run: RunFigures) -> float:
    """Gain by device-hour."""
    return run.gain_per_device_hour


# --- the machine's view -------------------------------------------------------------------------------------------


def summary(comparison: Comparison) -> dict[str, Any]:
    """The three figures that the comparison is judged by, each with `…_interval` and, where something is to be said
    about it, `…_note`. None where they are not known."""
    found: dict[str, Any] = {}
    judged: tuple[tuple[str, Value], ...] = (
        ("async2_vs_sync1_tokens", figure(TOKENS)),
        ("async2_vs_sync1_concurrency", figure(CONCURRENCY)),
        ("async2_vs_sync1_reward_per_device_hour", per_device_hour),
    )
    for name, value in judged:
        ratio = comparison.ratio(_BEST, value)
        found[name] = rounded(ratio.value)
        found[f"{name}_interval"] = [rounded(ratio.low), rounded(ratio.high)]
        if ratio.note:
            found[f"{name}_note"] = ratio.note
    return found


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything that the tables show, and each run, as plain JSON: no NaN, no infinity, six digits."""
    schedules = {}
    for name in comparison.schedules:
        runs = comparison.of(name)
        measured = sorted({key for run in runs for key in run.figures})
        schedules[name] = {
            "seeds": [run.seed for run in runs],
            "figures": {key: rounded(comparison.mean(name, figure(key)).value) for key in measured},
            "phases_s": {key: rounded(mean.value) for key, mean in _phases(comparison, name).items()},
            "tokens_ratio": estimate_json(comparison.ratio(name, figure(TOKENS))),
            "concurrency_ratio": estimate_json(comparison.ratio(name, figure(CONCURRENCY))),
            "gain": estimate_json(comparison.mean(name, gain)),
            "gain_per_100_updates": estimate_json(comparison.mean(name, per_100_updates)),
            "gain_per_100_updates_ratio": estimate_json(comparison.ratio(name, per_100_updates)),
            "gain_per_device_hour": estimate_json(comparison.mean(name, per_device_hour)),
            "gain_per_device_hour_ratio": estimate_json(comparison.ratio(name, per_device_hour)),
        }
    return {"summary": summary(comparison), "schedules": schedules, "runs": [_run_json(run) for run in comparison.runs]}


def _run_json(run: RunFigures) -> dict[str, Any]:
    plain = asdict(run)
    del plain["curve"], plain["load"]  # of the plots, and too long for here
    return _all_rounded(plain | {"gain": run.gain, "gain_per_device_hour": run.gain_per_device_hour})


def _all_rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _all_rounded(each) for key, each in value.items()}
    return rounded(value) if isinstance(value, float) else value


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    """An estimate as JSON; `note` only where there is one."""
    plain = {key: value for key, value in asdict(estimate).items() if key != "note" or value}
    return _all_rounded(plain)


def rounded(value: float | None) -> float | None:
    """To six significant digits."""
    return None if value is None else float(f"{value:.{_DIGITS}g}")


# --- the reader's view --------------------------------------------------------------------------------------------


def tables(comparison: Comparison) -> list[Table]:
    """Throughput, reward per 100 updates, reward per device-hour, and where the time goes."""
    return [_throughput(comparison), _per_updates(comparison), _per_hours(comparison), _time(comparison)]


def _throughput(comparison: Comparison) -> Table:
    columns: tuple[tuple[str, str, str], ...] = (
        (TOKENS, "tokens / device / min", ",.0f"),
        (CONCURRENCY, "requests / replica", ".1f"),
        ("kv/used_fraction_mean", "KV used", ".1%"),
        ("idle/device_fraction", "devices idle", ".1%"),
        (OUTSIDE_TAIL, "… outside tails", ".1%"),
        ("staleness/mean", "staleness", ".2f"),
        ("staleness/max", "… largest", ".0f"),
        ("correction/affected_token_fraction", "tokens corrected", ".2%"),
    )
    ratios = {TOKENS, CONCURRENCY}
    rows = []
    for name in comparison.schedules:
        row = [name]
        for key, _, form in columns:
            row.append(_number(comparison.mean(name, figure(key)).value, form))
            if key in ratios:
                row.append(_against(comparison, name, figure(key)))
        rows.append(tuple(row))
    heads: list[str] = ["schedule"]
    for key, head, _ in columns:
        heads += [head, f"÷ {BASELINE}'s"] if key in ratios else [head]
    note = "Means over seeds, weighted by time within a run; ratios paired by seed, with 95 % intervals."
    return Table("Throughput", note, tuple(heads), tuple(rows))


def _per_updates(comparison: Comparison) -> Table:
    rows = tuple(
        (
            name,
            _number(comparison.mean(name, lambda run: run.solve_start).value, ".1%"),
            _number(comparison.mean(name, lambda run: run.solve_end).value, ".1%"),
            _points(comparison.mean(name, gain)),
            _number(comparison.mean(name, lambda run: run.updates).value, ".0f"),
            _points(comparison.mean(name, per_100_updates)),
            _against(comparison, name, per_100_updates),
        )
        for name in comparison.schedules
    )
    heads = ("schedule", "start", "end", "gain, points", "updates", "points / 100 updates", f"÷ {BASELINE}'s")
    return Table("Reward per 100 updates", _reward_note(comparison, per_100_updates), heads, rows)


def _per_hours(comparison: Comparison) -> Table:
    rows = tuple(
        (
            name,
            _number(comparison.mean(name, lambda run: run.device_hours).value, ".3f"),
            _points(comparison.mean(name, per_device_hour)),
            _against(comparison, name, per_device_hour),
            str(len(comparison.of(name))),
        )
        for name in comparison.schedules
    )
    heads = ("schedule", "device-hours", "points / device-hour", f"÷ {BASELINE}'s", "seeds")
    return Table("Reward per device-hour", _reward_note(comparison, per_device_hour), heads, rows)


def _reward_note(comparison: Comparison, value: Value) -> str:
    text = (
        "Reward is the solve rate on the same fresh tasks at temperature 1, end − start; the start is the mean of all "
        "runs' first evaluations, as they begin with one policy; 95 % intervals over seeds."
    )
    said = {name: comparison.ratio(name, value).note for name in comparison.schedules if name != BASELINE}
    return " ".join([text, *(f"{name}: {note}." for name, note in said.items() if note)])


def _phases(comparison: Comparison, schedule: str) -> dict[str, Estimate]:
    """Mean seconds per delivery of each phase that the schedule's runs measured."""
    runs = comparison.of(schedule)
    there = [phase for phase in ("step", *PHASES) if any(phase in run.phases for run in runs)]
    return {phase: mean_of([run.phases[phase] for run in runs if phase in run.phases]) for phase in there}


def _time(comparison: Comparison) -> Table:
    shares = (("idle/trainer_fraction", "trainer idle"), ("idle/inference_fraction", "servers idle"))
    rows = []
    for name in comparison.schedules:
        phases = _phases(comparison, name)
        seconds = [_number(phases[phase].value if phase in phases else None, ".2f") for phase in ("step", *PHASES)]
        idle = [_number(comparison.mean(name, figure(key)).value, ".1%") for key, _ in shares]
        rows.append((name, *seconds, *idle))
    heads = ("schedule", "step", *PHASES, *(head for _, head in shares))
    note = (
        "Seconds per delivery. Generate, tool, score and setup share out the time in which rollouts run by what "
        "they are busy with; in sync, train and deliver come after it, in async they lie within it. The tail is the "
        "part of a step in which slots stand empty for want of work."
    )
    return Table("Where the time goes", note, heads, tuple(rows))


def _points(estimate: Estimate) -> str:
    """A difference of solve rates in percentage points."""
    return _spread(estimate, ".1%").replace("%", "")


def _against(comparison: Comparison, schedule: str, value: Value) -> str:
    """The ratio to the baseline; 1 is the baseline's own."""
    return "1" if schedule == BASELINE else _spread(comparison.ratio(schedule, value), ".2f")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _spread(estimate: Estimate, form: str) -> str:
    """`value [low, high]`, without the brackets where there are no bounds."""
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return _number(estimate.value, form)
    return f"{estimate.value:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]"

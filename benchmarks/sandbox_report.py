"""Figures of `benchmarks/sandbox.py`: from measured rounds to levels, the summary, and a table to read."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

OURS_DOCKER = "agentrl-docker"
OURS_BUBBLEWRAP = "agentrl-bubblewrap"
DOCKER_EXEC = "docker-exec"
REX_SESSION = "swe-rex-session"
REX_EXECUTE = "swe-rex-execute"
FRESH_CONTAINER = "fresh-container"

PLAIN, SEARCH, TURNOVER = "plain", "search", "turnover"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One system under one load in one round. `count`: commands, or episodes in a turnover. CPU is in
    milliseconds per command or episode, None where it cannot be seen: of our end (`client`), of the sandboxes'
    processes (`inside`), of the whole machine with daemon and kernel (`machine`)."""

    work: str
    system: str
    sandboxes: int
    round: int
    count: int
    seconds: float
    p50_ms: float
    p95_ms: float
    client_cpu_ms: float
    inside_cpu_ms: float | None
    machine_cpu_ms: float
    lease_p50_ms: float | None = None

    @property
    def per_s(self) -> float:
        return self.count / self.seconds


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value at `fraction` of the sorted values (nearest rank); NaN where there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else math.nan


def levels(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Per work, system and number of sandboxes: the median over the rounds of each figure."""
    groups: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.work, row.system, row.sandboxes), []).append(row)
    figures = ("per_s", "p50_ms", "p95_ms", "client_cpu_ms", "inside_cpu_ms", "machine_cpu_ms", "lease_p50_ms")
    found = []
    for (work, system, sandboxes), members in groups.items():
        level: dict[str, Any] = {"work": work, "system": system, "sandboxes": sandboxes, "rounds": len(members)}
        level["count"] = sum(row.count for row in members)
        for name in figures:
            values = [value for row in members if (value := getattr(row, name)) is not None]
            if values:
                level[name] = round(statistics.median(values), 3)
        found.append(level)
    return found


def summarize(found: Iterable[Mapping[str, Any]], *, sandboxes: int) -> dict[str, Any]:
    """The ratios at `sandboxes`, ours on Docker; a ratio is None where one side was not measured.

    SWE-ReX's figure is the faster of its two ways to run a command.
    """
    rates = {(level["work"], level["system"]): level["per_s"] for level in found if level["sandboxes"] == sandboxes}

    def best(work: str, *systems: str) -> float | None:
        return max((rates[work, system] for system in systems if (work, system) in rates), default=None)

    def ratio(work: str, ours: str, *theirs: str) -> float | None:
        mine, other = best(work, ours), best(work, *theirs)
        return round(mine / other, 2) if mine is not None and other else None

    rex = (REX_SESSION, REX_EXECUTE)
    return {
        "sandboxes": sandboxes,
        "speedup_vs_docker_exec": ratio(PLAIN, OURS_DOCKER, DOCKER_EXEC),
        "speedup_vs_swerex": ratio(PLAIN, OURS_DOCKER, *rex),
        "turnover_vs_fresh": ratio(TURNOVER, OURS_DOCKER, FRESH_CONTAINER),
        "bubblewrap": {
            "speedup_vs_docker_exec": ratio(PLAIN, OURS_BUBBLEWRAP, DOCKER_EXEC),
            "speedup_vs_swerex": ratio(PLAIN, OURS_BUBBLEWRAP, *rex),
            "turnover_vs_fresh": ratio(TURNOVER, OURS_BUBBLEWRAP, FRESH_CONTAINER),
        },
        "search": {
            "speedup_vs_docker_exec": ratio(SEARCH, OURS_DOCKER, DOCKER_EXEC),
            "speedup_vs_swerex": ratio(SEARCH, OURS_DOCKER, *rex),
        },
    }


def row_json(row: Row) -> dict[str, Any]:
    """A round as it is written, numbers shortened."""
    return {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in {**asdict(row), "per_s": row.per_s}.items()
    }


def table(found: Iterable[Mapping[str, Any]]) -> str:
    """The levels as aligned lines."""
    lines = [
        f"{'work':9}{'system':20}{'n':>4}{'per s':>9}{'p50 ms':>10}{'p95 ms':>10}"
        f"{'CPU ms: client':>16}{'inside':>9}{'machine':>9}{'lease p50 ms':>14}"
    ]
    for level in found:
        inside, lease = level.get("inside_cpu_ms"), level.get("lease_p50_ms")
        lines.append(
            f"{level['work']:9}{level['system']:20}{level['sandboxes']:4}{level['per_s']:9.1f}{level['p50_ms']:10.2f}"
            f"{level['p95_ms']:10.2f}{level['client_cpu_ms']:16.2f}{'-' if inside is None else f'{inside:.2f}':>9}"
            f"{level['machine_cpu_ms']:9.2f}{'-' if lease is None else f'{lease:.2f}':>14}"
        )
    return "\n".join(lines)

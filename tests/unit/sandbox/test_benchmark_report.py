"""The figures of `benchmarks/sandbox.py`: medians over rounds, and ratios of the right systems at the right level."""

from __future__ import annotations

import pytest
import sandbox_report as report


def _row(system: str, per_s: float, *, work: str = report.PLAIN, sandboxes: int = 32, number: int = 1) -> report.Row:
    return report.Row(
        work=work,
        system=system,
        sandboxes=sandboxes,
        round=number,
        count=round(per_s * 10),
        seconds=10.0,
        p50_ms=1e3 / per_s,
        p95_ms=2e3 / per_s,
        client_cpu_ms=0.1,
        inside_cpu_ms=None,
        machine_cpu_ms=2.0,
    )


def test_levels_are_medians_over_rounds() -> None:
    rows = [_row(report.OURS_DOCKER, rate, number=i) for i, rate in enumerate((100, 900, 200))]
    rows.append(_row(report.OURS_DOCKER, 50, sandboxes=1))
    first, second = report.levels(rows)
    assert (first["sandboxes"], first["rounds"], first["per_s"], first["p50_ms"]) == (32, 3, 200, 5)
    assert first["count"] == 12_000
    assert "inside_cpu_ms" not in first  # it could not be seen
    assert (second["sandboxes"], second["rounds"], second["per_s"]) == (1, 1, 50)


def test_summary_takes_the_faster_way_of_swe_rex_and_the_asked_level() -> None:
    rows = [
        _row(report.OURS_DOCKER, 1000),
        _row(report.OURS_BUBBLEWRAP, 1200),
        _row(report.DOCKER_EXEC, 40),
        _row(report.REX_SESSION, 100),
        _row(report.REX_EXECUTE, 400),
        _row(report.OURS_DOCKER, 300, work=report.SEARCH),
        _row(report.DOCKER_EXEC, 30, work=report.SEARCH),
        _row(report.OURS_DOCKER, 20, work=report.TURNOVER),
        _row(report.FRESH_CONTAINER, 2.5, work=report.TURNOVER),
        _row(report.DOCKER_EXEC, 1, sandboxes=8),  # another level
        _row(report.REX_EXECUTE, 5000, sandboxes=1),
    ]
    found = report.summarize(report.levels(rows), sandboxes=32)
    assert found["sandboxes"] == 32
    assert found["speedup_vs_docker_exec"] == 25
    assert found["speedup_vs_swerex"] == 2.5
    assert found["turnover_vs_fresh"] == 8
    assert found["bubblewrap"] == {"speedup_vs_docker_exec": 30, "speedup_vs_swerex": 3, "turnover_vs_fresh": None}
    assert found["search"] == {"speedup_vs_docker_exec": 10, "speedup_vs_swerex": None}


@pytest.mark.parametrize(("fraction", "value"), [(0.0, 1), (0.5, 3), (0.95, 5), (1.0, 5)])
def test_quantile_is_one_of_the_values(fraction: float, value: float) -> None:
    assert report.quantile([5, 1, 4, 2, 3], fraction) == value


def test_table_has_a_line_per_level() -> None:
    lines = report.table(report.levels([_row(report.OURS_DOCKER, 100), _row(report.DOCKER_EXEC, 10)])).splitlines()
    assert [line.split()[:3] for line in lines[1:]] == [
        ["plain", report.OURS_DOCKER, "32"],
        ["plain", report.DOCKER_EXEC, "32"],
    ]

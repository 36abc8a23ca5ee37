"""`report.html`: one self-contained page for one or several runs. Opens from a disk, without a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from agentrl.errors import UsageError
from agentrl.telemetry.chart_parts import Chart
from agentrl.telemetry.charts import chart_sections
from agentrl.telemetry.live_state import alarm_text
from agentrl.telemetry.page import asset, self_contained
from agentrl.telemetry.payload import table_payload, trajectory_payload
from agentrl.telemetry.run_data import RunData, load_runs
from agentrl.telemetry.tokens import TokenDecoder
from agentrl.telemetry.trajectories import Summary, TrajectoryStore, latest_with_mates
from agentrl.telemetry.writing import write_whole
from agentrl.wire import EventKind

EMBEDDED_TRAJECTORIES = 60
EMBEDDED_BYTES = 12_000_000
_SHOWN_ALARMS = 8


def write_report(run_dirs: Sequence[Path], out: Path) -> None:
    """Write the report of `run_dirs` to `out`, whole or not at all.

    Missing metrics leave their plot out with a note. Raises `RunFolderError` for a folder that is no run's,
    `UsageError` without any folder, `DiskFullError`.
    """
    if not run_dirs:
        raise UsageError("no run folder to report on", remedy="agentrl report RUN [RUN …]")
    runs = load_runs(run_dirs)
    sections = chart_sections(runs)
    stores = [TrajectoryStore(run.run_dir) for run in runs]
    summaries = [store.summaries() for store in stores]
    data = {
        "charts": [chart for _, charts in sections for chart in charts],
        "table": [row for i, found in enumerate(summaries) for row in table_payload(found, run=i)],
        "runs": [run.name for run in runs],
        **_embedded(stores, summaries),
    }
    title = f"agentrl · {', '.join(run.name for run in runs)}"
    body = _body(runs, sections, [problem for store in stores for problem in store.problems])
    scripts = [plotly_source(), *map(asset, _SCRIPTS)]
    html = self_contained(title, body, data, scripts)
    write_whole(out, html)


def plotly_source() -> str:
    """plotly.js fit to stand inside a page: it must not end the element, nor change when line ends are
    normalised (the page names it by the hash of what the browser reads)."""
    return get_plotlyjs().replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script")


_SCRIPTS = ("page.js", "table.js", "disagreements.js", "trajectory.js", "charts.js", "report.js")


# --- trajectories within the page -----------------------------------------------------------------


def _embedded(stores: Sequence[TrajectoryStore], summaries: Sequence[Sequence[Summary]]) -> dict[str, Any]:
    """Payloads of each run's latest groups, within the run's share of `EMBEDDED_BYTES`."""
    pages: dict[str, Any] = {}
    vocabs: list[dict[int, str]] = []
    specials: list[list[int]] = []
    for index, (store, found) in enumerate(zip(stores, summaries, strict=True)):
        decoder = TokenDecoder.of_run(store.run_dir)
        vocab: dict[int, str] = {}
        special: set[int] = set()
        room = EMBEDDED_BYTES // len(stores)
        chosen = latest_with_mates(found, max(1, EMBEDDED_TRAJECTORIES // len(stores)))
        rows = store.load(summary.trajectory_id for summary in chosen)
        for summary in chosen:
            payload = trajectory_payload(rows[summary.trajectory_id], decoder, vocab, special)
            room -= len(json.dumps(payload))
            if room < 0:
                break
            pages[f"{index}/{summary.trajectory_id}"] = payload
        vocabs.append(vocab)
        specials.append(sorted(special))
    return {"pages": pages, "vocabs": vocabs, "specials": specials}


# --- the page's skeleton --------------------------------------------------------------------------


def _body(runs: Sequence[RunData], sections: Sequence[tuple[str, Sequence[Chart]]], problems: Sequence[str]) -> str:
    cards = "\n".join(_run_card(run, index) for index, run in enumerate(runs))
    plots = "\n".join(chart_section(title, charts) for title, charts in sections)
    warnings = "".join(f'<p class="note warn">{escape(problem)}</p>' for problem in problems)
    shown = str(runs[0].run_dir) if len(runs) == 1 else "RUN"
    heading = "Training report" if len(runs) == 1 else f"Training report: {len(runs)} runs"
    return f"""<header class="top"><div class="wrap bar">
<a class="brand" href="#">agentrl</a><span class="crumb" id="crumb">{escape(heading)}</span>
<span class="grow"></span>
<div class="seg" id="axis" role="group" aria-label="horizontal axis">
<button data-axis="step" class="on">steps</button><button data-axis="minutes">minutes</button></div>
<button class="ghost" id="theme" title="dark or light">◐</button></div></header>
<main class="wrap" id="overview">
<div class="cards">{cards}</div>
{plots}
<section><h2>Trajectories</h2>{warnings}
<p class="lead">One line per episode. Those with a link can be read token by token in this page; for all of
them run <code>agentrl view {escape(shown)}</code>.</p>
<div id="trajectories"></div></section>
</main>
<main class="wrap" id="detail" hidden></main>"""


def chart_section(title: str, charts: Sequence[Chart]) -> str:
    """HTML of a section: a figure for each plot, and a note for each that has nothing to draw."""
    plots = [chart for chart in charts if "missing" not in chart]
    notes = "".join(
        f"<li><b>{escape(chart['title'])}</b> {escape(chart['missing'])}</li>" for chart in charts if "missing" in chart
    )
    figures = "".join(
        f'<figure class="card{" wide" if chart["tall"] else ""}"><figcaption>'
        f"<h3>{escape(chart['title'])}</h3><p>{escape(chart['caption'])}</p></figcaption>"
        f'<div class="plot" id="chart-{escape(chart["id"])}"></div></figure>'
        for chart in plots
    )
    left_out = f'<ul class="note">{notes}</ul>' if notes else ""
    return f'<section><h2>{escape(title)}</h2><div class="plots">{figures}</div>{left_out}</section>'


def _run_card(run: RunData, index: int) -> str:
    rates = "".join(_rate(run, split) for split in ("fresh", "unseen", "train"))
    facts = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in _facts(run))
    name = f'<i class="dot c{index % 8}"></i>{escape(run.name)}{_status(run)}'
    return f"""<article class="card run"><h1>{name}</h1>
<div class="rates">{rates or '<p class="note">No solve rate was measured yet.</p>'}</div>
<dl class="facts">{facts}</dl>{_alarms(run)}{_versions(run)}</article>"""


def _rate(run: RunData, split: str) -> str:
    """Start → end of a split, with the end's interval; of noisy training steps the mean of three."""
    points = run.solve(split)
    if not points:
        return ""
    window = 3 if split == "train" and len(points) >= 6 else 1
    start = sum(p.value for p in points[:window]) / window
    end = sum(p.value for p in points[-window:]) / window
    last = points[-1].interval
    gain = f'<span class="{"up" if end >= start else "down"}">{(end - start) * 100:+.1f} pp</span>'
    spread = f"95 %: {last.low:.1%} to {last.high:.1%}" if window == 1 and last else "mean of 3 steps at either end"
    return (
        f'<div class="rate {split}"><h3>{split} tasks</h3><p class="big">{start:.1%}'
        f'<span class="arrow"> → </span>'
        f"<b>{end:.1%}</b></p><p>{gain} · {spread}</p></div>"
    )


def _status(run: RunData) -> str:
    finished, started = run.of_kind(EventKind.RUN_FINISHED), run.of_kind(EventKind.RUN_STARTED)
    if finished and (not started or finished[-1].time >= started[-1].time):
        outcome = str(finished[-1].data.get("outcome", "done"))
    else:
        outcome = "no end recorded"
    return f'<span class="chip {"ok" if outcome == "done" else "warn"}">{escape(outcome)}</span>'


def _facts(run: RunData) -> list[tuple[str, str]]:
    """What a reader must know to judge the run; settings that the configuration lacks are left out."""
    get = run.setting
    steps = f"{run.metrics[-1].step if run.metrics else 0} of {get('steps', '?')}"
    minutes = run.minutes_at(run.metrics[-1].time) if run.metrics else None
    correction = get("train.correction")
    preset = correction.get("name", "custom") if isinstance(correction, dict) else correction
    groups = f"{get('rollout.groups')} × {get('rollout.group_size')}" if get("rollout.groups") else None
    loss = f"{get('train.loss.name')}, {get('train.loss.mode', 'decoupled')}" if get("train.loss.name") else None
    bound = f", staleness ≤ {get('rollout.max_staleness')}" if get("rollout.schedule") == "async" else ""
    schedule = f"{get('rollout.schedule')}{bound}" if get("rollout.schedule") else None
    devices = run.metrics[-1].values.get("throughput/devices") if run.metrics else None
    facts = [
        ("steps", steps),
        ("minutes", None if minutes is None else f"{minutes:.1f}"),
        ("environment", get("environment.name")),
        ("policy", get("policy.model")),
        ("sandbox", get("sandbox.backend")),
        ("groups × rollouts", groups),
        ("schedule", schedule),
        ("devices", None if devices is None else f"{devices:g}"),
        ("temperature", get("rollout.temperature")),
        ("loss", loss),
        ("correction", preset),
        ("advantage", get("train.advantage.name")),
        *_teaching(run),
        ("learning rate", get("train.optimizer.learning_rate")),
        ("updates per delivery", get("train.updates_per_step")),
        ("seed", get("seed")),
    ]
    return [(name, str(value)) for name, value in facts if value is not None]


def _teaching(run: RunData) -> list[tuple[str, Any]]:
    """Teachers and divergence; nothing without a teacher."""
    get = run.setting
    teachers = get("distill.teachers") or []
    if not teachers:
        return []
    told = ", ".join(f"{teacher.get('name', 'teacher')}: {teacher.get('model')}" for teacher in teachers)
    return [
        ("teacher" if len(teachers) == 1 else "teachers", told),
        ("divergence", get("train.divergence.name")),
        ("reward weight", get("distill.reward_weight")),
    ]


def _alarms(run: RunData) -> str:
    # A resumed run may go through a step again: its last word counts.
    latest = {(e.data.get("step"), e.data.get("name")): e for e in run.of_kind(EventKind.ALARM)}
    alarms = list(latest.values())
    if not alarms:
        return '<p class="alarms ok">No alarms.</p>'
    shown = "".join(
        f"<li><b>step {escape(str(event.data.get('step', '?')))}</b> {escape(alarm_text(event.data))}</li>"
        for event in alarms[-_SHOWN_ALARMS:]
    )
    more = f" (the last {_SHOWN_ALARMS})" if len(alarms) > _SHOWN_ALARMS else ""
    word = "alarm" if len(alarms) == 1 else "alarms"
    summary = f"<summary>{len(alarms)} {word}{more}</summary>"
    return f'<details class="alarms" open>{summary}<ul>{shown}</ul></details>'


def _versions(run: RunData) -> str:
    started = run.of_kind(EventKind.RUN_STARTED)
    versions = started[-1].data.get("versions") if started else None
    if not isinstance(versions, dict) or not versions:
        return ""
    text = " · ".join(f"{escape(str(name))} {escape(str(value))}" for name, value in sorted(versions.items()))
    return f'<p class="versions">{text}</p>'

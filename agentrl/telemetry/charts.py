"""The report's plots, by section and in reading order. `chart_parts` says what a plot is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.telemetry.chart_parts import Chart, Line, interval_band, lines, make_chart, there_and_back, traced, x_of
from agentrl.telemetry.live_state import agent_share
from agentrl.telemetry.run_data import SPLITS, RunData, SolvePoint
from agentrl.telemetry.schedule_charts import concurrency, effective_tokens, learning_by_device_hours, throughput
from agentrl.telemetry.teacher_charts import is_taught, teacher_charts

_DASHES = {"train": "dot", "fresh": "solid", "unseen": "dash"}
_PHASES = ("generate", "tool", "score", "setup", "train", "deliver")
_STEP_MARK: dict[str, Any] = {"mode": "markers", "marker": {"color": "@ink", "size": 9, "symbol": "diamond"}}


def chart_sections(runs: Sequence[RunData]) -> list[tuple[str, list[Chart]]]:
    """(title, charts) of each section of the report, in reading order; the teacher's where there is one."""
    taught = [("Teacher", teacher_charts(runs))] if is_taught(runs) else []
    return [
        ("Learning", learning_charts(runs)),
        *taught,
        ("Speed", speed_charts(runs)),
        ("Staleness and correction", correction_charts(runs)),
    ]


def learning_charts(runs: Sequence[RunData]) -> list[Chart]:
    """What is learned."""
    return [
        learning(runs),
        learning_by_device_hours(runs),
        lines(
            runs,
            "episodes",
            "Episodes",
            "Share of episodes that end with a submit, and malformed tool calls per episode.",
            (Line("agent/submit_rate", "submit rate"), Line("agent/bad_calls", "bad calls")),
        ),
        lines(
            runs,
            "entropy",
            "Entropy",
            "Mean entropy of the policy on agent tokens, in nats.",
            (Line("entropy", "entropy"),),
        ),
        lines(
            runs,
            "update",
            "Gradient norm",
            "Global norm before clipping, mean over the step's updates.",
            (Line("grad_norm", "gradient norm"),),
        ),
    ]


def speed_charts(runs: Sequence[RunData]) -> list[Chart]:
    """How fast, and what stands idle."""
    return [
        concurrency(runs),
        throughput(runs),
        lines(
            runs,
            "tokens",
            "Tokens per device and minute",
            "Of the trajectories that a step consumed, each once, over the whole step: training and delivery included.",
            (
                Line("throughput/tokens_per_device_minute", "all"),
                Line("throughput/environment_tokens_per_device_minute", "environment's"),
                Line("throughput/agent_tokens_per_device_minute", "agent's"),
            ),
        )
        | {"y_format": ",.0f"},
        phases(runs),
        lines(
            runs,
            "idle",
            "Idle shares",
            "Share of a step's time without work: trainer, policy servers (no request), devices (neither), and devices "
            "outside the tail in which nothing is left to start.",
            (
                Line("idle/trainer_fraction", "trainer"),
                Line("idle/inference_fraction", "inference"),
                Line("idle/device_fraction", "devices"),
                Line("idle/outside_tail_fraction", "outside the tail"),
            ),
            percent=True,
        ),
        lines(
            runs,
            "kv",
            "KV room in use",
            "Share of the policy servers' KV cache that is in use, mean over servers and the step's time.",
            (Line("kv/used_fraction_mean", "in use"),),
            percent=True,
        ),
        agent_tokens(runs),
    ]


def correction_charts(runs: Sequence[RunData]) -> list[Chart]:
    """How old and how far off the tokens are, and how many count."""
    return [
        lines(
            runs,
            "staleness",
            "Staleness",
            "Versions behind at the batch's first update: over its tokens; of the oldest, in flight and in the queue.",
            (
                Line("staleness/mean", "mean"),
                Line("staleness/max", "max"),
                Line("staleness/in_flight", "in flight"),
                Line("staleness/in_queue", "in queue"),
            ),
        ),
        lines(
            runs,
            "fairness",
            "Slow tasks' share of training",
            "Share of the slowest quarter among trained groups ÷ their share among all that could have been trained.",
            (Line("fairness/slow_share_ratio", "trained share ÷ share"),),
        ),
        effective_tokens(runs),
        lines(
            runs,
            "updates",
            "Optimizer steps",
            "Taken for each delivery; those after a batch's first are off the policy by what the first has moved.",
            (Line("updates", "taken"), Line("off_policy_updates", "off policy"), Line("skipped_updates", "skipped")),
        ),
        lines(
            runs,
            "ess",
            "Effective sample size",
            "1 means every token counts alike; near 0, few tokens carry the update.",
            (Line("correction/ess", "ess"),),
            bounds=[0, 1.05],
        ),
        lines(
            runs,
            "masked",
            "Tokens touched by correction",
            "Shares of agent tokens (or sequences) whose weight was clamped or set to zero.",
            (
                Line("correction/affected_token_fraction", "affected"),
                Line("correction/clamped_fraction", "clamped"),
                Line("correction/masked_token_fraction", "masked tokens"),
                Line("correction/masked_sequence_fraction", "masked sequences"),
            ),
            percent=True,
        ),
        lines(
            runs,
            "kl",
            "Policy server against trainer",
            "kl = mean of log π_rollout − log π_train on agent tokens; k3_kl is its positive estimator.",
            (Line("correction/kl", "kl"), Line("correction/k3_kl", "k3_kl")),
        ),
    ]


def learning(runs: Sequence[RunData]) -> Chart:
    """Solve rates of the three splits with their 95 % intervals."""
    traces: list[dict[str, Any]] = []
    for index, run in enumerate(runs):
        for split in SPLITS:
            points = run.solve(split)
            if points:
                traces += _learning_traces(runs, index, split, points)
    return make_chart(
        "learning",
        "Learning curve",
        "Solve rate by split with 95 % intervals: an evaluation's own; for training "
        "rollouts Wilson's, which takes them as independent and so is too narrow where groups agree.",
        traces,
        "no solve/train, solve/fresh or solve/unseen yet",
        percent=True,
        tall=True,
        bounds=[0, 1],
    )


def _learning_traces(
    runs: Sequence[RunData], index: int, split: str, points: Sequence[SolvePoint]
) -> list[dict[str, Any]]:
    single = len(runs) == 1
    colour = f"@{split}" if single else f"@c{index % 8}"
    name = split if single else f"{runs[index].name} · {split}"
    x = {"step": [p.step for p in points], "minutes": [p.minutes for p in points]}
    sparse = split != "train"
    line = {
        "name": name,
        "x": x,
        "y": [p.value for p in points],
        "mode": "lines+markers" if sparse else "lines",
        "line": {
            "color": colour,
            "width": 2.5 if sparse else 1.5,
            "dash": "solid" if single else _DASHES[split],
        },
        "marker": {"color": colour, "size": 7},
        "legendgroup": name,
        "text": [_interval_text(p) for p in points],
        "hovertemplate": "%{y:.1%} %{text}<extra>" + "%{fullData.name}</extra>",
    }
    known = [p for p in points if p.interval is not None]
    if not known or not (single or sparse):
        # Bands of several runs' noisy training curves would only cover each other.
        return [line]
    band = interval_band(known, colour, 0.16 if sparse else 0.09, name)
    band["x"] = {
        "step": there_and_back([p.step for p in known]),
        "minutes": there_and_back([p.minutes for p in known]),
    }
    return [band, line]


def _interval_text(point: SolvePoint) -> str:
    return "" if point.interval is None else f"({point.interval.low:.1%} to {point.interval.high:.1%})"


def phases(runs: Sequence[RunData]) -> Chart:
    """Where a step's time goes: stacked by step for one run, means side by side for several; a mark is the whole."""
    shown = [(phase, f"time/{phase}_s", _bar(phase)) for phase in _PHASES]
    traces = []
    for name, metric, look in [*shown, ("whole step", "time/step_s", _STEP_MARK)]:
        found = [(run, run.series(metric)) for run in runs]
        if not any(series for _, series in found):
            continue
        trace = look | {"name": name, "hovertemplate": "%{y:.2f} s<extra>" + name + "</extra>"}
        if len(runs) == 1:
            series = found[0][1]
            trace |= {"x": x_of(runs[0], [row for row, _ in series]), "y": [value for _, value in series]}
        else:
            trace["x"] = [run.name for run, _ in found]
            trace["y"] = [sum(v for _, v in series) / len(series) if series else None for _, series in found]
        traces.append(trace)
    caption = (
        f"Seconds of each phase per step{'' if len(runs) == 1 else ', mean over steps'}. "
        "An async schedule trains and delivers beside the rollouts: its phases overlap and exceed the whole step."
    )
    made = make_chart("phases", "Where the time goes", caption, traces, "no time/…_s")
    return made | {"stacked": True, "y_title": "seconds", **({} if len(runs) == 1 else {"axis": "none"})}


def _bar(phase: str) -> dict[str, Any]:
    return {"type": "bar", "marker": {"color": f"@phase-{phase}"}}


def agent_tokens(runs: Sequence[RunData]) -> Chart:
    """Share of recorded tokens that the agent sampled: only these are trained."""
    return traced(
        runs,
        "agent_share",
        "Agent-token share",
        "Agent tokens over all recorded tokens. Only the agent's are trained; the rest is prompt and tool output.",
        (("agent share", lambda row: agent_share(row.values)),),
        "no tokens/agent and tokens/environment",
        percent=True,
    )

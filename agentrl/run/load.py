"""How busy everything is: looks at engine and policy servers, and the figures of the time between two `take`s.

A look holds until the next one, so that every figure is weighted by time and looks may come at any pace; `mark` adds
one where the trainer's work begins or ends, which makes its share exact between looks. Delivering what was trained is
part of that work.

A device *idles* while it neither serves (no request at its server) nor trains (or takes the new weights). Colocated,
server i and rank i share device i; disaggregated, each has a device of its own.

The *tail* of a round is the time in which slots stand empty because there is no work left to fill them: groups are
still running, no rollout waits for a slot, and fewer are active than at the round's peak.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

_KV_DIGITS = 4


@dataclass(frozen=True, slots=True)
class LoadSample:
    """One look, at monotonic second `now`.

    `active` trajectories are in their episode, at most `limit` of them; `waiting` ones are set up or being set up.
    `running` requests and `kv` used fraction have one entry per policy server; `preemptions` counts all servers' since
    they started. `in_flight` groups are unfinished, `queued` ones finished and not consumed.
    """

    now: float
    active: int
    waiting: int
    limit: int
    running: tuple[int, ...]
    kv: tuple[float, ...]
    preemptions: int
    training: bool
    in_flight: int
    queued: int


def event_data(sample: LoadSample) -> dict[str, Any]:
    """The `data` of an `EventKind.LOAD` event."""
    return {
        "active": sample.active,
        "waiting": sample.waiting,
        "limit": sample.limit,
        "running": list(sample.running),
        "kv": [round(fraction, _KV_DIGITS) for fraction in sample.kv],
        "training": sample.training,
        "in_flight": sample.in_flight,
        "queued": sample.queued,
    }


class LoadMeter:
    """Looks between two `take`s. `ranks` trainer processes train; `colocated` says whose devices they use."""

    def __init__(self, *, ranks: int = 1, colocated: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._ranks, self._colocated, self._clock = ranks, colocated, clock
        self._samples: list[LoadSample] = []

    def add(self, sample: LoadSample) -> None:
        """Take a look in; looks come in the order of their time."""
        self._samples.append(sample)

    def mark(self, *, training: bool) -> None:
        """Training begins or ends now; all else is as in the last look. Nothing before the first look."""
        if self._samples:
            self.add(replace(self._samples[-1], now=self._clock(), training=training))

    def take(self) -> dict[str, float]:
        """Figures since the last call by their public names, {} where nothing is known; a new interval begins."""
        now = self._clock()
        samples, spans = self._samples, list(self._spans(now))
        if not spans:
            return {}
        self._samples = [replace(samples[-1], now=now)]  # what was seen last holds on
        return {"kv/preemptions": float(samples[-1].preemptions - samples[0].preemptions), **self._figures(spans)}

    def _spans(self, now: float) -> Iterator[tuple[LoadSample, float]]:
        """(look, seconds it held)."""
        ends = [*(sample.now for sample in self._samples[1:]), now]
        for sample, end in zip(self._samples, ends, strict=False):
            if end > sample.now:
                yield sample, end - sample.now

    def _figures(self, spans: list[tuple[LoadSample, float]]) -> dict[str, float]:
        peak = max(sample.active for sample, _ in spans)
        tail = [(sample, seconds) for sample, seconds in spans if _is_tail(sample, peak)]
        body = [(sample, seconds) for sample, seconds in spans if not _is_tail(sample, peak)]
        figures = {
            "concurrency/limit": _mean(spans, lambda sample: sample.limit),
            "kv/used_fraction_mean": _mean(spans, lambda sample: sum(sample.kv) / max(1, len(sample.kv))),
            "idle/trainer_fraction": _mean(spans, lambda sample: not sample.training),
            "idle/inference_fraction": _mean(spans, _servers_idle),
            "idle/device_fraction": _mean(spans, self._devices_idle),
            "time/tail_s": sum(seconds for _, seconds in tail),
        }
        if body:
            figures["idle/outside_tail_fraction"] = _mean(body, self._devices_idle)
        return figures

    def _devices_idle(self, sample: LoadSample) -> float:
        """The share of devices that neither serve nor train."""
        serving = {i for i, requests in enumerate(sample.running) if requests > 0}
        first = 0 if self._colocated else len(sample.running)
        training = set(range(first, first + self._ranks)) if sample.training else set()
        devices = max(1, len(sample.running), first + self._ranks)
        return 1 - len(serving | training) / devices


def _is_tail(sample: LoadSample, peak: int) -> bool:
    return sample.in_flight > 0 and sample.waiting == 0 and sample.active < peak


def _servers_idle(sample: LoadSample) -> float:
    """The share of policy servers without a request."""
    return sum(requests == 0 for requests in sample.running) / max(1, len(sample.running))


def _mean(spans: list[tuple[LoadSample, float]], value: Callable[[LoadSample], float]) -> float:
    """Weighted by time."""
    return sum(value(sample) * seconds for sample, seconds in spans) / sum(seconds for _, seconds in spans)

"""A step's interval and its figures.

A step runs from the end of the one before, its delivery included, to the end of its own delivery, so that steps add
up to the run. Evaluations and checkpoints are left out where nothing ran beside them; where rollouts went on
meanwhile, their seconds belong to the step that takes what they made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from agentrl.rollout.fairness import FairnessMeter, group_seconds
from agentrl.rollout.filters import Verdict
from agentrl.rollout.metrics import (
    concurrency_metrics,
    correction_metrics,
    filter_metrics,
    rollout_metrics,
    throughput_metrics,
)
from agentrl.rollout.teaching import teaching_metrics
from agentrl.run.feed import Settled
from agentrl.run.services import Services
from agentrl.trajectory import Trained

_LOST = (Verdict.STALE, Verdict.FAILED)


class StepMeter:
    """Measures one step after another; made when the first begins."""

    def __init__(self, services: Services, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._services = services
        self._clock = clock
        self._fairness = FairnessMeter()
        self.restart()

    def restart(self) -> None:
        """Forget what went before: a step begins now."""
        services = self._services
        services.engine.take_usage()
        services.router.take_in_flight()
        services.load.take()
        if services.scorer is not None:
            services.scorer.take()
        self._began = self._clock()

    def read(
        self,
        settled: Settled,
        *,
        apart_s: float,
        trainer: Mapping[str, float],
        records: Mapping[str, Sequence[Trained] | None],
    ) -> dict[str, float]:
        """The step's figures beside `trainer`, those of training; the next step begins now.

        `apart_s` were spent on training and delivery: where devices are shared, nothing was generated meanwhile.
        """
        services, now = self._services, self._clock()
        seconds, self._began = now - self._began, now
        groups = settled.groups
        generating_s = seconds - apart_s if services.placement.colocated else seconds
        trained = [scored.group for scored in settled.trained]
        metrics = rollout_metrics(groups, wall_s=max(0.0, generating_s))
        metrics |= concurrency_metrics(services.engine.take_usage(), requests=services.router.take_in_flight())
        metrics |= services.load.take() | filter_metrics(settled.counts)
        metrics |= throughput_metrics(groups, seconds=seconds, devices=services.devices)
        metrics |= correction_metrics(trainer, trained, records) | services.sandbox_metrics()
        if services.scorer is not None:
            metrics |= teaching_metrics(groups) | services.scorer.take()
        return metrics | self._fair(settled) | {"time/step_s": seconds}

    def _fair(self, settled: Settled) -> dict[str, float]:
        for scored in settled.trained:
            self._fairness.trained(group_seconds(scored.group))
        for scored in settled.others:
            if scored.verdict in _LOST:
                self._fairness.lost(group_seconds(scored.group))
        for seconds in settled.given_up_s:
            self._fairness.lost(seconds)
        return self._fairness.metrics()

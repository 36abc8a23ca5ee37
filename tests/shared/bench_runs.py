"""Run folders of a comparison with figures that a test can work out by hand. Seconds of nothing to make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentrl.config.load import dump_toml
from agentrl.run.bench_plan import BenchRun
from agentrl.telemetry.metrics import EventWriter, MetricsWriter
from agentrl.wire import Event, EventKind

START = 1_700_000_000.0

Step = Mapping[str, float]


def write_run(run: BenchRun, steps: Sequence[Step], *, solve: tuple[float, float], evaluated: bool = True) -> None:
    """A folder as `agentrl train` leaves it: `steps` are the metrics of steps 1, 2 …; `solve` start and end."""
    run.folder.mkdir(parents=True)
    (run.folder / "config.toml").write_text(dump_toml(run.config))
    with MetricsWriter(run.folder / "metrics.jsonl") as metrics, EventWriter(run.folder / "events.jsonl") as events:
        now = START
        events.write(Event(kind=EventKind.RUN_STARTED, time=now, data={}))
        metrics.write(0, {"solve/fresh": solve[0]}, time=now)
        events.write(Event(kind=EventKind.STEP_FINISHED, time=now, data={"step": 0, "metrics": {}}))
        for number, values in enumerate(steps, 1):
            last = number == len(steps)
            for second in range(int(values["time/step_s"])):
                events.write(load(now + second, 10.0 * number))
            now += values["time/step_s"]
            events.write(Event(kind=EventKind.DELIVERY_FINISHED, time=now, data={"step": number}))
            events.write(load(now + 1, 999.0))  # an evaluation's
            now += 2
            metrics.write(number, {**values, **({"solve/fresh": solve[1]} if last and evaluated else {})}, time=now)
            events.write(Event(kind=EventKind.STEP_FINISHED, time=now, data={"step": number, "metrics": {}}))


def load(time: float, running: float) -> Event:
    """One look at two servers; the second has two requests more than the first."""
    return Event(kind=EventKind.LOAD, time=time, data={"running": [running - 1, running + 1], "active": 3})


def step(seconds: float, *, tokens: float, concurrency: float, **more: float) -> dict[str, float]:
    """One step's metrics; further ones with `__` for `/`."""
    found = {
        "time/step_s": seconds,
        "time/train_s": 1.0,
        "updates": 1.0,
        "throughput/devices": 2.0,
        "throughput/tokens_per_device_minute": tokens,
        "concurrency/per_replica_mean": concurrency,
    }
    return found | {name.replace("__", "/"): value for name, value in more.items()}

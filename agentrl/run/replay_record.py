"""A recorded trajectory turn by turn: what the agent said, whether its calls ran, what it read next."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.chat import END_OF_TURN, ChatFormat
from agentrl.errors import DatasetError, UsageError
from agentrl.run.debug import near
from agentrl.run.folder import CONFIG, check_run_folder
from agentrl.trajectory import FinishReason, Purpose, Segment, Span, SpanKind, Trajectory, read_trajectories

_LISTED = 8
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One turn of the agent.

    `ids` are its sampled tokens, `cut` says that a token limit ended them. `ran`: its calls were carried out. `read`
    are the environment's tokens after it, None where none are recorded by themselves; `reopened` is then the prompt
    of the next segment, where the template rewrote history and what was read stands in it.
    """

    turn: int
    segment: int
    ids: list[int]
    purpose: Purpose
    cut: bool
    ran: bool
    read: list[int] | None
    reopened: list[int] | None


# --- finding ------------------------------------------------------------------------------------------------------


def find_trajectory(name: str) -> tuple[Path, Trajectory]:
    """The run folder and the trajectory that RUN/TRAJECTORY means, the latter by its id or a beginning of it that
    only one has. Raises RunFolderError, UsageError, DatasetError."""
    run_name, slash, wanted = name.rstrip("/").rpartition("/")
    if not slash or not run_name or not wanted:
        raise UsageError(
            f"{name!r} names no trajectory",
            where="command line",
            remedy="give RUN/TRAJECTORY, e.g. runs/demo/train-000003-1",
        )
    run = Path(run_name).expanduser()
    if (Path(name).expanduser() / CONFIG).is_file():  # a run alone: its trajectories are listed
        run, wanted = Path(name).expanduser(), ""
    check_run_folder(run)
    files: dict[Path, list[str]] = {}
    unreadable: DatasetError | None = None
    for file in sorted((run / "trajectories").glob("*.parquet")):
        try:
            files[file] = _ids_in(file)
        except DatasetError as error:  # which matters where no other file has the trajectory
            unreadable = error
    known = list(dict.fromkeys(each for ids in files.values() for each in ids))
    found = [wanted] if wanted in known else [each for each in known if each.startswith(wanted)]
    if not found and unreadable is not None:
        raise unreadable
    if len(found) != 1:
        what = f"no trajectory {wanted!r}" if not found else f"{len(found)} trajectories begin with {wanted!r}"
        what = what if wanted else f"{name!r} is a run with {len(known)} trajectories, and names none of them"
        shown = ", ".join(found[:_LISTED]) + (", …" if len(found) > _LISTED else "")
        raise UsageError(
            what, where=str(run / "trajectories"), remedy=f"name one: {shown}" if found else near(wanted, known)
        )
    file = next(file for file, ids in files.items() if found[0] in ids)
    return run, next(t for t, _ in read_trajectories([file]) if t.trajectory_id == found[0])


def _ids_in(file: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        column: list[str] = pq.read_table(file, columns=["trajectory_id"]).column(0).to_pylist()
    except (pa.ArrowInvalid, OSError) as error:
        raise DatasetError(f"not a readable Parquet file: {error}", where=str(file)) from error
    return column


# --- turns --------------------------------------------------------------------------------------------------------


def recorded_turns(trajectory: Trajectory, *, window: int) -> list[RecordedTurn]:
    """The turns in order, over all segments. `window` is the most tokens that a segment could hold."""
    turns: list[RecordedTurn] = []
    for index, segment in enumerate(trajectory.segments):
        following = trajectory.segments[index + 1] if index + 1 < len(trajectory.segments) else None
        turns += _turns_of(trajectory, index, segment, following, window)
    return turns


def _turns_of(
    trajectory: Trajectory, index: int, segment: Segment, following: Segment | None, window: int
) -> Iterator[RecordedTurn]:
    for place, span in enumerate(segment.spans):
        if span.kind is not SpanKind.AGENT:
            continue
        after = segment.spans[place + 1] if place + 1 < len(segment.spans) else None
        read = _tokens(segment, after) if after is not None and after.kind is SpanKind.ENVIRONMENT else None
        reopened = _tokens(following, following.spans[0]) if after is None and following is not None else None
        finish = trajectory.turns[span.turn].finish_reason if span.turn < len(trajectory.turns) else FinishReason.STOP
        is_last = read is None and reopened is None
        yield RecordedTurn(
            turn=span.turn,
            segment=index,
            ids=_tokens(segment, span),
            purpose=span.purpose or Purpose.ACT,
            cut=finish is FinishReason.LENGTH,
            # An episode that ends while it samples, or with its window full, carries out nothing more.
            ran=not is_last
            or not (finish is FinishReason.ABORT or (finish is FinishReason.LENGTH and span.stop >= window)),
            read=read,
            reopened=reopened,
        )


def _tokens(segment: Segment, span: Span) -> list[int]:
    return [int(token) for token in segment.token_ids[span.start : span.stop]]


# --- comparing ----------------------------------------------------------------------------------------------------


def read_texts(chat: ChatFormat, turn: RecordedTurn, results: Sequence[str]) -> tuple[str, str] | None:
    """(what was read after the turn, what would be read now); None where no record of it is left.

    Equal tokens give equal texts; of others both are decoded, so that only what the policy could tell apart differs.
    """
    if turn.read is not None:
        now = chat.close_turn(turn.ids) + chat.observe(results)
        return ("", "") if now == turn.read else (chat.decode(turn.read), chat.decode(now))
    if turn.reopened is None:
        return None
    text = END_OF_TURN + chat.decode(chat.observe(results))
    parts = chat.decode(turn.reopened).split(END_OF_TURN)
    kept = parts[-text.count(END_OF_TURN) :]
    return END_OF_TURN + END_OF_TURN.join(kept), text


def only_numbers_differ(before: str, after: str) -> bool:
    """True for texts that are equal but for durations, addresses, counts."""
    return _NUMBERS.sub("#", before) == _NUMBERS.sub("#", after)


def call_line(call: Any, *, width: int = 72) -> str:
    """A call, or what is wrong with it, in one line."""
    if hasattr(call, "message"):
        return f"(malformed) {_one_line(call.message, width)}"
    shown = " ".join(_one_line(str(value), width) for value in call.arguments.values())
    return _one_line(f"{call.name} {shown}".strip(), width)


def _one_line(text: str, width: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 1]}…"

"""`agentrl sandbox verify`: a verdict for every task, in a file that a broken-off verification goes on with."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from agentrl.config import RunConfig
from agentrl.errors import AgentRLError, DatasetError, InfrastructureError, UsageError, disk_full_is_typed
from agentrl.rollout.driver import Limits
from agentrl.run.debug import GRADE_SETTINGS, SCRATCH, Choice, all_tasks, debug_pool, no_verdict_by_accident, resolve
from agentrl.run.debug_text import file_name, note, printable
from agentrl.run.environments import load_environment
from agentrl.run.grading import Grader
from agentrl.run.signals import INTERRUPTED, Interrupted, run_interruptible
from agentrl.run.verify_task import TaskVerdict, Verdict, verify_task
from agentrl.wire import Environment, Task

_LISTED = 50


def verify_command(
    choice: Choice, *, jobs: int | None, tasks: int | None, runs: int, out: Path | None, resume: bool
) -> int:
    """Verify an environment's tasks, `jobs` at once; 0 where all are valid, 1 where not all are.

    A line per task goes to `out` as it is known; with `resume` those that have a line are not verified again.
    Raises UsageError, InfrastructureError where nothing can be verified here.
    """
    config = resolve(choice, reads=GRADE_SETTINGS)
    environment = load_environment(config.environment, recipes=config.sandbox.recipes)
    chosen = all_tasks(environment, tasks)
    path = out or _default_out(config)
    with no_verdict_by_accident(), Ledger(path, resume=resume) as ledger:
        waiting = [task for task in chosen if task.id not in ledger.known]
        counted = [ledger.known[task.id] for task in chosen if task.id in ledger.known]
        faults: list[str] = []
        if counted:
            note(f"{len(counted)} of {len(chosen)} tasks have their verdict in {path}")
        interrupted = False
        try:
            run_interruptible(_verify(config, environment, waiting, jobs or _cores(), runs, ledger, counted, faults))
        except Interrupted:
            interrupted = True
        except AgentRLError:
            note(f"{len(counted)} verdicts are in {path}; the same command with --resume --out {path} goes on")
            raise
        _summarise(counted, len(chosen), path)
    if interrupted:
        note(f"interrupted; the same command with --resume --out {path} goes on")
        return INTERRUPTED
    if faults:
        raise InfrastructureError(
            f"a fault of the program with {len(faults)} tasks, which have no verdict",
            where=printable(", ".join(faults[:5])),
            remedy="AGENTRL_TRACEBACK=1 shows where; report it",
        )
    return int(any(each.verdict is not Verdict.VALID for each in counted))


def _default_out(config: RunConfig) -> Path:
    dataset = config.environment.options.get("dataset")
    name = file_name(Path(str(dataset)).stem) if dataset else "tasks"
    return SCRATCH / f"verify-{file_name(config.environment.name)}-{name}.jsonl"


def _cores() -> int:
    return len(os.sched_getaffinity(0))


async def _verify(
    config: RunConfig,
    environment: Environment,
    tasks: Sequence[Task],
    jobs: int,
    runs: int,
    ledger: Ledger,
    counted: list[TaskVerdict],
    faults: list[str],
) -> None:
    """Verify `tasks`; each verdict goes into the ledger and to `counted` at once. A task that brings the program down
    goes to `faults`, by its id: the others are verified all the same."""
    if not tasks:
        return
    total, waiting = len(counted) + len(tasks), iter(tasks)
    jobs = min(jobs, len(tasks))
    with Progress(total) as progress:
        async with debug_pool(config, size=jobs) as pool, asyncio.TaskGroup() as group:
            grader = Grader(environment, pool, Limits.from_config(config), progress.say)

            async def work() -> None:
                for task in waiting:
                    try:
                        verdict = await verify_task(grader, task, runs=runs)
                        ledger.add(verdict)
                    except AgentRLError:
                        raise
                    except Exception as error:
                        if os.environ.get("AGENTRL_TRACEBACK"):
                            traceback.print_exception(error)
                        progress.say(f"{task.id}: a fault of the program: {type(error).__name__}: {error}")
                        faults.append(task.id)
                    else:
                        counted.append(verdict)
                        progress.tell(verdict, counted)

            for _ in range(jobs):
                group.create_task(work())


def _summarise(counted: Sequence[TaskVerdict], total: int, path: Path) -> None:
    counts = Counter(each.verdict for each in counted)
    print(f"{len(counted)} of {total} tasks in {sum(each.seconds for each in counted):.0f} s of sandboxes")
    for verdict in Verdict:
        if counts[verdict]:
            print(f"  {verdict.value:17} {counts[verdict]:5}")
    bad = [each for each in counted if each.verdict is not Verdict.VALID]
    for each in bad[:_LISTED]:
        print(printable(" ".join(f"{each.verdict.value}: {each.task}: {each.reason}".split())))
    if len(bad) > _LISTED:
        print(f"… {len(bad) - _LISTED} more")
    print(f"verdicts: {path}")


class Progress:
    """One line a task where nobody watches; a bar on a terminal, with a line for whatever is not valid."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._bar: Callable[[int, str], None] | None = None
        self._close: Callable[[], None] = lambda: None
        self._print: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar

            bar = Bar(console=Console(stderr=True), transient=True)
            line = bar.add_task("verify", total=self._total)
            bar.start()
            self._bar = lambda done, text: bar.update(line, completed=done, description=text)
            self._print = lambda text: bar.console.print(text, markup=False, highlight=False)
            self._close = bar.stop
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def say(self, text: str) -> None:
        """One line for whoever watches."""
        self._print(f"agentrl: {printable(text)}")

    def tell(self, verdict: TaskVerdict, counted: Sequence[TaskVerdict]) -> None:
        """A task is done."""
        if self._bar is None or verdict.verdict is not Verdict.VALID:
            reason = f": {verdict.reason}" if verdict.reason else ""
            text = (
                f"{len(counted)}/{self._total} {verdict.task} {verdict.verdict.value} ({verdict.seconds:.1f} s){reason}"
            )
            self._print(printable(" ".join(text.split())))
        if self._bar is not None:
            counts = Counter(each.verdict.value for each in counted)
            self._bar(len(counted), ", ".join(f"{count} {name}" for name, count in counts.items()))


class Ledger:
    """The verdicts' file: a JSON line per task, written whole and flushed. `known` are those it had when opened.

    Raises UsageError where it exists and is not gone on with, is in use, cannot be written or is none of ours;
    DiskFullError.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self.known: dict[str, TaskVerdict] = {}
        try:
            if path.is_file() and path.stat().st_size and not resume:
                raise UsageError(
                    f"{path} is used", where="--out", remedy="go on with it (--resume), name another file, or remove it"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            # unbuffered, so that what a full disk refused is not tried again when the file is closed
            self._file = path.open("a+b", buffering=0)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}", where="--out") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except OSError as error:
            self._file.close()
            raise UsageError(f"another verification writes {path}", where="--out", remedy="wait for it") from error
        except UsageError:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _read(self) -> None:
        """Take the lines in; a last one that was cut while it was written is removed."""
        if not self.path.is_file():  # a device or pipe remembers nothing, and may have no end
            return
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            self._file.truncate(len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                verdict = msgspec.json.decode(line, type=TaskVerdict)
            except msgspec.MsgspecError as error:
                raise DatasetError(
                    f"no verdict: {error}", where=f"{self.path}, line {number}", remedy="remove the line or the file"
                ) from error
            self.known[verdict.task] = verdict

    def add(self, verdict: TaskVerdict) -> None:
        """Write a line. Raises DiskFullError."""
        line = memoryview(msgspec.json.encode(verdict) + b"\n")
        with disk_full_is_typed(self.path):
            while line:
                line = line[self._file.write(line) :]

"""`agentrl sandbox run` and `agentrl sandbox grade`: one command, one grade."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import UsageError
from agentrl.rollout.driver import Limits
from agentrl.run.debug import GRADE_SETTINGS, TASK_SETTINGS, Choice, debug_pool, no_verdict_by_accident, open_task
from agentrl.run.debug_bench import open_bench
from agentrl.run.debug_session import OUTPUT_LIMIT, bash_line, bash_word
from agentrl.run.debug_text import (
    PATCH_BYTES,
    check_log,
    exit_code_of,
    grade_lines,
    note,
    printable,
    show,
    write_grade_log,
)
from agentrl.run.grading import Grader
from agentrl.run.signals import INTERRUPTED, Interrupted, run_interruptible
from agentrl.wire import Grade


def run_command(choice: Choice, task_id: str, words: Sequence[str], *, timeout_s: float) -> int:
    """Run one command in a fresh, prepared sandbox of a task; its exit code (124: out of time, 130: Ctrl-C).

    One word is shell text, several are one command's arguments. Raises UsageError, InfrastructureError.
    """
    if not words or not words[0].strip():
        raise UsageError("no command is given", where="command line", remedy="agentrl sandbox run ID -- COMMAND…")
    config, environment, task = open_task(choice, task_id, reads=TASK_SETTINGS)
    with no_verdict_by_accident(), open_bench(config, environment, task, note=note) as bench:
        command = bash_line(words[0]) if len(words) == 1 else " ".join(map(bash_word, words))
        result = bench.run(command, timeout_s=timeout_s, output_limit=OUTPUT_LIMIT)
        show(result.output)
        return exit_code_of(result, timeout_s=timeout_s, interrupted=bench.was_interrupted)


def grade_command(choice: Choice, task_id: str, *, patch: str | None, reference: bool, log: Path | None) -> int:
    """Grade a patch (`-`: of stdin) or the reference patch: 0 resolved, 1 not. The whole log is kept.

    Raises UsageError, InfrastructureError.
    """
    if (patch is not None) == reference:
        raise UsageError(
            "what is to be graded?", where="agentrl sandbox grade", remedy="give either --patch FILE or --reference"
        )
    given = read_patch(patch) if patch is not None else None
    if log is not None:
        check_log(log)
    config, environment, task = open_task(choice, task_id, reads=GRADE_SETTINGS)
    text = environment.reference_patch(task) if given is None else given

    async def work() -> Grade:
        async with debug_pool(config, size=1, image=environment.image(task)) as pool:
            return await Grader(environment, pool, Limits.from_config(config), note).grade(task, text)

    with no_verdict_by_accident():
        try:
            grade = run_interruptible(work())
        except Interrupted:
            note("interrupted")
            return INTERRUPTED
        kept = write_grade_log(log, task, environment.image(task), text, grade)
        print(printable(f"{task.id}: ") + "\n".join(grade_lines(grade)), flush=True)
        print(f"log: {kept}", flush=True)
        return 0 if grade.resolved else 1


def read_patch(name: str) -> str:
    """The bytes of a patch file (`-`: stdin), never stripped; bytes that are no UTF-8 as surrogates.

    Raises UsageError, also for more than `PATCH_BYTES`.
    """
    try:
        if name != "-":
            with Path(name).expanduser().open("rb") as file:
                data = file.read(PATCH_BYTES + 1)
        else:
            data = sys.stdin.buffer.read(PATCH_BYTES + 1) if sys.stdin is not None else b""
    except OSError as error:
        raise UsageError(
            f"the patch cannot be read: {error.strerror}", where=name, remedy="name a file, or `-` for stdin"
        ) from error
    if len(data) > PATCH_BYTES:
        raise UsageError(f"the patch has more than {PATCH_BYTES >> 20} MiB", where=name, remedy="grade a smaller one")
    return data.decode("utf-8", "surrogateescape")

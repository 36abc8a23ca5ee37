"""Grading of real rows: the program that prepares a tree for its tests, the run of the named tests, the
verdict."""

from __future__ import annotations

import functools
import importlib.resources
import json
import shlex
from collections.abc import Mapping, Sequence

import msgspec

from agentrl.errors import DatasetError, GradingTimeoutError, SetupFailedError
from agentrl.wire import Grade, Sandbox
from agentrl_envs.swe_gym.rows import Row, patch_paths
from agentrl_envs.swe_gym.verdict import judge

_PROGRAM_TIMEOUT_S = 120.0
_OUTPUT_TAIL_CHARS = 3000
_TEST_FOLDERS = frozenset({"test", "tests", "testing"})
_BOOT = (
    "import json, sys; d = json.load(sys.stdin); n = {'__name__': 'grade_program'}; exec(d['program'], n); "
    "print(); print(json.dumps(n['main'](d['payload'])))"
)


class Preparation(msgspec.Struct, frozen=True, kw_only=True):
    """What `grade_program.main` answers. `applied` is None where the candidate's patch fits in no way."""

    applied: str | None
    attempts: list[str]
    undone: list[str]
    test_error: str


@functools.cache
def _program() -> str:
    return importlib.resources.files("agentrl_envs.swe_gym").joinpath("grade_program.py").read_text(encoding="utf-8")


async def run_grade_program(
    sandbox: Sandbox,
    *,
    where: str,
    patch: str,
    test_patch: str = "",
    test_paths: Sequence[str] = (),
    test_files: Mapping[str, str] | None = None,
) -> Preparation:
    """Apply `patch` and put tests and configuration in order, in the work tree of a fresh, prepared sandbox.

    Raises `SetupFailedError` where the program itself fails, `DatasetError` where the row's test patch does
    not apply.
    """
    payload = {
        "patch": patch,
        "test_patch": test_patch,
        "test_paths": list(test_paths),
        "test_files": test_files or {},
    }
    request = json.dumps({"program": _program(), "payload": payload}).encode()
    command = f"exec python3 -I -c {shlex.quote(_BOOT)}"
    result = await sandbox.run(command, timeout_s=_PROGRAM_TIMEOUT_S, cwd=sandbox.workdir, stdin=request)
    place = f"{where}, sandbox {sandbox.id}"
    if result.timed_out:
        raise GradingTimeoutError(f"applying the patch took over {_PROGRAM_TIMEOUT_S:.0f} s", where=place)
    if result.exit_code != 0:
        raise SetupFailedError(f"the tree could not be prepared for grading: {result.output[-800:]}", where=place)
    done = msgspec.json.decode(result.output.strip().rsplit("\n", 1)[-1], type=Preparation)
    if done.test_error:
        raise DatasetError(
            f"the test patch does not apply: {done.test_error.strip()}",
            where=f"{where}, field test_patch",
            remedy="check that base_commit, tree and test_patch belong together, or leave the row out",
        )
    return done


def grading_targets(row: Row) -> tuple[list[str], list[str]]:
    """(files that pytest runs, paths restored before the test patch) of a row.

    Restored are the files of the named tests and of the test patch, and the folders that hold nothing but
    tests: helpers there belong to what judges, not to what is judged. A folder in which the row's own fix
    changes anything else holds more than tests (`pkg/testing` may be a product) and is left alone.
    """
    files = sorted({test.split("::")[0] for test in (*row.fail_to_pass, *row.pass_to_pass)})
    touched = sorted({*files, *patch_paths(row.test_patch)})
    mended = patch_paths(row.patch) - set(touched)
    folders = {folder for path in touched if (folder := _test_folder(path))}
    folders -= {folder for folder in folders if any(path.startswith(f"{folder}/") for path in mended)}
    return files, sorted(folders | {path for path in touched if _test_folder(path) not in folders})


def _test_folder(path: str) -> str | None:
    """The innermost folder of tests that holds `path`; None where there is none."""
    parts = path.split("/")[:-1]
    for depth in range(len(parts), 0, -1):
        if parts[depth - 1] in _TEST_FOLDERS:
            return "/".join(parts[:depth])
    return None


async def grade_row(row: Row, sandbox: Sandbox, patch: str, *, timeout_s: float) -> Grade:
    """Grade `patch` in a fresh sandbox that holds the row's tree. `timeout_s` is the test session's own
    allowance."""
    files, restored = grading_targets(row)
    where = f"row {row.instance_id}"
    done = await run_grade_program(sandbox, where=where, patch=patch, test_patch=row.test_patch, test_paths=restored)
    if done.applied is None:
        return Grade(reward=0.0, resolved=False, log="\n".join(["the patch does not apply", *done.attempts]))
    arguments = ["-q", "--tb=short", "--color=no", "-p", "no:cacheprovider", *files]
    report = await sandbox.run_tests(arguments, timeout_s=timeout_s, canary=True, cwd=sandbox.workdir)
    if report.timed_out:
        raise GradingTimeoutError(
            f"the tests did not end within {timeout_s:.0f} s",
            where=f"{where}, sandbox {sandbox.id}",
            remedy="raise environment.test_timeout_s, or leave the row out",
        )
    verdict = judge(report, fail_to_pass=row.fail_to_pass, pass_to_pass=row.pass_to_pass)
    log = [f"patch applied by: {done.applied}"]
    log += [f"put back before the tests: {path}" for path in done.undone]
    log += verdict.log
    if not verdict.resolved:
        log += ["output of the tests, its end:", report.output[-_OUTPUT_TAIL_CHARS:]]
    return Grade(reward=float(verdict.resolved), resolved=verdict.resolved, log="\n".join(log), tests=verdict.tests)

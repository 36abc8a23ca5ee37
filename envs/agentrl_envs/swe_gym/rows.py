"""Rows of SWE-Gym, SWE-bench and SWE-smith: checked, and made into one type."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentrl.errors import DatasetError
from agentrl_envs.swe_gym.log_parsers import PARSERS
from agentrl_envs.swe_gym.reversal import UnreversiblePatchError, reverse_patch
from agentrl_envs.swe_gym.row_files import read_raw

_PATCH_PATH = re.compile(r"^(?:---|\+\+\+) (?:[ab]/)?([^\t\n]+)|^(?:rename|copy) (?:from|to) (.+)$", re.MULTILINE)
_TEST_SECTION = re.compile(r"^[^\n]*>>>>> Start Test Output[^\n]*\n(.*?)^[^\n]*>>>>> End Test Output", re.M | re.S)
_SMITH = "swesmith/"
_SMITH_STATEMENT = "Some tests of this repository fail, and they passed before. Find the bug and mend it. They are:\n{}"
_SHOWN_TESTS = 20


class TreeRef(msgspec.Struct, frozen=True):
    """Where a row's tree lies: a bundle's file name, the ref in it, and the tree's sha (None: not recorded)."""

    bundle: str
    ref: str
    tree_sha: str | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One instance.

    `patch` is the fix. `bug_patch` (SWE-smith) makes the base tree of the image's. `duration_s` is the longest recorded
    run of its tests; `image` what the row itself names; `test_command` how the row's own evaluation runs its tests,
    `log_parser` how its output is read; `folder` where the row's file lies, None for a hub set.
    """

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    patch: str
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    version: str | None = None
    kind: str | None = None
    image: str | None = None
    tree: TreeRef | None = None
    duration_s: float | None = None
    bug_patch: str = ""
    test_command: str | None = None
    log_parser: str | None = None
    folder: str | None = None

    @property
    def content_hash(self) -> str:
        """SHA-256 (hex) of what makes two instances the same problem, whatever they are called."""
        parts = (self.repo, self.base_commit, self.problem_statement, self.patch)
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def load_rows(dataset: str, *, hub_split: str) -> list[Row]:
    """Every row of `dataset`, a file, a folder or a hub name. Raises `DatasetError`: file, row, field, remedy."""
    rows: list[Row] = []
    places: dict[str, str] = {}
    for raw in read_raw(dataset, hub_split=hub_split):
        row = parse_row(raw.fields, place=raw.place, folder=raw.folder)
        if row.instance_id in places:
            raise DatasetError(
                f"instance_id {row.instance_id!r} comes twice",
                where=f"{raw.place}, first at {places[row.instance_id]}",
                remedy="remove one of the two rows",
            )
        places[row.instance_id] = raw.place
        rows.append(row)
    if not rows:
        raise DatasetError("the data set has no rows", where=dataset, remedy="give a file or a split with rows")
    return rows


def parse_row(fields: Mapping[str, Any], *, place: str, folder: Path | None = None) -> Row:
    """One row from its fields; `place` names it in errors."""
    name = fields.get("instance_id")
    place = f"{place} ({name})" if isinstance(name, str) and name else place
    instance_id, repo = _text(fields, "instance_id", place), _text(fields, "repo", place)
    of_smith = repo.startswith(_SMITH)
    failing = _test_ids(fields, "FAIL_TO_PASS", place, empty=False)
    given = _text(fields, "patch", place)
    return Row(
        instance_id=instance_id,
        repo=repo,
        base_commit=_smith_commit(fields, place) if of_smith else _text(fields, "base_commit", place),
        problem_statement=_smith_statement(fields, failing, place)
        if of_smith
        else _text(fields, "problem_statement", place),
        patch=_reversed(given, place) if of_smith else given,
        bug_patch=given if of_smith else "",
        test_patch=_optional_text(fields, "test_patch", place) or "",
        fail_to_pass=failing,
        pass_to_pass=_test_ids(fields, "PASS_TO_PASS", place, empty=True),
        version=_version(fields, place),
        kind=_optional_text(fields, "x_kind", place),
        image=_image(fields, place),
        tree=_tree(fields.get("x_tree"), place),
        duration_s=_duration(fields.get("x_validated")),
        test_command=_test_command(fields, place),
        log_parser=_log_parser(fields, place),
        folder=None if folder is None else str(folder),
    )


def _bad(field: str, what: str, place: str, remedy: str = "") -> DatasetError:
    return DatasetError(
        f"field {field} {what}",
        where=place,
        remedy=remedy or f"give {field} as SWE-Gym rows have it, or leave the row out",
    )


def _text(fields: Mapping[str, Any], field: str, place: str) -> str:
    value = _optional_text(fields, field, place)
    if not value or not value.strip():
        raise _bad(field, "is empty" if field in fields else "is missing", place)
    return value


def _optional_text(fields: Mapping[str, Any], field: str, place: str) -> str | None:
    value = fields.get(field)
    if value is not None and not isinstance(value, str):
        raise _bad(field, f"is {type(value).__name__}, not text", place)
    return value


def _version(fields: Mapping[str, Any], place: str) -> str | None:
    value = fields.get("version")
    return f"{value}" if isinstance(value, float) else _optional_text(fields, "version", place)


def _image(fields: Mapping[str, Any], place: str) -> str | None:
    texts = (_optional_text(fields, field, place) for field in ("image_name", "docker_image", "image"))
    return next((text.strip() for text in texts if text and text.strip()), None)


# --- tests --------------------------------------------------------------------------------------------------


def _test_ids(fields: Mapping[str, Any], field: str, place: str, *, empty: bool) -> tuple[str, ...]:
    if fields.get(field) is None:
        raise _bad(field, "is missing", place)
    value = fields[field]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise _bad(field, f"is text, but no JSON: {error}", place) from error
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(test, str) for test in value):
        raise _bad(field, "is no list of test ids", place)
    if not value and not empty:
        raise _bad(field, "names no test, so that nothing would be graded", place)
    return tuple(value)


def _test_command(fields: Mapping[str, Any], place: str) -> str | None:
    """The test command of a row's evaluation script: what stands between the markers of its output."""
    script = _optional_text(fields, "eval_script", place)
    if script is None:
        return _optional_text(fields, "x_test_cmd", place)
    section = _TEST_SECTION.search(script)
    if section is None or not section[1].strip():
        raise _bad(
            "eval_script",
            "has no command between `>>>>> Start Test Output` and `>>>>> End Test Output`",
            place,
            "give the script as SWE-bench 5 has it, or leave the field out: its tests are then run by pytest",
        )
    return section[1].strip()


def _log_parser(fields: Mapping[str, Any], place: str) -> str | None:
    kind = _optional_text(fields, "eval_type", place)
    if kind not in (None, "", "pass_and_fail"):
        raise _bad(
            "eval_type",
            f"is {kind!r}",
            place,
            "only pass_and_fail can be graded: each named test must say how it ended",
        )
    name = _optional_text(fields, "log_parser", place)
    if name and name not in PARSERS:
        raise _bad("log_parser", f"names {name!r}, which is not known here", place, f"one of {', '.join(PARSERS)}")
    return name or None


# --- SWE-smith ----------------------------------------------------------------------------------------------


def _smith_commit(fields: Mapping[str, Any], place: str) -> str:
    """SWE-smith names the commit in the repository's name: `swesmith/owner__repo.commit8`."""
    given = _optional_text(fields, "base_commit", place)
    commit = given or _text(fields, "repo", place).rpartition(".")[2]
    if not re.fullmatch(r"[0-9a-f]{7,40}", commit):
        raise _bad("repo", "names no commit", place, "write it as swesmith/owner__repo.commit8")
    return commit


def _smith_statement(fields: Mapping[str, Any], failing: Sequence[str], place: str) -> str:
    """SWE-smith has rows without an issue; their failing tests, which stand in the tree, are the statement."""
    given = _optional_text(fields, "problem_statement", place)
    shown = [f"- {test}" for test in failing[:_SHOWN_TESTS]]
    return given if given and given.strip() else _SMITH_STATEMENT.format("\n".join(shown))


def _reversed(patch: str, place: str) -> str:
    try:
        return reverse_patch(patch)
    except UnreversiblePatchError as error:
        raise _bad("patch", f"cannot be reversed: {error}", place, "leave the row out") from error


# --- trees --------------------------------------------------------------------------------------------------


def _tree(value: Any, place: str) -> TreeRef | None:
    if value is None:
        return None
    try:
        tree = msgspec.convert(value, TreeRef)
    except msgspec.ValidationError as error:
        raise _bad("x_tree", f"is malformed: {error}", place, "give x_tree as {bundle, ref, tree_sha}") from error
    if Path(tree.bundle).name != tree.bundle or tree.bundle in ("", ".", "..") or not tree.ref:
        raise _bad(
            "x_tree",
            f"names bundle {tree.bundle!r}, ref {tree.ref!r}",
            place,
            "name a file in the bundles' folder",
        )
    return tree


def _duration(value: Any) -> float | None:
    """The longest recorded run of a row's tests in seconds, of those that ended by themselves: a run that was killed
    says how long somebody waited."""
    if not isinstance(value, Mapping):
        return None
    runs = [run for run in (value.get("before"), value.get("after")) if isinstance(run, Mapping)]
    ended = [run.get("s") for run in runs if not run.get("timeout") and _ended(run.get("rc"))]
    return max((float(s) for s in ended if isinstance(s, int | float)), default=None)


def _ended(code: Any) -> bool:
    """Whether an exit code is a program's own, and no signal's."""
    return not isinstance(code, int) or 0 <= code < 128


def patch_paths(patch: str) -> set[str]:
    """Every path that a patch's headers name, old and new, `/dev/null` aside."""
    names = (first or second for first, second in _PATCH_PATH.findall(patch))
    return {name.strip() for name in names} - {"/dev/null"}

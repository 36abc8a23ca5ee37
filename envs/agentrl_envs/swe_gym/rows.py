"""SWE-Gym and SWE-bench rows: read from JSONL, Parquet or the hub, checked, and made into one type.

JSONL and Parquet are read here row by row, because one file may hold both encodings of the test lists (a
list, or a JSON string of one) and an error must name its line; hub sets come through `datasets`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentrl.errors import DatasetError

_PATCH_PATH = re.compile(r"^(?:---|\+\+\+) (?:[ab]/)?([^\t\n]+)|^(?:rename|copy) (?:from|to) (.+)$", re.MULTILINE)


class TreeRef(msgspec.Struct, frozen=True):
    """Where a row's tree lies: a bundle's file name, the ref in it, and the tree's sha (None: not recorded)."""

    bundle: str
    ref: str
    tree_sha: str | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One instance. `duration_s` is the longest recorded run of its tests; `image` what the row itself names."""

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    patch: str
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    kind: str | None = None
    image: str | None = None
    tree: TreeRef | None = None
    duration_s: float | None = None

    @property
    def content_hash(self) -> str:
        """SHA-256 (hex) of what makes two instances the same problem, whatever they are called."""
        parts = (self.repo, self.base_commit, self.problem_statement, self.patch)
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def load_rows(dataset: str, *, hub_split: str) -> list[Row]:
    """Every row of `dataset`, a file or a hub name. Raises `DatasetError`: file, row, field, remedy."""
    path = Path(dataset).expanduser()
    raw = _read_file(path) if is_file_name(dataset) else _read_hub(dataset, hub_split)
    rows: list[Row] = []
    places: dict[str, str] = {}
    for place, fields in raw:
        row = parse_row(fields, place=place)
        if row.instance_id in places:
            raise DatasetError(
                f"instance_id {row.instance_id!r} comes twice",
                where=f"{place}, first at {places[row.instance_id]}",
                remedy="remove one of the two rows",
            )
        places[row.instance_id] = place
        rows.append(row)
    if not rows:
        raise DatasetError("the data set has no rows", where=dataset, remedy="give a file or a split with rows")
    return rows


def is_file_name(dataset: str) -> bool:
    """True where `dataset` names a local file and no hub data set."""
    return Path(dataset).suffix in (".jsonl", ".parquet")


def _read_file(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not path.is_file():
        raise DatasetError(
            "there is no such data set file",
            where=str(path),
            remedy="set environment.dataset to an existing file",
        )
    yield from _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path)


def _read_jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                fields = json.loads(line)
            except ValueError as error:  # bad JSON or bad UTF-8
                raise DatasetError(f"the line is no JSON: {error}", where=place, remedy="one object a line") from error
            if not isinstance(fields, dict):
                raise DatasetError("the line is no JSON object", where=place, remedy="one object a line")
            yield place, fields


def _read_parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DatasetError(
            f"the file is no readable Parquet: {error}", where=str(path), remedy="write it anew"
        ) from error
    for number, fields in enumerate(table.to_pylist()):
        yield f"{path}, row {number}", fields


def _read_hub(name: str, split: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    import datasets

    try:
        loaded = datasets.load_dataset(name, split=split)
    except Exception as error:  # the library raises its own, the hub client's and the network's errors alike
        raise DatasetError(
            f"the data set does not load: {type(error).__name__}: {error}",
            where=f"hub name {name!r}, split {split!r}",
            remedy="check the name, environment.hub_split and the network, or give a .jsonl or .parquet file",
        ) from error
    for number, fields in enumerate(loaded):
        yield f"{name}[{split}], row {number}", fields


def parse_row(fields: Mapping[str, Any], *, place: str) -> Row:
    """One row from its fields; `place` names it in errors."""
    name = fields.get("instance_id")
    place = f"{place} ({name})" if isinstance(name, str) and name else place
    duration = _duration(fields.get("x_validated"))
    return Row(
        instance_id=_text(fields, "instance_id", place),
        repo=_text(fields, "repo", place),
        base_commit=_text(fields, "base_commit", place),
        problem_statement=_text(fields, "problem_statement", place),
        patch=_text(fields, "patch", place),
        test_patch=_optional_text(fields, "test_patch", place) or "",
        fail_to_pass=_test_ids(fields, "FAIL_TO_PASS", place, empty=False),
        pass_to_pass=_test_ids(fields, "PASS_TO_PASS", place, empty=True),
        kind=_optional_text(fields, "x_kind", place),
        image=next((fields[key] for key in ("image_name", "docker_image", "image") if fields.get(key)), None),
        tree=_tree(fields.get("x_tree"), place),
        duration_s=duration,
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
    """The longest recorded run of a row's tests in seconds, where both runs ended."""
    if not isinstance(value, Mapping):
        return None
    seconds = [run.get("s") for run in (value.get("before"), value.get("after")) if isinstance(run, Mapping)]
    return max((float(s) for s in seconds if isinstance(s, int | float)), default=None)


def patch_paths(patch: str) -> set[str]:
    """Every path that a patch's headers name, old and new, `/dev/null` aside."""
    names = (first or second for first, second in _PATCH_PATH.findall(patch))
    return {name.strip() for name in names} - {"/dev/null"}

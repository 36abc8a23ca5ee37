"""Data sets as files and hub names: raw rows with the place that an error names.

JSONL and Parquet are read here row by row, because one file may hold both encodings of the test lists (a
list, or a JSON string of one) and an error must name its line; hub sets come through `datasets`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import DatasetError

_SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True, slots=True)
class RawRow:
    """`place` names the row in errors; `folder` is that of its file, None for a hub set."""

    place: str
    fields: Mapping[str, Any]
    folder: Path | None = None


def is_local(dataset: str) -> bool:
    """True where `dataset` names a file or a folder and no hub data set."""
    path = Path(dataset).expanduser()
    return path.suffix in _SUFFIXES or path.is_dir() or dataset.startswith(("/", "./", "../", "~"))


def read_raw(dataset: str, *, hub_split: str) -> Iterator[RawRow]:
    """Every row of a file, of all files below a folder, or of a hub set. Raises `DatasetError`: place, remedy."""
    if not is_local(dataset):
        yield from _read_hub(dataset, hub_split)
        return
    path = Path(dataset).expanduser()
    for file in _files(path) if path.is_dir() else [path]:
        for place, fields in _read_file(file):
            yield RawRow(place, fields, file.parent)


def _files(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    if not files:
        raise DatasetError(
            "the folder holds no .jsonl and no .parquet file",
            where=str(folder),
            remedy="set environment.dataset to a folder or file of rows",
        )
    return files


def _read_file(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not path.is_file() or path.suffix not in _SUFFIXES:
        raise DatasetError(
            "there is no such data set file" if not path.is_file() else "the file is neither .jsonl nor .parquet",
            where=str(path),
            remedy="set environment.dataset to an existing .jsonl or .parquet file, or to a folder of them",
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


def _read_hub(name: str, split: str) -> Iterator[RawRow]:
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
        yield RawRow(f"{name}[{split}], row {number}", fields)

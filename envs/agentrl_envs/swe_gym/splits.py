"""Splits of a finite data set: disjoint, by a rule on each row's content or by a file that lists ids."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.errors import ConfigError, DatasetError
from agentrl.trajectory import Split
from agentrl_envs.swe_gym.rows import Row


def split_rows(rows: Sequence[Row], *, fresh_fraction: float, unseen_repos: Sequence[str]) -> dict[Split, list[Row]]:
    """Rows of `unseen_repos` are unseen; of the others a fixed share, chosen by content hash, is fresh.

    Two rows of equal content are always in the same split, whatever their ids.
    """
    missing = set(unseen_repos) - {row.repo for row in rows}
    if missing:
        raise ConfigError(
            f"environment.unseen_repos names repositories without rows: {', '.join(sorted(missing))}",
            where="environment.unseen_repos",
            remedy=f"name some of {', '.join(sorted({row.repo for row in rows}))}",
        )
    unseen_hashes = {row.content_hash for row in rows if row.repo in unseen_repos}
    splits: dict[Split, list[Row]] = {split: [] for split in Split}
    for row in rows:
        share = int(row.content_hash[:12], 16) / 16**12
        if row.content_hash in unseen_hashes:
            splits[Split.UNSEEN].append(row)
        else:
            splits[Split.FRESH if share < fresh_fraction else Split.TRAIN].append(row)
    return splits


def split_by_file(rows: Sequence[Row], path: Path) -> dict[Split, list[Row]]:
    """Splits as `path` lists them: {"train": [ids], "fresh": [ids], "unseen": [ids]}. Rows it does not list
    are left out."""
    listed = _read_split_file(path)
    by_id = {row.instance_id: row for row in rows}
    splits: dict[Split, list[Row]] = {split: [] for split in Split}
    owner: dict[str, tuple[Split, str]] = {}
    for split in Split:
        for name in listed.get(split.value, []):
            if name not in by_id:
                raise DatasetError(f"id {name!r} is no row", where=f"{path}, {split.value}", remedy="remove the id")
            row = by_id[name]
            first = owner.setdefault(row.content_hash, (split, name))
            if first != (split, name):
                raise DatasetError(
                    f"{name} ({split.value}) is the same problem as {first[1]} ({first[0].value})",
                    where=str(path),
                    remedy="splits must be disjoint by content: list it once",
                )
            splits[split].append(row)
    return splits


def _read_split_file(path: Path) -> Mapping[str, list[str]]:
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DatasetError(
            "there is no such split file", where=str(path), remedy="set environment.split_file"
        ) from error
    except ValueError as error:
        raise DatasetError(f"the split file is no JSON: {error}", where=str(path), remedy="write it anew") from error
    names = {split.value for split in Split}
    sound = (
        isinstance(listed, dict)
        and set(listed) <= names
        and all(isinstance(ids, list) and all(isinstance(name, str) for name in ids) for ids in listed.values())
    )
    if not sound:
        raise DatasetError(
            "the split file is malformed",
            where=str(path),
            remedy='write {"train": [ids], "fresh": [ids], "unseen": [ids]}',
        )
    return listed


def epoch_order(rows: Sequence[Row], *, seed: int, start: int, count: int) -> list[Row]:
    """Rows [start, start + count) of an endless sequence that shuffles all rows anew in each pass."""
    taken: list[Row] = []
    position = start
    while rows and len(taken) < count:
        epoch, offset = divmod(position, len(rows))
        order = random.Random(f"{seed}/{epoch}").sample(range(len(rows)), len(rows))
        step = order[offset : offset + count - len(taken)]
        taken += [rows[index] for index in step]
        position += len(step)
    return taken

"""What a teacher is made from."""

from __future__ import annotations

from pathlib import Path

import pytest
from teacher_toys import teacher_spec

NAMES = ["teacher", "django/django", "../x", "a b", "..", "über"]


def test_every_name_has_a_log_of_its_own_within_the_folder(tmp_path: Path) -> None:
    paths = [teacher_spec(tmp_path, name=name).log_path for name in [*NAMES, "django_django"]]
    assert len(set(paths)) == len(paths)
    assert {path.parent for path in paths} == {tmp_path}
    assert paths[0].name == "teacher-teacher.log"


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_no_way_out_of_the_folder(tmp_path: Path, name: str) -> None:
    assert teacher_spec(tmp_path, name=name).log_path.resolve().parent == tmp_path.resolve()

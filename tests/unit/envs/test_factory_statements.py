"""Hidden tests and problem statements of injected bugs: what is taken out, what is told, what never is."""

from __future__ import annotations

import textwrap

import pytest

from agentrl_envs.swe_gym.factory.hiding import find_test, name_parts, parameters, without_tests
from agentrl_envs.swe_gym.factory.source import Source
from agentrl_envs.swe_gym.factory.statements import Failure, failures, write_statement

TESTS = textwrap.dedent('''\
    import pytest
    from lib import size, Box

    VALUE = 1  # stays


    @pytest.mark.parametrize("text, n", [("a b", 3)])
    def test_size(text, n):
        """Not told."""
        box = Box(text)
        assert size(box) == n


    class Base:
        def test_common(self):
            assert size(Box("")) == 0


    class TestBox(Base):
        def test_raises(self):
            with pytest.raises(ValueError):
                Box(None)
    ''').encode()
OUTPUT = """\
.F..
=================================== FAILURES ===================================
_____________________________ test_size[a b-3] _____________________________
tests/test_lib.py:11: in test_size
    assert size(box) == n
E   assert 4 == 3
E    +  where 4 = size(<lib.Box object at 0x7f30aa5dd0>)
____________________________ TestBox.test_raises ____________________________
tests/test_lib.py:21: in test_raises
    Box(None)
lib.py:5: in __init__
    raise TypeError(secret_line_of_the_source)
E   TypeError: no text in /testbed/lib.py
=========================== short test summary info ============================
FAILED tests/test_lib.py::test_size[a b-3] - assert 4 == 3
"""
IDS = ["tests/test_lib.py::test_size[a b-3]", "tests/test_lib.py::TestBox::test_raises"]
FILES = {"tests/test_lib.py": TESTS}


def test_ids_come_apart_with_blanks_and_colons_in_parameters() -> None:
    assert name_parts("t.py::A::test_x[a::b c]") == ["A", "test_x"]
    assert parameters("t.py::A::test_x[a::b [c]]") == "a::b [c]"
    assert parameters("t.py::test_x") == ""


def test_hidden_tests_are_gone_and_the_rest_is_as_it_was() -> None:
    changed = without_tests(FILES, IDS[:1])
    assert changed is not None
    rest = changed["tests/test_lib.py"].decode()
    kept, cut = TESTS.decode().split("@pytest.mark.parametrize")[0], TESTS.decode().split("== n\n")[1]
    assert rest == kept + cut


def test_a_class_without_its_tests_still_parses() -> None:
    changed = without_tests(FILES, IDS[1:])
    assert changed is not None
    assert changed["tests/test_lib.py"].decode().endswith("class TestBox(Base):\n    pass\n")


def test_an_inherited_test_is_found_in_its_base() -> None:
    (found,) = find_test(Source(TESTS).tree, "tests/test_lib.py::TestBox::test_common")
    assert found.lineno == 15


@pytest.mark.parametrize(
    "test", ["tests/test_lib.py::test_made_up", "tests/test_lib.py::No::test_size", "other.py::test_x"]
)
def test_a_test_that_is_not_found_cannot_be_hidden(test: str) -> None:
    assert without_tests(FILES, [IDS[0], test]) is None


def test_failures_are_read_from_what_pytest_printed() -> None:
    assert failures(OUTPUT, [*IDS, "tests/test_lib.py::test_other"]) == [
        Failure(IDS[0], 11, "assert 4 == 3\n +  where 4 = size(<lib.Box object at 0x…>)"),
        Failure(IDS[1], 21, "TypeError: no text in lib.py"),
    ]


def test_a_hostile_output_stays_bounded() -> None:
    output = OUTPUT.replace("E   assert 4 == 3", "E   " + "x\x1b[31m" * 5000 + "\n" + "E   y\n" * 1000)
    (first, _) = failures(output, IDS)
    assert len(first.error) < 2500
    assert "\x1b" not in first.error


def test_a_wrong_value_is_told_by_the_test_s_own_lines() -> None:
    text = write_statement(failures(OUTPUT, IDS[:1]), IDS[:1], FILES, secrets=[], key="k")
    assert text.startswith("Wrong result from `size`\n")
    assert "```python\nbox = Box(text)\nassert size(box) == n\n```" in text
    assert "`a b-3`" in text
    assert "assert 4 == 3" in text
    assert "Not told" not in text


def test_an_exception_is_told_without_the_source_it_came_from() -> None:
    text = write_statement(failures(OUTPUT, IDS[1:]), IDS[1:], FILES, secrets=[], key="k")
    assert text.startswith("`Box` raises TypeError\n")
    assert "secret_line_of_the_source" not in text


def test_no_line_of_the_bug_or_the_fix_is_told() -> None:
    secret = "where 4 = size("
    text = write_statement(failures(OUTPUT, IDS[:1]), IDS, FILES, secrets=[secret], key="k")
    assert secret not in text
    assert text == "Wrong behaviour: size\n\nThis used to work and does not any more.\n"


def test_the_same_key_tells_the_same() -> None:
    found = failures(OUTPUT, IDS)
    texts = {key: write_statement(found, IDS, FILES, secrets=[], key=key) for key in "abcdefgh"}
    assert texts == {key: write_statement(found, IDS, FILES, secrets=[], key=key) for key in "abcdefgh"}
    assert len(set(texts.values())) > 2

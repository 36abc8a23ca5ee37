"""What a test session told is read as hostile: a line is believed or is none, and no line is a fault of the server."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.sandbox.server.testing import Report, read_report
from agentrl.wire import protocols

KEY = "0123456789abcdef"
TOLD = (["collected", 2], ["test", "a", "passed"], ["test", "b", "failed"], ["canary", True], ["done", 1])


def lines(*values: object) -> bytes:
    return b"".join(f"{KEY}{json.dumps(value)}\n".encode() for value in values)


@pytest.mark.parametrize(
    "line",
    [
        b"[]",
        b"{",
        b"null",
        b"[" * 100_000,
        b"\xff",
        b'["test", "a"]',
        b'["test", "a", "passed", 1]',
        b'["test", {}, "passed"]',
        b'["collected"]',
        b'["collected", "many"]',
        b'["collected", 1e999]',
        b'["canary", "yes"]',
        b'["done", 99999999999999999999999]',
        b'["done", null]',
    ],
)
def test_k42_a_line_that_makes_no_sense_is_no_fault_of_the_sandbox(line: bytes) -> None:
    """Code under test that found the key could else turn its failure into a rollout that is not scored."""
    forged = KEY.encode() + line + b"\n"
    expected = Report(results={"a": "passed", "b": "failed"}, collected=2, canary_failed=True, status=1)
    assert read_report(lines(*TOLD) + forged, KEY) == expected
    assert read_report(forged + lines(*TOLD), KEY) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
)
KINDS = st.sampled_from(["test", "collected", "canary", "done"])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(KINDS, JSON, JSON) | st.tuples(KINDS, JSON)))
def test_whatever_is_told_can_be_told_on(told: list[tuple[object, ...]]) -> None:
    report = read_report(lines(*told), KEY)
    answer = {
        "exit_code": report.status,
        "output": "",
        "timed_out": False,
        "out_of_memory": False,
        "duration_s": 0.0,
        "results": report.results,
        "collected": report.collected,
        "canary_failed": report.canary_failed,
    }
    msgspec.json.decode(json.dumps(answer).encode(), type=protocols.TestReport)

"""Calls out of the agent's text and back (K12)."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.chat import NO_CALL, CallFormat, MalformedCall, call_pattern, parse_calls, render_call, render_calls
from agentrl.wire import ToolCall

SCHEMAS: dict[str, dict[str, Any]] = {
    "edit": {
        "properties": {
            "path": {"type": "string"},
            "old": {"type": "string"},
            "line": {"type": "integer"},
            "range": {"type": "array"},
            "flag": {"type": "boolean"},
            "ratio": {"type": "number"},
            "tree": {"type": "object"},
        }
    }
}


def qwen(text: str, *, cut: bool = False) -> list[ToolCall | MalformedCall]:
    return parse_calls(text, "qwen3_coder", SCHEMAS, cut=cut)


def edit(**arguments: Any) -> ToolCall:
    return ToolCall(name="edit", arguments=arguments)


def wrapped(value: str) -> str:
    return f"<tool_call>\n<function=edit>\n<parameter=old>\n{value}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    "value",
    [
        "    x = 1",
        "\n\nx\n\n",
        "",
        "\n",
        "a < b",
        "</",
        "</parameter>",
        "x\n</parameter>\ny",
        "</parameter></parameter>",
        "12",
        "true",
        "use <parameter=x> inline",
        "and </function> inline",
        "<tool_call>",
        "\r\n",
        "</tool_call>",
        "</think>",
    ],
)
def test_values_are_raw_text_with_one_newline_stripped_each_side(value: str) -> None:
    assert qwen(wrapped(value)) == [edit(old=value)]


def test_values_without_line_breaks_around_them() -> None:
    assert qwen("<tool_call><function=edit><parameter=old> a </parameter></function></tool_call>") == [edit(old=" a ")]
    assert qwen("<function=edit><parameter=old>a</parameter><parameter=path>b</parameter></function>") == [
        edit(old="a", path="b")
    ]


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("line", "12", 12),
        ("range", "[1, -1]", [1, -1]),
        ("flag", "True", True),
        ("flag", "false", False),
        ("ratio", "0.5", 0.5),
        ("tree", '{"a": 1}', {"a": 1}),
        ("path", "12", "12"),
        ("line", "twelve", "twelve"),
        ("line", "9" * 5000, "9" * 5000),
        ("range", "[1,", "[1,"),
        ("range", "[" * 5000, "[" * 5000),
        ("ratio", "", ""),
        ("unheard", "7", "7"),
    ],
)
def test_values_are_read_by_the_schema_s_type(name: str, raw: str, value: Any) -> None:
    text = f"<tool_call>\n<function=edit>\n<parameter={name}>\n{raw}\n</parameter>\n</function>\n</tool_call>"
    assert qwen(text) == [edit(**{name: value})]


@pytest.mark.parametrize("end", ["\n</function>\n", "\n</function>", "\n", "\n</parameter>\n</function>\n", ""])
def test_closing_tags_swallowed_by_a_stop_string(end: str) -> None:
    text = "<tool_call>\n<function=edit>\n<parameter=path>\na.py\n</parameter>\n<parameter=old>\nx <y" + end
    assert qwen(text) == [edit(path="a.py", old="x <y")]


def test_a_call_cut_by_the_token_limit_is_not_made() -> None:
    """Half a file must not be written; a complete call before the cut is made."""
    whole = wrapped("x")
    got = qwen(whole + "\n<tool_call>\n<function=edit>\n<parameter=old>\nhalf a fi", cut=True)
    assert got == [edit(old="x"), MalformedCall("Error: no valid tool call: it was cut by the token limit.")]
    half = '<tool_call>\n{"name": "edit", "arguments": {}}'
    assert parse_calls(half, "hermes", {}) == [ToolCall(name="edit", arguments={})]
    assert isinstance(parse_calls(half, "hermes", {}, cut=True)[0], MalformedCall)


def test_several_calls_and_text_around_them() -> None:
    last = "<tool_call>\n<function=submit>\n</function>\n</tool_call>"
    text = f"First.\n{wrapped('a')}\nthen\n{wrapped('b')} done {last}"
    assert qwen(text) == [edit(old="a"), edit(old="b"), ToolCall(name="submit", arguments={})]


def test_a_missing_closing_parameter_tag_ends_at_the_next_tag() -> None:
    text = "<tool_call>\n<function=edit>\n<parameter=path>\na.py\n<parameter=old>\nx\n</parameter>\n</function>"
    assert qwen(text) == [edit(path="a.py", old="x")]


def test_malformed_calls_say_what_is_wrong() -> None:
    """K12: an error text, never an exception."""
    assert qwen("I think I am done.") == []
    assert qwen("<tool_call>\nsubmit\n</tool_call>") == [
        MalformedCall("Error: no valid tool call: <function=NAME> is missing.")
    ]
    twice = "<function=edit>\n<parameter=old>\na\n</parameter>\n<parameter=old>\nb\n</parameter>\n</function>"
    assert qwen(twice) == [MalformedCall("Error: no valid tool call: parameter old is given twice.")]


def test_calls_that_are_only_thought_about_are_not_made() -> None:
    said = f"{wrapped('b')}"
    assert qwen(f"<think>\n{wrapped('a')}\n</think>\n{said}") == [edit(old="b")]
    assert qwen(f"maybe\n</think>\n{said}") == [edit(old="b")]


def hermes(text: str) -> list[ToolCall | MalformedCall]:
    return parse_calls(text, "hermes", SCHEMAS)


def test_hermes_reads_json_even_with_tags_and_line_breaks_inside() -> None:
    text = '<tool_call>\n{"name": "edit", "arguments": {"old": "a\n</tool_call> \\u00e9"}}\n</tool_call>'
    assert hermes(text) == [edit(old="a\n</tool_call> é")]
    assert hermes('<tool_call>{"name": "edit", "arguments": "{\\"line\\": 3}"}') == [edit(line=3)]
    assert hermes('<tool_call>{"name": "submit"}</tool_call>') == [ToolCall(name="submit", arguments={})]


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "[1]",
        '{"name": 1}',
        '{"arguments": {}}',
        '{"name": "a", "arguments": [1]}',
        '{"name": "a", "arguments": "x"}',
        '{"name": "a", "arguments": {"x": NaN}}',
        "[" * 20_000,
        '{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}",
        "",
    ],
)
def test_hermes_malformed(body: str) -> None:
    got = hermes(f"<tool_call>{body}</tool_call>")
    assert len(got) == 1
    assert isinstance(got[0], MalformedCall)
    assert got[0].message.startswith(NO_CALL[:-1])


def test_hermes_goes_on_after_a_malformed_call() -> None:
    got = hermes('<tool_call>{oops}</tool_call>\n<tool_call>\n{"name": "submit"}\n</tool_call>')
    assert [type(call) for call in got] == [MalformedCall, ToolCall]


NAME = st.from_regex(r"[a-z_][a-z_0-9]{0,8}", fullmatch=True)
# A tag of the format itself inside a value is ambiguous by nature; every other text must survive.
RAW = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from(["</parameter>", "<", "</", "\n", " ", "x", "</tool_call>", "=1>", "</think>"])).map(
        "".join
    ),
).filter(lambda text: not re.search(r"<parameter=|</function>|<think>", text))


@settings(max_examples=300)
@given(calls=st.lists(st.tuples(NAME, st.dictionaries(NAME, RAW, max_size=3)), min_size=1, max_size=3))
@pytest.mark.parametrize("call_format", ["qwen3_coder", "hermes"])
def test_round_trip_of_text_values(call_format: CallFormat, calls: list[tuple[str, dict[str, str]]]) -> None:
    made = [ToolCall(name=name, arguments=dict(arguments)) for name, arguments in calls]
    assert parse_calls(render_calls(made, call_format), call_format, {}) == made


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(
    line=st.integers(),
    flag=st.booleans(),
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    rows=st.lists(JSON, max_size=3),
)
@pytest.mark.parametrize("call_format", ["qwen3_coder", "hermes"])
def test_round_trip_of_typed_values(
    call_format: CallFormat, line: int, flag: bool, ratio: float, rows: list[Any]
) -> None:
    made = edit(line=line, flag=flag, ratio=ratio, range=rows)
    text = render_call(made, call_format)
    if not re.search(r"<parameter=|</function>|<think>", text.split("<parameter=range>")[-1].split("</parameter>")[0]):
        assert parse_calls(text, call_format, SCHEMAS) == [made]


FRAGMENTS = st.lists(
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            "<function=",
            "edit>",
            "</function>",
            "<parameter=",
            "old>",
            "</parameter>",
            "\n",
            "{",
            "}",
            '"name"',
            ":",
            '"edit"',
            ",",
            '"arguments"',
            "[",
            "<think>",
            "</think>",
            "x",
            " ",
        ]
    ),
    max_size=25,
).map("".join)


@settings(max_examples=400)
@given(text=st.one_of(st.text(), FRAGMENTS), cut=st.booleans())
@pytest.mark.parametrize("call_format", ["qwen3_coder", "hermes"])
def test_no_text_crashes_the_parser(call_format: CallFormat, text: str, cut: bool) -> None:
    """K12."""
    for call in parse_calls(text, call_format, SCHEMAS, cut=cut):
        if isinstance(call, MalformedCall):
            assert call.message.startswith("Error: no valid tool call")
        else:
            assert call.name


_LINE = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"], exclude_characters='<>"\\'), min_size=1)


@settings(deadline=None)
@given(call_format=st.sampled_from(["qwen3_coder", "hermes"]), old=_LINE, new=_LINE, line=st.integers(0, 999))
def test_the_pattern_matches_one_readable_call_and_no_other_text(
    call_format: CallFormat, old: str, new: str, line: int
) -> None:
    schemas = {
        "edit": {
            "properties": {"old": {"type": "string"}, "new": {"type": "string"}, "note": {"type": "string"}},
            "required": ["old", "new"],
        },
        "go": {"properties": {"line": {"type": "integer"}}, "required": ["line"]},
        "submit": {"properties": {}, "required": []},
    }
    pattern = re.compile(call_pattern(schemas, call_format))
    calls = [
        ToolCall(name="edit", arguments={"old": old, "new": new}),
        ToolCall(name="go", arguments={"line": line}),
        ToolCall(name="submit", arguments={}),
    ]
    for call in calls:
        text = render_call(call, call_format)
        assert pattern.fullmatch(text)
        assert parse_calls(text, call_format, schemas) == [call]
        assert not pattern.fullmatch(text + " and more")
    assert not pattern.fullmatch(render_call(ToolCall(name="other", arguments={}), call_format))
    assert not pattern.fullmatch(render_call(ToolCall(name="edit", arguments={"new": new, "old": old}), call_format))

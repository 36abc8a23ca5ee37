"""Tools: what a call does in the sandbox, what the agent reads, what counts as a bad call."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.agent import TOOLS, ToolResult, ToolRunner, check_arguments, select_tools, tool_schemas
from agentrl.agent.observations import compact_error, compact_tests, cut_text
from agentrl.chat import MalformedCall
from agentrl.config import ToolsConfig
from agentrl.errors import ConfigError, SandboxDeadError
from agentrl.wire import EditResult, Sandbox, ToolCall


class Shop:
    """A runner over a fake sandbox."""

    def __init__(self, kit: Any, **options: Any) -> None:
        self.sandbox = kit.FakeSandbox()
        self.runner = ToolRunner(names=tuple(TOOLS), sandbox=self.sandbox, config=ToolsConfig(**options))

    def call(self, name: str, time_left_s: float = 1000.0, **arguments: Any) -> ToolResult:
        call = ToolCall(name=name, arguments=arguments)
        return asyncio.run(self.runner.execute(call, time_left_s=time_left_s))


@pytest.fixture
def full(kit: Any) -> Shop:
    return Shop(kit, observations="full", output_limit_chars=200)


@pytest.fixture
def compact(kit: Any) -> Shop:
    return Shop(kit, observations="compact", output_limit_chars=200)


def test_the_stand_in_has_the_shape_of_a_sandbox(kit: Any) -> None:
    assert isinstance(kit.FakeSandbox(), Sandbox)


def test_schemas_in_the_shape_of_chat_templates() -> None:
    schema = tool_schemas(["view"])[0]
    assert schema["type"] == "function"
    assert schema["function"]["parameters"]["required"] == ["path"]
    assert schema["function"]["parameters"]["properties"]["view_range"]["type"] == "array"
    assert tuple(TOOLS) == ("bash", "view", "create", "str_replace", "insert", "undo_edit", "submit")
    with pytest.raises(ConfigError, match="no tool 'browse'") as caught:
        select_tools(["bash", "browse"])
    assert "str_replace" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "arguments", "path", "rest"),
    [
        ("view", {"path": "a.py"}, "/testbed/a.py", {}),
        ("view", {"path": "/etc/x", "view_range": [1, -1]}, "/etc/x", {"view_range": [1, -1]}),
        ("create", {"path": "p/b.py", "file_text": ""}, "/testbed/p/b.py", {"file_text": ""}),
        (
            "str_replace",
            {"path": "./a.py", "old_str": " a", "new_str": ""},
            "/testbed/a.py",
            {"old_str": " a", "new_str": ""},
        ),
        (
            "insert",
            {"path": "a.py", "insert_line": 0, "new_str": "x"},
            "/testbed/a.py",
            {"insert_line": 0, "new_str": "x"},
        ),
        ("undo_edit", {"path": "a.py"}, "/testbed/a.py", {}),
    ],
)
def test_editor_calls_reach_the_editor_unchanged(
    full: Shop, name: str, arguments: dict[str, Any], path: str, rest: dict[str, Any]
) -> None:
    result = full.call(name, **arguments)
    assert full.sandbox.calls == [(name, {"path": path, "timeout_s": 60.0, **rest})]
    assert result == ToolResult(f"{name} done")
    assert full.runner.counts["edits"] == (name in ("create", "str_replace", "insert"))


def test_submit_needs_no_sandbox(full: Shop) -> None:
    assert full.call("submit") == ToolResult("", submitted=True)
    assert full.sandbox.calls == []
    assert full.runner.counts["submitted"] == 1


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("view", {}, "Error: missing parameter path."),
        ("view", {"path": "a", "depth": "2"}, "Error: unknown parameter depth."),
        ("view", {"path": 3}, "Error: parameter path must be string."),
        ("view", {"path": "a", "view_range": "1,2"}, "Error: parameter view_range must be array of integer."),
        (
            "view",
            {"path": "a", "view_range": [1, True]},
            "Error: parameter view_range must be array of integer.",
        ),
        (
            "insert",
            {"path": "a", "insert_line": "one", "new_str": ""},
            "Error: parameter insert_line must be integer.",
        ),
        ("bash", {"command": "  "}, "Error: parameter command is empty or holds a NUL byte."),
        ("bash", {"command": "a\0b"}, "Error: parameter command is empty or holds a NUL byte."),
        ("bash", {"command": "a\ud800"}, "Error: parameter command is not valid text."),
        ("submit", {"answer": "x"}, "Error: unknown parameter answer."),
        (
            "browse",
            {},
            "Error: unknown tool. Tools: bash, view, create, str_replace, insert, undo_edit, submit.",
        ),
    ],
)
def test_wrong_calls_are_bad_calls_with_a_reason(
    compact: Shop, name: str, arguments: dict[str, Any], text: str
) -> None:
    """K12: all treated alike, none reaches the sandbox."""
    assert compact.call(name, **arguments) == ToolResult(text, bad=True)
    assert compact.sandbox.calls == []
    assert compact.runner.counts["bad_calls"] == 1


def test_a_malformed_call_s_message_is_the_observation(compact: Shop) -> None:
    result = asyncio.run(compact.runner.execute(MalformedCall("Error: no valid tool call."), time_left_s=1))
    assert result == ToolResult("Error: no valid tool call.", bad=True)
    assert (compact.runner.counts["bad_calls"], compact.runner.counts["tool_calls"]) == (1, 0)


def test_commands_in_full(full: Shop, kit: Any) -> None:
    answers = {
        "ok": kit.ended("out\n"),
        "none": kit.ended(""),
        "fail": kit.ended("bad\n", 2),
        "slow": kit.ended("part\n", None, timed_out=True),
        "big": kit.ended("", 137, out_of_memory=True),
    }
    full.sandbox.commands.update(answers)
    assert full.call("bash", command="ok").text == "out"
    assert full.call("bash", command="none").text == "(no output)"
    assert full.call("bash", command="fail").text == "bad\n[exit code 2]"
    assert full.call("bash", command="slow").text == "part\nError: the command was stopped after 60 s."
    assert full.call("bash", command="big").text == "Error: the command ran out of memory and was killed."
    wanted = {"tool_calls": 5, "sandbox_calls": 5, "bad_calls": 0, "edits": 0, "tests": 0, "submitted": 0}
    assert full.runner.counts == wanted
    full.call("no_such_tool")
    full.call("bash", nonsense="x")
    full.call("submit")
    assert (full.runner.counts["tool_calls"], full.runner.counts["sandbox_calls"]) == (8, 5)


def test_a_command_deadline_is_told_and_bounded_by_the_episode(full: Shop, kit: Any) -> None:
    full.sandbox.commands["x"] = kit.ended("", None, timed_out=True)
    assert full.call("bash", time_left_s=2.5, command="x").text == "Error: the command was stopped after 2.5 s."
    assert full.sandbox.calls[0][1]["timeout_s"] == 2.5
    full.call("bash", time_left_s=-1.0, command="x")
    assert full.sandbox.calls[1][1]["timeout_s"] > 0


def test_output_is_cut_to_head_and_tail(full: Shop, kit: Any) -> None:
    full.sandbox.commands["x"] = kit.ended("h" * 300 + "é" * 300, output_bytes=5000)
    text = full.call("bash", command="x").text
    head, note, tail = text.split("\n")
    assert (head, tail) == ("h" * 100, "é" * 100)
    assert note == f"[… {5000 - 100 - 200} bytes left out …]"
    assert full.sandbox.calls[0][1]["output_limit"] == 800


@given(text=st.text(max_size=60), limit=st.integers(2, 30))
def test_cut_text_keeps_head_and_tail(text: str, limit: int) -> None:
    cut = cut_text(text, limit)
    if len(text) <= limit:
        assert cut == text
    else:
        assert cut.startswith(text[: limit // 2])
        assert cut.endswith(text[-(limit - limit // 2) :])
        assert "left out" in cut


def test_compact_editor_answers(compact: Shop) -> None:
    assert compact.call("view", path="a.py").text == "x = 1"
    assert compact.call("str_replace", path="a.py", old_str="a", new_str="b").text == "Edited."
    compact.sandbox.edits["view"] = EditResult(ok=True, text="folder listing", content=None)
    assert compact.call("view", path=".").text == "folder listing"
    compact.sandbox.edits["view"] = EditResult(ok=True, text="numbered", content="")
    assert compact.call("view", path="empty.py").text == "(empty)"
    refused = "No replacement was performed, old_str `x\ny` did not appear verbatim in /testbed/a.py."
    compact.sandbox.edits["str_replace"] = EditResult(ok=False, text=refused)
    result = compact.call("str_replace", path="a.py", old_str="x\ny", new_str="b")
    assert result == ToolResult("Error: old_str found 0 times.", bad=True)
    assert (compact.runner.counts["edits"], compact.runner.counts["bad_calls"]) == (1, 1)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "No replacement was performed. Multiple occurrences of old_str `in lines [9]` in lines "
            "[3, 7, 12]. Please ensure it is unique.",
            "Error: old_str found 3 times.",
        ),
        (
            "No replacement was performed. Multiple occurrences of old_str `a` in lines [3]. Please ensure …",
            "Error: old_str found 2 times.",
        ),
        (
            "Invalid `path` parameter: /testbed/b.py. The path /testbed/b.py does not exist. Please …",
            "Error: no such file.",
        ),
        (
            "ERROR:\nNo edit history found for /testbed/a.py.\nmore",
            "Error: No edit history found for /testbed/a.py.",
        ),
        ("", "Error: the editor refused."),
    ],
)
def test_compact_errors(text: str, line: str) -> None:
    assert compact_error(text) == line


PYTEST = """F.                                                                       [100%]
=================================== FAILURES ===================================
_________________________________ test_clamp_x _________________________________

    def test_clamp_x():
>       assert clamp_x(3, 0, 2) == 2
E       assert 3 == 2
E        +  where 3 = clamp_x(3, 0, 2)

test_mod.py:4: AssertionError
=========================== short test summary info ============================
FAILED test_mod.py::test_clamp_x - assert 3 == 2
1 failed, 1 passed in 0.02s
"""


def test_compact_pytest_output_says_what_failed_and_no_times(compact: Shop, kit: Any) -> None:
    compact.sandbox.commands["python -m pytest -q"] = kit.ended(PYTEST, 1)
    shown = compact.call("bash", command="python -m pytest -q").text
    assert shown == "E assert 3 == 2\nE + where 3 = clamp_x(3, 0, 2)\n1 failed, 1 passed"
    assert compact.runner.counts["tests"] == 1
    assert compact_tests("..\n======= 2 passed, 1 warning in 1.50s =======\n") == "2 passed, 1 warning"
    assert compact_tests("no tests ran in 0.00s\n") == "no tests ran"
    assert compact_tests("E   odd\nnothing counted\n") == "E   odd\nnothing counted\n"


@pytest.mark.parametrize(
    ("command", "is_test"),
    [
        ("pytest", True),
        ("cd a && python -m pytest -q x.py | tail", True),
        ("cat pytest.ini", False),
        ("grep pytest_plugins .", False),
    ],
)
def test_which_commands_count_as_tests(full: Shop, command: str, is_test: bool) -> None:
    full.call("bash", command=command)
    assert full.runner.counts["tests"] == is_test


def test_full_pytest_output_is_left_alone(full: Shop, kit: Any) -> None:
    full.sandbox.commands["pytest"] = kit.ended("1 passed in 0.02s\n")
    assert full.call("bash", command="pytest").text == "1 passed in 0.02s"


def test_a_dead_sandbox_raises(full: Shop) -> None:
    full.sandbox.commands["x"] = SandboxDeadError("gone", where="sandbox fake")
    with pytest.raises(SandboxDeadError):
        full.call("bash", command="x")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    name=st.sampled_from([*TOOLS, "other"]),
    arguments=st.dictionaries(st.sampled_from([*TOOLS["str_replace"].parameters, "command", "view_range"]), VALUES),
)
def test_no_arguments_crash_a_tool(full: Shop, name: str, arguments: dict[str, Any]) -> None:
    """K12: a call reaches the sandbox only with arguments of the right names and types."""
    full.sandbox.calls.clear()
    result = asyncio.run(full.runner.execute(ToolCall(name=name, arguments=arguments), time_left_s=5))
    sound = name in TOOLS and check_arguments(TOOLS[name], arguments) is None
    assert result.bad is not sound
    assert bool(full.sandbox.calls) == (sound and name != "submit")
    result.text.encode("utf-8", "strict")

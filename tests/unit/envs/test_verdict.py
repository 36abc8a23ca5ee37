"""K45: every rule of the verdict, one by one."""

from typing import Any

import pytest
from swe_rows import report

from agentrl_envs.swe_gym.verdict import judge

F, P = "t.py::f", "t.py::p"


@pytest.mark.parametrize(
    ("f", "p", "resolved"),
    [
        ("passed", "passed", True),
        ("xfailed", "xfailed", True),
        ("passed", "skipped", True),
        ("skipped", "passed", False),
        ("failed", "passed", False),
        ("error", "passed", False),
        ("xpassed", "passed", False),
        ("passed", "failed", False),
        (None, "passed", False),
        ("passed", None, False),
    ],
)
def test_statuses(f: str | None, p: str | None, resolved: bool) -> None:
    results = {name: status for name, status in ((F, f), (P, p)) if status}
    verdict = judge(report(results), fail_to_pass=[F], pass_to_pass=[P])
    assert verdict.resolved is resolved
    assert verdict.tests == {F: f or "missing", P: p or "missing"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"canary_failed": False}, "did not fail"),
        ({"canary_failed": None}, "did not run"),
        ({"exit_code": 1}, "does not agree"),
        ({"exit_code": 2}, "exit code 2"),
        ({"exit_code": None}, "exit code None"),
        ({"others": {"t.py::other": "failed"}, "exit_code": 0}, "does not agree"),
    ],
)
def test_a_session_that_cannot_be_believed_is_rejected(changes: dict[str, Any], said: str) -> None:
    results = {F: "passed", P: "passed", **changes.pop("others", {})}
    verdict = judge(report(results, **changes), fail_to_pass=[F], pass_to_pass=[P])
    assert not verdict.resolved
    assert any(said in line for line in verdict.log)


def test_a_failing_test_that_nobody_named_does_not_count() -> None:
    results = {F: "passed", P: "passed", "t.py::new": "failed"}
    assert judge(report(results), fail_to_pass=[F], pass_to_pass=[P]).resolved


def test_nothing_named_proves_nothing() -> None:
    assert not judge(report({P: "passed"}), fail_to_pass=[], pass_to_pass=[P]).resolved
    assert not judge(report({}, exit_code=5), fail_to_pass=[F], pass_to_pass=[]).resolved


def test_ids_with_blanks_are_matched_whole() -> None:
    name = "t.py::f[x > y]"
    assert judge(report({name: "passed"}), fail_to_pass=[name], pass_to_pass=[]).resolved
    assert not judge(report({"t.py::f[x > z]": "passed"}), fail_to_pass=[name], pass_to_pass=[]).resolved


def test_ids_cut_at_a_blank_are_excused_by_prefix_and_listed() -> None:
    results = {F: "passed", "t.py::p[a b]": "passed", "t.py::p[a c]": "skipped"}
    verdict = judge(report(results), fail_to_pass=[F], pass_to_pass=["t.py::p[a"])
    assert verdict.resolved
    assert verdict.tests["t.py::p[a"] == "passed"
    assert any("cut at a blank" in line and "t.py::p[a" in line for line in verdict.log)
    # only with an unclosed bracket, only at a blank, and only if something of that name ran
    for listed in ("t.py::p", "t.py::p[a b", "t.py::q[a"):
        results = {F: "passed", "t.py::p[a bc]": "passed"}
        assert not judge(report(results), fail_to_pass=[F], pass_to_pass=[listed]).resolved
    # none that it begins may fail
    results = {F: "passed", "t.py::p[a b]": "passed", "t.py::p[a c]": "failed"}
    assert not judge(report(results), fail_to_pass=["t.py::p[a"], pass_to_pass=[]).resolved
    assert not judge(report(results), fail_to_pass=[F], pass_to_pass=["t.py::p[a"]).resolved
    # a bracket that closes an inner one leaves the outer one open
    results = {F: "passed", "t.py::p[a[0] b]": "passed"}
    assert judge(report(results), fail_to_pass=[F], pass_to_pass=["t.py::p[a[0]"]).resolved


def test_what_must_fail_and_did_not_rejects_all() -> None:
    """K45."""
    results = {F: "passed", "t.py::canary": "failed"}
    assert judge(report(results), fail_to_pass=[F], pass_to_pass=[], must_fail=["t.py::canary"]).resolved
    for status in ("passed", "skipped", "xfailed", "xpassed"):
        faked = report(results | {"t.py::canary": status, "t.py::other": "failed"})
        verdict = judge(faked, fail_to_pass=[F], pass_to_pass=[], must_fail=["t.py::canary"])
        assert not verdict.resolved
        assert any("must fail" in line for line in verdict.log)


def test_skips_expected_failures_and_absent_canaries_are_unproved() -> None:
    results = {F: "xfailed", P: "skipped", "t.py::q": "passed"}
    verdict = judge(report(results), fail_to_pass=[F], pass_to_pass=[P, "t.py::q"], must_fail=["t.py::canary"])
    assert verdict.resolved
    assert set(verdict.unproved) == {F, P, "t.py::canary"}


def test_copies_that_did_not_fail_are_unproved() -> None:
    results = {F: "passed", "t.py::a": "failed", "t.py::b[1]": "failed", "t.py::b[2]": "passed", "t.py::c": "error"}
    twins = ["t.py::a", "t.py::b", "t.py::c", "t.py::d"]
    verdict = judge(report(results), fail_to_pass=[F], pass_to_pass=[], twins=twins)
    assert verdict.resolved
    assert verdict.unproved == ("t.py::b", "t.py::d")

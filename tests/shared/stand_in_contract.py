"""What the benchmarks' stand-ins must do as the real parts do: run on both.

A sandbox check takes a leased sandbox; a policy check a router and a vocabulary that every id must be of.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np

from agentrl.trajectory import FinishReason
from agentrl.wire import PolicyRouter, SamplingParams, Sandbox
from agentrl_envs.swe_gym.archives import pack

MODULE = "def double(x):\n    return x + 1\n"
TESTS = """\
from mod import double


def test_two():
    assert double(2) == 4


def test_zero():
    assert double(0) == 0
"""
TREE = {"mod.py": MODULE, "test_mod.py": TESTS}
TRAJECTORY = "train-000000-0"

SandboxCheck = Callable[[Sandbox], Awaitable[None]]
PolicyCheck = Callable[[PolicyRouter, int], Awaitable[None]]


# --- sandbox ------------------------------------------------------------------------------------------------------


async def shows_the_tree_that_was_unpacked(box: Sandbox) -> None:
    await box.unpack(pack(TREE))
    seen = await box.edit("view", path=f"{box.workdir}/mod.py", timeout_s=30)
    assert seen.ok
    assert seen.content == MODULE
    assert await box.read_file("test_mod.py") == TESTS.encode()
    assert await box.read_file("other.py") is None
    await box.unpack(pack({"other.py": "x = 1\n"}))
    assert await box.read_file("mod.py") is None


async def finds_lines(box: Sandbox) -> None:
    await box.unpack(pack(TREE))
    found = await box.run('grep -rn "def double" .', timeout_s=30)
    assert (found.exit_code, found.output) == (0, "./mod.py:1:def double(x):\n")
    assert found.output_bytes == len(found.output)
    assert not found.timed_out


async def keeps_an_edit(box: Sandbox) -> None:
    await box.unpack(pack(TREE))
    edited = await box.edit("str_replace", path=f"{box.workdir}/mod.py", timeout_s=30, old_str="x + 1", new_str="x * 2")
    assert edited.ok
    assert edited.content == MODULE.replace("x + 1", "x * 2")
    again = await box.edit("str_replace", path=f"{box.workdir}/mod.py", timeout_s=30, old_str="x + 1", new_str="y")
    assert not again.ok
    assert "did not appear verbatim" in again.text
    nowhere = await box.edit("view", path=f"{box.workdir}/other.py", timeout_s=30)
    assert not nowhere.ok
    assert "does not exist" in nowhere.text


async def reports_each_test(box: Sandbox) -> None:
    """Of a tree whose tests pass: a stand-in knows no other."""
    await box.unpack(pack({**TREE, "mod.py": MODULE.replace("x + 1", "x * 2")}))
    report = await box.run_tests(["-q", "test_mod.py"], timeout_s=60, canary=True)
    assert report.results == {"test_mod.py::test_two": "passed", "test_mod.py::test_zero": "passed"}
    assert (report.exit_code, report.collected, report.timed_out) == (0, 2, False)
    assert report.canary_failed is True


async def a_late_command_is_a_result(box: Sandbox) -> None:
    await box.unpack(pack(TREE))
    late = await box.run("sleep 20", timeout_s=0.2)
    assert late.timed_out
    assert late.exit_code is None


SANDBOX_CHECKS: tuple[SandboxCheck, ...] = (
    shows_the_tree_that_was_unpacked,
    finds_lines,
    keeps_an_edit,
    reports_each_test,
    a_late_command_is_a_result,
)


# --- policy -------------------------------------------------------------------------------------------------------


async def streams_have_one_length(router: PolicyRouter, vocabulary: int) -> None:
    """Turn after turn of one trajectory; ids of the vocabulary, a finite log-probability and a version each."""
    prompt = [5, 6, 7]
    with router.session(TRAJECTORY) as client:
        for turn in range(2):
            params = SamplingParams(max_tokens=60, stop_token_ids=(2,))
            got = await client.generate(prompt, params, request_id=f"{TRAJECTORY}.{turn}.0", timeout_s=60)
            assert got.token_ids.dtype == got.versions.dtype == np.int32
            assert got.logprobs.dtype == np.float32
            assert got.token_ids.shape == got.logprobs.shape == got.versions.shape
            assert 1 <= len(got.token_ids) <= 60
            assert ((got.token_ids >= 0) & (got.token_ids < vocabulary)).all()
            assert (got.logprobs <= 0).all()
            assert np.isfinite(got.logprobs).all()
            assert len(set(got.versions.tolist())) == 1
            assert got.versions[0] >= 0
            assert got.prompt_tokens == len(prompt)
            assert got.decode_s > 0
            prompt += got.token_ids.tolist()


async def keeps_to_max_tokens(router: PolicyRouter, vocabulary: int) -> None:
    with router.session(TRAJECTORY) as client:
        got = await client.generate([5, 6], SamplingParams(max_tokens=2), request_id=f"{TRAJECTORY}.0.0", timeout_s=60)
    assert len(got.token_ids) == 2
    assert got.finish_reason is FinishReason.LENGTH


async def a_full_window_samples_nothing(router: PolicyRouter, vocabulary: int) -> None:
    with router.session(TRAJECTORY) as client:
        for length, room in ((router.max_model_len, 0), (router.max_model_len - 1, 1)):
            request = f"{TRAJECTORY}.{room}.0"
            got = await client.generate([5] * length, SamplingParams(max_tokens=9), request_id=request, timeout_s=60)
            assert len(got.token_ids) == room
            assert got.finish_reason is FinishReason.LENGTH
            assert got.prompt_tokens == length


POLICY_CHECKS: tuple[PolicyCheck, ...] = (
    streams_have_one_length,
    keeps_to_max_tokens,
    a_full_window_samples_nothing,
)

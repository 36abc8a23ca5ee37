"""Kind `transformers`: a real process with a real model, its contract, its death and its owner's."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import teacher_contract as contract
from teacher_toys import ANSWER, PROMPT, RESULT, TINY, request, segment, teacher_spec

from agentrl.chat.tiny_tokenizer import save_tiny_tokenizer, train_tiny_tokenizer
from agentrl.errors import ConfigError, DeadlineError, TeacherDeadError, TeacherStartError
from agentrl.wire import ScoreRequest, TeacherSpec
from agentrl_teachers.local import open_transformers
from agentrl_teachers.worker_process import WorkerProcess

TOP_K = 4
START_S = 300.0
IDS = np.arange(5, 125, dtype=np.int32)
POSITIONS = np.arange(1, 120, dtype=np.int32)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with another tokenizer than the shipped policy's."""
    import torch
    from toy_qwen import toy_config
    from transformers import Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("other")
    tokenizer = train_tiny_tokenizer([PROMPT + ANSWER + RESULT] * 3, vocab_size=300)
    config = toy_config(positions=2048)
    config.vocab_size = tokenizer.get_vocab_size()
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    save_tiny_tokenizer(tokenizer, folder)
    return folder


def case(*, turns: int, **how: object) -> contract.Case:
    """`turns`: of a segment that no longer fits the window."""
    numbers = itertools.count()

    def new() -> ScoreRequest:
        number = next(numbers)
        return replace(request(segment(f"{number}. {ANSWER}", ANSWER)), trajectory_id=f"r{number}")

    def too_long() -> ScoreRequest:
        return replace(request(segment(*[ANSWER] * turns)), trajectory_id="long")

    return contract.Case(request=new, too_long=too_long, **how)  # type: ignore[arg-type]


async def holds_contract(spec: TeacherSpec, how: contract.Case) -> None:
    async with open_transformers(spec) as teacher:
        for check in contract.CHECKS:
            await check(teacher, how)


@pytest.mark.parametrize("top_k", [0, TOP_K, None], ids=["sampled", "top-k", "vocabulary"])
def test_contract(top_k: int | None, tmp_path: Path) -> None:
    spec = teacher_spec(tmp_path, top_k=top_k, cache=tmp_path / "cache")
    asyncio.run(holds_contract(spec, case(turns=60, candidates=top_k)))
    assert (tmp_path / "teacher-teacher.log").is_file()


def test_contract_with_another_tokenizer(other: Path, tmp_path: Path) -> None:
    spec = teacher_spec(tmp_path, model=str(other), top_k=0, align_bytes=True)
    asyncio.run(holds_contract(spec, case(turns=60, same_tokens=False)))


def test_another_tokenizer_is_refused(other: Path, tmp_path: Path) -> None:
    """K37: the reason and the remedy."""

    async def run() -> None:
        async with open_transformers(teacher_spec(tmp_path, model=str(other))) as teacher:
            await teacher.probe(request().segment.token_ids.tolist(), timeout_s=60)

    with pytest.raises(ConfigError, match="another tokenizer") as caught:
        asyncio.run(run())
    assert "distill.align=bytes" in caught.value.remedy


def test_the_students_own_candidates_are_scored(tmp_path: Path) -> None:
    """Any token can be asked for, and the sampled one among them has its own score."""
    made = request()
    tokens = made.segment.token_ids[made.mask]
    candidates = np.stack([(tokens + 1) % 1024, tokens, np.full_like(tokens, -1)], axis=1)

    async def run() -> None:
        async with open_transformers(teacher_spec(tmp_path, top_k=0)) as teacher:
            scores = await teacher.score(replace(made, candidates=candidates), timeout_s=60)
        assert scores.candidate_ids is not None
        assert scores.candidate_logprobs is not None
        assert np.array_equal(scores.candidate_ids, candidates)
        assert np.array_equal(scores.candidate_logprobs[:, 1], scores.logprobs[scores.mask])
        assert np.isnan(scores.candidate_logprobs[:, 2]).all()

    asyncio.run(run())


# --- the process ----------------------------------------------------------------------------------------------------


def with_process(folder: Path, body: Callable[[WorkerProcess], Awaitable[None]]) -> None:
    async def run() -> int:
        process = await WorkerProcess.start(
            name="t", model=TINY, dtype="float32", threads=1, log_path=folder / "t.log", timeout_s=START_S
        )
        try:
            await body(process)
        finally:
            await process.close()
        return process.pid

    pid = asyncio.run(run())
    assert not Path(f"/proc/{pid}").exists()


def test_a_killed_process_fails_what_waits_and_what_comes(tmp_path: Path) -> None:
    async def body(process: WorkerProcess) -> None:
        os.kill(process.pid, signal.SIGSTOP)
        waiting = [asyncio.create_task(process.score(IDS, positions=POSITIONS, timeout_s=60)) for _ in range(3)]
        await asyncio.sleep(0.2)
        os.kill(process.pid, signal.SIGKILL)
        started = time.monotonic()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, TeacherDeadError)
            assert "killed by signal 9" in result.what
            assert "t.log" in result.where
            assert "parameters on" in result.where  # the end of its log
        with pytest.raises(TeacherDeadError):
            await process.score(IDS, positions=POSITIONS, timeout_s=60)
        assert time.monotonic() - started < 10

    with_process(tmp_path, body)


def test_a_silent_process_is_a_deadline_and_owes_nothing_afterwards(tmp_path: Path) -> None:
    async def body(process: WorkerProcess) -> None:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(DeadlineError, match=r"no scores within 0\.3 s"):
            await process.score(IDS, positions=POSITIONS, timeout_s=0.3)
        given_up = asyncio.create_task(process.score(IDS, positions=POSITIONS, timeout_s=60))
        await asyncio.sleep(0.1)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        os.kill(process.pid, signal.SIGCONT)
        got = await process.score(IDS[:7], positions=POSITIONS[:6], timeout_s=60)
        assert np.isfinite(got.logprobs).all()
        assert len(got.logprobs) == 6

    with_process(tmp_path, body)


def test_closing_fails_what_still_waits(tmp_path: Path) -> None:
    async def body(process: WorkerProcess) -> None:
        os.kill(process.pid, signal.SIGSTOP)
        waiting = asyncio.create_task(process.score(IDS, positions=POSITIONS, timeout_s=60))
        await asyncio.sleep(0.1)
        await process.close()
        with pytest.raises(TeacherDeadError, match="closed"):
            await waiting

    with_process(tmp_path, body)


OWNER = """
import asyncio, sys
from pathlib import Path
import numpy as np
from agentrl_teachers.worker_process import WorkerProcess

async def main():
    process = await WorkerProcess.start(
        name="t", model=Path(sys.argv[1]), dtype="float32", threads=1, log_path=Path(sys.argv[2]), timeout_s=300
    )
    print(process.pid, flush=True)
    ids = np.arange(1000, dtype=np.int32)
    while True:
        await asyncio.gather(*(process.score(ids, positions=ids[1:], timeout_s=300) for _ in range(20)))

asyncio.run(main())
"""


def test_no_process_outlives_its_owner(tmp_path: Path) -> None:
    """Killed outright while the other computes, the owner has no word left to say."""
    command = [sys.executable, "-c", OWNER, str(TINY), str(tmp_path / "t.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        descriptor = os.pidfd_open(pid)
        time.sleep(0.5)
        owner.kill()
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        assert poller.poll(10_000), f"process {pid} outlives its owner"
        os.close(descriptor)


@pytest.mark.parametrize("timeout_s", [START_S, 0.05], ids=["broken", "slow"])
def test_one_that_does_not_come_up_says_why(timeout_s: float, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    (folder / "model.safetensors").write_bytes(b"broken")

    async def run() -> None:
        async with open_transformers(teacher_spec(tmp_path, model=str(folder), start_timeout_s=timeout_s)):
            raise AssertionError("it came up")

    with pytest.raises(TeacherStartError, match="did not start" if timeout_s > 1 else "was not loaded") as caught:
        asyncio.run(run())
    assert "teacher-teacher.log" in caught.value.where


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        async with open_transformers(teacher_spec(tmp_path, model=str(tmp_path / "none"), name="big")):
            raise AssertionError("it came up")

    with pytest.raises(ConfigError) as caught:
        asyncio.run(run())
    assert caught.value.where == "distill.teachers, big"


def test_a_student_that_is_its_own_teacher_scores_the_same(tmp_path: Path) -> None:
    """K6: below 1e-4 per token in float32, of the very token, not its neighbour."""
    import torch
    from transformers import AutoModelForCausalLM

    made = request()
    ids = torch.from_numpy(made.segment.token_ids.astype(np.int64))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)(input_ids=ids[None]).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0].numpy()

    async def run() -> np.ndarray:
        async with open_transformers(teacher_spec(tmp_path, top_k=0)) as teacher:
            return (await teacher.score(made, timeout_s=60)).logprobs

    found = asyncio.run(run())
    assert np.abs(found[1:] - expected)[made.mask[1:]].max() < 1e-4
    assert np.array_equal(np.isfinite(found), made.mask)
